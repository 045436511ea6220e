"""Runs at addresses of an object store: found by their journals, which are copied to this machine and read there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trainer.checkpoint.fetched import journal
from trainer.errors import TrainerError
from trainer.monitor.metrics_log import METRICS_LOG
from trainer.runs.status import RunStatus, read_status
from trainer.store.objects import Objects


def statuses_at(address: str, now: float, price: float | None) -> Iterator[RunStatus]:
    """The status of every run at or below ``address``. Raises TrainerError if the server does not answer."""
    objects = Objects(address)
    for key in objects.list():
        if f"/{key}".endswith(f"/{METRICS_LOG}"):
            run = f"{objects.address}/{key}".removesuffix(f"/{METRICS_LOG}")
            yield replace(read_status(copy_of(run), now, price), folder=run)


def copy_of(place: Path | str) -> Path:
    """The local folder with a run's journal and configuration. Raises TrainerError if there is no journal."""
    if isinstance(place, Path):
        return place
    folder = journal(Objects(place))
    if not (folder / METRICS_LOG).is_file():
        raise TrainerError(f"{place} has no {METRICS_LOG}: name a run's address")
    return folder
