"""Saving checkpoints: each rank copies its part at a step boundary, and threads write the copies to disk.

Every rank's thread brings its part into a draft, and rank 0's thread makes the draft a checkpoint once all parts are in
it (trainer/checkpoint/store.py). The threads share the draft and nothing else. At later step boundaries all ranks agree
on the outcome of a save, in collectives of a few bytes that never wait for a disk. So a slow disk does not delay a
collective, and a failure on any rank reaches all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from trainer.checkpoint.listing import listing
from trainer.checkpoint.part import Part, copy_part
from trainer.checkpoint.reading import CheckpointConfig, name_of
from trainer.checkpoint.store import Draft, Store
from trainer.engine.optimizer import LambertOptimizer
from trainer.errors import TrainerError, explain
from trainer.ranks.world import World, broadcast_text

POLL_SECONDS = 0.01  # between two checks by a waiting rank
_REASON_BYTES = 400  # how much of a failure's text is sent to the other ranks


@dataclass(frozen=True)
class Saved:
    """The outcome of one save. Its size, its times and ``leftover`` are those seen by rank 0."""

    step: int
    place: str  # its folder
    failure: str  # which rank could not save, and why; empty for a complete checkpoint
    size: int  # bytes
    stall_seconds: float  # how long training stood still for it
    seconds: float  # from its step boundary until it was complete
    ended: float  # Unix time
    leftover: str = ""  # files that could not be removed, each with path and reason; each is reported once


@dataclass
class _Save:
    """A save in progress on this rank. Its thread sets the second half of the fields before it ends."""

    step: int
    draft: Draft
    record: dict[str, Any]
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
    """Saves a run's checkpoints in ``store``, one at a time. Every rank must make every call, at the same step.

    A save that fails on any rank leaves nothing with a checkpoint's name. It raises nothing; see ``Saved.failure``.
    """

    def __init__(self, store: Store, config: CheckpointConfig, optimizer: LambertOptimizer, world: World) -> None:
        self.store, self.config, self.optimizer, self.world = store, config, optimizer, world
        self.last: Saved | None = None
        self.warned: set[str] = set()  # leftovers already reported
        self._running: _Save | None = None

    def save(self, step: int, record: dict[str, Any]) -> list[Saved]:
        """Start saving ``step`` with ``record`` (plain data); without ``asynchronous``, also wait for the end.

        Waits first for a save that is still running. Returns the saves that ended during the call.
        """
        ended = self.finish()
        self._running = self._begin(_Save(step, Draft(name_of(step), ""), record))
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
        if fails and self.world.is_main and save.draft.mark:  # it may have failed for lack of disk space
            self.store.discard(save.draft)
        numbers = save.size, save.stall_seconds, save.seconds, save.ended
        self.last = Saved(save.step, self.store.place(save.draft.name), failure, *numbers, save.leftover)
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
        def begin() -> None:
            save.draft = replace(save.draft, mark=self.store.begin(save.draft.name))

        failure = attempt(begin) if self.world.is_main else ""
        if first_failure(failure, self.world):
            save.failure = failure
            return save
        save.draft = replace(save.draft, mark=broadcast_text(save.draft.mark, self.world))  # after this, it exists
        try:
            part = copy_part(self.optimizer, self.world)
            thread = Thread(target=self._write, args=(save, part), name="saver", daemon=True)
            thread.start()
            save.thread = thread
        except (MemoryError, RuntimeError) as error:  # PyTorch is out of memory, or Python cannot start a thread
            save.failure = explain(error)
        save.stall_seconds = time.perf_counter() - save.begun
        return save

    def _write(self, save: _Save, part: Part) -> None:
        """The body of the thread. Everything it needs has already been copied."""

        def write() -> None:
            self.store.deposit(save.draft, part)
            if self.world.is_main and (parts := self.store.collect(save.draft, self.world.size, save.abandoned)):
                save.size, left = self.store.publish(save.draft, listing(part.shapes, parts, save.record))
                left |= self.store.prune(self.config, save.step)
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
