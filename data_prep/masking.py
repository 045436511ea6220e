"""Planned pairs to masked samples, after Devlin et al., "BERT" (2019), section 3.1.

A share of the ordinary tokens is to be predicted; of these 80 % become [MASK], 10 % a random ordinary token
and 10 % stay. Control tokens, padding and [UNK] are never predicted and never a replacement. Every draw is
keyed by (seed, sample number, position), so a mask does not depend on the shard or process that makes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from data_prep.draws import bits, uniform
from data_prep.errors import DataError
from data_prep.pairs import SPECIALS_IN_PAIR
from data_prep.settings import Settings
from data_prep.shards import Sample
from data_prep.store import Store
from data_prep.tokenizer import SpecialIds

CHOICE, KIND, RANDOM = 0x6D61736B, 0x6B696E64, 0x72616E64  # streams of draws: "mask", "kind", "rand"
TO_MASK, TO_RANDOM = 0.8, 0.1  # the rest stays
POSITION_BITS = np.uint64(0xFFFF)  # of a draw
TOKENS_AT_ONCE = 1 << 17  # of the samples made together


@dataclass(frozen=True)
class Vocabulary:
    """Which ids are ordinary tokens."""

    mask: int
    is_ordinary: NDArray[np.bool_]  # [V]
    ordinary: NDArray[np.int32]  # their ids, ascending


def make_vocabulary(vocab_size: int, specials: SpecialIds) -> Vocabulary:
    """Raises DataError for fewer than two ordinary tokens: a random replacement would have no choice."""
    is_ordinary = np.ones(vocab_size, np.bool_)
    is_ordinary[list(astuple(specials))] = False
    ordinary = np.flatnonzero(is_ordinary).astype(np.int32)
    if len(ordinary) < 2:
        raise DataError(
            f"the vocabulary of {vocab_size} pieces is too small for random replacement: it needs 2 beside "
            "the control tokens; train a larger one"
        )
    return Vocabulary(specials.mask, is_ordinary, ordinary)


def make_samples(
    store: Store, pairs: NDArray[np.void], first: int, vocab_size: int, specials: SpecialIds, settings: Settings
) -> Iterator[Sample]:
    """The samples numbered ``first``, ``first + 1``, ... of ``pairs``, PAIR[samples]."""
    vocabulary = make_vocabulary(vocab_size, specials)
    step = max(1, TOKENS_AT_ONCE // settings.sequence_length)
    for start in range(0, len(pairs), step):
        rows = pairs[start : start + step]
        numbers = first + start + np.arange(len(rows))
        ids = _lay_out(store, rows, specials)  # (B, S)
        chosen = choose_positions(ids, numbers, vocabulary, settings.seed, settings.masked_share)  # (B, S)
        row, position = np.nonzero(chosen)  # (P,), (P,): row by row, ascending
        replacements = replace(ids[chosen], numbers[row], position, vocabulary, settings.seed)  # (P,)
        positions = position.astype(np.int32)
        lengths = (rows["a_length"] + rows["b_length"] + SPECIALS_IN_PAIR).tolist()
        splits, is_next = (rows["a_length"] + 2).tolist(), rows["is_next"].tolist()
        begin = 0
        for i, end in enumerate(np.cumsum(chosen.sum(axis=1)).tolist()):
            yield Sample(ids[i, : lengths[i]], splits[i], is_next[i], positions[begin:end], replacements[begin:end])
            begin = end


def choose_positions(
    ids: NDArray[np.int32], samples: NDArray[np.int64], vocabulary: Vocabulary, seed: int, share: float
) -> NDArray[np.bool_]:
    """Which tokens are to be predicted: max(1, round(share * ordinary tokens)) of each row that has any.

    Args:
        ids: [B, S], padded with a control token.
        samples: [B] sample numbers.
    Returns:
        bool[B, S].
    """
    ordinary = vocabulary.is_ordinary[ids]  # (B, S)
    column = np.arange(ids.shape[1], dtype=np.uint64)
    draws = bits(seed, CHOICE, samples[:, None], column)  # (B, S)
    draws = draws & ~POSITION_BITS | column  # no two of a row are equal
    available = ordinary.sum(axis=1)
    counts = np.minimum(np.maximum(np.rint(share * available), 1), available).astype(np.int64)
    lowest = np.sort(np.where(ordinary, draws, ~np.uint64(0)), axis=1)
    limit = lowest[np.arange(len(ids)), counts - 1]  # (B,)
    chosen: NDArray[np.bool_] = ordinary & (draws <= limit[:, None])
    return chosen


def replace(
    labels: NDArray[np.int32],
    samples: NDArray[np.int64],
    positions: NDArray[np.int64],
    vocabulary: Vocabulary,
    seed: int,
) -> NDArray[np.int32]:
    """What stands in place of ``labels`` in the masked input. All arrays are [P], one entry a position."""
    kind = uniform(seed, KIND, samples, positions)
    pick = uniform(seed, RANDOM, samples, positions) * len(vocabulary.ordinary)
    random = vocabulary.ordinary[pick.astype(np.int64)]
    changed = np.where(kind < TO_MASK, np.int32(vocabulary.mask), random)
    return np.where(kind < TO_MASK + TO_RANDOM, changed, labels)


def _lay_out(store: Store, pairs: NDArray[np.void], specials: SpecialIds) -> NDArray[np.int32]:
    """[CLS] A [SEP] B [SEP] of each pair, int32[B, S], padded with [PAD] to the longest."""
    a_length, b_length = pairs["a_length"][:, None], pairs["b_length"][:, None]  # (B, 1)
    column = np.arange(int((a_length + b_length).max()) + SPECIALS_IN_PAIR)  # (S,)
    last = a_length + b_length + 2
    ids = np.full((len(pairs), len(column)), specials.pad, np.int32)
    ids[:, 0] = specials.cls
    ids[(column == a_length + 1) | (column == last)] = specials.sep
    # A boolean index goes row by row, as `gather` does.
    ids[(column >= 1) & (column <= a_length)] = store.gather(pairs["a_start"], pairs["a_length"])
    ids[(column >= a_length + 2) & (column < last)] = store.gather(pairs["b_start"], pairs["b_length"])
    return ids
