"""Shared parts of the command lines: a common option, and how results and errors are printed."""

from __future__ import annotations

import argparse

from data_prep.streams import flush
from kernels import backend
from trainer.errors import TrainerError


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
