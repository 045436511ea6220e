"""Saving checkpoints: each rank copies its part at a step boundary, and threads write the copies to disk.

Every rank's thread writes its part into one folder with a dotted name, and rank 0's thread renames the folder once all
parts are in it. The threads share that folder and nothing else. At later step boundaries all ranks agree on the outcome
of a save, in collectives of a few bytes that never wait for a disk. So a slow disk does not delay a collective, and a
failure on any rank reaches all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from data_prep.atomic import replacing, sync
from data_prep.manifest import file_sha256
from trainer.checkpoint import leftovers
from trainer.checkpoint import reading as checkpoint
from trainer.checkpoint.leftovers import move_aside, remove, temporary
from trainer.checkpoint.reading import CheckpointConfig
from trainer.engine.optimizer import LambertOptimizer
from trainer.errors import TrainerError, explain
from trainer.ranks.world import World, broadcast_text

POLL_SECONDS = 0.01  # between two checks by a waiting rank
_REASON_BYTES = 400  # how much of a failure's text is sent to the other ranks


@dataclass(frozen=True)
class Saved:
    """The outcome of one save. Its size, its times and ``leftover`` are those seen by rank 0."""

    step: int
    folder: Path
    failure: str  # which rank could not save, and why; empty for a complete checkpoint
    size: int  # bytes
    stall_seconds: float  # how long training stood still for it
    seconds: float  # from its step boundary until the folder had its final name
    ended: float  # Unix time
    leftover: str = ""  # files that could not be removed, each with path and reason; each is reported once


@dataclass
class _Save:
    """A save in progress on this rank. Its thread sets the second half of the fields before it ends."""

    step: int
    folder: Path
    record: dict[str, Any]
    temporary: Path = Path()  # the folder's name until the save is complete, the same on all ranks
    begun: float = field(default_factory=time.perf_counter)
    stall_seconds: float = 0.0
    thread: Thread | None = None
    abandoned: Event = field(default_factory=Event)  # another rank failed, so its part will never arrive

    failure: str = "its thread died, see the traceback above"
    leftover: str = ""
    size: int = 0
    seconds: float = 0.0
    ended: float = field(default_factory=time.time)


class Saver:
    """Saves a run's checkpoints under ``root``, one at a time. Every rank must make every call, at the same step.

    A save that fails on any rank leaves nothing with a checkpoint's name. It raises nothing; see ``Saved.failure``.
    """

    def __init__(self, root: Path, config: CheckpointConfig, optimizer: LambertOptimizer, world: World) -> None:
        self.root, self.config, self.optimizer, self.world = root, config, optimizer, world
        self.last: Saved | None = None
        self.warned: set[Path] = set()  # leftovers already reported
        self._running: _Save | None = None

    def save(self, step: int, record: dict[str, Any]) -> list[Saved]:
        """Start saving ``step`` with ``record`` (plain data); without ``asynchronous``, also wait for the end.

        Waits first for a save that is still running. Returns the saves that ended during the call.
        """
        ended = self.finish()
        self._running = self._begin(_Save(step, self.root / f"step-{step:08d}", record))
        return ended if self.config.asynchronous else ended + self.finish()

    def look(self) -> list[Saved]:
        """The running save, if it has ended on all ranks by now. Never waits for a disk."""
        save = self._running
        if save is None:
            return []
        writing = save.thread is not None and save.thread.is_alive()
        states = torch.tensor(
            [writing, not writing and save.failure != ""], dtype=torch.int32, device=self.world.device
        )
        dist.all_reduce(states, op=dist.ReduceOp.MAX)
        writes, fails = states.tolist()
        if fails:
            save.abandoned.set()
        if writes:
            return []
        self._running = None
        failure = first_failure(save.failure, self.world) if fails else ""
        if fails and self.world.is_main:  # it may have failed for lack of disk space
            shutil.rmtree(save.temporary, ignore_errors=True)
        numbers = save.size, save.stall_seconds, save.seconds, save.ended
        self.last = Saved(save.step, save.folder, failure, *numbers, save.leftover)
        return [self.last]

    def finish(self) -> list[Saved]:
        """Wait for the running save, if any, and return its outcome."""
        began = time.perf_counter()
        ended = self.look()
        while self._running is not None:
            time.sleep(POLL_SECONDS)
            ended = self.look()
        return [replace(saved, stall_seconds=saved.stall_seconds + time.perf_counter() - began) for saved in ended]

    def _begin(self, save: _Save) -> _Save:
        def make_folder() -> None:
            for path in drafts(self.root):  # from killed or failed saves: no other save is running
                remove(path)
            save.temporary = temporary(save.folder)
            save.temporary.mkdir(parents=True)

        failure = attempt(make_folder) if self.world.is_main else ""
        if first_failure(failure, self.world):
            save.failure = failure
            return save
        save.temporary = self.root / broadcast_text(save.temporary.name, self.world)  # after this, the folder exists
        try:
            part = _Part(*_copy(self.optimizer, self.world), self.world.rank, self.world.size)
            thread = Thread(target=self._write, args=(save, part), name="saver", daemon=True)
            thread.start()
            save.thread = thread
        except (MemoryError, RuntimeError) as error:  # PyTorch is out of memory, or Python cannot start a thread
            save.failure = explain(error)
        save.stall_seconds = time.perf_counter() - save.begun
        return save

    def _write(self, save: _Save, part: _Part) -> None:
        """The body of the thread. Everything it needs has already been copied."""

        def write() -> None:
            part.write(save.temporary)
            if self.world.is_main and (parts := _wait_for_parts(save.temporary, self.world.size, save.abandoned)):
                save.size, left = _publish(save, parts, part.shapes)
                left |= prune(self.root, self.config, save.step)
                save.leftover = "; ".join(reason for path, reason in left.items() if path not in self.warned)
                self.warned.update(left)

        failure = attempt(write)
        save.seconds, save.ended = time.perf_counter() - save.begun, time.time()
        save.failure = failure


def attempt(action: Callable[[], None]) -> str:
    """Run ``action``. Returns one line with the reason if it failed, and an empty one if it succeeded."""
    try:
        action()
    except (TrainerError, OSError, SafetensorError, MemoryError) as error:
        return explain(error)
    return ""


def first_failure(failure: str, world: World) -> str:
    """The first failed rank's number and ``failure``, on every rank; empty if none failed. A collective."""
    own = f"rank {world.rank}: {failure}".encode()[:_REASON_BYTES] if failure else b""
    padded = torch.frombuffer(bytearray(own.ljust(_REASON_BYTES, b"\0")), dtype=torch.uint8).to(world.device)
    gathered = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(gathered, padded)
    texts = (bytes(text.tolist()).rstrip(b"\0").decode(errors="ignore") for text in gathered)
    return next((text for text in texts if text), "")


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
    past = sorted((f for f in checkpoint.named(root) if checkpoint.step_of(f) <= step), key=checkpoint.step_of)
    often, left = config.keep_every_steps, dict[Path, str]()
    for path in (path for path in past[: -config.keep] if often is None or checkpoint.step_of(path) % often):
        if path.is_symlink():  # somebody moved it to another disk
            left |= leftovers.stuck([path])
            continue
        try:
            move_aside(path)  # atomic, so a half-removed folder never has a checkpoint's name
        except OSError as error:
            left[path] = f"{path}: {error.strerror}"
    reasons = {path: remove(path) for path in drafts(root)}
    return left | {path: reason for path, reason in reasons.items() if reason}


