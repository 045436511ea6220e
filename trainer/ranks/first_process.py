"""Imported first by the program: as process 1 of a container it must end at a SIGTERM, too, while it starts.

The kernel drops a signal to process 1 that has no handler, and the imports alone take seconds. From
:class:`~trainer.ranks.stop.Stop` on, a SIGTERM ends the run at a step's border.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from trainer.exits import STOPPED


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(STOPPED)  # nothing has begun that could be saved


if os.getpid() == 1:
    signal.signal(signal.SIGTERM, _end)
