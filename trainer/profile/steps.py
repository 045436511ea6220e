"""The trainer's own steps of one phase, from random weights and in no run's folder: nothing of them lasts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from trainer.checkpoint.train_state import TrainState
from trainer.data.loader import StepBatch
from trainer.engine.engine import Engine
from trainer.engine.schedule import batch_of
from trainer.errors import PassingError, TrainerError
from trainer.model.flops import model_flops
from trainer.monitor.metrics import Metrics, Subject
from trainer.profile.marks import DATA, END, MarkingStopwatch, heads_marked, mark
from trainer.ranks.stop import Stop
from trainer.ranks.world import World, limit_waits, together
from trainer.run.description import describe, devices
from trainer.run.fresh import build_model
from trainer.run.phases import PhaseData, Plan, remaining

WARM_UP = 3  # steps before any is timed: kernels are compiled, memory is allocated
MOST_WARM_UP = 30  # in fp16, the first steps may overflow until the loss scale is low enough


@dataclass(frozen=True)
class Size:
    """A step's batch: sequences over all ranks, and micro-batches per rank; and the same in the run itself."""

    global_batch: int
    micro_batches: int
    run_micro_batches: int

    @staticmethod
    def of(data: PhaseData, ranks: int, most: int) -> Size:
        """The phase's batch after its warm-up, cut down to ``most`` micro-batches per rank."""
        batch, parts = batch_of(data.phase, ranks)
        kept = min(parts, most)
        return Size(max(1, batch * kept // parts), kept, parts)


@dataclass(frozen=True)
class Timing:
    """Some steps without the profiler, on this rank: means per step."""

    milliseconds: float
    waited: float  # ms in which the host waited for the loader
    tokens: float  # valid tokens of the global batch
    flops: float  # operations of the model for the global batch
    skipped: int  # steps that overflowed, of all


def device_name(world: World) -> str:
    """The name of this rank's GPU, or CPU."""
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"


class Steps:
    """An engine, a loader and metrics, which take one step after the other. Every rank takes the same steps."""

    def __init__(self, plan: Plan, phase: int, size: Size, world: World, folder: Path, tell: Callable[[str], None]):
        config, self.data = plan.config, plan.phases[phase]
        self.size, self.world, self.state = size, world, TrainState(phase=phase)
        self.rate = self.state.rate(self.data.phase)  # of the first step for all: there may be more than in the phase
        watch = MarkingStopwatch(world.device)
        module = together(partial(build_model, plan), world)
        self.engine = Engine(config.engine, module, config.optimizer, world, config.run.seed, watch)
        limit_waits(config.run.timeout_seconds)
        quiet = replace(config.metrics, port=None, trackers=(), print_seconds=math.inf, linger_seconds=0.0)
        baselines = tuple(each.baseline for each in plan.phases)
        left, every = partial(remaining, plan.phases), config.checkpoint.every_steps
        subject = Subject(config.run.name, folder, config.model, None, left, every, baselines)
        self.metrics = Metrics(quiet, subject, world, watch)
        self.stop = Stop(world, config.metrics.log_every_steps)
        facts, ranks = describe(config, self.engine, world, tell), devices(world)
        self.metrics.describe(self.state, facts, ranks)

    @contextmanager
    def opened(self) -> Iterator[Iterator[StepBatch]]:
        """The batches, from the first sample of the phase on."""
        size = self.size.global_batch, self.size.micro_batches
        with closing(self.data.loader.steps(self.data.order, 0, *size, self.stop)) as batches:
            yield batches

    def take(self, batches: Iterator[StepBatch]) -> tuple[StepBatch, bool]:
        """Take one step as the trainer does. Returns its batch, and whether it was applied."""
        mark(DATA)
        batch = next(batches)
        counts = self.data.weighted(batch.counts)
        result = self.engine.step(batch.micro_batches, counts, self.state.attempts, self.rate)
        self.state = self.state.after(batch, result.applied)
        self.metrics.step(self.state, batch, result, self.rate)
        if self.stop.agreed(self.state.attempts):
            raise PassingError("stopped by a signal" if self.world.is_main else "")
        return batch, result.applied

    def measured(self, count: int, trace: Path) -> Timing:
        """Warm up, then take ``count`` steps without the profiler and as many with it, which writes ``trace``.

        Raises PassingError if the GPU's memory is too small.
        """
        try:
            with self.opened() as batches:
                self.warm_up(batches)
                timing = self.timed(batches, count)
                self.profiled(batches, count, trace)
        except torch.OutOfMemoryError as error:
            remedy = f"lower phases.{self.state.phase}.micro_batch, or end what else uses the GPU"
            raise PassingError(f"{str(error).split('. ')[0]}: {remedy}") from None
        return timing

    def warm_up(self, batches: Iterator[StepBatch]) -> None:
        """Take some steps, the last of which is applied. Raises TrainerError if none is."""
        for number in range(MOST_WARM_UP):
            _, applied = self.take(batches)
            if applied and number + 1 >= WARM_UP:
                return
        said = f"the gradients overflowed in {MOST_WARM_UP} steps: lower engine.initial_loss_scale"
        raise TrainerError(said if self.world.is_main else "")

    def timed(self, batches: Iterator[StepBatch], count: int) -> Timing:
        """Take ``count`` steps without a profiler."""
        self._meet()
        begun, taken = time.perf_counter(), []
        for _ in range(count):
            batch, applied = self.take(batches)
            flops = model_flops(self.engine.model.model, batch.counts)
            taken.append((batch.wait_seconds, batch.counts.tokens, flops, not applied))
        self._meet()
        seconds = time.perf_counter() - begun
        waited, tokens, flops, skipped = map(sum, zip(*taken, strict=True))
        return Timing(1000 * seconds / count, 1000 * waited / count, tokens / count, flops / count, int(skipped))

    def profiled(self, batches: Iterator[StepBatch], count: int, trace: Path) -> None:
        """Take ``count`` steps under PyTorch's profiler, after one more that is not to be counted; write ``trace``."""
        cuda = self.world.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._meet()
        with heads_marked(self.engine.model), profile(activities=activities) as recording:
            for _ in range(1 + count):
                self.take(batches)
            self._synchronize()
            mark(END)
        recording.export_chrome_trace(str(trace))

    def _meet(self) -> None:
        dist.barrier()
        self._synchronize()

    def _synchronize(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
