"""Make SIGTERM work during start-up when this process is number 1 of a container. The program imports this first.

The kernel drops signals to process 1 that have no handler, and the imports alone take seconds. Later, once
:class:`~trainer.ranks.stop.Stop` exists, a SIGTERM ends the run at a step boundary.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from trainer.exits import STOPPED


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(STOPPED)  # there is nothing to save yet


if os.getpid() == 1:
    signal.signal(signal.SIGTERM, _end)
