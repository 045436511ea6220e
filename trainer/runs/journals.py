"""The journals of runs as a server reads them: only what was added, and for a limited time per request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import TrainerError
from trainer.monitor.history import Follower, History
from trainer.monitor.metrics_log import METRICS_LOG
from trainer.runs.status import skim

READ_SECONDS = 1.0  # for one request
PAUSES = 20  # times the duration of a skim, before the next one of the same journal
KEPT_BYTES = 1 << 30  # of journals whose histories are kept; a history takes about a quarter of that in memory


@dataclass(frozen=True)
class _Skimmed:
    found: History | TrainerError
    stamp: tuple[int, int]  # the journal's size and time of change
    again: float  # time.monotonic() before which it is not skimmed again


class Journals:
    """The histories of the runs that were asked for."""

    def __init__(self) -> None:
        self._skimmed: dict[Path, _Skimmed] = {}
        self._followed: dict[Path, Follower] = {}  # the last one asked for is the last

    def renew(self, folders: Sequence[Path]) -> float:
        """Skim the journals of these runs that have changed, for a limited time, and forget all others.

        Those come first that were skimmed the longest ago; one of a million steps takes seconds, and is skimmed seldom.
        Returns which share of the runs has been skimmed at all.
        """
        until = time.monotonic() + READ_SECONDS
        self._skimmed = {folder: self._skimmed[folder] for folder in folders if folder in self._skimmed}
        for folder in sorted(folders, key=self._age):
            if time.monotonic() < until:
                self._skim(folder)
        return len(self._skimmed) / len(folders) if folders else 1.0

    def skimmed(self, folder: Path) -> History:
        """A run's history as `trainer.runs.status.skim` read it for `renew`. Raises the TrainerError that it raised."""
        found = self._skimmed[folder].found
        if isinstance(found, TrainerError):
            raise found
        return found

    def _age(self, folder: Path) -> float:
        return self._skimmed[folder].again if folder in self._skimmed else 0.0

    def _skim(self, folder: Path) -> None:
        stamp, now = _stamp(folder / METRICS_LOG), time.monotonic()
        if folder in self._skimmed and (self._skimmed[folder].stamp == stamp or now < self._skimmed[folder].again):
            return
        found: History | TrainerError
        try:
            found = skim(folder)
        except TrainerError as error:
            found = error
        ended = time.monotonic()
        self._skimmed[folder] = _Skimmed(found, stamp, ended + PAUSES * (ended - now))

    def read(self, folders: Sequence[Path]) -> tuple[float, dict[Path, History]]:
        """Read on in the runs' journals, for a limited time: which share of their bytes has been read, and at 1 all.

        A run is missing if its journal cannot be read, or contains no step yet.
        """
        until = time.monotonic() + READ_SECONDS
        wanted = {folder: self._followed.get(folder) or Follower(folder) for folder in folders}
        others = {folder: follower for folder, follower in self._followed.items() if folder not in wanted}
        self._followed = others | wanted
        whole, found = True, list[Path]()
        for folder, follower in wanted.items():
            with suppress(TrainerError):
                whole &= follower.read(until)
                found.append(folder)
        self._forget(len(wanted))
        if not whole:
            place, size = (sum(getattr(wanted[folder], key) for folder in found) for key in ("place", "size"))
            return min(0.99, place / max(1, size)), {}
        histories = {folder: wanted[folder].history() for folder in found}
        return 1.0, {folder: history for folder, history in histories.items() if len(history.steps["step"])}

    def _forget(self, wanted: int) -> None:
        """Forget the journals that nobody has asked for lately, if there are many bytes of them."""
        kept = sum(follower.place for follower in self._followed.values())
        for folder in list(self._followed)[: len(self._followed) - wanted]:
            if kept > KEPT_BYTES:
                kept -= self._followed.pop(folder).place


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns
