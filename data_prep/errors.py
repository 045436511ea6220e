"""The errors that data preparation raises for its user."""

from __future__ import annotations


class DataError(ValueError):
    """Bad input or a damaged data set. The message is one line: what is wrong, where, what to change."""


class KilledError(DataError):
    """A worker process was killed; nothing is wrong with the input."""
