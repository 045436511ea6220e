"""Compare the planner with one GPU: its memory, its step times, and the largest micro-batch that it allows.

Two commands, on one GPU. The first one measures rates, at lengths that the second one does not use:

    python -m trainer.bench --size base large --lengths 64 120 160 256 448 --tokens 8192 32768 --write rates.json
    python -m trainer.bench.plan --rates rates.json

Each row is one shape: full sequences, two micro-batches per step. It has the peak of the memory that PyTorch reserves,
and the median time of a step, each next to what :mod:`trainer.plan` predicts. An engine is built once for each size and
ZeRO stage, and the kinds of activation checkpointing take turns over the shapes, so that each kind meets each length
and each size of micro-batch. ``--checkpointing`` measures its kinds at every shape instead. A row that fails says why,
and the next one follows.

Then the first engine gets a limit on PyTorch's memory. The largest micro-batch that fits by the plan, which leaves 5 %
free, must run, and one a tenth larger must not. On CPUs a small model only shows that this works.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from triton.errors import TritonError

from data_prep.errors import DataError
from data_prep.options import CommandParser, check_range
from trainer.bench.model import MODEL_SIZES, counts_of, micro_batch
from trainer.console import print_result
from trainer.engine.engine import Engine, EngineConfig
from trainer.engine.optimizer import OptimizerConfig
from trainer.errors import TrainerError, one_line
from trainer.model.bert import Bert, ModelConfig
from trainer.model.checkpointing import Checkpointing
from trainer.plan.cards import CARDS, SPARE, Card, choose, read_rates
from trainer.plan.estimate import largest
from trainer.plan.lengths import Lengths
from trainer.plan.memory import CONTEXT_BYTES, GIB, Load, Setting, peak, reserved
from trainer.plan.speed import assumed, step_time
from trainer.ranks.world import World, from_launcher, join, leave

CPU_MODEL = ModelConfig(layers=1, hidden=16, heads=2, intermediate=32, vocab_size=100)
MICRO_BATCHES, WARM, REPEATS = 2, 2, 5
TURNS: tuple[Checkpointing, ...] = ("none", "cheap", "none", "full")
MEMORY_BAR, TIME_BAR = 0.05, 0.10  # the errors that we accept
LIMIT_LENGTH, LIMIT_SHARES = 128, (90, 95, 100, 105, 110)  # percent of the largest micro-batch that fits by the plan
# What ends a row, but not the table; CUDA's errors are RuntimeErrors.
FAILURES = (
    *(RuntimeError, ArithmeticError, AssertionError, AttributeError, LookupError, OSError, TypeError, ValueError),
    *(TrainerError, TritonError),
)
HEADER = """\
| model | ZeRO | checkpointing | length | sequences | allocated, GiB | reserved | planned | | step, ms | planned | |
|---|---|---|---|---|---|---|---|---|---|---|---|"""


class Error(NamedTuple):
    """A row's relative errors: planned over measured, minus 1."""

    row: str
    memory: float
    time: float


