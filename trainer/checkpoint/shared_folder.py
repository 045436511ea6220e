"""A folder that all ranks see, and that keeps a run's checkpoints.

Every rank's thread writes its part into one folder with a dotted name, and rank 0's thread renames the folder once all
parts are in it. The threads share that folder and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any

from data_prep.atomic import replacing, sync
from trainer.checkpoint import leftovers
from trainer.checkpoint import reading as checkpoint
from trainer.checkpoint.leftovers import move_aside, remove, temporary
from trainer.checkpoint.listing import amended
from trainer.checkpoint.part import Part
from trainer.checkpoint.reading import Check, Checkpoint, CheckpointConfig
from trainer.checkpoint.store import Draft, outdated
from trainer.errors import TrainerError
from trainer.ranks.world import World

POLL_SECONDS = 0.01  # between two checks by a waiting rank


class SharedFolder:
    """Keeps checkpoints in ``root``, which all ranks see. It is a `trainer.checkpoint.store.Store`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def place(self, name: str) -> str:
        """The checkpoint's folder."""
        return str(self.root / name)

    def begin(self, name: str) -> str:
        """Create the draft's folder, and remove those of killed or failed saves: no other save is running."""
        for path in drafts(self.root):
            remove(path)
        folder = temporary(self.root / name)
        folder.mkdir(parents=True)
        return folder.name

    def deposit(self, draft: Draft, part: Part) -> None:
        """Write the part, then a file with its size and sha256 for rank 0, which appears atomically."""
        folder = self.root / draft.mark
        facts = part.write(folder)
        beside = folder / facts["name"]
        unfinished = beside.with_suffix(".tmp")
        unfinished.write_text(json.dumps(facts), encoding="utf-8")
        unfinished.replace(beside.with_suffix(".json"))

    def collect(self, draft: Draft, ranks: int, abandoned: Event) -> list[dict[str, Any]]:
        """See `_wait_for_parts`."""
        return _wait_for_parts(self.root / draft.mark, ranks, abandoned)

    def publish(self, draft: Draft, listing: bytes) -> tuple[int, dict[str, str]]:
        """Give the folder its final name, then write ``latest``."""
        size, left = _publish(self.root / draft.mark, self.root / draft.name, listing)
        return size, _by_name(left)

    def discard(self, draft: Draft) -> None:
        """Remove the draft's folder: the save may have failed for lack of disk space."""
        shutil.rmtree(self.root / draft.mark, ignore_errors=True)

    def prune(self, config: CheckpointConfig, step: int) -> dict[str, str]:
        """See :func:`prune`."""
        return _by_name(prune(self.root, config, step))

    def remove(self, steps: range) -> list[str]:
        """Move the checkpoints of these steps aside, and remove them."""
        left = []
        for path in checkpoint.named(self.root):
            if checkpoint.step_of(path) in steps and (aside := move_aside(path)) is not None:
                left.append(remove(aside))
        return [reason for reason in left if reason]

    def amend(self, found: Checkpoint, **changes: Any) -> None:
        """See :func:`amend`."""
        amend(found.folder, **changes)

    def newest(self, damaged: Mapping[str, str], check: Check) -> tuple[Checkpoint | None, list[str]]:
        """See :func:`trainer.checkpoint.reading.newest`."""
        return checkpoint.newest(self.root, damaged, check)

    def disprove(self, name: str, world: World) -> str:
        """See :func:`trainer.checkpoint.reading.disprove`."""
        return checkpoint.disprove(self.root / name, world)

    def found(self, name: str) -> Checkpoint:
        """The checkpoint in its folder."""
        return checkpoint.read(self.root / name)


def _by_name(left: Mapping[Path, str]) -> dict[str, str]:
    return {str(path): reason for path, reason in left.items()}


def drafts(root: Path) -> list[Path]:
    """Unfinished checkpoints left by killed saves."""
    return leftovers.drafts(root, r"step-\d{8,}")


def stuck_saves(root: Path) -> dict[Path, str]:
    """Paths that no save under ``root`` will be able to remove, with the reasons. Changes nothing."""
    return leftovers.stuck([*drafts(root), *checkpoint.named(root)])


def prune(root: Path, config: CheckpointConfig, step: int) -> dict[Path, str]:
    """Remove checkpoints up to ``step`` that ``config`` does not keep, and the remains of killed saves.

    Returns the paths that could not be removed, with the reasons. Folders of later steps stay: the run did not resume
    from them, and a person may want them.
    """
    old, left = outdated(map(checkpoint.step_of, checkpoint.named(root)), config, step), dict[Path, str]()
    for path in sorted((f for f in checkpoint.named(root) if checkpoint.step_of(f) in old), key=checkpoint.step_of):
        if path.is_symlink():  # somebody moved it to another disk
            left |= leftovers.stuck([path])
            continue
        try:
            move_aside(path)  # atomic, so a half-removed folder never has a checkpoint's name
        except OSError as error:
            left[path] = f"{path}: {error.strerror}"
    reasons = {path: remove(path) for path in drafts(root)}
    return left | {path: reason for path, reason in reasons.items() if reason}


def _wait_for_parts(folder: Path, ranks: int, abandoned: Event) -> list[dict[str, Any]]:
    """Wait until all parts are on disk, and return the name, size and sha256 of each; empty if ``abandoned``.

    Raises TrainerError if the folder was removed from outside, because the parts would never arrive.
    """
    beside = [(folder / checkpoint.part_name(rank, ranks)).with_suffix(".json") for rank in range(ranks)]
    while not all(path.exists() for path in beside):
        if abandoned.wait(POLL_SECONDS):
            return []
        if not folder.is_dir():
            raise TrainerError(f"{folder} was removed during the save: check what else writes to or cleans its folder")
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in beside]
    for path in beside:
        path.unlink()
    return parts


def _publish(draft: Path, folder: Path, listing: bytes) -> tuple[int, dict[Path, str]]:
    """Give the folder its final name, then write ``latest``.

    Returns the checkpoint's size in bytes and, if ``latest`` cannot be written, the reason; Lambert does not need it.
    """
    path = draft / "checkpoint.json"
    path.write_bytes(listing)
    for each in (path, draft):
        sync(each)
    size = sum(each.stat().st_size for each in draft.iterdir())
    move_aside(folder)  # a damaged checkpoint of the same step, which the resume skipped
    os.replace(draft, folder)
    sync(folder.parent)
    try:
        _point_to(folder)
    except OSError as error:
        pointer = folder.with_name("latest")
        return size, {pointer: f"cannot write {pointer}: {error.strerror}"}
    return size, {}


def amend(folder: Path, **changes: Any) -> None:
    """Let ``latest`` name a checkpoint, and replace these items of its record, at once. Its tensors stay as they are.

    Raises OSError if the disk does not allow it; the checkpoint is then unchanged.
    """
    _point_to(folder)
    path = folder / "checkpoint.json"
    listing = amended(path.read_bytes(), **changes)
    with replacing(path) as file:
        file.write(listing)


def _point_to(folder: Path) -> None:
    with replacing(folder.with_name("latest")) as file:
        file.write(f"{folder.name}\n".encode())
