"""Adds up the partial weight gradients of a backward pass: each program writes fp32 sums over some of the tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import tl, triton


@triton.jit
def _add_partials_kernel(
    partials,  # (G, N, D) fp32: N partial sums, one per program, of G gradients
    sums,  # (G, D)
    count,  # N
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(0, count, ROWS):
        rows = begin + tl.arange(0, ROWS)
        at = (group * count + rows).to(tl.int64)[:, None] * WIDTH + columns[None, :]
        total += tl.load(partials + at, mask=(rows < count)[:, None] & inside[None, :], other=0.0)
    tl.store(sums + group * WIDTH + columns, tl.sum(total, 0).to(sums.dtype.element_ty), mask=inside)


def add_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum (G, N, D) fp32 over N to (G, D) in ``dtype``. The order of the sums depends only on the shape."""
    groups, count, width = partials.shape
    sums = partials.new_empty(groups, width, dtype=dtype)
    _add_partials_kernel[(triton.cdiv(width, 32), groups)](
        partials, sums, count, WIDTH=width, ROWS=64, BLOCK=32, num_warps=8
    )
    return sums