class Bench:
    """One engine, measured at one shape after another."""

    def __init__(self, size: str, stage: int, card: Card, world: World) -> None:
        self.size, self.card, self.world, self.cuda = size, card, world, world.device.type == "cuda"
        self.model = MODEL_SIZES[size] if self.cuda else CPU_MODEL
        self.setting = Setting(stage, "fp16" if self.cuda else "bf16", 1)
        config: dict[str, Any] = {"zero_stage": stage, "precision": self.setting.precision}
        chosen = EngineConfig(**config, initial_loss_scale=2.0**14)
        self.engine = Engine(chosen, Bert(self.model, 1), OptimizerConfig(), world, 1)

    def row(self, kind: Checkpointing, length: int, sequences: int) -> Error | None:
        """Print a row and return its errors; None if it failed."""
        setting = replace(self.setting, checkpointing=kind)
        name = f"{self.size} | {setting.stage} | {kind} | {length} | {sequences}"
        load = Load(sequences * length, round(0.15 * sequences * length), sequences)
        planned_size = reserved(peak(self.model, setting, load, accumulates=True))
        work = full(length), MICRO_BATCHES * sequences, MICRO_BATCHES, self.card, assumed(1, 1)
        planned = sum(step_time(self.model, setting, "lamb", *work).values())
        plan = f"planned {planned_size / GIB:.2f} GiB and {1000 * planned:.1f} ms"
        found = self.measure(kind, length, sequences, WARM + REPEATS)
        if isinstance(found, str):
            print_result(f"| {name} | {found}: {plan} | | | | | | |")
            return None
        allocated, size, times = found
        seconds = statistics.median(times[WARM:])
        error = Error(name, planned_size / size - 1 if size else 0.0, planned / seconds - 1)
        memory = f"{allocated / GIB:.2f} | {size / GIB:.2f} | {planned_size / GIB:.2f} | {error.memory:+.1%}"
        print_result(f"| {name} | {memory} | {1000 * seconds:.1f} | {1000 * planned:.1f} | {error.time:+.1%} |")
        return error

    def measure(
        self, kind: Checkpointing, length: int, sequences: int, steps: int
    ) -> tuple[int, int, list[float]] | str:
        """Run some steps: the peaks of allocated and reserved bytes, and each step's seconds; or why they failed."""
        try:
            self._forget()
            self.engine.model.checkpointing = kind
            batch = micro_batch([length] * sequences, self.model).to(self.world.device)
            counts, times = counts_of(batch, MICRO_BATCHES), []
            for step in range(steps):
                began = time.perf_counter()
                self.engine.step([batch] * MICRO_BATCHES, counts, step, 1e-5)
                if self.cuda:
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - began)
            self.engine.watch.read()  # so that its events do not pile up
        except torch.cuda.OutOfMemoryError:
            return "out of memory"
        except FAILURES as error:
            return said(error)
        if not self.cuda:
            return 0, 0, times
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), times

    def _forget(self) -> None:
        """Free what the row before this one left, also if it failed between a backward pass and its end."""
        for parameter in self.engine.model.parameters():
            parameter.grad = None
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def limited(self, limit: int) -> None:
        """Print whether the largest micro-batch that fits into ``limit`` bytes runs, and whether larger ones do."""
        lengths, card = full(LIMIT_LENGTH), Card("limit", (limit + CONTEXT_BYTES) / GIB, ())
        most = largest(self.model, self.setting, lengths, 2**16, card)
        print_result(
            f"\nlimit {limit / GIB:.2f} GiB, {self.size}, ZeRO {self.setting.stage}: by the plan {most:,} sequences of "
            f"{LIMIT_LENGTH} fit, with {SPARE:.0%} left free"
        )
        total = torch.cuda.get_device_properties(self.world.device).total_memory if self.cuda else 0
        if most < 10 or limit >= total:
            print_result("not tried: the limit needs a GPU with more memory, and room for ten sequences")
            return
        self._forget()
        torch.cuda.set_per_process_memory_fraction(limit / total, self.world.device)
        runs = {}
        for share in LIMIT_SHARES:
            sequences = -(-most * share // 100)
            found = self.measure("none", LIMIT_LENGTH, sequences, 2)
            runs[share] = not isinstance(found, str)
            ended = found if isinstance(found, str) else f"runs, {found[1] / GIB:.2f} GiB"
            print_result(f"  {share} %, {sequences:,} sequences: {ended}")
        torch.cuda.set_per_process_memory_fraction(1.0, self.world.device)
        print_result(f"{'holds' if runs[100] and not runs[110] else 'does not hold'}: 100 % runs and 110 % does not")

    def close(self) -> None:
        """Free the engine's memory."""
        self.engine.close()
        del self.engine


def said(error: Exception) -> str:
    """An error's kind and the start of its text, on one line."""
    return one_line(f"{type(error).__name__}: {error}")[:200]


def full(length: int) -> Lengths:
    """Sequences of one length, 15 % of them masked."""
    counts = np.zeros(length + 1, np.int64)
    counts[length] = 100
    return Lengths(counts, 15 * length, True)


def shapes(
    lengths: Sequence[int], tokens: Sequence[int], kinds: Sequence[Checkpointing] | None, turn: int
) -> Iterator[tuple[Checkpointing, int, int]]:
    """Kind of checkpointing, length and number of sequences of each row; ``turn``: whose turn comes first."""
    for i, length in enumerate(lengths):
        for j, size in enumerate(tokens):
            for kind in kinds or [TURNS[(turn + i + j) % len(TURNS)]]:
                yield kind, length, size // length


def summary(rows: Sequence[Error | None]) -> str:
    """The worst errors, and how many rows are within the bars; None stands for a row that failed."""
    errors = [error for error in rows if error is not None]
    found = [f"\n{len(errors)} rows measured, {rows.count(None)} failed"]
    for part, bar in (("memory", MEMORY_BAR), ("time", TIME_BAR)):
        worst_first = sorted(errors, key=lambda error: -abs(getattr(error, part)))
        within = sum(abs(getattr(error, part)) <= bar for error in errors)
        worst = "; ".join(f"{getattr(error, part):+.1%} {error.row.replace(' |', ',')}" for error in worst_first[:5])
        found.append(f"{part}: {within} of {len(errors)} within {bar:.0%}; worst: {worst or 'none'}")
    return "\n".join(found)


def main() -> None:
    """Measure, printing each row of the table as soon as it is ready."""
    parser = CommandParser(prog="python -m trainer.bench.plan", description=__doc__.split("\n")[0])
    parser.add_argument("--rates", type=Path, metavar="FILE", help="measured rates, from trainer.bench --write")
    parser.add_argument("--sizes", nargs="+", choices=MODEL_SIZES, default=["base", "large"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[96, 128, 384, 512])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 32768, 65536], help="of a micro-batch")
    parser.add_argument("--stages", nargs="+", type=int, choices=(1, 2), default=[1, 2])
    parser.add_argument("--checkpointing", nargs="+", choices=get_args(Checkpointing), help="these at every shape")
    parser.add_argument("--limit", type=float, default=16.0, metavar="GIB", help="for the largest micro-batch (16)")
    given = parser.parse_args()
    try:
        for length in given.lengths:
            check_range("--lengths", length, 1, ModelConfig.max_positions)
        for tokens in given.tokens:
            check_range("--tokens", tokens, ModelConfig.max_positions, 2**24)
        check_range("--limit", given.limit, 1, 2**10)
        world = from_launcher("auto")
        name = torch.cuda.get_device_name() if world.device.type == "cuda" else "h200"
        card = choose(read_rates(given.rates or CARDS), name)
    except (DataError, TrainerError) as error:
        raise SystemExit(f"trainer.bench.plan: error: {error}") from error
    join(world, 600)
    print_result(f"{world.device.type}: {name}, torch {torch.__version__}, rates of {given.rates or CARDS.name}\n")
    print_result(HEADER)
    errors: list[Error | None] = []
    for number, (size, stage) in enumerate(product(given.sizes, given.stages)):
        turn = given.stages.index(stage) + 2 * given.sizes.index(size)
        try:
            bench = Bench(size, stage, card, world)
            for shape in shapes(given.lengths, given.tokens, given.checkpointing, turn):
                errors.append(bench.row(*shape))
            if number == 0:
                bench.limited(round(given.limit * GIB))
            bench.close()
        except FAILURES as error:
            print_result(f"{size}, ZeRO {stage} ended: {said(error)}")
            errors.append(None)
    print_result(summary(errors))
    leave(0)


if __name__ == "__main__":
    main()
