"""The figures by which tasks are judged, in plain NumPy.

Classes are numbers from 0 on. A figure that is not defined is the one that scikit-learn and SciPy give: 0 for F1 and
Matthews' coefficient without any right or wrong of a kind, NaN for a correlation with what does not vary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Classes = NDArray[np.int64]


def accuracy(gold: Classes, said: Classes) -> float:
    """Share of equal classes."""
    return float(np.mean(gold == said))


def f1(gold: Classes, said: Classes, positive: int = 1) -> float:
    """2 · right / (said + there) of the ``positive`` class, as GLUE has it for MRPC and QQP."""
    right = np.sum((gold == positive) & (said == positive))
    return _share(2 * right, np.sum(gold == positive) + np.sum(said == positive))


def macro_f1(gold: Classes, said: Classes) -> float:
    """Mean of the F1 of all classes that are there or were said."""
    return float(np.mean([f1(gold, said, int(one)) for one in np.union1d(gold, said)]))


def matthews(gold: Classes, said: Classes) -> float:
    """Matthews' correlation coefficient for any number of classes (Gorodkin 2004); 0 where one side is constant."""
    classes = int(max(gold.max(), said.max())) + 1
    table = np.zeros((classes, classes))
    np.add.at(table, (gold, said), 1)
    there, spoken, every = table.sum(1), table.sum(0), table.sum()
    covariance = np.trace(table) * every - there @ spoken
    spread = (every**2 - spoken @ spoken) * (every**2 - there @ there)
    return _share(covariance, np.sqrt(spread))


def pearson(gold: Numbers, said: Numbers) -> float:
    """Pearson's correlation; NaN where one side is constant."""
    a, b = np.asarray(gold, np.float64), np.asarray(said, np.float64)
    a, b = a - a.mean(), b - b.mean()
    spread = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / spread if spread > 0 else float("nan")


def spearman(gold: Numbers, said: Numbers) -> float:
    """Spearman's correlation: Pearson's of the ranks, equal numbers sharing their mean rank."""
    return pearson(ranks(gold), ranks(said))


def ranks(values: Numbers) -> Numbers:
    """Rank of each number from 1 on; equal ones have the mean of theirs."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[group], np.float64)


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0


FIGURES: dict[str, Callable[..., float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}
