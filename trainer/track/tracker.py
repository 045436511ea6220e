"""The interface that every tracker has, and how its library's failures are reported."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from trainer.errors import PassingError, TrainerError
from trainer.monitor.trackers import Name
from trainer.track.about import About, without_secrets
from trainer.track.journal import Batch, Standing

SHOWN_CHARACTERS = 300  # of a library's message


class Tracker(Protocol):
    """One tracker. Each method raises PassingError if the tracker cannot be reached; `open` is then called again."""

    lasting: bool  # whether what was sent lasts before `close`, even if this process or its library's is killed

    def open(self, about: About, standing: Standing) -> Standing:
        """Create the tracked run or continue it. Returns what the tracker really has: nothing if the run is new to it.

        Raises TrainerError if the user must change something first.
        """

    def describe(self, about: About, facts: dict[str, str]) -> None:
        """Record the run's settings and what runs. Called when the run has started or resumed."""

    def send(self, batch: Batch) -> None:
        """Send a batch. It may have arrived before, in part or as a whole."""

    def close(self, state: str, standing: Standing) -> None:
        """Record the run's state: running, done, stopped, failed or killed. Wait until everything has arrived."""

    @property
    def place(self) -> str:
        """The place where the tracked run can be seen."""


@contextmanager
def outages(name: Name, kind: type[TrainerError] = PassingError) -> Iterator[None]:
    """Raise whatever a tracker's library raises as one error, with a message that has no password in it."""
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        raise kind(f"{name} {_explained(error)}") from None


def _explained(error: BaseException) -> str:
    """A library's error in a line of bounded length. The first of the errors that led to it may say it best."""
    first = error
    while isinstance(before := first.__cause__ or first.__context__ or (first.args or [None])[-1], BaseException):
        first = before
    if isinstance(first, ConnectionError | TimeoutError | socket.gaierror):
        return f"cannot be reached: {first.strerror or without_secrets(str(first))}"
    text = without_secrets(" ".join(str(error).split()) or type(error).__name__)
    return f"failed: {text if len(text) <= SHOWN_CHARACTERS else f'{text[:SHOWN_CHARACTERS]}…'}"


def repeated(standing: Standing) -> str:
    """The steps of which the tracker has values from before the run went back, as text; empty if there are none."""
    return ", ".join(f"{first}-{last}" for first, last in standing.repeats)
