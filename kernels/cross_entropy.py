"""Cross-entropy with integer labels, summed over rows, and the count of right answers.

    loss = sum over rows with a label of  log(sum_c exp(logits[row, c])) - logits[row, label]
    correct = number of rows whose largest logit (the first, if several) is the label's

A sum and not a mean: what it is divided by is known to the whole global batch only. ``logits`` (P, V),
``labels`` (P,); the loss is fp32. Kept for backward by the reference: the log-probabilities.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # label of a row without a target (PyTorch's own convention)


def cross_entropy_reference(logits: Tensor, labels: Tensor, valid_columns: int) -> tuple[Tensor, Tensor]:
    """The loss's sum and the count of right answers; the gradient is 0 beyond ``valid_columns``."""
    valid = logits[:, :valid_columns].to(torch.promote_types(logits.dtype, torch.float32))  # (P, V)
    loss = F.cross_entropy(valid, labels, ignore_index=IGNORED, reduction="sum")
    return loss, (valid.detach().argmax(-1) == labels).sum()


def cross_entropy(logits: Tensor, labels: Tensor, valid_columns: int | None = None) -> tuple[Tensor, Tensor]:
    """(loss summed over rows, fp32 scalar; right answers, int64 scalar) of ``logits`` (P, V).

    ``labels`` (P,) int64 lie in [0, valid_columns) or are IGNORED. Columns from ``valid_columns`` on (the
    vocabulary's padding) take no part. No row, or none with a label, gives 0 with a gradient of 0. Raises
    ValueError if shapes or dtypes do not fit, IndexError (on CPUs) for a label out of range.
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        seen = f"logits {tuple(logits.shape)}, labels {labels.dtype} {tuple(labels.shape)}"
        raise ValueError(f"cross_entropy got {seen}; they must be (P, V) and int64 (P,)")
    columns = logits.shape[1]
    valid = columns if valid_columns is None else valid_columns
    if not 0 < valid <= columns:
        raise ValueError(f"valid_columns is {valid}; it must be from 1 to the {columns} columns of logits")
    return cross_entropy_reference(logits, labels, valid)
