"""Watches a run for signs of trouble and decides what to do about them. docs/guard.md is the page for users.

Every rank judges the same numbers at the same step boundaries, so all ranks decide the same without a collective of
their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

from torch import Tensor

from data_prep.json_text import shown
from trainer.bounds import ABOVE_0, MOST_STEPS, outside
from trainer.checkpoint.reading import Checkpoint
from trainer.checkpoint.saving import Saved
from trainer.checkpoint.train_state import TrainState
from trainer.data.order import Gap
from trainer.errors import TrainerError
from trainer.monitor.metrics_log import Record

ACTIONS = ("warn", "lower", "rollback", "stop")
GUIDE = "docs/guard.md"
REMEDY = "training diverged; lower the learning rate or lengthen the warm-up, and resume from the last checkpoint"
LEAST_DEVIATION = 0.05  # nats; a loss that hardly varies has no smaller deviation than this
SLOW_RATIO, SLOW_SECONDS = 1.2, 600.0  # a slow rank works this much longer than the mean, for so long; as its alert
OUTSIDE = ("slow_rank", "failed_save")  # signs whose cause is not in the run: starting again may help


@dataclass(frozen=True)
class GuardConfig:
    """The action for each sign of trouble, and its limits.

    ``warn`` prints a line. ``lower`` lowers the learning rate for some steps. ``rollback`` goes back to a checkpoint
    and skips the samples that were read when the trouble began. ``stop`` saves and ends the run.
    """

    # a loss or gradient is NaN or infinite; the weights may be unusable, so stop does not save them
    non_finite: Literal["stop", "rollback"] = "stop"
    spike: Literal["warn", "lower", "rollback", "stop"] = "warn"  # the loss is far above that of the last steps
    loss_scale: Literal["warn", "lower", "rollback", "stop"] = "warn"  # the loss scale of fp16 has fallen to 1
    plateau: Literal["warn", "stop"] = "warn"  # the run is on the plateau at the unigram loss
    # for ten minutes, one rank has worked over 1.2 times as long as the mean
    slow_rank: Literal["warn", "stop"] = "warn"
    failed_save: Literal["warn", "stop"] = "warn"  # a checkpoint could not be saved
    spike_steps: int = 100  # last steps that a loss is compared with; a phase is judged once half of them are taken
    spike_deviations: float = 8.0  # a loss more than this many deviations above their median is a spike
    lower_factor: float = 0.5  # the factor of the learning rate for lower
    lower_steps: int = 100  # steps with the lower rate
    skip_before: int = 1  # rollback: steps before the first bad one whose samples are also skipped
    most_rollbacks: int = 3  # rollbacks within rollback_steps; one more stops the run
    rollback_steps: int = 10_000  # steps in which rollbacks are counted

    def problems(self) -> list[str]:
        """Every invalid setting, with what to change."""
        return outside(
            self,
            spike_steps=(2, 10_000),
            spike_deviations=(1, 1000),
            lower_factor=(ABOVE_0, 1),
            lower_steps=(1, MOST_STEPS),
            skip_before=(0, 1000),
            most_rollbacks=(1, 1000),
            rollback_steps=(1, MOST_STEPS),
        )


@dataclass(frozen=True)
class Finding:
    """A sign of trouble, and what the guard does about it."""

    sign: str  # a key of GuardConfig
    action: str  # one of ACTIONS
    step: int  # optimizer steps taken when the sign was noticed
    what: str  # one line for people
    phase: int = 0
    gap: Gap = Gap(0, 0)  # the samples to skip; none if the sign has nothing to do with data


class Setback(TrainerError):
    """Training cannot go on from this state. Raised on all ranks at the same step boundary."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.what)
        self.finding = finding


@dataclass(frozen=True)
class GuardState:
    """The guard's memory. Checkpoints contain it, so a resumed run decides as if it was never stopped."""

    phase: int = 0  # phase of the recent steps
    recent: tuple[tuple[int, float | None], ...] = ()  # position and loss of each; no loss if it was not applied
    gaps: tuple[tuple[int, int, int], ...] = ()  # skipped after rollbacks: phase, position, samples
    rollbacks: tuple[int, ...] = ()  # the steps from which the run went back
    lowered_until: int = 0  # the last step with a lower learning rate
    spiking: bool = False  # whether the last step was a spike: only the first of several is reported

    @staticmethod
    def of(found: Checkpoint) -> GuardState:
        """The state in a checkpoint's record. Raises TrainerError if it is damaged."""
        given: Any = found.record.get("guard", {"recent": [], "gaps": [], "rollbacks": []})  # older ones have none
        try:
            return GuardState(
                phase=_count(given.get("phase", 0)),
                recent=tuple((_count(at), None if loss is None else float(loss)) for at, loss in given["recent"]),
                gaps=tuple((_count(phase), _count(at), _count(samples)) for phase, at, samples in given["gaps"]),
                rollbacks=tuple(_count(step) for step in given["rollbacks"]),
                lowered_until=_count(given.get("lowered_until", 0)),
                spiking=given.get("spiking") is True,
            )
        except (AttributeError, LookupError, TypeError, ValueError):
            said = shown(given)
            raise TrainerError(f"checkpoint {found.folder} is damaged: guard in its record is {said}") from None


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(value)
    return value


