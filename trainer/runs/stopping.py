"""Asks a run to stop, if it may be running."""

from __future__ import annotations

from pathlib import Path

from trainer.errors import TrainerError
from trainer.run.lock import held
from trainer.run.stop_request import STOP_FILE, request
from trainer.runs.addresses import copy_of
from trainer.runs.status import LIVE, read_status
from trainer.runs.table import printable
from trainer.store.objects import Objects


def ask_to_stop(place: Path | str, now: float) -> str:
    """Ask the run in a folder or at an address to save and end, and say so in one line. ``now``: Unix time in seconds.

    Raises TrainerError if the run is not running, or if its folder or address cannot be written.
    """
    folder = copy_of(place)
    run = read_status(folder, now)
    if run.state not in LIVE and not (run.state == "unreadable" and held(folder)):
        reason = f" ({run.reason})" if run.reason else ""
        raise TrainerError(printable(f"{run.name} is not running: its state is {run.state}{reason}"))
    try:
        if isinstance(place, Path):
            request(place)
        else:
            Objects(place).write(STOP_FILE, b"")
    except OSError as error:
        raise TrainerError(f"{folder} cannot be written: {error.strerror}") from None
    silent = " (it has written nothing for a long time and may not respond)" if run.state == "silent" else ""
    what = "it will save at its next logged step and end with exit code 75"
    return printable(f"asked {run.name} ({place}) to stop: {what}{silent}")
