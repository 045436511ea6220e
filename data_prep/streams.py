"""What programs print while they work: lines, each of them whole, none of them worth a build or a run."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import NoReturn


def write_whole_lines() -> None:
    """From here on a line goes out in one write, as soon as it ends; for programs whose ranks share one log.

    Under ``PYTHONUNBUFFERED``, which images set as a rule, ``print`` writes each of its parts by itself, and the line
    break too: two ranks that speak at once are then read as ``trainer: rank 0: trainer: rank 1: …``.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def say_error(line: str) -> None:
    """Print a line to stderr. Where that is gone, a launcher's pipe or a disk that is full, the line is lost."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def flush() -> None:
    """Write what is held back. Where a stream is gone it is lost: Python would end with 120 for it, and not say why."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def end_process(code: int) -> NoReturn:
    """End this process with ``code``, without the interpreter's teardown."""
    flush()
    os._exit(code)
