"""The metrics that tasks are evaluated by, in plain NumPy.

Classes are numbers from 0. An undefined metric has the value that scikit-learn and SciPy give it: 0 for F1 and
Matthews' coefficient if the denominator is 0, NaN for a correlation with constant values.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Classes = NDArray[np.int64]


def accuracy(gold: Classes, said: Classes) -> float:
    """Share of predicted classes that equal the gold ones."""
    return float(np.mean(gold == said))


def f1(gold: Classes, said: Classes, positive: int = 1) -> float:
    """F1 of the ``positive`` class, 2 · correct / (predicted + gold), as GLUE defines it for MRPC and QQP."""
    right = np.sum((gold == positive) & (said == positive))
    return _share(2 * right, np.sum(gold == positive) + np.sum(said == positive))


def macro_f1(gold: Classes, said: Classes) -> float:
    """Mean F1 of all classes that occur among the gold or predicted ones."""
    return float(np.mean([f1(gold, said, int(one)) for one in np.union1d(gold, said)]))


def matthews(gold: Classes, said: Classes) -> float:
    """Matthews' correlation coefficient for any number of classes (Gorodkin 2004); 0 if one side is constant."""
    classes = int(max(gold.max(), said.max())) + 1
    table = np.zeros((classes, classes))
    np.add.at(table, (gold, said), 1)
    there, spoken, every = table.sum(1), table.sum(0), table.sum()
    covariance = np.trace(table) * every - there @ spoken
    spread = (every**2 - spoken @ spoken) * (every**2 - there @ there)
    return _share(covariance, np.sqrt(spread))


def pearson(gold: Numbers, said: Numbers) -> float:
    """Pearson's correlation; NaN if one side is constant."""
    a, b = np.asarray(gold, np.float64), np.asarray(said, np.float64)
    a, b = a - a.mean(), b - b.mean()
    spread = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / spread if spread > 0 else float("nan")


def spearman(gold: Numbers, said: Numbers) -> float:
    """Spearman's correlation: Pearson's correlation of the ranks, where ties share their mean rank."""
    return pearson(ranks(gold), ranks(said))


def ranks(values: Numbers) -> Numbers:
    """Rank of each number, from 1; ties share their mean rank."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[group], np.float64)


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0


TASK_METRICS: dict[str, Callable[..., float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}
