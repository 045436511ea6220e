"""Run by test_trainer_engine.py on each rank: steps of the engine over one global batch, cut as asked.

python tests/engine_on_ranks.py OUT ZERO_STAGE MICRO_BATCHES STEPS OPTIMIZER [DEVICE PRECISION [LOSS_SCALE]]
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.distributed as dist

from data_prep.draws import bits
from data_prep.shards import Sample
from trainer.batch import GlobalCounts, MicroBatch
from trainer.engine import Engine, EngineConfig
from trainer.loader import collate, filler
from trainer.model import ModelConfig
from trainer.optimizer import OptimizerConfig
from trainer.order import deal
from trainer.world import from_launcher, join, leave

MODEL = ModelConfig(
    layers=2, hidden=32, heads=2, intermediate=64, max_positions=64, vocab_size=90, dropout=0.1, attention_dropout=0.1
)
BATCH = 16


def sample(number: int) -> Sample:
    """A pair whose length and number of masks vary much with its number, drawn from the number alone."""
    draw = bits(7, number, np.arange(200))
    length = 6 + int(draw[0] % 58)
    ids = (5 + draw[1 : length + 1] % 85).astype(np.int32)
    masked = 1 + int(draw[190] % max(1, length // 3))
    positions = np.sort(np.argsort(draw[100 : 100 + length - 2])[:masked] + 1).astype(np.int32)
    split, replacements = 3 + int(draw[191] % (length - 4)), np.full(masked, 4, np.int32)
    return Sample(ids, split, int(draw[192] % 2), positions, replacements, np.zeros(length, np.bool_))


def cut(step: int, rank: int, size: int, micro_batches: int) -> tuple[list[MicroBatch], GlobalCounts]:
    """This rank's micro-batches of the global batch of ``step``, and the counts of all of it."""
    samples = [sample(step * BATCH + i) for i in range(BATCH)]
    lengths = np.array([len(s.ids) for s in samples])
    targets = sum(len(s.positions) for s in samples)
    parts = deal(lengths, size * micro_batches)[rank * micro_batches :][:micro_batches]
    batches = [collate([samples[i] for i in p], step * BATCH + p) if len(p) else filler(2, 3) for p in parts]
    return batches, GlobalCounts(targets, BATCH, int(lengths.sum()), int((lengths**2).sum()))


def first_gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """What the first step's gradients were, whole and flat by name, up to the factor 1 - β₁: its first moments."""
    assert engine.optimizer.partition is not None
    own = [
        (part.name, part.start, engine.optimizer.moments(buffer)["exp_avg"][part.offset :][: part.length].cpu())
        for buffer in engine.optimizer.partition.buffers
        for part in buffer.slices
    ]
    told: list[list[tuple[str, int, torch.Tensor]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(told, own)
    whole = {name: torch.zeros(shape.numel()) for name, shape in engine.optimizer.partition.shapes.items()}
    for name, start, piece in (part for parts in told for part in parts):
        whole[name][start : start + len(piece)] = piece
    return whole


def main() -> None:
    out, stage, micro_batches, steps, optimizer = sys.argv[1:6]
    device, precision, scale = (*sys.argv[6:], *("cpu", "fp32", "65536")[len(sys.argv) - 6 :])
    world = from_launcher(device)
    join(world, 60)
    config = EngineConfig(int(stage), precision, float(scale))  # type: ignore[arg-type]
    engine = Engine(config, MODEL, OptimizerConfig(name=optimizer), world, seed=3)  # type: ignore[arg-type]
    norms, losses, gradients = [], [], dict[str, torch.Tensor]()
    for step in range(int(steps)):
        batches, counts = cut(step, world.rank, world.size, int(micro_batches))
        result = engine.step(batches, counts, step, 1e-3)
        sums = result.sums.clone()
        dist.all_reduce(sums)
        losses.append(float(sums[0] / counts.targets + sums[1] / counts.pairs))
        norms.append(float(result.gradient_norm))
        if step == 0:
            gradients = first_gradients(engine)
    if world.is_main:
        weights = {name: p.detach().float().cpu() for name, p in engine.model.named_parameters()}
        torch.save({"losses": losses, "norms": norms, "weights": weights, "gradients": gradients}, out)
    leave(0)


if __name__ == "__main__":
    main()
