"""Measure the engine's overhead: torchrun --nproc_per_node 2 -m trainer.bench.engine [--stages 1 2 3]

One run compares the engine's step of BERT-Large, over micro-batches of 32,768 tokens (256 full sequences of 128), with
the forward and backward pass of the same model without an engine. The difference is accumulating and reducing
gradients, the optimizer, and gathering the weights. On CPUs a small model only shows that it works.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from data_prep.options import CommandParser
from kernels.dropout import token_keys
from trainer.bench.model import MODEL_SIZES, by_kernel, counts_of, micro_batch
from trainer.console import Tell, print_result, silent
from trainer.engine.engine import Engine, EngineConfig
from trainer.engine.optimizer import OptimizerConfig
from trainer.model.batch import MicroBatch
from trainer.model.bert import Bert, ModelConfig
from trainer.ranks.world import World, from_launcher, join, leave

CPU_MODEL = ModelConfig(layers=2, hidden=64, heads=2, intermediate=128, vocab_size=1000)
REPEATS = 8  # of the bare pass, in each of three turns
LENGTHS = {"cpu": [16] * 4, "cuda": [128] * 256}


def milliseconds(run: Callable[[], object], world: World, repeats: int) -> list[float]:
    """The times of ``run`` on this rank, with all ranks starting together."""
    times = []
    for _ in range(repeats):
        dist.barrier()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1e3)
    return times


def bare(model: ModelConfig, batch: MicroBatch, world: World) -> Callable[[], object]:
    """The forward and backward pass of one micro-batch without an engine, in the engine's precision."""
    bert = Bert(model, 1).to(world.device, torch.half if world.device.type == "cuda" else torch.float32)
    counts = counts_of(batch)

    def run() -> None:
        bert.zero_grad()
        keys = token_keys(1, 1, batch.samples, batch.positions, batch.cu_seqlens)
        torch.autograd.backward(bert(batch, keys).mean(counts) * 2.0**14)

    return run


def report(stage: int, accumulations: list[int], optimizer: str, world: World, tell: Tell) -> None:
    """Print a row for each number of micro-batches, and the kernels that the engine adds, longest first."""
    model = MODEL_SIZES["large"] if world.device.type == "cuda" else CPU_MODEL
    batch = micro_batch(LENGTHS[world.device.type], model).to(world.device)
    alone = bare(model, batch, world)
    chosen = EngineConfig(zero_stage=stage, initial_loss_scale=2.0**14)  # type: ignore[arg-type]
    engine = Engine(chosen, Bert(model, 1), OptimizerConfig(name=optimizer), world, 1)  # type: ignore[arg-type]
    for micro_batches in accumulations:
        counts = counts_of(batch, world.size * micro_batches)
        step = partial(engine.step, [batch] * micro_batches, counts, 1, 1e-5)
        own, whole = [], []
        for _ in range(3):  # alternate, so that both run at the same clock speeds
            own += milliseconds(alone, world, REPEATS)[1:]
            whole += milliseconds(step, world, max(3, 2 * REPEATS // micro_batches))[1:]
        a, b = statistics.median(own), statistics.median(whole) / micro_batches
        tell(f"| {stage} | {micro_batches} | {a:.1f} | {b:.1f} | {100 * (b / a - 1):+.1f} % |")
        if world.device.type == "cuda":
            before, after = by_kernel(alone), by_kernel(step)  # on every rank, because a step is a collective
            more = {name: ms - micro_batches * before.get(name, 0.0) for name, ms in after.items()}
            longest = sorted(more.items(), key=lambda item: -item[1])[:12]
            said = "; ".join(f"{name[:60]} {ms:.2f}" for name, ms in longest if ms > 0.05)
            tell(f"| | | added kernels, ms per step: {said} | | |")


def main() -> None:
    """Measure, printing each row of the table as soon as it is ready."""
    parser = CommandParser(prog="python -m trainer.bench.engine", description=__doc__.split("\n")[0])
    parser.add_argument("--stages", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2, 3])
    parser.add_argument("--accumulation", type=int, nargs="+", default=[8, 1], help="micro-batches per step")
    parser.add_argument("--optimizer", choices=("lamb", "adam"), default="lamb")
    given = parser.parse_args()
    world = from_launcher("auto")
    join(world, 600)
    tell = print_result if world.is_main else silent
    card = torch.cuda.get_device_name() if world.device.type == "cuda" else "CPU"
    tell(f"{world.size} x {card}, torch {torch.__version__}, {given.optimizer}\n")
    tell("| ZeRO | micro-batches | bare, ms | engine, ms per micro-batch | overhead |\n|---|---|---|---|---|")
    for stage in given.stages:
        report(stage, given.accumulation, given.optimizer, world, tell)
    leave(0)


if __name__ == "__main__":
    main()
