"""Planned pairs to masked samples."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from data_prep.masking import Vocabulary, choose_positions, replace
from data_prep.pairs import SPECIALS_IN_PAIR
from data_prep.ragged import gather
from data_prep.settings import Settings
from data_prep.shards import Sample
from data_prep.store import Store
from data_prep.tokenizer import SpecialIds

ROWS = 1024  # samples made at once


def make_samples(
    store: Store,
    pairs: NDArray[np.void],
    first: int,
    specials: SpecialIds,
    vocabulary: Vocabulary,
    settings: Settings,
) -> Iterator[Sample]:
    """The samples numbered ``first``, ``first + 1``, ... of ``pairs``, PAIR[samples]."""
    for start in range(0, len(pairs), ROWS):
        rows = pairs[start : start + ROWS]
        numbers = first + start + np.arange(len(rows))
        ids = lay_out(store, rows, specials)  # (B, S)
        chosen = choose_positions(ids, numbers, vocabulary, settings.seed, settings.masked_share)  # (B, S)
        row, position = np.nonzero(chosen)  # (P,), (P,): row by row, ascending
        replacements = replace(ids[chosen], numbers[row], position, vocabulary, settings.seed)  # (P,)
        positions = position.astype(np.int32)
        ends = np.cumsum(chosen.sum(axis=1)).tolist()
        starts = [0, *ends]
        lengths = (rows["a_length"] + rows["b_length"] + SPECIALS_IN_PAIR).tolist()
        splits, is_next = (rows["a_length"] + 2).tolist(), rows["is_next"].tolist()
        for i, (begin, end) in enumerate(zip(starts, ends, strict=False)):
            yield Sample(ids[i, : lengths[i]], splits[i], is_next[i], positions[begin:end], replacements[begin:end])


def lay_out(store: Store, pairs: NDArray[np.void], specials: SpecialIds) -> NDArray[np.int32]:
    """[CLS] A [SEP] B [SEP] of each pair, int32[B, S], padded with [PAD] to the longest."""
    a_length, b_length = pairs["a_length"][:, None], pairs["b_length"][:, None]  # (B, 1)
    column = np.arange(int((a_length + b_length).max()) + SPECIALS_IN_PAIR)  # (S,)
    last = a_length + b_length + 2
    ids = np.full((len(pairs), len(column)), specials.pad, np.int32)
    ids[:, 0] = specials.cls
    ids[(column == a_length + 1) | (column == last)] = specials.sep
    # A boolean index goes row by row, as `gather` does.
    ids[(column >= 1) & (column <= a_length)] = gather(store.ids, pairs["a_start"], pairs["a_length"])
    ids[(column >= a_length + 2) & (column < last)] = gather(store.ids, pairs["b_start"], pairs["b_length"])
    return ids
