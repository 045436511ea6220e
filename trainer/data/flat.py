"""Lay samples end to end as the arrays of an unpadded micro-batch. Pure functions; no torch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.shards import NO_PAIR, Samples


class Flat(NamedTuple):
    """The arrays of a :class:`~trainer.model.batch.MicroBatch`, in its order; ``is_next`` may be NO_PAIR."""

    tokens: NDArray[np.int64]
    segments: NDArray[np.int64]
    positions: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    max_seqlen: int
    samples: NDArray[np.int64]
    masked: NDArray[np.int64]
    labels: NDArray[np.int64]
    is_next: NDArray[np.int64]


def flatten(samples: Samples, numbers: NDArray[np.int64]) -> Flat:
    """Lay masked samples end to end; ``numbers`` (B,) seed their dropout."""
    lengths = samples.lengths
    starts = np.concatenate([[0], np.cumsum(lengths)])  # (B + 1,)
    tokens = samples.ids.astype(np.int64)  # (T,)
    masked = samples.positions + np.repeat(starts[:-1], samples.counts)  # (P,)
    labels = tokens[masked]
    tokens[masked] = samples.replacements
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    return Flat(
        tokens=tokens,
        segments=(positions >= np.repeat(samples.splits, lengths)).astype(np.int64),
        positions=positions,
        cu_seqlens=starts.astype(np.int32),
        max_seqlen=int(lengths.max()),
        samples=np.ascontiguousarray(numbers, np.int64),
        masked=masked,
        labels=labels,
        is_next=samples.is_next,
    )


def flat_filler(cls_id: int, sep_id: int) -> Flat:
    """Return one sequence without targets, which adds nothing to a loss or a gradient."""
    empty = np.empty(0, np.int64)
    return Flat(
        tokens=np.array([cls_id, sep_id, sep_id]),
        segments=np.array([0, 0, 1]),
        positions=np.arange(3),
        cu_seqlens=np.array([0, 3], np.int32),
        max_seqlen=3,
        samples=np.zeros(1, np.int64),
        masked=empty,
        labels=empty,
        is_next=np.array([NO_PAIR]),
    )
