"""The size, stall and best interval of checkpoints, and the share of time that is left for training. Pure functions.

The best interval is Daly's (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
2006, equation 37), which refines Young's √(2 δ M) (J. W. Young, "A first order approximation to the optimum checkpoint
interval", 1974). The time of a whole run is Daly's complete cost function, for failures that come independently of one
another:

    T = M e^(R / M) (e^((τ + δ) / M) - 1) T₀ / τ

with M the mean time between failures, τ the training time between checkpoints, δ the stall of a checkpoint, R the time
to restart, and T₀ the training time without checkpoints and failures.
"""

from __future__ import annotations

import math

SAVED_BYTES = 12  # per parameter: weights and two moments, in fp32
# Not measured: to be calibrated on a node with GPUs.
COPY_BYTES_PER_SECOND = 3e9  # from the GPU into pageable host memory


def stall(share: int, write_seconds: float, asynchronous: bool) -> float:
    """Seconds that training waits for a save of ``share`` parameters per rank: for the copy, or for everything."""
    copy = SAVED_BYTES * share / COPY_BYTES_PER_SECOND
    return copy if asynchronous else copy + write_seconds


def best_interval(stall: float, between: float) -> float:
    """Daly's interval in seconds of training between two checkpoints."""
    if stall >= 2 * between:
        return between
    ratio = stall / (2 * between)
    return math.sqrt(2 * stall * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def goodput(interval: float, stall: float, restart: float, between: float) -> float:
    """The share of wall-clock time that trains, T₀ / T, in 0–1."""
    if math.isinf(between):
        return interval / (interval + stall)
    if (restart + interval + stall) / between > 700:  # beyond this the run never ends, and exp overflows
        return 0.0
    return interval / (between * math.exp(restart / between) * math.expm1((interval + stall) / between))
