"""LAMB over flat fp32 buffers (You et al. 2020, "Large Batch Optimization", Algorithm 2, φ = identity).

    u = Adam's direction + λ x              (kernels/adam.py)
    x ← x - η · (‖x‖ / ‖u‖) · u             one ratio a tensor; 1 where either norm is zero

A flat buffer may hold only a part of a tensor (ZeRO cuts through them), so the norms are made of
partial sums of squares that the caller completes over ranks: :func:`square_sums` → all-reduce →
:func:`trust_ratios` → :func:`lamb_step`. Plain PyTorch: it is the reference and the CPU path.
"""

from __future__ import annotations

import torch
from torch import Tensor


def square_sums(weight: Tensor, direction: Tensor) -> Tensor:
    """(2,) fp32: the sums of squares of a part of a weight and of its direction."""
    return torch.stack([weight.dot(weight), direction.dot(direction)])


def trust_ratios(sums: Tensor) -> Tensor:
    """(K,) fp32 ratios ‖x‖ / ‖u‖ from completed sums of squares (K, 2); 1 where either is zero."""
    weight, direction = sums.sqrt().unbind(1)  # (K,), (K,)
    usable = (weight > 0) & (direction > 0)
    return torch.where(usable, weight / direction, torch.ones_like(weight))


def lamb_step(weight: Tensor, direction: Tensor, ratio: Tensor, rate: float) -> None:
    """Move a part of one tensor in place: ``x ← x - η · ratio · u``. fp32; ``ratio`` is a scalar."""
    weight.sub_(direction * ratio, alpha=rate)
