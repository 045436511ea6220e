"""Curves of a run's history as numbers: which steps have a value, the smoothed values, and fewer points to draw.

The report draws them with Matplotlib, and the page of runs in a browser.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainer.monitor.history import History, StepColumns

Numbers = NDArray[np.float64]

POINTS = 2000  # more points than this cannot be seen in a figure


def present(columns: StepColumns, *keys: str) -> list[Numbers]:
    """Steps and values (points,) of the rows in which all of these keys are finite."""
    rows = np.all([np.isfinite(columns[key]) for key in keys], axis=0)
    return [columns[key][rows] for key in ("step", *keys)]


def smooth(values: Numbers) -> Numbers:
    """Moving mean (rows,) over a window of 2 % of the values, which is truncated at both ends."""
    rows, reach = np.arange(len(values)), len(values) // 100
    sums = np.concatenate([[0.0], np.cumsum(values)])
    first, end = np.maximum(rows - reach, 0), np.minimum(rows + reach + 1, len(values))
    return np.asarray((sums[end] - sums[first]) / (end - first))


def smooth_logarithm(values: Numbers) -> Numbers:
    """`smooth` for values that span decades: on logarithms, so that a spike does not hide its neighbors."""
    return np.exp(smooth(np.log(values))) if values.min() > 0 else smooth(values)


def median_rate(history: History, key: str) -> float:
    """The median over the steps of ``key`` per second; NaN if unknown."""
    _, amounts, seconds = present(history.steps, key, "seconds")
    timed = seconds > 0
    return float(np.median(amounts[timed] / seconds[timed])) if timed.any() else float("nan")


def paced(history: History) -> list[Numbers]:
    """Steps, tokens and seconds, of the steps with a measured time."""
    x, tokens, seconds = present(history.steps, "tokens", "seconds")
    return [column[seconds > 0] for column in (x, tokens, seconds)]


def throughput(history: History) -> list[Numbers]:
    """Steps, tokens per second, and smoothed tokens per second."""
    x, tokens, seconds = paced(history)
    return [x, tokens / seconds, smooth(tokens) / smooth(seconds)]


def skew(history: History) -> list[Numbers]:
    """Steps, and the compute time of the fastest and the slowest rank over the mean of the ranks."""
    x, least, mean, most = present(history.ranks, "compute_min", "compute_mean", "compute_max")
    return [x, least / mean, most / mean]


def slowest_ranks(history: History) -> dict[int, float]:
    """The ranks that were the slowest, the most frequent first, and in which share of the measurements."""
    _, slowest = present(history.ranks, "slowest")
    ranks, times = np.unique(slowest, return_counts=True)
    order = np.argsort(-times, kind="stable")
    return {int(ranks[row]): float(times[row] / times.sum()) for row in order}


def thinned(x: Numbers, y: Numbers, points: int = POINTS) -> tuple[Numbers, Numbers]:
    """Reduce a curve to twice as many points: the lowest and the highest of each of ``points`` stretches, in order."""
    if len(x) <= 2 * points:
        return x, y
    size, longer = divmod(len(x), points)  # as np.array_split cuts them: the first ``longer`` have one row more
    border = longer * (size + 1)
    parts = np.arange(border).reshape(longer, size + 1), np.arange(border, len(x)).reshape(-1, size)
    found = [part[np.arange(len(part)), pick] for part in parts for pick in (y[part].argmin(1), y[part].argmax(1))]
    rows = np.unique(np.concatenate(found))
    return x[rows], y[rows]


def strided(*columns: Numbers, points: int = POINTS) -> list[Numbers]:
    """Reduce smooth curves to ``points`` evenly spaced rows."""
    rows = np.linspace(0, len(columns[0]) - 1, min(len(columns[0]), points)).astype(int)
    return [column[rows] for column in columns]
