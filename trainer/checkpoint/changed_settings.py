"""Lists the settings that changed between a checkpoint and the run that resumes from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.checkpoint.reading import Checkpoint
from trainer.checkpoint.train_state import TrainState
from trainer.engine.schedule import Phase, known_phases

Changes = dict[str, tuple[Any, Any]]  # key: its value in the checkpoint, and its value now
# sections that affect how a run continues
SECTIONS = ("model", "optimizer", "engine", "checkpoint", "evaluation", "guard")
NEXT_RATE = "the next step's learning rate"


@dataclass(frozen=True)
class Setup:
    """The settings that a run uses: configuration, identity, precision and number of ranks."""

    config: dict[str, Any]  # the configuration as a tree, with phases in steps
    identity: dict[str, Any]
    precision: str  # the one in use, never "auto"
    ranks: int

    @staticmethod
    def of(found: Checkpoint) -> Setup:
        """The setup that a checkpoint was saved under."""
        record = found.record
        return Setup(record["config"], record["identity"], record["precision"], len(found.parts))

    @property
    def phases(self) -> list[Phase]:
        """The phases, without keys that this version does not know."""
        return known_phases(self.config["phases"])

    def deciding(self, phase: int) -> dict[str, Any]:
        """The settings that affect the run from the phase with this index on."""
        phases = [
            None if index < phase else own | {"global_batch": same["global_batch"]}  # even if only its factors are set
            for index, (own, same) in enumerate(zip(self.config["phases"], self.identity["phases"], strict=True))
        ]
        found = {key: self.config[key] for key in SECTIONS if key in self.config}
        found["engine"] = found["engine"] | {"precision": self.precision}
        return {"ranks": self.ranks, "phases": phases} | found


def since(saved: Setup, ours: Setup, state: TrainState) -> Changes:
    """The settings that change when a run resumes from ``state``, and last the next step's learning rate. Pure."""
    found = differing(saved.deciding(state.phase), ours.deciding(state.phase))
    if state.entering(tuple(ours.phases)).phase == state.phase < len(ours.phases):
        before, now = (state.rate(own.phases[state.phase]) for own in (saved, ours))
        found |= {NEXT_RATE: (before, now)} if before != now else {}
    return found


def differing(before: Any, now: Any, where: str = "") -> Changes:
    """The leaves in which two trees of plain data differ, by key ("phases.0.steps"). Pure.

    A key that only one tree has comes from another version of Lambert and is left out. An item that only one of two
    lists has is reported whole, against None.
    """
    found: Changes = {}
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in now:
            if key in before:
                found |= differing(before[key], now[key], f"{where}.{key}" if where else str(key))
    elif isinstance(before, list | tuple) and isinstance(now, list | tuple):
        for index in range(max(len(before), len(now))):
            one, other = (part[index] if index < len(part) else None for part in (before, now))
            found |= differing(one, other, f"{where}.{index}")
    elif before != now:
        found[where] = before, now
    return found


def spelled(changes: Changes) -> str:
    """The changes as one line of text."""
    return "; ".join(f"{key} was {setting(before)}, now {setting(now)}" for key, (before, now) in changes.items())


def setting(value: Any) -> str:
    """One setting as text; a phase as its name."""
    if isinstance(value, Mapping) and "name" in value:  # a phase
        return str(value["name"])
    return value if isinstance(value, str) else f"{value:.10g}" if isinstance(value, float) else json.dumps(value)
