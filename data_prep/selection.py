"""Selects the documents: optionally without exact duplicates, and on one side of a held-out share.

Both use a hash of the document's cleaned text, which `store.py` writes. So a document and its duplicates are always
on the same side, and nothing can leak from the held-out part into training, whatever else is in the corpus.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.atomic import replacing
from data_prep.settings import Settings
from data_prep.store import READ_AT_ONCE

SORTED_AT_ONCE = 1 << 22  # digests: 64 MB
ALL = 2.0**64  # number of values of the first 8 bytes of a digest


class Selected(NamedTuple):
    """Counts of documents, and of the sentences and tokens in the selected ones."""

    documents: int  # read, with at least one sentence
    duplicates: int  # left out: an earlier document has the same text
    other_part: int  # left out: on the other side of the held-out share
    lone_sentences: int  # selected documents of one sentence
    sentences: int  # in the selected documents
    tokens: int  # in the selected documents


def select_documents(store: Path, out: Path, settings: Settings) -> Selected:
    """Writes (first sentence, end) of the selected documents to ``out`` as int64 pairs, in document order.

    The store has at least one document; ``out`` may have none.
    """
    starts = np.memmap(store / "documents", np.int64, "r")
    offsets = np.memmap(store / "sentences", np.int64, "r")
    digests = np.memmap(store / "digests", np.uint64, "r").reshape(-1, 2)
    count = len(digests)
    kept = np.ones(count, np.bool_)
    if settings.drop_duplicates:
        for again in _repeated(digests):
            kept[again] = False
    duplicates = count - int(np.count_nonzero(kept))
    if settings.part != "all":
        kept &= (digests[:, 0] / ALL < settings.held_out_share) == (settings.part == "held-out")
    lone = sentences = tokens = 0
    with replacing(out) as file:
        for first in range(0, count, READ_AT_ONCE):
            chosen = first + np.flatnonzero(kept[first : first + READ_AT_ONCE])
            rows = np.stack([starts[chosen], starts[chosen + 1]], axis=1)  # (documents, 2)
            lengths = rows[:, 1] - rows[:, 0]
            lone += int(np.count_nonzero(lengths == 1))
            sentences += int(lengths.sum())
            tokens += int((offsets[rows[:, 1]] - offsets[rows[:, 0]]).sum())
            file.write(rows.tobytes())
    left = int(np.count_nonzero(kept))
    return Selected(count, duplicates, count - duplicates - left, lone, sentences, tokens)


def _repeated(digests: NDArray[np.uint64]) -> Iterator[NDArray[np.int64]]:
    """Documents that repeat an earlier digest, [n] at a time: the digests are sorted in parts that fit in memory."""
    parts = np.uint64(-(-len(digests) // SORTED_AT_ONCE))
    for part in range(int(parts)):
        member = np.flatnonzero(digests[:, 1] % parts == part)
        some = digests[member]  # (n, 2)
        order = np.lexsort((some[:, 0], some[:, 1]))  # stable: the earliest of equal digests is first
        same = (some[order][1:] == some[order][:-1]).all(axis=1)
        yield member[order[1:][same]]
