"""Shared parts of the command lines: a parser that reports mistakes in one line, and common options."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from data_prep.streams import flush
from kernels import backend
from trainer.errors import TrainerError
from trainer.exits import REFUSED


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line, without the usage text.

    Options cannot be abbreviated: a new option could change what an abbreviation means.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print the error and end the process with exit code 2."""
        name = self.prog.removeprefix("python -m ")  # the same prefix as the command's other errors
        self.exit(REFUSED, f"{name}: error: {one_line(message)}; see {self.prog} --help\n")


def add_kernels(parser: argparse.ArgumentParser) -> None:
    """Add the option --kernels, for ``kernels.backend.using``."""
    text = "which kernels to use; auto is triton on GPUs and torch on CPUs (%(default)s)"
    parser.add_argument("--kernels", choices=backend.CHOICES, default="auto", help=text)


def print_result(text: str) -> None:
    """Print a command's result. Raises TrainerError if standard output cannot be written."""
    try:
        print(text, flush=True)
    except OSError as error:
        flush()
        raise TrainerError(f"standard output cannot be written: {error.strerror}") from None


def one_line(error: object) -> str:
    """Return an error's text without line breaks, with the ``kernels`` setting named as the option --kernels."""
    return " ".join(str(error).split()).replace("set kernels to", "set --kernels to")
