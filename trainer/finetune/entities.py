"""Entities of tagged sentences, and the precision, recall and F1 of the predicted ones.

An entity is right if its type, first word and last word are. Tags are O, B-TYPE and I-TYPE, in any order, as a tagger
may emit them: an entity begins at a B-, or at an I- that does not continue one of its own type; it ends before
whatever does not continue it. CoNLL's ``conlleval`` reads tags this way, and so does ``seqeval`` by default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

Tags = Sequence[str]  # of one sentence, one tag per word


def entities(tags: Tags) -> list[tuple[str, int, int]]:
    """(type, first word, last word) of each entity, in order."""
    found, kind, first = [], "", 0  # the entity that is open, if ``kind`` is not empty
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, own = tag.partition("-")
        if kind and (prefix != "I" or own != kind):
            found.append((kind, first, place - 1))
            kind = ""
        if prefix != "O" and not kind:
            kind, first = own, place
    return found


def entity_metrics(gold: Sequence[Tags], said: Sequence[Tags]) -> dict[str, float]:
    """Precision, recall and F1 over all entities and for each type, as ``f1.PER``; 0 if the denominator is 0."""
    right: Counter[str] = Counter()
    wanted: Counter[str] = Counter()
    claimed: Counter[str] = Counter()
    for own, other in zip(gold, said, strict=True):
        true, found = entities(own), entities(other)
        wanted.update(kind for kind, _, _ in true)
        claimed.update(kind for kind, _, _ in found)
        right.update(kind for kind, _, _ in set(true) & set(found))
    metrics = _metrics("", right.total(), claimed.total(), wanted.total())
    for kind in sorted(wanted | claimed):
        metrics |= _metrics(f".{kind}", right[kind], claimed[kind], wanted[kind])
    return metrics


def _metrics(suffix: str, right: int, claimed: int, wanted: int) -> dict[str, float]:
    precision, recall = right / max(claimed, 1), right / max(wanted, 1)
    f1 = 2 * right / max(claimed + wanted, 1)
    return {f"f1{suffix}": f1, f"precision{suffix}": precision, f"recall{suffix}": recall}
