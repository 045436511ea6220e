"""The share of the hidden states' variance that lies over tokens: near 0 if all tokens have the same vector.

A model that gives every token the same vector can only predict word frequencies. The share is computed from sums, so
it does not depend on how a batch is split into micro-batches and ranks, except for the few tokens of fillers.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def token_moments(x: Tensor) -> Tensor:
    """The sums over tokens of hidden states ``x`` (T, D): (D + 2,) fp32 or finer, to be added up over micro-batches.

    They are the sum of ``x`` in each of D columns, the sum of all squares, and T.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    norms = torch.linalg.vector_norm(x, dim=1, dtype=dtype)  # of each token first, which rounds less
    squares = norms.square().sum()
    return torch.cat([x.sum(0, dtype=dtype), squares[None], squares.new_full((1,), len(x))])


def variance_share(moments: Tensor) -> Tensor:
    """Variance over tokens divided by the mean square, in 0–1: (...) from summed ``moments`` (..., D + 2).

    With m the mean of x over tokens: sum((x - m)²) / sum(x²) = 1 - |sum(x)|² / (T sum(x²)). NaN for no tokens.
    """
    sums, squares, tokens = moments[..., :-2], moments[..., -2], moments[..., -1]
    return 1 - sums.square().sum(-1) / (tokens * squares)
