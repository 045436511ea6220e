"""Collate samples into unpadded micro-batches. Pure functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data_prep.shards import NO_PAIR, Sample, join
from trainer.data.flat import Flat, flat_filler, flatten
from trainer.model.batch import IGNORED, MicroBatch


def collate(samples: list[Sample], numbers: NDArray[np.int64]) -> MicroBatch:
    """Collate masked samples into one unpadded micro-batch; ``numbers`` (B,) seed their dropout."""
    return micro_batch(flatten(join(samples), numbers))


def filler(cls_id: int, sep_id: int) -> MicroBatch:
    """Return a micro-batch of one sequence without targets, which adds nothing to a loss or a gradient."""
    return micro_batch(flat_filler(cls_id, sep_id))


def micro_batch(flat: Flat) -> MicroBatch:
    """Return the arrays as tensors, which share their memory, except that a sequence without a pair gets IGNORED."""
    fields: dict[str, Any] = flat._asdict()
    fields["is_next"] = np.where(flat.is_next == NO_PAIR, IGNORED, flat.is_next)
    for name, value in fields.items():
        fields[name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return MicroBatch(**fields)
