"""Runs a rank whose system calls fail: ``failing_rank.py CALL ERRNO STEP SCRIPT ARGUMENTS…``.

Once step STEP is read, each ``os.CALL`` raises that error; ERRNO 0 is a MemoryError.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any, NoReturn

from trainer.data.reader import Reader, Step

call, number, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
del sys.argv[:4]
read, reads = Reader.step, 0


def fail(*arguments: object) -> NoReturn:
    raise OSError(number, os.strerror(number)) if number else MemoryError


def read_or_fail(*arguments: Any) -> Step:
    global reads
    reads += 1
    if reads >= step:
        setattr(os, call, fail)
    return read(*arguments)


Reader.step = read_or_fail  # type: ignore[method-assign, assignment]
runpy.run_path(sys.argv[0], run_name="__main__")