def spike(loss: float, before: Iterable[float], deviations: float) -> str:
    """Describe how far ``loss`` is above the losses ``before`` it, or return "" if it is no spike.

    The deviation is 1.4826 times the median distance from the median, which for normally distributed losses is their
    standard deviation (Rousseeuw and Croux, "Alternatives to the Median Absolute Deviation", 1993).
    """
    losses = list(before)
    middle = median(losses)
    deviation = max(LEAST_DEVIATION, 1.4826 * median(abs(each - middle) for each in losses))
    above = (loss - middle) / deviation
    if above <= deviations:
        return ""
    return f"loss {loss:.3f} is {above:.1f} deviations above the median {middle:.3f} of {len(losses)} steps"


class Guard:
    """Judges a run's steps as they are logged. Every rank has one and gives it the same numbers."""

    def __init__(self, config: GuardConfig | None = None) -> None:
        self.config, self.state = config or GuardConfig(), GuardState()
        self.ending: Finding | None = None  # why the run saves and ends at this step boundary
        self._slow, self._slow_seconds = -1, 0.0  # the slowest rank, and for how long it has been too slow

    def gaps(self, phase: int) -> tuple[Gap, ...]:
        """The samples of a phase that rollbacks made the run skip."""
        return tuple(Gap(at, samples) for own, at, samples in self.state.gaps if own == phase)

    def rate(self, rate: float, step: int) -> float:
        """The learning rate after ``step`` steps, with the schedule's ``rate``."""
        return rate * self.config.lower_factor if step < self.state.lowered_until else rate

    def judge(self, steps: list[Record], seconds: Tensor, compute: Tensor, stuck: bool) -> list[Finding]:
        """Judge the steps since the last call. Returns what was found; the caller reports it and calls `act`.

        ``seconds`` and ``compute``, (ranks,): each rank's time in these steps, and its own work without waiting for
        others. ``stuck``: whether the run is on the plateau at the unigram loss.
        """
        found = [finding for step in steps for finding in self._step(step)]
        at = steps[-1]["step"]
        if stuck and self.config.plateau == "stop":
            found.append(Finding("plateau", "stop", at, "the run is on the plateau at the unigram loss"))
        return _merged(found, at) + self._slow_rank(at, seconds, compute)

    def saved(self, saved: Saved) -> list[Finding]:
        """Judge the outcome of a save. A failure that only warns is reported elsewhere."""
        if not saved.failure or self.config.failed_save == "warn":
            return []
        return [Finding("failed_save", "stop", saved.step, f"a checkpoint could not be saved ({saved.failure})")]

    def act(self, found: list[Finding]) -> None:
        """Do what was decided. Raises Setback if the run cannot go on from here."""
        for finding in found:
            if finding.sign == "non_finite" or getattr(self.config, finding.sign) == "rollback":
                raise Setback(finding)
            if finding.action == "stop":
                self.ending = self.ending or finding
                return  # nothing that follows is graver
            if finding.action == "lower":
                self.state = replace(self.state, lowered_until=finding.step + self.config.lower_steps)

    def overflowed(self, state: TrainState, end: int, what: str) -> Finding:
        """The finding for a step from ``state``, with samples up to ``end``, whose gradients are not finite."""
        self._enter(state.phase)
        begin = self._before(state.position)
        return self._finding("non_finite", state.step, self._diverged(what), state.phase, Gap(begin, end - begin))

    def told(self, finding: Finding) -> str:
        """The line about a finding that does not end the run."""
        done = {
            "warn": f"see {GUIDE}",
            "lower": f"lowering the learning rate for {self.config.lower_steps} steps",
            "rollback": "going back to a checkpoint",
        }
        return f"guard: {finding.what}; {done[finding.action]}"

    def went_back(self, found: Checkpoint, finding: Finding) -> None:
        """Continue from a checkpoint's state, but keep what is skipped and count the rollback."""
        gap = (finding.phase, finding.gap.position, finding.gap.samples)
        gaps, rollbacks = (*self.state.gaps, gap), (*self.state.rollbacks, finding.step)
        self.state = replace(GuardState.of(found), gaps=gaps, rollbacks=rollbacks, spiking=False)

    def _finding(self, sign: str, step: int, what: str, phase: int, gap: Gap) -> Finding:
        """The finding, with the action that the configuration names; one rollback too many is a stop."""
        action, after = getattr(self.config, sign), step - self.config.rollback_steps
        if action == "rollback" and sum(past > after for past in self.state.rollbacks) >= self.config.most_rollbacks:
            most, within = self.config.most_rollbacks, self.config.rollback_steps
            action, what = "stop", f"{what}; it went back {most} times within {within} steps"
        return Finding(sign, action, step, what, phase, gap)

    def _diverged(self, what: str) -> str:
        """The text without its remedy if the guard has one of its own."""
        return what if self.config.non_finite == "stop" else what.rpartition(": ")[0]

    def _step(self, step: Record) -> list[Finding]:
        """Judge one step and remember it."""
        self._enter(step["phase"])
        begin = step["position"] - step["batch"] - step["left_out"]
        losses = [loss for _, loss in self.state.recent if loss is not None][-self.config.spike_steps :]
        applied, what, sign = step["applied"], "", ""
        finite = applied and math.isfinite(step["loss"]) and math.isfinite(step["gradient_norm"])
        if applied and not finite:
            numbers = f"loss {step['loss']:.4g}, gradient norm {step['gradient_norm']:.4g}"
            what, sign = self._diverged(f"step {step['step']}: {numbers}: {REMEDY}"), "non_finite"
        elif applied and 2 * len(losses) >= self.config.spike_steps:
            if above := spike(step["loss"], losses, self.config.spike_deviations):
                what, sign = f"step {step['step']}: {above}", "spike"
        elif not applied and step["loss_scale"] == 2:
            what, sign = f"step {step['step']}: the loss scale has fallen to 1, its floor", "loss_scale"
        quiet = sign == "spike" and self.state.spiking and self.config.spike != "rollback"
        spiking = sign == "spike" or (self.state.spiking and not applied)
        start = self._before(begin)
        kept = self.config.spike_steps + self.config.skip_before
        recent = (*self.state.recent, (begin, float(step["loss"]) if finite else None))[-kept:]
        self.state = replace(self.state, recent=recent, spiking=spiking)
        if not sign or quiet:
            return []
        gap = Gap(start, step["position"] - start)
        return [self._finding(sign, step["step"], what, step["phase"], gap)]

    def _before(self, begin: int) -> int:
        """The position of the step ``skip_before`` steps before the one that begins at ``begin``."""
        starts = [at for at, _ in self.state.recent]
        return [*starts, begin][-1 - min(self.config.skip_before, len(starts))]

    def _enter(self, phase: int) -> None:
        """Forget the steps of another phase: its losses and positions are not comparable."""
        if phase != self.state.phase:
            self.state = replace(self.state, phase=phase, recent=(), spiking=False)

    def _slow_rank(self, step: int, seconds: Tensor, compute: Tensor) -> list[Finding]:
        rank, over = int(compute.argmax()), float(compute.max()) / max(float(compute.mean()), 1e-9)
        if over <= SLOW_RATIO or rank != self._slow:
            self._slow, self._slow_seconds = rank, 0.0
        if over <= SLOW_RATIO:
            return []
        before, self._slow_seconds = self._slow_seconds, self._slow_seconds + float(seconds.max())
        if not before < SLOW_SECONDS <= self._slow_seconds:
            return []
        ratio = f"over {SLOW_RATIO} times as long as the mean"
        what = f"rank {rank} is slow: for {SLOW_SECONDS / 60:.0f} minutes it has worked {ratio}"
        return [Finding("slow_rank", self.config.slow_rank, step, what)]


def _merged(found: list[Finding], step: int) -> list[Finding]:
    """One finding for each sign, noticed at ``step``, whose gap spans all of that sign; the gravest sign first."""
    merged: dict[str, Finding] = {}
    for finding in found:
        first = merged.setdefault(finding.sign, finding)
        samples = finding.gap.position + finding.gap.samples - first.gap.position
        merged[finding.sign] = replace(first, gap=Gap(first.gap.position, samples), step=step)
    return sorted(merged.values(), key=lambda finding: (finding.sign != "non_finite", -ACTIONS.index(finding.action)))
