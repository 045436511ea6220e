"""The place where a run's checkpoints are kept: a folder that all ranks see, or an object store.

Saving and resuming know only this interface. trainer/checkpoint/shared_folder.py and object_store.py implement it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import Event
from typing import Any, Protocol

from trainer.checkpoint.part import Part
from trainer.checkpoint.reading import Check, Checkpoint, CheckpointConfig
from trainer.ranks.world import World


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being saved."""

    name: str  # step-…, its name once it is complete
    mark: str  # sets this save apart from others of the same name


class Store(Protocol):
    """The place where a run's checkpoints are kept. Its methods raise OSError or TrainerError."""

    def place(self, name: str) -> str:
        """A checkpoint's place, as text for people."""

    def begin(self, name: str) -> str:
        """Begin a save and return its mark, which all ranks then get. Rank 0 calls it at a step boundary."""

    def deposit(self, draft: Draft, part: Part) -> None:
        """Bring a rank's part into the draft. A thread of each rank calls it."""

    def collect(self, draft: Draft, ranks: int, abandoned: Event) -> list[dict[str, Any]]:
        """Wait until all parts are in the draft, and return the name, size and sha256 of each; empty if ``abandoned``.

        Rank 0's thread calls it.
        """

    def publish(self, draft: Draft, listing: bytes) -> tuple[int, dict[str, str]]:
        """Make the draft a checkpoint, all at once; ``listing`` is its checkpoint.json. Rank 0's thread calls it.

        Returns the checkpoint's size in bytes, and what could not be written that Lambert does not need, with reasons.
        """

    def discard(self, draft: Draft) -> None:
        """Give up a draft. Rank 0 calls it at a step boundary."""

    def prune(self, config: CheckpointConfig, step: int) -> dict[str, str]:
        """Remove the checkpoints up to ``step`` that ``config`` does not keep, and the remains of killed saves.

        Rank 0's thread calls it. Returns what could not be removed, with the reasons.
        """

    def remove(self, steps: range) -> list[str]:
        """Remove the checkpoints of these steps. Rank 0 calls it. Returns a reason for each that is left behind."""

    def amend(self, found: Checkpoint, **changes: Any) -> None:
        """Replace these items of a checkpoint's record at once, and make it the latest. Rank 0 calls it."""

    def newest(self, damaged: Mapping[str, str], check: Check) -> tuple[Checkpoint | None, list[str]]:
        """The newest complete checkpoint, and why newer ones were skipped, as `reading.newest`. Rank 0 calls it."""

    def disprove(self, name: str, world: World) -> str:
        """Why a checkpoint is not intact, judged by this rank's share of it; empty if that is intact.

        Every rank calls it. If all shares are intact, the checkpoint is in ``found`` on every node.
        """

    def found(self, name: str) -> Checkpoint:
        """The checkpoint that every rank has found intact."""


def outdated(steps: Iterable[int], config: CheckpointConfig, step: int) -> list[int]:
    """The steps, among those of whole checkpoints, that ``config`` does not keep after ``step`` has been saved."""
    past, often = sorted(each for each in steps if each <= step), config.keep_every_steps
    return [each for each in past[: -config.keep] if often is None or each % often]
