"""One line on stderr that says how far a stage is and how fast it goes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

TERMINAL_SECONDS = 0.2  # between two updates of the line
LOG_SECONDS = 5.0  # between two lines, when stderr is a file


class Progress:
    """Counts ``unit`` of a stage; ``scale`` turns what is added into that unit."""

    def __init__(self, stage: str, unit: str, scale: float = 1.0) -> None:
        self._stage, self._unit, self._scale = stage, unit, scale
        self._terminal = sys.stderr.isatty()
        self._done = 0.0
        self._start = self._shown = time.monotonic()

    def watch(self, items: Iterable[Item], amount: Callable[[Item], int]) -> Iterator[Item]:
        """Passes the items on, counts ``amount`` of each, and shows the line when its time has come."""
        for item in items:
            self._done += amount(item) * self._scale
            now = time.monotonic()
            if now - self._shown >= (TERMINAL_SECONDS if self._terminal else LOG_SECONDS):
                self._shown = now
                self._show("\r" if self._terminal else "\n")
            yield item
        self._show("\n")

    def _show(self, end: str) -> None:
        seconds = max(time.monotonic() - self._start, 1e-9)
        rate = f"{self._done / seconds:,.1f} {self._unit}/s"
        line = f"data_prep: {self._stage} {self._done:,.1f} {self._unit} in {seconds:,.1f} s, {rate}"
        print(line, end=end, file=sys.stderr, flush=True)
