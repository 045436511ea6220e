"""Command lines whose mistakes take one line each, and are told before the work, not after it."""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from data_prep.errors import DataError


class Parser(argparse.ArgumentParser):
    """Takes no shortened options: a later version may have two that begin like them."""

    def __init__(self, prog: str | None = None, **more: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **more)

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2 and one line, as every other error is said."""
        name = self.prog.removeprefix("python -m ").partition(" ")[0]  # without the command's
        self.exit(2, f"{name}: error: {' '.join(message.split())}; see {self.prog} --help\n")


def check_range(option: str, value: float, low: float, high: float = math.inf) -> None:
    """Raises DataError for a number that is not within both bounds."""
    if not low <= value <= high:  # so written, it refuses NaN
        raise DataError(f"{option} {value}: wanted {low} {'or more' if high == math.inf else f'to {high}'}")


def check_place(option: str, path: Path, suffix: str, new: bool = False) -> None:
    """Raises DataError if ``path`` does not end in ``suffix``, or if no file can be made there.

    The suffix, which no text has, keeps an option from overwriting a corpus; ``new``: it overwrites nothing.
    """
    if path.suffix != suffix or path.is_dir():
        raise DataError(f"{option} {path}: wanted a file whose name ends in {suffix}")
    if new and path.exists():
        raise DataError(f"{option} {path} is there already: name another, or remove it")
    try:
        with tempfile.TemporaryFile(dir=path.parent):  # whatever forbids it: no such folder, its owner, its disk
            pass
    except OSError as error:
        raise DataError(
            f"{option} {path}: no file can be made in the folder {path.parent} ({error.strerror}); name another"
        ) from None
