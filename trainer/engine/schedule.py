"""Phases of a run, and the learning rate as a pure function of the step inside a phase."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from data_prep.json_text import shown
from trainer.bounds import ABOVE_0, LARGEST_BATCH, MOST_SAMPLES, MOST_STEPS, outside
from trainer.data.order import Gap

MOST_TOKENS = 2**31  # in a micro-batch: kernels count them in 32 bits
MOST_PARTS = 2**17  # micro-batches of all ranks in one step
MOST_MINUTES = 10**6  # almost two years
MOST_PASSES = 100  # passes over the shards in one step


@dataclass(frozen=True)
class BatchStage:
    """Some steps at the start of a phase with a batch smaller than the phase's own."""

    steps: int  # optimizer steps with this batch
    global_batch: int  # sequences per step; larger than in the stage before, smaller than the phase's global_batch

    def problems(self) -> list[str]:
        """Every invalid setting of this stage, with what to change."""
        return outside(self, steps=(1, MOST_STEPS), global_batch=(1, LARGEST_BATCH))


@dataclass(frozen=True)
class Phase:
    """One part of a run, at one sequence length. A run is a list of phases; moments carry over from one to the next.

    Set two of ``global_batch``, ``micro_batch`` and ``accumulation``; the third follows from the number of ranks
    (see :func:`batch_of`). Set one of ``steps``, ``samples``, ``epochs`` and ``minutes``; once the shards are open,
    :func:`resolve` turns samples and epochs into steps.
    """

    name: str  # names the phase in logs and checkpoints; each phase has its own
    train: str  # training shards: a folder, or an address such as s3://bucket/folder
    sequence_length: int  # sequence length of those shards; checked against their manifest
    steps: int = 0  # optimizer steps; 0: as many as samples or epochs require
    learning_rate: float = 0.0  # peak learning rate; must be set
    global_batch: int | None = None  # sequences per optimizer step, over all ranks and micro-batches
    # maximum number of sequences in one forward and backward pass on one rank; auto: the planner finds, at the run's
    # first start, how many fit into 95 % of the GPUs' memory, and a run that resumes keeps the number if it still fits
    micro_batch: int | Literal["auto"] | None = None
    accumulation: int | None = None  # micro-batches per step on one rank
    # batch warm-up: stages with growing batches, before the steps with global_batch; they do not change the rate
    batch_warmup: tuple[BatchStage, ...] = ()
    samples: int | None = None  # sequences to train on, rounded up to whole steps
    epochs: float | None = None  # passes over the training shards, rounded up to whole steps
    # minutes of training, in place of steps; the learning rate follows the time, so two runs do not give equal bits
    minutes: float | None = None
    # the global batch for which the rates are given; for another one they scale with the square root of the ratio
    reference_batch: int | None = None
    warmup_steps: int = 0  # steps over which the rate rises to learning_rate
    warmup_minutes: float = 0.0  # the same in minutes of training, for a phase with minutes
    warmup_power: float = 1.0  # exponent of the warm-up; 1 is linear
    start_learning_rate: float = 0.0  # learning rate at the start of the warm-up
    decay: Literal["polynomial", "exponential"] = "polynomial"  # how the rate falls after the warm-up
    power: float = 1.0  # exponent of the polynomial decay; 1 is linear, 0 is constant
    decay_rate: float | None = None  # exponential decay: factor by which the rate falls every decay_steps
    decay_steps: int | None = None  # exponential decay: steps in which the rate falls by the factor decay_rate
    end_learning_rate: float = 0.0  # learning rate that either decay approaches and never falls below
    mlm_weight: float = 1.0  # weight of the MLM loss in the loss that is optimized; reported losses are not weighted
    nsp_weight: float = 1.0  # the same for the NSP loss
    heldout: str | None = None  # held-out shards, a folder or an address, evaluated during the phase
    # static: the masks stored in the training shards; dynamic: new masks in each epoch, drawn the same way
    masks: Literal["static", "dynamic"] = "static"
    # rows of the position table that training uses: each sequence starts at a random one, so that a phase of short
    # sequences prepares the table for longer ones; null: every sequence starts at position 0
    spread_positions: int | None = None
    # samples that training skips, such as damaged text: each gap is a position in the order and a number of samples
    pass_over: tuple[Gap, ...] = ()

    def problems(self) -> list[str]:
        """Every invalid or contradictory setting of this phase, with what to change."""
        found = []
        stated = [self.global_batch, self.micro_batch, self.accumulation]
        if self.micro_batch == "auto" and self.global_batch is None:
            found.append(
                "micro_batch is auto, and global_batch is not set: set these two, and not accumulation; otherwise the "
                "batch would depend on the GPUs"
            )
        elif sum(value is not None for value in stated) != 2:
            found.append("global_batch, micro_batch, accumulation: set exactly two of them; the third follows")
        lengths = [self.samples, self.epochs, self.minutes]
        if (self.steps != 0) + sum(length is not None for length in lengths) != 1:
            found.append("steps, samples, epochs, minutes: set exactly one of them, the length of the phase")
        found += outside(
            self,
            sequence_length=(1, 2**16),
            global_batch=(1, LARGEST_BATCH),
            micro_batch=(1, LARGEST_BATCH),
            accumulation=(1, LARGEST_BATCH),
            samples=(1, MOST_SAMPLES),
            reference_batch=(1, LARGEST_BATCH),
            decay_steps=(1, MOST_STEPS),
            spread_positions=(1, 2**16),
        )
        if self.spread_positions is not None and 0 < self.spread_positions < self.sequence_length:
            found.append(
                f"spread_positions is {self.spread_positions} but sequence_length is {self.sequence_length}: "
                "raise it, or remove it to start every sequence at position 0"
            )
        if self.steps < 0:
            found.append(f"steps is {shown(self.steps)}: must be 1 or more")
        found += outside(
            self, steps=(-math.inf, MOST_STEPS), epochs=(ABOVE_0, MOST_STEPS), minutes=(ABOVE_0, MOST_MINUTES)
        )
        found += self._batch_warmup_problems()
        return found + self._rate_problems() + self._warmup_problems() + self._decay_problems()

    def _batch_warmup_problems(self) -> list[str]:
        if not self.batch_warmup:
            return []
        found = []
        if self.global_batch is None or self.micro_batch is None:
            found.append("batch_warmup needs global_batch and micro_batch: set these two, and not accumulation")
        batches = [stage.global_batch for stage in self.batch_warmup]
        if self.global_batch is not None:
            batches.append(self.global_batch)
        if any(later <= earlier for earlier, later in pairwise(batches)):
            grown = ", ".join(shown(batch) for batch in batches)
            found.append(f"batch_warmup: the batches up to global_batch are {grown}: each must exceed the one before")
        taken = sum(stage.steps for stage in self.batch_warmup)
        if 0 < self.steps <= taken:
            found.append(
                f"batch_warmup takes {shown(taken)} steps, but the phase has only {shown(self.steps)}: shorten it, so "
                "that steps with global_batch follow"
            )
        return found

    def _rate_problems(self) -> list[str]:
        found = outside(self, learning_rate=(ABOVE_0, 100), mlm_weight=(0, 1000), nsp_weight=(0, 1000))
        if self.mlm_weight == self.nsp_weight == 0:
            found.append("mlm_weight, nsp_weight are both 0: raise one of them, or nothing is learned")
        for name in ("start_learning_rate", "end_learning_rate"):
            if not 0 <= getattr(self, name) <= self.learning_rate:
                bounds = f"0 and learning_rate ({self.learning_rate})"
                found.append(f"{name} is {getattr(self, name)}: must be between {bounds}")
        return found

    def _warmup_problems(self) -> list[str]:
        found = []
        if self.warmup_steps < 0 or 0 < self.steps < self.warmup_steps:
            most = f"0 and steps ({shown(self.steps)})" if self.steps > 0 else "0 and the length of the phase"
            found.append(f"warmup_steps is {shown(self.warmup_steps)}: must be between {most}")
        else:
            found += outside(self, warmup_steps=(0, MOST_STEPS))
        if self.minutes is not None and self.warmup_steps > 0:
            found.append("warmup_steps counts steps, but minutes sets the length: set warmup_minutes in its place")
        if self.minutes is None and self.warmup_minutes != 0:
            found.append("warmup_minutes needs minutes, but the phase has none: set warmup_steps in its place")
        elif self.minutes is not None and not 0 <= self.warmup_minutes <= self.minutes:
            found.append(f"warmup_minutes is {self.warmup_minutes}: must be between 0 and minutes ({self.minutes})")
        found += outside(self, warmup_power=(ABOVE_0, 20))  # a step count to this power still fits a float
        if (
            self.warmup_power > 0
            and self.warmup_steps == self.warmup_minutes == 0
            and (self.start_learning_rate, self.warmup_power) != (0.0, 1.0)
        ):
            key = "warmup_steps" if self.minutes is None else "warmup_minutes"
            found.append(f"start_learning_rate, warmup_power need a warm-up, but {key} is 0: set it, or remove them")
        return found

    def _decay_problems(self) -> list[str]:
        found = outside(self, power=(0, 20))
        exponential = self.decay == "exponential"
        if exponential != (self.decay_rate is not None) or exponential != (self.decay_steps is not None):
            found.append("decay_rate, decay_steps: set both for decay: exponential, and neither for any other decay")
        if self.decay_rate is not None and not 0 < self.decay_rate <= 1:
            found.append(f"decay_rate is {self.decay_rate}: must be above 0, and 1 or less")
        if exponential and self.minutes is not None:
            found.append("decay is exponential, which counts steps, but minutes sets the length: use polynomial")
        if exponential and self.power != Phase.power:
            found.append("power is for decay: polynomial, but decay is exponential: remove it")
        return found


