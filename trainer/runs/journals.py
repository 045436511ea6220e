"""The journals of runs as a server reads them: only what was added, and for a limited time per request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.errors import TrainerError
from trainer.monitor.history import Follower, History
from trainer.monitor.metrics_log import METRICS_LOG
from trainer.run.lock import LOCK_FILE
from trainer.runs.status import CONFIG, LIVE, RunStatus, read_status, skim

READ_SECONDS = 1.0  # for one request
PAUSES = 20  # times the duration of a skim, before the next one of the same journal
KEPT_BYTES = 1 << 30  # of journals whose histories are kept; a history takes about a quarter of that in memory


Stamp = tuple[int, int]  # a file's size and time of change; zeros without a file


@dataclass(frozen=True)
class _Known:
    status: RunStatus
    found: History | TrainerError | None  # in its journal; None for a run that has ended
    journal: Stamp  # when it was skimmed
    others: tuple[Stamp, Stamp]  # of its configuration and its lock, which a new attempt writes
    again: float  # time.monotonic() before which the journal is not skimmed again
    looked: float  # time.monotonic() of the last look at the run


class Journals:
    """The statuses of all runs, and the histories of those that were asked for."""

    def __init__(self) -> None:
        self._known: dict[Path, _Known] = {}
        self._followed: dict[Path, Follower] = {}  # the last one asked for is the last

    def renew(self, folders: Sequence[Path], price: float | None) -> tuple[float, list[RunStatus]]:
        """Look at these runs, for a limited time, and forget all others: which share is known, and their statuses.

        Those come first that were looked at the longest ago. A run that has ended is read again only if one of its
        files has changed. A journal of a million steps takes seconds, and is skimmed seldom.
        """
        until = time.monotonic() + READ_SECONDS
        self._known = {folder: self._known[folder] for folder in folders if folder in self._known}
        for folder in sorted(folders, key=self._looked):
            if time.monotonic() < until:
                self._known[folder] = self._look(folder, price)
        share = len(self._known) / len(folders) if folders else 1.0
        return share, [known.status for known in self._known.values()]

    def _looked(self, folder: Path) -> float:
        return self._known[folder].looked if folder in self._known else 0.0

    def _look(self, folder: Path, price: float | None) -> _Known:
        known, began = self._known.get(folder), time.monotonic()
        journal, others = _stamp(folder / METRICS_LOG), (_stamp(folder / CONFIG), _stamp(folder / LOCK_FILE))
        if known and known.status.state not in LIVE and (known.journal, known.others) == (journal, others):
            return replace(known, looked=began)
        if known and known.found and (known.journal == journal or began < known.again):
            found, journal, again = known.found, known.journal, known.again
        else:
            found = _skimmed(folder)
            ended = time.monotonic()
            again = ended + PAUSES * (ended - began)

        def read(folder: Path) -> History:
            if isinstance(found, TrainerError):
                raise found
            return found

        status = read_status(folder, time.time(), price, read)
        kept = found if status.state in LIVE or isinstance(found, TrainerError) else None
        return _Known(status, kept, journal, others, again, began)

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


def _skimmed(folder: Path) -> History | TrainerError:
    try:
        return skim(folder)
    except TrainerError as error:
        return error


def _stamp(path: Path) -> Stamp:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns
