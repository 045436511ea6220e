"""The unpadded micro-batch: what the loader hands to the model.

Shape letters, the same in every file: B sequences of a micro-batch, T tokens of all of them in one
row, P masked positions, S sequence length, D hidden, N heads, H head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

IGNORED = -100  # label of a position or pair that has no target (PyTorch's own convention)


@dataclass(frozen=True)
class Rows:
    """What the encoder reads of an unpadded micro-batch. Sequence b is ``tokens[cu_seqlens[b]:cu_seqlens[b + 1]]``."""

    tokens: Tensor  # (T,) int64, ids after masking
    segments: Tensor  # (T,) int64, 0 for [CLS] A [SEP], 1 for B [SEP]
    positions: Tensor  # (T,) int64, position inside its own sequence, from 0
    cu_seqlens: Tensor  # (B + 1,) int32, cumulative lengths, as FlashAttention's varlen interface has them
    max_seqlen: int  # longest sequence of the micro-batch
    samples: Tensor  # (B,) int64, sample numbers: position in the run's order, they key the dropout

    def to(self, device: torch.device) -> Self:
        """The same micro-batch on ``device``; from pinned memory the copies are not waited for."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self, device: torch.device) -> Self:
        """The same micro-batch in pinned memory, if it goes to a GPU; the same object if not."""
        if device.type != "cuda":
            return self
        with torch.cuda.device(device):  # a thread's first use of CUDA would make a context on the first GPU
            return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in changed.items():
            if isinstance(value, Tensor):
                changed[name] = change(value)
        return replace(self, **changed)


@dataclass(frozen=True)
class MicroBatch(Rows):
    """One unpadded micro-batch of pre-training."""

    masked: Tensor  # (P,) int64, index into T of each predicted token
    labels: Tensor  # (P,) int64, the original ids there, or IGNORED
    is_next: Tensor  # (B,) int64, 1 where B follows A, 0 where not (`Sample.is_next`), IGNORED where there is no B


@dataclass(frozen=True)
class GlobalCounts:
    """What a step's losses are divided by: counts over the whole global batch, known before its first forward."""

    targets: int  # masked positions
    pairs: int  # sentence pairs; 0 where the data have no second task
    tokens: int  # valid tokens
    squares: int  # sum of the squared sequence lengths: what attention costs
