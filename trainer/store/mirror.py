"""A mirror of a folder's small files at an address: metrics, configuration, tokenizer, and what the guard finds.

Objects cannot be appended to, so a file that has changed is sent again whole. A thread does so every PUSH_SECONDS, and
for a file of n bytes not before n / RATE seconds have passed: the journal of a long run would fill the network.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread

from data_prep.atomic import TEMPORARY
from trainer.console import Tell, warn
from trainer.errors import TrainerError, explain
from trainer.store.objects import LARGEST, Objects

PUSH_SECONDS = 10.0
RATE = 200_000  # bytes per second, the mean over time for one file
_SNAPSHOT = ".mirrored"

Kept = Callable[[str], bool]  # whether a file of this name, relative to the folder, is mirrored


class Mirror:
    """Mirrors the files of ``folder`` for which ``kept`` holds.

    It calls ``ready`` before it changes anything at the address, which raises TrainerError if it may not.
    """

    def __init__(self, objects: Objects, folder: Path, kept: Kept, ready: Callable[[], object], tell: Tell) -> None:
        self.objects, self.folder, self.kept, self.ready, self.tell = objects, folder, kept, ready, tell
        self._sent: dict[str, tuple[int, int]] = {}  # name: time of change and size of what is at the address
        self._due: dict[str, float] = {}  # name: not to be sent before then, by time.monotonic()
        self._failing = False
        self._turn, self._ended = Lock(), Event()
        self._thread: Thread | None = None

    def pull(self) -> None:
        """Fetch all files from the address. Raises TrainerError if one cannot be fetched."""
        for name, size in self.objects.list().items():
            if self.kept(name):
                path = self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                self.objects.get(name, path, LARGEST, size=size)
                self._sent[name] = _version(path)

    def start(self) -> None:
        """Send what changes from a thread."""

        def run() -> None:
            while not self._ended.wait(PUSH_SECONDS):
                self.try_push(everything=False)

        self._thread = Thread(target=run, name="mirror", daemon=True)
        self._thread.start()

    def push(self, everything: bool = True) -> None:
        """Send the files that have changed, or only those that are due, and remove those that are gone here.

        Raises TrainerError or OSError if one cannot be sent.
        """
        with self._turn:
            found = dict(self._changed())
            gone = [name for name in self._sent if name not in found]
            due = [name for name in found if everything or time.monotonic() >= self._due.get(name, 0.0)]
            due = [name for name in due if self._sent.get(name) != found[name]]
            if gone or due:
                self.ready()
            for name in gone:
                self.objects.delete(name)
                del self._sent[name]
            for name in due:
                self._send(name)
                self._sent[name] = found[name]
                self._due[name] = time.monotonic() + found[name][1] / RATE

    def try_push(self, everything: bool = True) -> None:
        """Send like `push`. A failure is reported once, until it has worked again."""
        try:
            self.push(everything)
            self._failing = False
        except (TrainerError, OSError, MemoryError) as error:
            if not self._failing:
                place = self.objects.address
                warn(f"{place} lacks the newest metrics until it can be written again: {explain(error)}", self.tell)
            self._failing = True

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _changed(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """The files and their versions. Meanwhile, other ranks and threads create and remove files in the folder."""
        for base, folders, files in os.walk(self.folder, onerror=_fail):
            within = Path(base).relative_to(self.folder)
            folders[:] = [name for name in folders if self.kept((within / name).as_posix())]
            for name in ((within / each).as_posix() for each in files):
                if self.kept(name) and not name.endswith(TEMPORARY):
                    with suppress(FileNotFoundError):
                        yield name, _version(self.folder / name)

    def _send(self, name: str) -> None:
        """Send a copy, so that a file that grows meanwhile arrives as it was."""
        copy = self.folder / _SNAPSHOT
        try:
            shutil.copyfile(self.folder / name, copy)
            self.objects.put(copy, name)
        finally:
            copy.unlink(missing_ok=True)


def _fail(error: OSError) -> None:
    raise error  # a folder that cannot be read must not count as empty: its files would be removed at the address


def _version(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_mtime_ns, about.st_size
