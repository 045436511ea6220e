"""Command lines whose mistakes take one line each, as every other error of Lambert does."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from data_prep.streams import flush
from kernels import backend
from trainer.errors import TrainerError
from trainer.exits import REFUSED


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line, without the usage, and where to read more.

    Options are taken whole: one that comes later could change what a shortened one means.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2."""
        name = self.prog.removeprefix("python -m ")  # as the commands' other errors begin
        self.exit(REFUSED, f"{name}: error: {one_line(message)}; see {self.prog} --help\n")


def add_kernels(parser: argparse.ArgumentParser) -> None:
    """The option --kernels, for ``kernels.backend.using``."""
    text = "what computes: triton on GPUs and torch on CPUs, unless it is named (%(default)s)"
    parser.add_argument("--kernels", choices=backend.CHOICES, default="auto", help=text)


def print_result(text: str) -> None:
    """Print what a command came to. Raises TrainerError where the standard output takes no more."""
    try:
        print(text, flush=True)
    except OSError as error:
        flush()
        raise TrainerError(f"the standard output cannot be written: {error.strerror}") from None


def one_line(error: object) -> str:
    """An error's text without line breaks, with what is a run's setting elsewhere as the option that it is here."""
    return " ".join(str(error).split()).replace("set kernels to", "set --kernels to")
