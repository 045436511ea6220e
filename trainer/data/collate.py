"""Collates samples into unpadded micro-batches. Pure functions."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from data_prep.shards import NO_PAIR, Sample
from trainer.model.batch import IGNORED, MicroBatch


def collate(samples: list[Sample], numbers: NDArray[np.int64]) -> MicroBatch:
    """Collate masked samples into one unpadded micro-batch; ``numbers`` seed their dropout."""
    lengths = np.array([len(sample.ids) for sample in samples])
    starts = np.concatenate([[0], np.cumsum(lengths)])  # (B + 1,)
    tokens = np.concatenate([sample.ids for sample in samples]).astype(np.int64)  # (T,)
    masked = np.concatenate([s.positions + start for s, start in zip(samples, starts[:-1], strict=True)])
    labels = tokens[masked]  # (P,)
    tokens[masked] = np.concatenate([sample.replacements for sample in samples])
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    splits = np.repeat([sample.split for sample in samples], lengths)
    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        segments=torch.from_numpy((positions >= splits).astype(np.int64)),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        max_seqlen=int(lengths.max()),
        samples=torch.from_numpy(np.ascontiguousarray(numbers, np.int64)),
        masked=torch.from_numpy(masked.astype(np.int64)),
        labels=torch.from_numpy(labels),
        is_next=torch.tensor([IGNORED if s.is_next == NO_PAIR else s.is_next for s in samples], dtype=torch.int64),
    )


def filler(cls_id: int, sep_id: int) -> MicroBatch:
    """Return a micro-batch of one sequence without targets, which adds nothing to a loss or a gradient."""
    empty = torch.empty(0, dtype=torch.int64)
    return MicroBatch(
        tokens=torch.tensor([cls_id, sep_id, sep_id]),
        segments=torch.tensor([0, 0, 1]),
        positions=torch.arange(3),
        cu_seqlens=torch.tensor([0, 3], dtype=torch.int32),
        max_seqlen=3,
        samples=torch.zeros(1, dtype=torch.int64),
        masked=empty,
        labels=empty,
        is_next=torch.tensor([IGNORED]),
    )
