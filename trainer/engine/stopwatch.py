"""A stopwatch for the parts of a rank's steps, timed on the device without waiting for it."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Times consecutive parts of a step: each `begin` ends the part before it.

    On a GPU the boundaries are events in its stream, so the times are those of the work itself, not of the calls that
    queued it.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._boundaries: list[tuple[str, Any]] = []  # a part's name and its start, an event or seconds

    def begin(self, part: str) -> None:
        """Start timing ``part``, or nothing if it is empty."""
        boundary: Any = time.perf_counter()
        if self._cuda:
            boundary = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            boundary.record()
        self._boundaries.append((part, boundary))

    def read(self) -> dict[str, float]:
        """Seconds of each part since the last reading. Call it once a later result is known.

        On a GPU it waits for the last boundary, which has passed by then.
        """
        boundaries, self._boundaries = self._boundaries, []
        if boundaries and self._cuda:
            boundaries[-1][1].synchronize()
        total: dict[str, float] = {}
        for (part, begun), (_, ended) in zip(boundaries, boundaries[1:], strict=False):
            if part:
                seconds = begun.elapsed_time(ended) / 1000 if self._cuda else ended - begun
                total[part] = total.get(part, 0.0) + seconds
        return total
