"""A run's progress: a log line now and then, each also recorded in the metrics log."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.checkpoint.changed_settings import Changes, spelled
from trainer.console import say
from trainer.engine.engine import StepResult
from trainer.errors import DivergedError, NotFiniteError
from trainer.finetune.evaluation import Judged
from trainer.monitor.metrics_log import METRICS_LOG, MetricsLog
from trainer.ranks.world import World

PROGRESS_LINES = 10  # of progress in a run; all ranks synchronise for each
FINITE_CHECK_STEPS = 10  # steps between checks that the gradients are finite; each waits for the device
DIVERGED_FACTOR = 10.0  # times the first step's loss: above that, the run has diverged


class Progress:
    """Adds up losses on the device, and waits for it only when a line is due."""

    def __init__(self, name: str, folder: Path, steps: int, epoch: int, world: World) -> None:
        self.name, self.steps, self.epoch, self.world = name, steps, epoch, world
        self.every = max(1, steps // PROGRESS_LINES)
        self.log = MetricsLog(folder / METRICS_LOG)
        self.loss = torch.zeros((), dtype=torch.float64, device=world.device)
        self.finite = torch.ones((), dtype=torch.bool, device=world.device)  # all gradients so far
        self.targets = self.examples = 0  # since the last line
        self.start(0, None)

    def start(self, attempts: int, first_loss: float | None) -> None:
        """Start the clock; ``first_loss`` is the first step's loss, if it was taken before."""
        self.first_loss = first_loss
        self.first, self.began, self.since = attempts, time.perf_counter(), time.perf_counter()

    def step(self, result: StepResult, targets: int, examples: int) -> None:
        """Add a step, with the numbers of targets and examples in the whole batch."""
        if result.applied:
            self.loss += result.sums[0]
            self.targets += targets
            self.finite &= result.gradient_norm.isfinite()  # the norm is over all ranks, so they agree
        self.examples += examples

    def require_finite(self) -> None:
        """Raise NotFiniteError, on all ranks, if a step had non-finite gradients: the weights are then ruined."""
        if not self.finite:
            raise NotFiniteError("the gradients are not finite: lower the rate, or lengthen the warm-up")

    def log_step(self, attempts: int, rate: float) -> None:
        """Log a line if one is due; all ranks call this.

        Raises as ``require_finite`` does, which is checked more often than lines are due. Raises DivergedError, on
        all ranks, for a loss far above the first step's.
        """
        due = attempts % self.every == 0 or attempts in (1, self.steps)
        if due or attempts % FINITE_CHECK_STEPS == 0:
            self.require_finite()
        if not due:
            return
        dist.all_reduce(self.loss)
        now, loss = time.perf_counter(), float(self.loss) / max(self.targets, 1)
        record = {
            "event": "step",
            "step": attempts,
            "loss": loss,
            "rate": rate,
            "examples_per_second": self.examples / max(now - self.since, 1e-9),
        }
        left = (now - self.began) / max(attempts - self.first, 1) * (self.steps - attempts)
        learnt = self.targets
        self.loss.zero_()
        self.targets = self.examples = 0
        self.since = now
        speed = f"{record['examples_per_second']:,.0f} examples/s, {left:,.0f} s left"
        self._report(f"step {attempts}/{self.steps}, loss {record['loss']:.4f}, {speed}", record)
        if self.first_loss is None and learnt > 0:  # steps that overflowed do not count
            self.first_loss = loss
        if self.first_loss is not None and loss > DIVERGED_FACTOR * self.first_loss:
            raise DivergedError(
                f"the loss is {loss:.3g}, the first step's was {self.first_loss:.3g}: lower the rate, or lengthen the "
                "warm-up"
            )

    def changed(self, step: int, changes: Changes) -> None:
        """Report and record what changed since the checkpoint that the run resumes from."""
        if changes:
            record = {"event": "changed", "step": step, "settings": changes}
            self._report(f"changed since that checkpoint: {spelled(changes)}", record)

    def evaluated(self, place: dict[str, Any], judged: Judged, measure: str) -> None:
        """Report the dev metrics, the deciding one first."""
        names = [measure, *(name for name in judged.metrics if name != measure)]
        shown = ", ".join(f"{name} {judged.metrics[name]:.4f}" for name in names[:4])
        odd = " (it gives the same answer for every input)" if judged.constant else ""
        text = f"epoch {place['epoch']:.2f}, dev: {shown}{odd}"
        self._report(text, {"event": "dev", **place, "figures": judged.metrics})

    def _report(self, text: str, record: dict[str, Any]) -> None:
        if self.world.is_main:
            say(f"{self.name}: {text}")
            self.log.write([record])
