"""Errors shown to users: one line that says what is wrong, where, and what to change."""

from __future__ import annotations

import re

from safetensors import SafetensorError

from data_prep import errors
from data_prep.errors import SHORTAGES
from trainer.exits import FAILED, LOST, REFUSED

_NUMBER = re.compile(r"(?:code: |os error )(\d+)")  # how safetensors writes an OSError's errno


class TrainerError(Exception):
    """Ends the program with its message on one line and exit code 2, without a traceback."""


class NotFiniteError(TrainerError):
    """Non-finite gradients that lowering the loss scale cannot fix. Raised before their step is logged."""


class DivergedError(TrainerError):
    """The loss is far above that of the first step."""


class LostError(TrainerError):
    """The other ranks cannot be reached. Ends the program with exit code 3: starting again may help."""


class PassingError(TrainerError):
    """A resource ran out, or a device or server failed. Ends the program with exit code 1: starting again may help."""


def shortage(error: BaseException) -> str:
    """Say which resource ran out, like `data_prep.errors.shortage`; also understands safetensors' errors."""
    if isinstance(error, SafetensorError) and (found := _NUMBER.search(str(error))):
        return SHORTAGES.get(int(found[1]), "")
    return errors.shortage(error)


def explain(error: BaseException) -> str:
    """Format an error as one line; for a shortage, add what ran out and what to do."""
    said, lacks = " ".join(str(error).split()) or type(error).__name__, shortage(error)
    return f"{said} ({lacks})" if lacks and lacks not in said else said


def one_line(error: object) -> str:
    """Return an error's text without line breaks, with the ``kernels`` setting named as the option --kernels."""
    return " ".join(str(error).split()).replace("set kernels to", "set --kernels to")


def exit_code(error: BaseException) -> int:
    """Choose the exit code: REFUSED only if the user must change something."""
    if isinstance(error, LostError):
        return LOST
    return FAILED if isinstance(error, PassingError) or shortage(error) else REFUSED
