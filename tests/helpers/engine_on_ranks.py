"""Takes engine steps over one global batch, cut as asked; test_trainer_engine.py and test_gpu.py run it on each rank.

    python tests/helpers/engine_on_ranks.py OUT ZERO_STAGE MICRO_BATCHES STEPS [key=value …]

``batch=16``: samples of a step. ``scales=1,256``: the loss scales of the steps, repeated; by default the engine's
own, which starts at ``scale`` and grows after ``growth`` steps. ``poison=RANK:STEP``: that rank overflows in it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

import trainer.engine.engine
from data_prep.draws import bits
from data_prep.shards import Sample
from trainer.checkpoint.reading import flat_tensors
from trainer.data.collate import collate, filler
from trainer.data.order import deal
from trainer.engine.engine import Engine, EngineConfig
from trainer.engine.optimizer import OptimizerConfig
from trainer.engine.stopwatch import Stopwatch
from trainer.model.batch import GlobalCounts, MicroBatch
from trainer.model.bert import Bert, ModelConfig
from trainer.ranks.world import from_launcher, join, leave
from trainer.run.evaluation import evaluate

MODEL = ModelConfig(
    layers=2, hidden=32, heads=2, intermediate=64, max_positions=64, vocab_size=90, dropout=0.1, attention_dropout=0.1
)
DEFAULTS = {
    "optimizer": "lamb",
    "implementation": "lambert",
    "device": "cpu",
    "precision": "fp32",
    "batch": "16",
    "scale": "65536",
    "growth": "1000",
    "layer_norm": "after",
}


def sample(number: int) -> Sample:
    """A pair drawn from its number alone; its length and number of masks vary widely."""
    draw = bits(7, number, np.arange(200))
    length = 6 + int(draw[0] % 58)
    ids = (5 + draw[1 : length + 1] % 85).astype(np.int32)
    masked = 1 + int(draw[190] % max(1, length // 3))
    positions = np.sort(np.argsort(draw[100 : 100 + length - 2])[:masked] + 1).astype(np.int32)
    split, replacements = 3 + int(draw[191] % (length - 4)), np.full(masked, 4, np.int32)
    return Sample(ids, split, int(draw[192] % 2), positions, replacements, np.zeros(length, np.bool_))


def cut(step: int, rank: int, size: int, micro_batches: int, batch: int = 16) -> tuple[list[MicroBatch], GlobalCounts]:
    """This rank's micro-batches of the global batch of ``step``, and the counts of all of it."""
    samples = [sample(step * batch + i) for i in range(batch)]
    lengths = np.array([len(s.ids) for s in samples])
    targets = sum(len(s.positions) for s in samples)
    parts = deal(lengths, size * micro_batches)[rank * micro_batches :][:micro_batches]
    batches = [collate([samples[i] for i in p], step * batch + p) if len(p) else filler(2, 3) for p in parts]
    return batches, GlobalCounts(targets, batch, int(lengths.sum()), int((lengths**2).sum()))


def heldout(rank: int, size: int) -> Iterator[MicroBatch]:
    """This rank's share of seven samples, one per batch; some ranks get more than others."""
    return (collate([sample(number)], np.array([number])) for number in range(10_000 + rank, 10_007, size))


def whole(engine: Engine[Bert], kind: str) -> dict[str, torch.Tensor]:
    """The masters ("weight") or a moment by name, gathered from all ranks; every rank must call it."""
    own = [
        (part.name, part.start, flat_tensors(engine.optimizer, buffer)[kind][part.offset :][: part.length].cpu())
        for buffer in engine.partition.buffers
        for part in buffer.slices
    ]
    gathered: list[list[tuple[str, int, torch.Tensor]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own)
    tensors = {name: torch.full(shape, torch.nan) for name, shape in engine.partition.shapes.items()}
    for name, start, piece in (part for parts in gathered for part in parts):
        tensors[name].view(-1)[start : start + len(piece)] = piece
    return tensors


def allow_fp16_on_cpus() -> None:
    """Allow fp16 on CPUs: PyTorch computes it there, slowly, but Lambert and DeepSpeed refuse it."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda self: True
    trainer.engine.engine.resolve_precision = lambda config, device: config.precision


def main() -> None:
    out, stage, micro_batches, steps = sys.argv[1:5]
    options = DEFAULTS | dict(option.split("=", 1) for option in sys.argv[5:])
    world = from_launcher(options["device"])
    join(world, 60)
    if options["device"] == "cpu":
        allow_fp16_on_cpus()
    config = EngineConfig(
        zero_stage=int(stage),  # type: ignore[arg-type]
        precision=options["precision"],  # type: ignore[arg-type]
        initial_loss_scale=float(options["scale"]),
        loss_scale_growth_interval=int(options["growth"]),
    )
    watch = Stopwatch(world.device)
    model = replace(MODEL, layer_norm=options["layer_norm"])  # type: ignore[arg-type]
    optimizer = OptimizerConfig(name=options["optimizer"], implementation=options["implementation"])  # type: ignore[arg-type]
    engine = Engine(config, Bert(model, 3), optimizer, world, 3, watch)
    scales = [float(scale) for scale in options["scales"].split(",")] if "scales" in options else []
    poisoned = (
        [tuple(map(int, part.split(":"))) for part in options["poison"].split(",")] if "poison" in options else []
    )
    record: dict[str, list[float]] = {name: [] for name in ("losses", "norms", "heldout", "applied", "scales")}
    start, gradients = whole(engine, "weight"), dict[str, torch.Tensor]()
    for step in range(int(steps)):
        batches, counts = cut(step, world.rank, world.size, int(micro_batches), int(options["batch"]))
        if scales:
            engine.loss_scale = replace(engine.loss_scale, scale=scales[step % len(scales)])
        overflows = (world.rank, step) in poisoned
        hooks = [p.register_hook(lambda g: g + torch.inf) for p in [engine.model.mlm_bias] if overflows]  # type: ignore[no-untyped-call]
        result = engine.step(batches, counts, step, 1e-3)
        for hook in hooks:
            hook.remove()
        sums = result.sums.clone()
        dist.all_reduce(sums)
        record["losses"].append(float(sums[0] / counts.targets + sums[1] / counts.pairs))
        record["norms"].append(float(result.gradient_norm))
        record["applied"].append(result.applied)
        record["scales"].append(result.loss_scale)
        metrics = evaluate(engine.model, heldout(world.rank, world.size), world.device, engine.gathers)
        record["heldout"].append(metrics["mlm_loss"])
        if step == 0:  # the first moments, up to the factor 1 - β₁
            gradients = whole(engine, "exp_avg")
    weights = whole(engine, "weight")
    if world.is_main:
        matrices = {name: p for name, p in engine.model.named_parameters() if p.dim() > 1}
        taken = {"steps": engine.optimizer.steps, "parts": watch.read()}
        taken["unaligned"] = [name for name, p in matrices.items() if p.data_ptr() % 16]
        torch.save({**record, **taken, "start": start, "weights": weights, "gradients": gradients}, out)
    leave(0)


if __name__ == "__main__":
    main()
