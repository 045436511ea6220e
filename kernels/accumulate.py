"""Adds half-precision gradients up in fp32, reading and writing everything once.

    total ← total + gradient      or, for the first one, total ← gradient

10 bytes an element, 6 for the first. PyTorch's own ``total.add_(gradient.float())`` writes the gradient as fp32 first
and reads it again, with a cast that does not load wide: 4.5 times as long on an H200 (docs/lab.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import fused, tl, triton

BLOCK = 4096  # elements of a program


def accumulate_reference(total: Tensor | None, gradient: Tensor) -> Tensor:
    """See above; ``total`` changes in place."""
    return gradient.float() if total is None else total.add_(gradient.view_as(total))


@triton.jit
def _accumulate_kernel(
    total,  # (size,) fp32
    gradient,  # (size,) fp16 or bf16
    size,
    FIRST: tl.constexpr,  # whether ``total`` holds nothing yet
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    value = tl.load(gradient + at, mask=mask).to(tl.float32)
    if not FIRST:
        value += tl.load(total + at, mask=mask)
    tl.store(total + at, value, mask=mask)


def accumulate(total: Tensor | None, gradient: Tensor) -> Tensor:
    """``total`` (any shape, fp32, contiguous, None before the first), with ``gradient`` of as many elements added."""
    if not fused(gradient) or gradient.dtype == torch.float32 or gradient.numel() == 0:
        return accumulate_reference(total, gradient)
    first, gradient = total is None, gradient.contiguous()
    if total is None:
        total = torch.empty_like(gradient, dtype=torch.float32)
    if not total.is_contiguous() or total.dtype != torch.float32 or total.numel() != gradient.numel():
        raise ValueError(f"total is {total.dtype} {tuple(total.shape)}; it must be contiguous fp32, as the gradient is")
    grid = (triton.cdiv(gradient.numel(), BLOCK),)
    _accumulate_kernel[grid](total, gradient, gradient.numel(), FIRST=first, BLOCK=BLOCK, num_warps=8)
    return total
