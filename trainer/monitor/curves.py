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


def thinned(x: Numbers, y: Numbers) -> tuple[Numbers, Numbers]:
    """Reduce a curve to a few thousand points: the lowest and the highest of each stretch, in order."""
    if len(x) <= 2 * POINTS:
        return x, y
    kept: set[int] = set()
    for stretch in np.array_split(np.arange(len(x)), POINTS):
        kept |= {int(stretch[y[stretch].argmin()]), int(stretch[y[stretch].argmax()])}
    rows = sorted(kept)
    return x[rows], y[rows]


def strided(*columns: Numbers) -> list[Numbers]:
    """Reduce smooth curves to a few thousand evenly spaced rows."""
    rows = np.linspace(0, len(columns[0]) - 1, min(len(columns[0]), POINTS)).astype(int)
    return [column[rows] for column in columns]
