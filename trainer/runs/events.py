"""The events of a run besides its steps, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainer.monitor.history import History
from trainer.monitor.summary import evaluated, judged, records, saved


class Event(NamedTuple):
    """Something that happened after a step."""

    step: int
    kind: str  # phase, restart, rollback, alarm, plateau, evaluation, checkpoint or end
    text: str


def events(history: History, phases: Sequence[str]) -> list[Event]:
    """All events of a run, in order. ``phases``: the names of its phases, if known."""
    found = sorted([*_turns(history, phases), *_reports(history)], key=lambda event: event.step)
    return [*found, Event(int(history.steps["step"][-1]), "end", history.end)] if history.end else found


def _turns(history: History, phases: Sequence[str]) -> Iterator[Event]:
    steps, phase = history.steps["step"], history.steps["phase"]
    for row in [0, *(np.flatnonzero(np.diff(phase)) + 1)]:
        index = int(phase[row]) if np.isfinite(phase[row]) else 0
        name = phases[index] if 0 <= index < len(phases) else str(index)
        yield Event(int(steps[row]) - 1, "phase", f"{name} begins")
    for step in history.restarts:
        yield Event(step, "restart", f"resumed from step {step:,}")
    for step, sign, action in history.guard:
        kind = "rollback" if action == "rollback" else "alarm"
        yield Event(step, kind, f"{sign.replace('_', ' ')}: {action}")


def _reports(history: History) -> Iterator[Event]:
    for row in records(history.heldout):
        yield _at(row, "evaluation", evaluated(row))
    for row in records(history.checkpoints):
        yield _at(row, "checkpoint", saved(row))
    for row in records(history.failed):
        yield _at(row, "alarm", "a checkpoint could not be saved")
    for row in records(history.plateaus):
        yield _at(row, "plateau", judged(row))


def _at(row: dict[str, Any], kind: str, text: str) -> Event:
    return Event(int(row["step"]), kind, text)
