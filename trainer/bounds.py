"""Ranges of the numbers in a configuration, stated beside its fields."""

from __future__ import annotations

import math
from typing import Any

from data_prep.json_text import shown

ABOVE_0 = math.nextafter(0, 1)  # as a lower bound: 0 itself is refused
MOST_STEPS = 10**9
MOST_SAMPLES = 10**15  # their number, times any that a sample has, still fits 63 bits
LARGEST_BATCH = 2**19  # sequences of a step; the largest that was published is an eighth of it


def outside(config: Any, **bounds: tuple[float, float]) -> list[str]:
    """A line for each attribute of ``config`` that is outside its ``(lowest, highest)``; None is outside nothing.

    A lowest of -inf leaves that side to the caller.
    """
    found = []
    for name, (low, high) in bounds.items():
        value = getattr(config, name)
        if value is None:
            continue
        if value > high:
            found.append(f"{name} is {shown(value)}: must be {high:,} or less")
        elif low > -math.inf and not value >= low:  # so written, it refuses NaN
            found.append(f"{name} is {shown(value)}: must be {'above 0' if low == ABOVE_0 else f'{low:,} or more'}")
    return found