def known_phases(trees: Iterable[dict[str, Any]]) -> list[Phase]:
    """Phases that a run has stored as plain data, without keys that this version does not know."""
    names = Phase.__dataclass_fields__
    known = [{key: value for key, value in own.items() if key in names} for own in trees]
    stages = [tuple(BatchStage(**stage) for stage in own.get("batch_warmup", ())) for own in known]
    return [Phase(**own | {"batch_warmup": each}) for own, each in zip(known, stages, strict=True)]


def batch_of(phase: Phase, ranks: int) -> tuple[int, int]:
    """``(global batch, micro-batches per rank)`` of a phase on this many ranks. Pure.

    Ranks need not get equal shares: 64 sequences on 3 ranks are split 22, 21, 21. If there are more parts than
    sequences, some parts are empty, and the loader pads them with sequences of weight zero. ``micro_batch: auto`` gives
    one micro-batch per step, until :mod:`trainer.plan.micro_batch` has found a number.
    """
    if phase.global_batch is None:
        assert isinstance(phase.micro_batch, int) and phase.accumulation is not None  # Phase.problems
        return phase.micro_batch * phase.accumulation * ranks, phase.accumulation
    if phase.accumulation is not None:
        return phase.global_batch, phase.accumulation
    if phase.micro_batch == "auto":
        return phase.global_batch, 1
    assert phase.micro_batch is not None
    share = -(-phase.global_batch // ranks)
    return phase.global_batch, -(-share // phase.micro_batch)


def batch_at(phase: Phase, step: int, ranks: int) -> tuple[int, int]:
    """``(global batch, micro-batches per rank)`` of step 1 … ``phase.steps``, which batch warm-up makes smaller. Pure.

    It depends on the optimizer steps taken, as the learning rate does: a skipped step does not shorten a stage.
    """
    for stage in phase.batch_warmup:
        if step <= stage.steps:
            return batch_of(replace(phase, global_batch=stage.global_batch), ranks)
        step -= stage.steps
    return batch_of(phase, ranks)


def samples_in(phase: Phase, steps: int, global_batch: int) -> int:
    """Number of samples in the first ``steps`` steps of a phase, whose batch grows to ``global_batch``. Pure."""
    samples = 0
    for stage in phase.batch_warmup:
        taken = min(steps, stage.steps)
        samples, steps = samples + taken * stage.global_batch, steps - taken
    return samples + steps * global_batch


def batch_problems(phase: Phase, ranks: int, available: int) -> list[str]:
    """Problems with a step's batch on this many ranks, for shards of ``available`` samples. Pure."""
    found = []
    global_batch, micro_batches = batch_of(phase, ranks)
    cut = f"on {ranks:,} rank(s)"
    if global_batch > LARGEST_BATCH:
        found.append(
            f"micro_batch, accumulation: they give {global_batch:,} sequences per step {cut}: must be "
            f"{LARGEST_BATCH:,} or less"
        )
    if ranks * micro_batches > MOST_PARTS:
        found.append(
            f"accumulation: it gives {ranks * micro_batches:,} micro-batches per step {cut}: must be "
            f"{MOST_PARTS:,} or less"
        )
    cuts = [batch_of(replace(phase, global_batch=stage.global_batch), ranks) for stage in phase.batch_warmup]
    largest = max(-(-batch // (ranks * parts)) for batch, parts in [(global_batch, micro_batches), *cuts])
    tokens = largest * phase.sequence_length
    if tokens >= MOST_TOKENS and phase.micro_batch != "auto":
        found.append(f"micro_batch: one may have {tokens:,} tokens {cut}: must be under {MOST_TOKENS:,}: lower it")
    if global_batch > MOST_PASSES * available:
        found.append(
            f"global_batch: a step takes {global_batch:,} sequences, but the shards contain only {available:,}, and a "
            f"step may use each at most {MOST_PASSES} times: lower the batch, or add shards"
        )
    return found


def resolve(phase: Phase, global_batch: int, available: int) -> Phase:
    """The phase as it runs, with ``global_batch`` sequences per step over shards of ``available`` samples. Pure.

    Its length is in steps, rounded up so that no requested sample is left out. If the batch is k times
    ``reference_batch``, the rates are multiplied by √k: the rule by which LAMB's authors train BERT at all batches from
    512 to 32,768 (You et al. 2020, section 4; Krizhevsky 2014). Batch warm-up changes the number of steps, not k.
    """
    by = math.sqrt(global_batch / phase.reference_batch) if phase.reference_batch is not None else 1.0
    samples = phase.samples if phase.epochs is None else round(phase.epochs * available)
    steps = phase.steps if samples is None else max(1, _steps_for(phase, samples, global_batch))
    rates = {name: getattr(phase, name) * by for name in ("start_learning_rate", "learning_rate", "end_learning_rate")}
    return replace(phase, steps=steps, samples=None, epochs=None, reference_batch=None, **rates)


def _steps_for(phase: Phase, samples: int, global_batch: int) -> int:
    """Number of steps that take at least ``samples`` samples."""
    steps = 0
    for stage in phase.batch_warmup:
        taken = min(stage.steps, -(-samples // stage.global_batch))
        steps, samples = steps + taken, max(0, samples - taken * stage.global_batch)
    return steps + -(-samples // global_batch)


def learning_rate(phase: Phase, step: int, seconds: float = 0.0) -> float:
    """The rate of step 1 … ``phase.steps``: warm-up from ``start`` to ``peak``, then decay towards ``end``.

    warm-up      start + (peak - start) · (step / warmup_steps) ** warmup_power
    polynomial   end + (peak - end) · (1 - (step - 1) / steps) ** power
    exponential  end + (peak - end) · decay_rate ** ((step - 1 - warmup_steps) / decay_steps)

    The polynomial decay counts from the phase's start, not from the end of the warm-up, as in google-research/bert and
    NVIDIA's BERT. The exponential decay is DeepSpeed's (bing_bert, ``warmup_exp_decay_exp``). To reproduce it, use a
    warm-up of power 2, set ``start`` and ``end`` to its ``lr_offset``, and ``peak`` to its rate plus that offset.

    In a phase with ``minutes``, both follow the ``seconds`` of training in that phase in place of steps.
    """
    if phase.minutes is not None:
        return _rate_at(phase, phase.minutes, seconds / 60)
    if step <= phase.warmup_steps:
        span, power = phase.learning_rate - phase.start_learning_rate, phase.warmup_power
        return float(phase.start_learning_rate + span * step**power / phase.warmup_steps**power)
    if phase.decay == "exponential":
        assert phase.decay_rate is not None and phase.decay_steps is not None  # Phase.problems
        left = phase.decay_rate ** ((step - 1 - phase.warmup_steps) / phase.decay_steps)
    else:
        left = (1.0 - (step - 1) / phase.steps) ** phase.power
    return float(phase.end_learning_rate + (phase.learning_rate - phase.end_learning_rate) * left)


def _rate_at(phase: Phase, length: float, elapsed: float) -> float:
    """The rate of a phase of ``length`` minutes after ``elapsed`` minutes."""
    if elapsed < phase.warmup_minutes:
        span = phase.learning_rate - phase.start_learning_rate
        return float(phase.start_learning_rate + span * (elapsed / phase.warmup_minutes) ** phase.warmup_power)
    left = max(0.0, 1.0 - elapsed / length) ** phase.power
    return float(phase.end_learning_rate + (phase.learning_rate - phase.end_learning_rate) * left)
