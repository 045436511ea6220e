"""Labels of records: which of them mean that there is none, and how often each class stands in a file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

NONE = "no label"  # its name among the counts
Counts = dict[str, float]


def says_nothing(label: str | None, no_label: Sequence[str]) -> bool:
    """Whether a record is without a label: empty, or one of ``no_label``; as numbers, -1 and -1.0 are alike."""
    if label is None or not label.strip() or label in no_label:
        return True
    return any(_number(label) == _number(value) for value in no_label)  # NaN, of a text, is equal to nothing


def count(labels: Sequence[str], said: Iterable[str | None]) -> Counts:
    """How often each of ``labels`` was said, in their order; then how often none was, if ever."""
    counts = Counter(said)
    found: Counts = {label: counts[label] for label in labels}
    return found | ({NONE: counts[None]} if counts[None] else {})


def only_class(counts: Counts) -> str | None:
    """The single class of several that a file's labels name, if it has two records or more with a label."""
    found = [label for label, number in counts.items() if number and label != NONE]
    return found[0] if len(found) == 1 and counts[found[0]] > 1 and len(counts) > 1 else None


def _number(label: str) -> float:
    try:
        return float(label)
    except ValueError:
        return math.nan
