"""The command-line option that several commands share."""

from __future__ import annotations

import argparse

from kernels import backend


def add_kernels(parser: argparse.ArgumentParser) -> None:
    """Add the option --kernels, for ``kernels.backend.using``."""
    text = "which kernels to use; auto is triton on GPUs and torch on CPUs (%(default)s)"
    parser.add_argument("--kernels", choices=backend.CHOICES, default="auto", help=text)
