"""Repeats work on remote servers whose failure may be temporary."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from data_prep.addresses import hide_queries
from data_prep.errors import DataError

Result = TypeVar("Result")

LONGEST_REASON = 300  # most characters shown of an error
HOPELESS = (  # a retry does not help; any other error of a driver may be the network's
    DataError,
    PermissionError,
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    FileExistsError,
    NotImplementedError,
    ImportError,
    TypeError,
    ValueError,
)


def patiently(
    work: Callable[[], Result], waits: Iterable[float], pause: Callable[[float], object] = time.sleep
) -> Result:
    """Runs ``work()``, and again after each of ``waits`` seconds while its error may be temporary.

    ``pause`` waits, and ends the attempts by returning true. Raises the last error.
    """
    for seconds in waits:
        try:
            return work()
        except Exception as error:  # each driver has its own classes, which can't be named without importing it
            if is_hopeless(error) or pause(seconds):
                raise
    return work()


def is_hopeless(error: Exception) -> bool:
    """Whether a retry would fail in the same way."""
    status = getattr(error, "status", None)  # HTTP status; 408 and 429 ask for a retry
    refused = isinstance(status, int) and 400 <= status < 500 and status not in (408, 429)
    full = getattr(error, "errno", None) == errno.ENOSPC
    return refused or full or isinstance(error, HOPELESS) or "Credential" in type(error).__name__


def shown(error: Exception) -> str:
    """An error as one line that is safe to print: a server may have written any part of it, and a query is secret."""
    return printable(hide_queries(f"{type(error).__name__}: {error}"))


def printable(text: str) -> str:
    """Text from anywhere as one line of at most LONGEST_REASON characters that is safe to print."""
    text = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in text[:LONGEST_REASON]) + (
        "…" if len(text) > LONGEST_REASON else ""
    )
