"""Phases of a run, and the learning rate as a pure function of the step inside a phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Phase:
    """One stretch of a run at one sequence length. A run is a list of them; moments carry over.

    State two of ``global_batch``, ``micro_batch`` and ``accumulation``; with the number of ranks the
    third follows (see :func:`batch_of`).
    """

    name: str
    train: str  # training shards: a folder, or an address such as s3://bucket/folder
    sequence_length: int  # of those shards; checked against their manifest
    steps: int  # optimizer steps
    learning_rate: float  # peak
    global_batch: int | None = None  # sequences of all ranks and micro-batches in one step
    micro_batch: int | None = None  # sequences of one forward and backward on one rank, at most
    accumulation: int | None = None  # micro-batches of one rank in one step
    warmup_steps: int = 0
    power: float = 1.0  # of the polynomial decay; 1 is linear, 0 is constant
    end_learning_rate: float = 0.0
    heldout: str | None = None  # held-out shards, likewise, evaluated during the phase
    # of the training shards; static: those in them; dynamic: new ones in each epoch, drawn as those were
    masks: Literal["static", "dynamic"] = "static"

    def problems(self) -> list[str]:
        """What contradicts itself in this phase, each with its remedy."""
        found = []
        stated = [self.global_batch, self.micro_batch, self.accumulation]
        if sum(value is not None for value in stated) != 2:
            found.append("global_batch, micro_batch, accumulation: state exactly two of them; the third follows")
        for name in ("steps", "sequence_length", "global_batch", "micro_batch", "accumulation"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"{name} is {value}: must be 1 or more")
        if not self.learning_rate > 0:
            found.append(f"learning_rate is {self.learning_rate}: must be above 0")
        if not 0 <= self.end_learning_rate <= self.learning_rate:
            found.append(
                f"end_learning_rate is {self.end_learning_rate}: must lie between 0 and learning_rate "
                f"({self.learning_rate})"
            )
        if not 0 <= self.warmup_steps <= self.steps:
            found.append(f"warmup_steps is {self.warmup_steps}: must lie between 0 and steps ({self.steps})")
        if self.power < 0:
            found.append(f"power is {self.power}: must be 0 or more")
        return found


def batch_of(phase: Phase, ranks: int) -> tuple[int, int]:
    """``(global batch, micro-batches a rank)`` of a phase on this many ranks. Pure.

    A rank's share need not be whole: 64 sequences on 3 ranks are cut 22, 21, 21. Only more parts
    than sequences are impossible, and the cut then has empty parts, which the loader pads with
    sequences of weight zero.
    """
    if phase.global_batch is None:
        assert phase.micro_batch is not None and phase.accumulation is not None  # Phase.problems
        return phase.micro_batch * phase.accumulation * ranks, phase.accumulation
    if phase.accumulation is not None:
        return phase.global_batch, phase.accumulation
    assert phase.micro_batch is not None
    share = -(-phase.global_batch // ranks)
    return phase.global_batch, -(-share // phase.micro_batch)


def learning_rate(phase: Phase, step: int) -> float:
    """Rate of step 1 … ``phase.steps``: linear warm-up, then polynomial decay over the whole phase.

    As google-research/bert and NVIDIA's BERT have it, the decay counts from the phase's start, not
    from the end of the warm-up: ``end + (peak - end) · (1 - (step - 1) / steps) ** power``.
    """
    if step <= phase.warmup_steps:
        return phase.learning_rate * step / phase.warmup_steps
    remaining = 1.0 - (step - 1) / phase.steps
    span = phase.learning_rate - phase.end_learning_rate
    return float(phase.end_learning_rate + span * remaining**phase.power)
