"""Where the time of a rank's steps goes, told by its device, which is never waited for."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Times parts that follow one another: each `begin` ends the one before.

    On a GPU the borders are events in its stream: the times are those of its work, not of the calls that queued it.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._borders: list[tuple[str, Any]] = []  # a part's name; its beginning, an event or seconds

    def begin(self, part: str) -> None:
        """``part`` begins now; empty: none does."""
        border: Any = time.perf_counter()
        if self._cuda:
            border = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            border.record()
        self._borders.append((part, border))

    def read(self) -> dict[str, float]:
        """Seconds of each part since the last reading; to be asked when a later result is known already.

        On a GPU this waits for the last border, which has passed by then.
        """
        borders, self._borders = self._borders, []
        if borders and self._cuda:
            borders[-1][1].synchronize()
        total: dict[str, float] = {}
        for (part, begun), (_, ended) in zip(borders, borders[1:], strict=False):
            if part:
                seconds = begun.elapsed_time(ended) / 1000 if self._cuda else ended - begun
                total[part] = total.get(part, 0.0) + seconds
        return total
