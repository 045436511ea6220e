"""The one error that a user sees: a line that says what is wrong, where, and what to change."""

from __future__ import annotations


class TrainerError(Exception):
    """Ends the program with its message on one line and exit code 2, without a traceback."""


class NotFiniteError(TrainerError):
    """Gradients that are not finite, which no loss scale could help, before their step was noted."""


class DivergedError(TrainerError):
    """A loss far above that of the first step."""


class LostError(TrainerError):
    """The other ranks cannot be reached. To start again may help, so it ends the program with exit code 3."""
