"""Labels of records: which values mean "no label", and how often each class occurs in a file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

NONE = "no label"  # the key of such records among the counts
LabelCounts = dict[str, float]


def says_nothing(label: str | None, no_label: Sequence[str]) -> bool:
    """Whether a record has no label: it is empty or one of ``no_label``, where -1 and -1.0 are equal."""
    if label is None or not label.strip() or label in no_label:
        return True
    return any(_number(label) == _number(value) for value in no_label)  # a text becomes NaN, which equals nothing


def count(labels: Sequence[str], said: Iterable[str | None]) -> LabelCounts:
    """Count each of ``labels``, in their order; then the records without a label, if any."""
    counts = Counter(said)
    found: LabelCounts = {label: counts[label] for label in labels}
    return found | ({NONE: counts[None]} if counts[None] else {})


def only_class(counts: LabelCounts) -> str | None:
    """The class of all labels in a file, if it is the same for two or more of them and the task has other classes."""
    found = [label for label, number in counts.items() if number and label != NONE]
    return found[0] if len(found) == 1 and counts[found[0]] > 1 and len(counts) > 1 else None


def _number(label: str) -> float:
    try:
        return float(label)
    except ValueError:
        return math.nan
