"""What a process prints: lines, each of them whole."""

from __future__ import annotations

import io
import sys


def write_whole_lines() -> None:
    """From here on a line goes out in one write, as soon as it ends; for programs whose ranks share one log.

    Under ``PYTHONUNBUFFERED``, which images set as a rule, ``print`` writes each of its parts by itself, and the line
    break too: two ranks that speak at once are then read as ``trainer: rank 0: trainer: rank 1: …``.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
