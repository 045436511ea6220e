"""Command-line options that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from kernels import backend
from trainer.data.remote import is_remote

CHECKPOINT = "a run's folder or address, or a step-… in it"


def add_kernels(parser: argparse.ArgumentParser) -> None:
    """Add the option --kernels, for ``kernels.backend.using``."""
    text = "which kernels to use; auto is triton on GPUs and torch on CPUs (%(default)s)"
    parser.add_argument("--kernels", choices=backend.CHOICES, default="auto", help=text)


def add_average(parser: argparse.ArgumentParser) -> None:
    """Add the option --average, for ``trainer.checkpoint.average.select``."""
    text = "use the mean of the weights of the run's newest N checkpoints, 2 or more"
    parser.add_argument("--average", type=_several, metavar="N", help=text)


def path_or_address(text: str) -> Path | str:
    """A local path, or an address as it is; for ``trainer.checkpoint.fetched``."""
    return text if is_remote(text) else Path(text)


def _several(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text} is not a number of checkpoints: it must be 2 or more")
    return int(text)
