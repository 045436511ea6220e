"""Range checks for the numbers in a configuration. Each config dataclass states its own ranges."""

from __future__ import annotations

import math
from typing import Any

from data_prep.json_text import shown

ABOVE_0 = math.nextafter(0, 1)  # as a lower bound, it excludes 0 itself
MOST_STEPS = 10**9
MOST_SAMPLES = 10**15  # multiplied by any per-sample count, still fits in 63 bits
LARGEST_BATCH = 2**19  # sequences per step; eight times the largest batch ever published


def outside(config: Any, **bounds: tuple[float, float]) -> list[str]:
    """List the attributes of ``config`` that are outside their ``(lowest, highest)``, one line each.

    None and texts pass. If the lowest is -inf, the caller checks the lower bound.
    """
    found = []
    for name, (low, high) in bounds.items():
        value = getattr(config, name)
        if value is None or isinstance(value, str):
            continue
        if value > high:
            found.append(f"{name} is {shown(value)}: must be {high:,} or less")
        elif low > -math.inf and not value >= low:  # written this way, it also refuses NaN
            found.append(f"{name} is {shown(value)}: must be {'above 0' if low == ABOVE_0 else f'{low:,} or more'}")
    return found
