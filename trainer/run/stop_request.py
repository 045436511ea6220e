"""A request to stop a run: a file in its folder, which rank 0 finds even if it runs on another node.

The run removes it when it ends, and when it starts again after a kill, so that it does not stop at once.
"""

from __future__ import annotations

import os
from pathlib import Path

from data_prep.atomic import replacing
from trainer.console import Tell

STOP_FILE = "stop-request"  # in the run's folder; empty


def request(folder: Path) -> None:
    """Ask the run that writes to ``folder`` to stop. Raises OSError if the file cannot be written."""
    with replacing(folder / STOP_FILE):
        pass


def requested(folder: Path, tell: Tell) -> bool:
    """Whether the run was asked to stop, which is then reported. An error of the file system is no request."""
    found = os.path.exists(folder / STOP_FILE)
    if found:
        tell(f"a stop was requested: {folder / STOP_FILE}")
    return found


def forget_request(folder: Path) -> None:
    """Remove the request, if there is one."""
    (folder / STOP_FILE).unlink(missing_ok=True)
