"""Everything that the trainer prints: a run's line, a warning, a command's error and its result."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

from data_prep.streams import flush, say_error
from trainer.errors import TrainerError, explain, one_line

Tell = Callable[[str], None]  # where a part's lines go: `say`, a command's `teller`, or `silent`


def say(text: str) -> None:
    """Print a run's line. If the log is on a full disk, the line is lost, but the run continues."""
    with suppress(OSError):
        print(f"lambert: {text}", flush=True)


def silent(text: str) -> None:
    """Print nothing: rank 0 prints it."""


def teller(program: str) -> Tell:
    """Return what prints a command's lines to stderr; stdout is for its result."""
    return lambda text: say_error(f"{program}: {text}")


def warn(text: str, tell: Tell = say) -> None:
    """Print a warning."""
    tell(f"warning: {text}")


def complain(program: str, error: Exception) -> None:
    """Print the error that ends a command, as one line on stderr."""
    say_error(f"{program}: error: {one_line(explain(error))}")


def print_result(text: str) -> None:
    """Print a command's result. If the reader closed the pipe, as ``| head`` does, the rest is lost without an error.

    A character that standard output cannot encode becomes a question mark. Raises TrainerError if standard output
    cannot be written for another reason.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), flush=True)
    except BrokenPipeError:
        flush()
    except OSError as error:
        flush()
        raise TrainerError(f"standard output cannot be written: {error.strerror}") from None
