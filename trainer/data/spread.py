"""Random first positions, so that short sequences train the whole position table.

A phase of short sequences trains only the first rows of the table. The next, longer phase then starts with untrained
rows, and its loss jumps. If each sequence starts at a random row, all rows train, and the model learns to go by
distances (Kiyono et al., "SHAPE: Shifted Absolute Position Embedding for Transformers", EMNLP 2021, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from data_prep.draws import bits
from trainer.model.batch import MicroBatch


@dataclass(frozen=True)
class Spread:
    """Settings for drawing each sequence's first position."""

    rows: int  # rows of the position table to use
    seed: int


def spread(batch: MicroBatch, settings: Spread) -> MicroBatch:
    """The micro-batch with each sequence moved as a whole to a random place in the first ``rows`` positions.

    The place is a function of (seed, sample number) only, so it does not depend on ranks or micro-batches.
    """
    lengths = batch.cu_seqlens.diff().long()  # (B,)
    room = (settings.rows - lengths + 1).numpy().astype("uint64")
    first = torch.from_numpy((bits(settings.seed, batch.samples.numpy()) % room).astype("int64"))  # (B,)
    return replace(batch, positions=batch.positions + first.repeat_interleave(lengths))
