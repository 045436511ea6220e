"""Measure what the metrics cost per step: [torchrun --nproc_per_node 2 -m | python -m] trainer.bench.overhead

One run alternates blocks of steps with all metrics on and with none, in pairs, so that other load on the machine
affects both equally. With metrics on, every step is recorded and its parts are timed; every tenth step, the metrics are
combined over the ranks, written, exported and printed. If step times vary by more than the
metrics cost, the time that rank 0's thread spends in them, without waiting for others, is the better measure.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from data_prep.options import CommandParser
from trainer.bench.model import counts_of, micro_batch
from trainer.checkpoint.train_state import TrainState
from trainer.console import print_result
from trainer.data.loader import StepBatch
from trainer.engine.engine import Engine, EngineConfig
from trainer.engine.optimizer import OptimizerConfig
from trainer.engine.stopwatch import Stopwatch
from trainer.model.bert import Bert, ModelConfig
from trainer.monitor.metrics import Metrics, MetricsConfig, Subject
from trainer.monitor.plateau import Baseline
from trainer.ranks.world import World, from_launcher, join, leave

# A step takes a tenth of a second on CPUs.
CPU_MODEL = ModelConfig(layers=4, hidden=256, heads=4, intermediate=1024, vocab_size=8192)
LENGTHS = {"cpu": [128] * 4, "cuda": [128] * 256}  # BERT-Base on GPUs


class Silent(Stopwatch):
    """A stopwatch that times nothing."""

    def begin(self, part: str) -> None:
        """Do nothing, where a Stopwatch records the boundary between two parts."""


class OverheadBench:
    """An engine, a batch, and the metrics of a run that ends when the measurement does."""

    def __init__(self, world: World, folder: Path) -> None:
        model = CPU_MODEL if world.device.type == "cpu" else ModelConfig()
        self.world, self.watches = world, {True: Stopwatch(world.device), False: Silent(world.device)}
        self.engine = Engine(EngineConfig(), Bert(model, 1), OptimizerConfig(), world, 1, self.watches[True])
        config = MetricsConfig(port=None)
        subject = Subject("overhead", folder, model, 10**6, lambda state: (0, 0.0), 100, (Baseline(7.0, 0),))
        self.metrics = Metrics(config, subject, world, self.watches[True])
        batch = micro_batch(LENGTHS[world.device.type], model)
        counts = counts_of(batch, world.size)
        self.batch = StepBatch(0, counts.pairs, (batch,), counts)
        self.state, self.seconds = TrainState(), 0.0  # seconds: this thread's time in the metrics
        self.metrics.describe(self.state, {})

    def block(self, steps: int, with_metrics: bool) -> float:
        """The seconds that this many steps take, with metrics if ``with_metrics``, else without."""
        self.engine.watch = self.watches[with_metrics]
        self._meet()
        begun = time.perf_counter()
        for _ in range(steps):
            result = self.engine.step(self.batch.micro_batches, self.batch.counts, self.state.attempts, 1e-5)
            self.state = self.state.after(self.batch, result.applied)
            if with_metrics:
                began = time.thread_time()
                self.metrics.step(self.state, self.batch, result, 1e-5)
                self.seconds += time.thread_time() - began
        self._meet()
        return time.perf_counter() - begun

    def _meet(self) -> None:
        dist.barrier()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    """Measure, and print the result."""
    parser = CommandParser(prog="python -m trainer.bench.overhead", description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=20, help="number of blocks with metrics, and as many without")
    parser.add_argument("--steps", type=int, default=20, help="steps per block; fewer than ten mean little")
    given = parser.parse_args()
    if given.pairs < 2 or given.steps < 1:
        parser.error("--pairs must be 2 or more, --steps 1 or more")
    world = from_launcher("auto")
    join(world, 600)
    with tempfile.TemporaryDirectory() as folder:
        bench = OverheadBench(world, Path(folder))
        for with_metrics in (True, False):
            bench.block(given.steps, with_metrics)
        times: dict[bool, list[float]] = {True: [], False: []}
        bench.seconds = 0.0
        for pair in range(given.pairs):
            for with_metrics in (True, False) if pair % 2 else (False, True):
                times[with_metrics].append(bench.block(given.steps, with_metrics))
    if world.is_main:
        ratios = [100 * (a / b - 1) for a, b in zip(times[True], times[False], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        step = 1000 * statistics.median(times[False]) / given.steps
        found = f"{middle:+.2f} % (quartiles {low:+.2f}, {high:+.2f}; {given.pairs} pairs of {given.steps} steps)"
        where = f"{world.size} ranks on {world.device.type}"
        print_result(f"{where}: {step:.1f} ms per step without metrics; with them {found}")
        own = 1000 * bench.seconds / (given.pairs * given.steps)
        print_result(f"rank 0's own work in the metrics: {own:.3f} ms per step, {100 * own / step:.3f} %")
    leave(0)


if __name__ == "__main__":
    main()
