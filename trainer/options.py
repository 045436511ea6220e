"""Command-line options that several commands share."""

from __future__ import annotations

import argparse

from kernels import backend


def add_kernels(parser: argparse.ArgumentParser) -> None:
    """Add the option --kernels, for ``kernels.backend.using``."""
    text = "which kernels to use; auto is triton on GPUs and torch on CPUs (%(default)s)"
    parser.add_argument("--kernels", choices=backend.CHOICES, default="auto", help=text)


def add_average(parser: argparse.ArgumentParser) -> None:
    """Add the option --average, for ``trainer.checkpoint.average.select``."""
    text = "use the mean of the weights of the run's newest N checkpoints, 2 or more"
    parser.add_argument("--average", type=_several, metavar="N", help=text)


def _several(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text} is not a number of checkpoints: it must be 2 or more")
    return int(text)
