"""The one error that a user sees: a line that says what is wrong, where, and what to change."""

from __future__ import annotations

import re

from safetensors import SafetensorError

from data_prep import errors
from data_prep.errors import SHORTAGES
from trainer.exits import FAILED, LOST, REFUSED

_NUMBER = re.compile(r"(?:code: |os error )(\d+)")  # how safetensors spells an OSError's number


class TrainerError(Exception):
    """Ends the program with its message on one line and exit code 2, without a traceback."""


class NotFiniteError(TrainerError):
    """Gradients that are not finite, which no loss scale could help, before their step was noted."""


class DivergedError(TrainerError):
    """A loss far above that of the first step."""


class LostError(TrainerError):
    """The other ranks cannot be reached. To start again may help, so it ends the program with exit code 3."""


class PassingError(TrainerError):
    """A resource ran out, or a device failed. It may pass, so it ends the program with exit code 1."""


def shortage(error: BaseException) -> str:
    """As `data_prep.errors.shortage`, also for what safetensors raises."""
    if isinstance(error, SafetensorError) and (found := _NUMBER.search(str(error))):
        return SHORTAGES.get(int(found[1]), "")
    return errors.shortage(error)


def explain(error: BaseException) -> str:
    """An error in one line; one that tells of a shortage says what ran out, and what to do."""
    said, lacks = " ".join(str(error).split()) or type(error).__name__, shortage(error)
    return f"{said} ({lacks})" if lacks and lacks not in said else said


def exit_code(error: BaseException) -> int:
    """The code to end with: only what the user must change is a refusal."""
    if isinstance(error, LostError):
        return LOST
    return FAILED if isinstance(error, PassingError) or shortage(error) else REFUSED
