"""Compare the planner with a GPU: python -m trainer.bench.plan [--sizes base large] [--lengths 96 128 384 512]

Each row is one engine on one GPU, with full sequences and two micro-batches per step: the peak of the memory that
PyTorch reserves, and the median time of a step, each next to what :mod:`trainer.plan` predicts. On CPUs a small model
only shows that it works.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import numpy as np
import torch

from data_prep.errors import DataError
from data_prep.options import CommandParser, check_range
from trainer.bench.model import MODEL_SIZES, micro_batch
from trainer.console import print_result
from trainer.engine.engine import Engine, EngineConfig
from trainer.engine.optimizer import OptimizerConfig
from trainer.errors import TrainerError
from trainer.model.batch import GlobalCounts
from trainer.model.bert import Bert, ModelConfig
from trainer.plan.activations import Load
from trainer.plan.cards import CARDS, Card, choose, read_rates
from trainer.plan.lengths import Lengths
from trainer.plan.memory import GIB, Setting, peak, reserved, sizes
from trainer.plan.network import assumed
from trainer.plan.speed import step_time
from trainer.ranks.world import World, from_launcher, join, leave

CPU_MODEL = ModelConfig(layers=1, hidden=16, heads=2, intermediate=32, vocab_size=100)
MICRO_BATCHES, WARM, REPEATS = 2, 3, 5


def measured(model: ModelConfig, setting: Setting, length: int, sequences: int, world: World) -> tuple[int, float]:
    """The peak bytes that PyTorch reserves, and a step's median seconds."""
    cuda = world.device.type == "cuda"
    gc.collect()  # the engine before this one
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    config: dict[str, Any] = {"zero_stage": setting.stage, "precision": setting.precision}
    engine = Engine(EngineConfig(**config, initial_loss_scale=2.0**14), Bert(model, 1), OptimizerConfig(), world, 1)
    batch = micro_batch([length] * sequences, model).to(world.device)
    one = batch.masked.numel(), sequences, sequences * length, sequences * length**2
    counts = GlobalCounts(*(MICRO_BATCHES * each for each in one))
    times = []
    for _ in range(WARM + REPEATS):
        began = time.perf_counter()
        engine.step([batch] * MICRO_BATCHES, counts, 1, 1e-5)
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    found = torch.cuda.max_memory_reserved() if cuda else 0
    engine.close()
    return found, statistics.median(times[WARM:])


def predicted(model: ModelConfig, setting: Setting, length: int, sequences: int, card: Card) -> tuple[int, float]:
    """The planner's reserved memory in bytes, and step time in seconds, for the same setting."""
    tokens, counted = sequences * length, sizes(model)
    load = Load(tokens, round(0.15 * tokens), sequences)
    counts = np.zeros(length + 1, np.int64)
    counts[length] = 100
    lengths = Lengths(counts, 15 * length, True)
    work = lengths, (MICRO_BATCHES * sequences, MICRO_BATCHES), (card, assumed(1, 1))
    found = peak(model, counted, setting, load, accumulates=True)
    return reserved(found), step_time(model, counted, setting, "lamb", *work).total


def report(name: str, model: ModelConfig, stage: int, shape: tuple[int, int], card: Card, world: World) -> None:
    """Print a row. ``shape``: the length, and the sequences in a micro-batch."""
    setting = Setting(stage, "fp16" if world.device.type == "cuda" else "bf16", 1)
    size, seconds = measured(model, setting, *shape, world)
    planned_size, planned = predicted(model, setting, *shape, card)
    memory = f"{size / GIB:.2f} | {planned_size / GIB:.2f} | {_error(planned_size, size)}"
    length, sequences = shape
    times = f"{1000 * seconds:.1f} | {1000 * planned:.1f} | {_error(planned, seconds)}"
    print_result(f"| {name} | {stage} | {length} | {sequences} | {memory} | {times} |")


def _error(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.1f} %" if measured else ""


def main() -> None:
    """Measure, printing each row of the table as soon as it is ready."""
    parser = CommandParser(prog="python -m trainer.bench.plan", description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=MODEL_SIZES, default=["base", "large"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[96, 128, 384, 512])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 32768, 65536], help="of a micro-batch")
    parser.add_argument("--stages", nargs="+", type=int, choices=(1, 2), default=[1, 2])
    given = parser.parse_args()
    try:
        for length in given.lengths:
            check_range("--lengths", length, 1, ModelConfig.max_positions)
        for tokens in given.tokens:
            check_range("--tokens", tokens, ModelConfig.max_positions, 2**24)
        world = from_launcher("auto")
        name = torch.cuda.get_device_name() if world.device.type == "cuda" else "h200"
        card = choose(read_rates(CARDS), name)
    except (DataError, TrainerError) as error:
        raise SystemExit(f"trainer.bench.plan: error: {error}") from error
    join(world, 600)
    print_result("| model | ZeRO | length | sequences | GiB | planned | | step, ms | planned | |")
    print_result("|---|---|---|---|---|---|---|---|---|---|")
    for size in given.sizes:
        model = MODEL_SIZES[size] if world.device.type == "cuda" else CPU_MODEL
        for stage in given.stages:
            for length in given.lengths:
                for tokens in given.tokens:
                    report(size, model, stage, (length, tokens // length), card, world)
    leave(0)


if __name__ == "__main__":
    main()
