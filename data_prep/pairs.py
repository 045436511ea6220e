"""Sentence pairs for next-sentence prediction, as a plan: where in the store each pair's two segments lie.

After Devlin et al., "BERT" (2019), appendix A.2, and its published `create_pretraining_data.py`: sentences of
a document are collected up to a target length and split at random into A and B; for half of the pairs B comes
from another document instead, and the sentences that it displaced are used again. Where this differs:

- the short target is drawn for each pair, not once a document, and the pair is cut to it;
- a pair is made of two sentences at least, however long they are, so that half of the pairs can be true;
  a single sentence left at a document's end starts no pair (it can still be a random B);
- A is cut at its front and B at its end, so that the two segments of a true pair touch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_prep.draws import uniform
from data_prep.settings import Settings
from data_prep.store import Store

SPECIALS_IN_PAIR = 3  # [CLS] A [SEP] B [SEP]
PAIR = np.dtype(
    [("a_start", "<i8"), ("b_start", "<i8"), ("a_length", "<i4"), ("b_length", "<i4"), ("is_next", "<i4")]
)  # 28 bytes a sample; starts are offsets in Store.ids, lengths in tokens
SHORT, TARGET, SPLIT, NEXT, DOCUMENT, SENTENCE = range(6)  # the draws of a pair
DRAWS = 6
DRAWN_AT_ONCE = 1024  # pairs
STREAM = 0x70616972  # "pair": keeps these draws apart from others of the same seed
BLOCK_TOKENS = 1 << 18  # of documents planned at once


@dataclass(frozen=True)
class Block:
    """Documents first..last-1, in one of the duplicates."""

    duplicate: int
    first: int
    last: int


def cut_blocks(store: Store, duplicates: int) -> Iterator[Block]:
    """The work of planning, in the order of the plan; a block is BLOCK_TOKENS long, or one document."""
    count = len(store.documents) - 1
    for duplicate in range(duplicates):
        first = 0
        while first < count:
            end = store.sentences[store.documents[first]] + BLOCK_TOKENS
            sentence = np.searchsorted(store.sentences, end)
            last = max(first + 1, min(int(np.searchsorted(store.documents, sentence)), count))
            yield Block(duplicate, first, last)
            first = last


def plan_pairs(store: Store, block: Block, settings: Settings, unknown: int) -> NDArray[np.void]:
    """The pairs of a block, PAIR[samples]; a document's depend on (store, settings, duplicate, document).

    A pair in which every token is ``unknown`` has nothing to predict and is left out.
    """
    documents = range(block.first, block.last)
    planned = [pair for number in documents for pair in _cut_document(store, block.duplicate, number, settings)]
    if not planned:
        return np.empty(0, PAIR)
    pairs = _place(store, np.array([cut for cut, _ in planned]), np.array([draws for _, draws in planned]))
    starts = np.stack([pairs["a_start"], pairs["b_start"]], axis=1).ravel()
    lengths = np.stack([pairs["a_length"], pairs["b_length"]], axis=1).ravel().astype(np.int64)
    known = store.gather(starts, lengths) != unknown
    first_of_pair = (np.cumsum(lengths) - lengths)[::2]
    kept: NDArray[np.void] = pairs[np.add.reduceat(known, first_of_pair, dtype=np.int64) > 0]
    return kept


def _cut_document(
    store: Store, duplicate: int, document: int, settings: Settings
) -> Iterator[tuple[tuple[int, ...], list[float]]]:
    """(document, first sentence of A, of B, of what follows, target length) and the draws of each pair."""
    start, end = (int(sentence) for sentence in store.documents[document : document + 2])
    offsets = store.sentences[start : end + 1].tolist()
    longest = settings.sequence_length - SPECIALS_IN_PAIR
    first, last_first, number = 0, end - start - 2, 0
    while first <= last_first:
        if number % DRAWN_AT_ONCE == 0:
            numbers = number + np.arange(min(DRAWN_AT_ONCE, last_first - first + 1))
            draws = uniform(settings.seed, STREAM, duplicate, document, numbers[:, None], np.arange(DRAWS)).tolist()
        draw = draws[number % DRAWN_AT_ONCE]
        short = draw[SHORT] < settings.short_sequence_rate
        target = 2 + int(draw[TARGET] * (longest - 1)) if short else longest
        last = min(max(bisect_left(offsets, offsets[first] + target), first + 2), end - start)
        middle = first + 1 + int(draw[SPLIT] * (last - first - 1))
        yield (document, start + first, start + middle, start + last, target), draw
        first = last if draw[NEXT] < 0.5 else middle
        number += 1


def _place(store: Store, cuts: NDArray[np.int64], draws: NDArray[np.float64]) -> NDArray[np.void]:
    """Gives each cut its B, true or from another document, and trims the pair to its target length."""
    document, first, middle, last, target = cuts.T
    is_next = draws[:, NEXT] < 0.5
    other = (draws[:, DOCUMENT] * (len(store.documents) - 2)).astype(np.int64)
    other += other >= document  # any document but this one
    other_first, other_last = store.documents[other], store.documents[other + 1]
    drawn = other_first + (draws[:, SENTENCE] * (other_last - other_first)).astype(np.int64)
    a_start = store.sentences[first]
    a_length = store.sentences[middle] - a_start
    b_start = store.sentences[np.where(is_next, middle, drawn)]
    filled = np.searchsorted(store.sentences, b_start + np.maximum(target - a_length, 1))
    b_length = store.sentences[np.where(is_next, last, np.minimum(filled, other_last))] - b_start

    b_kept = np.minimum(b_length, np.maximum(target - a_length, target // 2))  # the longer one gives way
    a_kept = np.minimum(a_length, target - b_kept)
    pairs = np.empty(len(cuts), PAIR)
    pairs["a_start"], pairs["a_length"] = a_start + a_length - a_kept, a_kept
    pairs["b_start"], pairs["b_length"] = b_start, b_kept
    pairs["is_next"] = is_next
    return pairs
