"""The unpadded micro-batch that the loader hands to the model.

Shape letters are the same in every file: B sequences in a micro-batch, T tokens of all sequences in one row, P masked
positions, S sequence length, D hidden size, N heads, H head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

IGNORED = -100  # label of a position or pair without a target (PyTorch's convention)


@dataclass(frozen=True)
class Rows:
    """The encoder's input: an unpadded micro-batch. Sequence b is ``tokens[cu_seqlens[b]:cu_seqlens[b + 1]]``."""

    tokens: Tensor  # (T,) int64, ids after masking
    segments: Tensor  # (T,) int64, 0 for [CLS] A [SEP], 1 for B [SEP]
    positions: Tensor  # (T,) int64, rows of the position table: consecutive in a sequence, from 0 unless spread
    cu_seqlens: Tensor  # (B + 1,) int32, cumulative lengths, as in FlashAttention's varlen interface
    max_seqlen: int  # length of the longest sequence in the micro-batch
    samples: Tensor  # (B,) int64, sample numbers: positions in the run's order, which seed the dropout

    def to(self, device: torch.device) -> Self:
        """The same micro-batch on ``device``; copies from pinned memory are asynchronous."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self, device: torch.device) -> Self:
        """A copy in pinned memory if ``device`` is a GPU, else this object itself."""
        if device.type != "cuda":
            return self
        with torch.cuda.device(device):  # otherwise a thread's first use of CUDA creates a context on the first GPU
            return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in changed.items():
            if isinstance(value, Tensor):
                changed[name] = change(value)
        return replace(self, **changed)


@dataclass(frozen=True)
class MicroBatch(Rows):
    """An unpadded micro-batch for pre-training."""

    masked: Tensor  # (P,) int64, index into T of each predicted token
    labels: Tensor  # (P,) int64, the original ids at these positions, or IGNORED
    is_next: Tensor  # (B,) int64, 1 if B follows A, 0 if not (`Sample.is_next`), IGNORED if there is no B


@dataclass(frozen=True)
class GlobalCounts:
    """Counts over the global batch that a step's losses are divided by, known before its first forward pass.

    The weights apply only to the loss that is optimized, not to the losses that are reported.
    """

    targets: int  # masked positions
    pairs: int  # sentence pairs; 0 if the data have no second task
    tokens: int  # valid tokens
    squares: int  # sum of squared sequence lengths, which determines the cost of attention
    mlm_weight: float = 1.0  # of the MLM loss
    nsp_weight: float = 1.0  # of the NSP loss
