"""Command-line parsing that reports each mistake in one line, and before the work starts."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from data_prep.errors import DataError


class CommandParser(argparse.ArgumentParser):
    """An argument parser without abbreviated options: a later version could make an abbreviation ambiguous."""

    def __init__(self, prog: str | None = None, **more: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **more)

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2 and one error line, in the same form as every other error."""
        name = self.prog.removeprefix("python -m ").partition(" ")[0]  # without the name of the subcommand
        self.exit(2, f"{name}: error: {' '.join(message.split())}; see {self.prog} --help\n")


def check_range(option: str, value: float, low: float, high: float = math.inf) -> None:
    """Raises DataError for a number outside the bounds."""
    if not low <= value <= high:  # this form also rejects NaN
        raise DataError(f"{option} {value}: wanted {low} {'or more' if high == math.inf else f'to {high}'}")


def check_place(option: str, path: Path, suffix: str, new: bool = False) -> None:
    """Raises DataError if ``path`` does not end in ``suffix``, or if no file can be created there.

    No text file has the suffix, so the option cannot overwrite a corpus. ``new``: existing files are an error.
    """
    if path.suffix != suffix or path.is_dir():
        raise DataError(f"{option} {path}: wanted a file whose name ends in {suffix}")
    if new and path.exists():
        raise DataError(f"{option} {path} already exists: name another, or remove it")
    try:
        with tempfile.TemporaryFile(dir=path.parent):  # fails for any cause: no folder, no rights, full disk
            pass
    except OSError as error:
        raise DataError(
            f"{option} {path}: no file can be created in the folder {path.parent} ({error.strerror}); name another"
        ) from None


def check_folder(option: str, folder: Path) -> None:
    """Raises DataError if ``folder`` is not a folder, or if none can be created there."""
    above = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not above.is_dir():
        raise DataError(f"{option} {folder}: {above} is not a folder; name another")
    try:
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise DataError(f"{option} {folder}: {above} cannot be written ({error.strerror}); name another") from None
