"""Masked positions and what stands there, after Devlin et al., "BERT" (2019), section 3.1.

A share of the ordinary tokens is to be predicted; of these 80 % become [MASK], 10 % a random ordinary token
and 10 % stay. Control tokens, padding and [UNK] are never predicted and never a replacement. Every draw is
keyed by (seed, sample number, position), so a mask does not depend on the shard or process that makes it.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from data_prep.draws import bits, uniform
from data_prep.errors import DataError
from data_prep.tokenizer import SpecialIds

CHOICE, KIND, RANDOM = 0x6D61736B, 0x6B696E64, 0x72616E64  # streams of draws: "mask", "kind", "rand"
TO_MASK, TO_RANDOM = 0.8, 0.1  # the rest stays
POSITION_BITS = np.uint64(0xFFFF)  # of a draw


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


def largest_count(sequence_length: int, share: float) -> int:
    """Masked positions of a full sequence of ``sequence_length``, of which 3 are control tokens."""
    return max(1, int(np.rint(share * (sequence_length - 3))))


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
