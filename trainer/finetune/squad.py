"""SQuAD's own metrics, as the official script for 2.0 defines them: exact match, and F1 over an answer's words.

Both ignore case, punctuation, articles and extra white space, and take the best match among a question's gold answers.
If there are none, only the empty answer "" is right: both metrics are then 1, otherwise 0. For SQuAD 1.1 the official
script agrees, except that it gives F1 0 for a gold answer that has only articles and punctuation.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Golds = Sequence[str]  # the right answers to one question; empty if it has none
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII's, as in the official script


def normalise(text: str) -> str:
    """Normalise a text for comparing answers."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def exact_match(said: str, golds: Golds) -> float:
    """1 if the answer is one of the gold ones, else 0."""
    return float(normalise(said) in _compared(golds))


def f1(said: str, golds: Golds) -> float:
    """The largest F1 of the answer's words with those of a gold answer."""
    return max(_f1(normalise(said).split(), gold.split()) for gold in _compared(golds))


def squad_metrics(said: Sequence[str], golds: Sequence[Golds]) -> dict[str, float]:
    """Means over the questions; if some have no answer, also over those with one and those without."""
    exact = np.array([exact_match(text, right) for text, right in zip(said, golds, strict=True)])
    words = np.array([f1(text, right) for text, right in zip(said, golds, strict=True)])
    answered = np.array([bool(right) for right in golds])
    metrics = {"f1": _mean(words), "exact_match": _mean(exact)}
    for name, part in (("answered", answered), ("unanswerable", ~answered)):
        if not answered.all() and part.any():
            metrics |= {f"f1.{name}": _mean(words[part]), f"exact_match.{name}": _mean(exact[part])}
    return metrics


def best_thresholds(said: Sequence[str], margins: Sequence[float], golds: Sequence[Golds]) -> dict[str, float]:
    """The best metrics that any threshold reaches on these same questions, and the lowest threshold that reaches each.

    A question is left unanswered if its margin, by which "no answer" beat ``said``, is above the threshold.
    """
    found: dict[str, float] = {}
    for name, metric in (("f1", f1), ("exact_match", exact_match)):
        nothing = np.array([metric("", right) for right in golds])
        gains = np.array([metric(text, right) for text, right in zip(said, golds, strict=True)]) - nothing
        order = np.argsort(margins, kind="stable")
        at = np.asarray(margins, np.float64)[order]
        sums = nothing.sum() + np.cumsum(gains[order])  # if all questions up to there are answered
        last = np.flatnonzero(
            np.append(at[1:] > at[:-1], True)
        )  # the last of equal margins: one threshold applies to all of them
        reached = np.append(nothing.sum(), sums[last])
        thresholds = np.append(np.floor(at[0]) - 1, at[last])
        best = int(reached.argmax())
        found |= {f"best_{name}": float(reached[best]) / len(said), f"best_{name}_threshold": float(thresholds[best])}
    return found


def _compared(golds: Golds) -> list[str]:
    return [gold for gold in map(normalise, golds) if gold] or [""]


def _f1(said: list[str], gold: list[str]) -> float:
    if not said or not gold:
        return float(said == gold)
    return 2 * (Counter(said) & Counter(gold)).total() / (len(said) + len(gold))


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean())
