"""Prints what data preparation says. Each line is written whole, and a log that cannot be written stops no program."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import NoReturn


def write_whole_lines() -> None:
    """Makes stdout and stderr write each line in one call as soon as it ends, for programs whose ranks share a log.

    Under ``PYTHONUNBUFFERED``, which most images set, ``print`` writes each part and the line break separately. Lines
    of two ranks that print at the same time then mix: ``trainer: rank 0: trainer: rank 1: …``.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def say_error(line: str) -> None:
    """Print a line to stderr. If stderr is gone (a launcher's closed pipe, a full disk), the line is lost."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Print a warning of data preparation."""
    say_error(f"data_prep: warning: {text}")


def complain(problem: str) -> None:
    """Print an error of data preparation."""
    say_error(f"data_prep: error: {problem}")


def print_result(text: str) -> bool:
    """Print a result. Returns False if the reader closed the pipe, as in ``inspect … | head``; that is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        return False
    return True


def flush() -> None:
    """Flush stdout and stderr. Output to a closed stream is lost; else Python would exit with 120 and no reason."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def end_process(code: int) -> NoReturn:
    """End this process with ``code``, without the interpreter's teardown."""
    flush()
    os._exit(code)
