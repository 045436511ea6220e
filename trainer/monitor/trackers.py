"""The trackers that a run sends its metrics to while it trains: one process for each, which reads the run's journal.

Training never waits for a tracker, and a tracker that hangs, crashes or cannot be reached costs it nothing. The process
is the command :mod:`trainer.track`, which can also send a run later.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from trainer.console import say, warn
from trainer.data.reading_process import BLOCKED, blocked
from trainer.errors import TrainerError

Name = Literal["tensorboard", "mlflow", "wandb"]
PACKAGES: dict[Name, str] = {"tensorboard": "tensorboard", "mlflow": "mlflow-skinny", "wandb": "wandb"}  # for pip
_START = "import sys; sys.path[:] = {path}; from trainer.track.__main__ import main; sys.exit(main({words}))"


def require_packages(names: Sequence[Name]) -> None:
    """Raise TrainerError if a tracker's package is not installed. Imports none of them, which would take seconds."""
    for name in names:
        found = find_spec(name)
        if found is None or found.origin is None:  # a folder of that name is no package
            raise TrainerError(f"the tracker {name} is not installed: pip install {PACKAGES[name]}")


class Trackers:
    """The processes that send the journal in ``folder`` to trackers. They end soon after this process, however it ends.

    Their standard input closes then. Signals that launchers send to all processes of a job never reach them.
    ``patience``: how many seconds they go on trying to reach a tracker after the run has ended.
    """

    def __init__(self, names: Sequence[Name], folder: Path, patience: float) -> None:
        self._folder = folder
        self._processes: dict[Name, subprocess.Popen[bytes]] = {}
        for name in names:
            words = ["--to", name, "--attached", str(patience), "--", str(folder)]
            code = _START.format(path=sys.path, words=words)  # the same modules as here
            try:
                with blocked(BLOCKED):  # from the start, and for what its library starts: both inherit it
                    self._processes[name] = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
            except OSError as error:
                warn(f"the process that sends metrics to {name} cannot start ({error.strerror}); {self._later(name)}")

    def wait(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the trackers to receive the rest; then end their processes."""
        until = time.monotonic() + seconds
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        for name, process in self._processes.items():
            try:
                complete = process.wait(max(0.0, until - time.monotonic())) == 0
            except subprocess.TimeoutExpired:
                complete = False
                process.kill()
            if not complete:
                say(f"{name} has not received everything; {self._later(name)}")

    def _later(self, name: Name) -> str:
        return f"to send the rest: python -m trainer.track {shlex.quote(str(self._folder))} --to {name}"
