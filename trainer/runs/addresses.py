"""Runs at addresses of an object store: found by their journals, which are copied to this machine and read there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread

from trainer.checkpoint.fetched import journal
from trainer.console import Tell, warn
from trainer.errors import TrainerError
from trainer.monitor.metrics_log import METRICS_LOG
from trainer.runs.status import RunStatus, read_status
from trainer.store.objects import Objects

COPY_SECONDS = 10.0  # a run at an address sends its journal as often


@dataclass
class Copies:
    """Local copies of the journals of all runs at or below some addresses; a thread renews them."""

    addresses: Sequence[str]
    tell: Tell
    runs: dict[Path, str] = field(default_factory=dict)  # the address of the run in each local folder
    _ended: Event = field(default_factory=Event)

    def start(self) -> None:
        """Copy all journals, and go on doing so. Raises TrainerError if a server does not answer the first time."""
        self._renew()
        Thread(target=self._keep, name="copies", daemon=True).start()

    def close(self) -> None:
        """Copy nothing more."""
        self._ended.set()

    def _renew(self) -> None:
        self.runs = {copy_of(run): run for address in self.addresses for run in runs_at(address)}

    def _keep(self) -> None:
        failing = False
        while not self._ended.wait(COPY_SECONDS):
            try:
                self._renew()
                failing = False
            except (TrainerError, OSError, MemoryError) as error:
                if not failing:
                    warn(f"the page shows what was copied before: {error}", self.tell)
                failing = True


def statuses_at(address: str, now: float, price: float | None) -> Iterator[RunStatus]:
    """The status of every run at or below ``address``. Raises TrainerError if the server does not answer."""
    for run in runs_at(address):
        yield replace(read_status(copy_of(run), now, price), folder=run)


def runs_at(address: str) -> Iterator[str]:
    """The addresses of all runs at or below ``address``. Raises TrainerError if the server does not answer."""
    objects = Objects(address)
    for key in objects.list():
        if f"/{key}".endswith(f"/{METRICS_LOG}"):
            yield f"{objects.address}/{key}".removesuffix(f"/{METRICS_LOG}")


def copy_of(place: Path | str) -> Path:
    """The local folder with a run's journal and configuration. Raises TrainerError if there is no journal."""
    if isinstance(place, Path):
        return place
    folder = journal(Objects(place))
    if not (folder / METRICS_LOG).is_file():
        raise TrainerError(f"{place} has no {METRICS_LOG}: name a run's address")
    return folder
