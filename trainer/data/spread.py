"""Random first positions, so that short sequences train the whole position table.

A phase of short sequences trains only the first rows of the table. The next, longer phase then starts with untrained
rows, and its loss jumps. If each sequence starts at a random row, all rows train, and the model learns to go by
distances (Kiyono et al., "SHAPE: Shifted Absolute Position Embedding for Transformers", EMNLP 2021, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_prep.draws import bits
from trainer.data.flat import Flat


@dataclass(frozen=True)
class Spread:
    """Settings for drawing each sequence's first position."""

    rows: int  # rows of the position table to use
    seed: int


def spread(flat: Flat, settings: Spread) -> Flat:
    """The micro-batch with each sequence moved as a whole to a random place in the first ``rows`` positions.

    The place is a function of (seed, sample number) only, so it does not depend on ranks or micro-batches.
    """
    lengths = np.diff(flat.cu_seqlens).astype(np.int64)  # (B,)
    room = (settings.rows - lengths + 1).astype(np.uint64)
    first = (bits(settings.seed, flat.samples) % room).astype(np.int64)  # (B,)
    return flat._replace(positions=flat.positions + np.repeat(first, lengths))