# ---- parts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """A copy of what one rank owns."""

    tensors: dict[str, Tensor]  # "kind/name": fp32, whole with its shape or a flat piece
    starts: dict[str, int]  # name: first element of the piece
    shapes: dict[str, torch.Size]  # of all parameters
    rank: int
    ranks: int

    def write(self, folder: Path) -> None:
        """Write the part to disk, then a file with its size and sha256 for rank 0, which appears atomically."""
        path = folder / checkpoint.part_name(self.rank, self.ranks)
        save_file(self.tensors, path, metadata={"starts": json.dumps(self.starts)})
        path.chmod(0o644)  # safetensors makes it readable by its owner only
        sync(path)
        facts = {"name": path.name, "bytes": path.stat().st_size, "sha256": file_sha256(path)}
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(facts), encoding="utf-8")
        draft.replace(path.with_suffix(".json"))


def _copy(optimizer: LambertOptimizer, world: World) -> tuple[dict[str, Tensor], dict[str, int], dict[str, torch.Size]]:
    """This rank's tensors in CPU memory, their starts, and the shapes of all parameters."""
    partition = optimizer.partition
    assert partition is not None
    tensors: dict[str, Tensor] = {}
    starts: dict[str, int] = {}
    for buffer in partition.buffers:
        for kind, flat in checkpoint.flat_tensors(optimizer, buffer).items():
            for part in buffer.slices:
                if partition.shared or world.is_main:  # if every rank has everything, rank 0's copy is enough
                    shape = partition.shapes[part.name]
                    piece = torch.empty(shape if part.length == shape.numel() else (part.length,), device="cpu")
                    piece.view(-1).copy_(flat[part.offset : part.offset + part.length])
                    tensors[f"{kind}/{part.name}"] = piece
                    starts[part.name] = part.start
    return tensors, starts, partition.shapes


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


def _publish(save: _Save, parts: list[dict[str, Any]], shapes: dict[str, torch.Size]) -> tuple[int, dict[Path, str]]:
    """Give the folder its final name, then write ``latest``.

    Returns the checkpoint's size in bytes and, if ``latest`` cannot be written, the reason; Lambert does not need it.
    """
    tree = {
        "format": checkpoint.FORMAT,
        "version": checkpoint.VERSION,
        "shapes": {name: list(shape) for name, shape in shapes.items()},
        "parts": parts,
        "record": save.record,
    }
    listing = save.temporary / "checkpoint.json"
    listing.write_bytes(_signed(tree))
    for path in (listing, save.temporary):
        sync(path)
    size = sum(path.stat().st_size for path in save.temporary.iterdir())
    move_aside(save.folder)  # a damaged checkpoint of the same step, which the resume skipped
    os.replace(save.temporary, save.folder)
    sync(save.folder.parent)
    try:
        _point_to(save.folder)
    except OSError as error:
        pointer = save.folder.with_name("latest")
        return size, {pointer: f"cannot write {pointer}: {error.strerror}"}
    return size, {}


def amend(folder: Path, **changes: Any) -> None:
    """Let ``latest`` name a checkpoint, and replace these items of its record, at once. Its tensors stay as they are.

    Raises OSError if the disk does not allow it; the checkpoint is then unchanged.
    """
    _point_to(folder)
    listing = folder / "checkpoint.json"
    tree = json.loads(listing.read_bytes())
    del tree["sha256"]
    tree["record"] |= changes
    with replacing(listing) as file:
        file.write(_signed(tree))


def _signed(tree: dict[str, Any]) -> bytes:
    """The content of checkpoint.json, with its own sha256."""
    return json.dumps({**tree, "sha256": checkpoint.tree_sha256(tree)}, indent=1).encode()


def _point_to(folder: Path) -> None:
    with replacing(folder.with_name("latest")) as file:
        file.write(f"{folder.name}\n".encode())
