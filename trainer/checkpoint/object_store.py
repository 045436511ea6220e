"""An object store that keeps a run's checkpoints. The ranks need no common folder.

Each rank writes its part to its node's own disk, sends it to where the checkpoint will be, and then puts an empty
note there, whose name has the part's size and sha256: one listing brings rank 0 the notes of all ranks. Once all parts
have arrived whole, rank 0 puts checkpoint.json there: without it there is no checkpoint. Removal begins with that file.
So a kill at any moment leaves a whole checkpoint, or parts that a later save removes.

To resume, each node fetches the checkpoint to its own disk. Its ranks share the work and check each file's sha256.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from threading import Event
from typing import Any

from data_prep.manifest import file_sha256
from trainer.checkpoint import reading as checkpoint
from trainer.checkpoint.leftovers import remove
from trainer.checkpoint.listing import amended
from trainer.checkpoint.part import Part
from trainer.checkpoint.reading import LARGEST_LISTING, LISTING, Check, Checkpoint, CheckpointConfig, name_of
from trainer.checkpoint.store import Draft, outdated
from trainer.errors import PassingError, TrainerError
from trainer.ranks.world import World
from trainer.store.lease import Lease
from trainer.store.mirror import Mirror
from trainer.store.objects import LARGEST, Objects, WrongFileError

POLL_SECONDS = 0.5  # between two looks for the other ranks' notes; in a long save, a twentieth of the time so far
_KEY = re.compile(r"(step-\d{8,})/.+", re.ASCII)


class ObjectStore:
    """Keeps checkpoints at the address of ``objects``. It is a `trainer.checkpoint.store.Store`.

    ``folder``: on this node's own disk, shared by its ranks. Rank 0 of a run also has the ``lease`` on the address, and
    changes nothing once it is lost, and the ``mirror`` of its files, which is pushed before a checkpoint appears.
    """

    def __init__(
        self, objects: Objects, folder: Path, lease: Lease | None = None, mirror: Mirror | None = None
    ) -> None:
        self.objects, self.folder, self.lease, self.mirror = objects, folder, lease, mirror
        self._stuck: dict[str, str] = {}  # what the running save could not remove, with the reasons

    def place(self, name: str) -> str:
        """The checkpoint's address."""
        return f"{self.objects.address}/{name}"

    def begin(self, name: str) -> str:
        """Draw the mark of the ranks' notes, so that none of an earlier save counts. Asks no server.

        Raises TrainerError if the lease is lost: no rank may then send its part, which could replace another run's.
        """
        if self.lease is not None and self.lease.lost:
            raise TrainerError(self.lease.lost)
        return secrets.token_hex(4)

    def deposit(self, draft: Draft, part: Part) -> None:
        """Write the part to disk, send it, and then put the note."""
        for path in (*self.folder.glob(".step-*.tmp"), *checkpoint.named(self.folder)):
            if not path.name.endswith(f".{draft.mark}.tmp"):
                remove(path)  # of a killed save, or what this run has resumed from
        if part.rank == 0:
            self._make_room(draft)
        folder = self.folder / f".{draft.name}.{draft.mark}.tmp"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            facts = part.write(folder)
            self.objects.put(folder / part.name, f"{draft.name}/{part.name}")
            note = f"{part.name}.{draft.mark}.{facts['bytes']}.{facts['sha256']}"
            self.objects.write(f"{draft.name}/{note}", b"")
        finally:
            (folder / part.name).unlink(missing_ok=True)
            with suppress(OSError):  # another rank of this node still has its part there
                folder.rmdir()

    def collect(self, draft: Draft, ranks: int, abandoned: Event) -> list[dict[str, Any]]:
        """Wait until all notes have arrived, and return what they say; empty if ``abandoned``."""
        note = re.compile(rf"{draft.name}/(part-.+)\.{draft.mark}\.(\d+)\.([0-9a-f]+)", re.ASCII)
        began = time.monotonic()
        while True:
            found = [known for key in self.objects.list(draft.name) if (known := note.fullmatch(key))]
            if len(found) == ranks:
                said = (known.groups() for known in found)
                return sorted(({"name": n, "bytes": int(b), "sha256": s} for n, b, s in said), key=itemgetter("name"))
            if abandoned.wait(max(POLL_SECONDS, (time.monotonic() - began) / 20)):
                return []

    def publish(self, draft: Draft, listing: bytes) -> tuple[int, dict[str, str]]:
        """Put checkpoint.json, if every part is there with its full size, and then ``latest``."""
        sizes = {f"{draft.name}/{part['name']}": part["bytes"] for part in json.loads(listing)["parts"]}
        there = self.objects.list(draft.name)
        for key, size in sizes.items():
            if there.get(key) != size:
                raise PassingError(f"{self.objects.address}/{key} has {there.get(key, 0):,} bytes instead of {size:,}")
        if self.mirror is not None:
            self.mirror.push()
        self._require_lease()
        self.objects.delete(*(key for key in there if key not in sizes))
        self.objects.write(f"{draft.name}/{LISTING}", listing)
        size = sum(sizes.values()) + len(listing)
        try:
            self._point_to(draft.name)
        except TrainerError as error:
            return size, {"latest": str(error)}
        return size, {}

    def discard(self, draft: Draft) -> None:
        """Leave the parts that have arrived to the next save: training must not wait for the server."""

    def prune(self, config: CheckpointConfig, step: int) -> dict[str, str]:
        """Remove the checkpoints up to ``step`` that ``config`` does not keep, and the remains of killed saves."""
        there = self._by_name()
        whole = [_step(name) for name, keys in there.items() if _listing(name) in keys]
        gone = {name_of(old) for old in outdated(whole, config, step)}
        gone |= {name for name, keys in there.items() if _listing(name) not in keys}
        return self._stuck | self._remove({name: there[name] for name in gone})

    def remove(self, steps: range) -> list[str]:
        """Remove the checkpoints of these steps."""
        self._require_lease()
        gone = {name: keys for name, keys in self._by_name().items() if _step(name) in steps}
        return list(self._remove(gone).values())

    def amend(self, found: Checkpoint, **changes: Any) -> None:
        """Put another checkpoint.json in place of the checkpoint's own."""
        name = found.folder.name
        self._require_lease()
        self._point_to(name)
        content = self.objects.read(_listing(name), LARGEST_LISTING)
        self.objects.write(_listing(name), amended(content, **changes))

    def newest(self, damaged: Mapping[str, str], check: Check) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint whose files have their full sizes at the address. Fetches only checkpoint.json."""
        there = self._by_name()
        names = sorted((name for name in there if _listing(name) in there[name]), key=_step, reverse=True)

        def opened(name: str) -> Checkpoint:
            sizes = {key.rpartition("/")[2]: size for key, size in there[name].items()}
            return self._open(name, sizes)

        return checkpoint.first_whole(names, opened, damaged, check)

    def disprove(self, name: str, world: World) -> str:
        """Fetch this rank's share of the parts to its node, and check their sha256. Empty if they are intact."""
        try:
            found = self._open(name)
            for path in found.folder.glob("part-*") if world.is_local_main else ():
                if path.name not in found.parts:  # of an earlier save of this step, by another number of ranks
                    remove(path)
            for part in list(found.parts)[world.local_rank :: world.local_size]:
                target, sha256 = found.folder / part, found.parts[part]
                if not (target.is_file() and file_sha256(target) == sha256):
                    self.objects.get(f"{name}/{part}", target, LARGEST, sha256)
        except WrongFileError as error:
            return f"checkpoint {self.place(name)} is damaged: {error}"
        return ""

    def found(self, name: str) -> Checkpoint:
        """The checkpoint, which is on this node's disk now."""
        return checkpoint.read(self.folder / name)

    def _open(self, name: str, sizes: Mapping[str, int] | None = None) -> Checkpoint:
        """The checkpoint without its parts. ``sizes``: its files at the address, if it is to be compared with them."""
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        self.objects.get(_listing(name), folder / LISTING, LARGEST_LISTING)
        try:
            return checkpoint.opened(folder, sizes)
        except TrainerError as error:
            raise type(error)(str(error).replace(str(folder), self.place(name))) from None

    def _require_lease(self) -> None:
        """Raise TrainerError if another run has the address."""
        if self.lease is not None:
            self.lease.renew()

    def _make_room(self, draft: Draft) -> None:
        """Remove what killed saves left at the address, and the listing of a damaged checkpoint of this step.

        Meanwhile, other ranks may already be sending their parts of ``draft``.
        """
        self._require_lease()
        there = self._by_name()
        if _listing(draft.name) in there.pop(draft.name, {}):
            self.objects.delete(_listing(draft.name))
        self._stuck = self._remove({name: keys for name, keys in there.items() if _listing(name) not in keys})
        try:
            self.objects.clear_uploads(lambda key: key.startswith(f"{draft.name}/") or not _KEY.fullmatch(key))
        except TrainerError as error:  # the rights to do so are often not granted
            self._stuck["uploads"] = f"cannot remove unfinished uploads, which take up space: {error}"

    def _remove(self, checkpoints: Mapping[str, Iterable[str]]) -> dict[str, str]:
        """Remove checkpoints, each with its keys, checkpoint.json first. Returns what is left behind, with reasons."""
        left = {}
        for name, keys in checkpoints.items():
            try:
                self.objects.delete(*sorted(keys, key=lambda key: (key != _listing(key.split("/")[0]), key)))
            except TrainerError as error:
                left[name] = str(error)
        return left

    def _by_name(self) -> dict[str, dict[str, int]]:
        """The keys and sizes of the files of each checkpoint, whole or not."""
        found: dict[str, dict[str, int]] = {}
        for key, size in self.objects.list().items():
            if name := _KEY.fullmatch(key):
                found.setdefault(name[1], {})[key] = size
        return found

    def _point_to(self, name: str) -> None:
        self.objects.write("latest", f"{name}\n".encode())


def _listing(name: str) -> str:
    return f"{name}/{LISTING}"


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))
