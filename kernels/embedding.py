"""BERT's input: the sum of three table rows a token, LayerNorm, dropout.

    sum[t] = token_table[tokens[t]] + segment_table[segments[t]] + position_table[positions[t]]
    out = dropout(LayerNorm(sum))
(Devlin et al., "BERT", 2019, figure 2.)

Kept for backward by the reference: the three index rows, the sum, its mean and 1 / standard deviation a
row, and the dropout multiplier. The sum and the statistics are fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import dropout
from kernels.layer_norm import layer_norm_reference


def embed_reference(
    indices: tuple[Tensor, Tensor, Tensor],  # (T,) int64 each: tokens, segments, positions
    tables: tuple[Tensor, Tensor, Tensor],  # (rows, D) each, in the same order
    weight: Tensor,  # (D,)
    bias: Tensor,  # (D,)
    eps: float,
) -> Tensor:  # (T, D)
    """Everything but the dropout, in the dtype of the tables."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    token, segment, position = (F.embedding(i, t).to(wide) for i, t in zip(indices, tables, strict=True))
    return layer_norm_reference(token + segment + position, weight, bias, eps)


def embed(
    tokens: Tensor,
    segments: Tensor,
    positions: Tensor,
    token_table: Tensor,
    segment_table: Tensor,
    position_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    dropout_p: float = 0.0,
    keys: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """The encoder's input (T, D), in the dtype of the tables.

    ``tokens``, ``segments``, ``positions`` are (T,) int64, the tables (rows, D), ``weight`` and ``bias`` of
    the LayerNorm (D,); ``keys`` (T, 2) int32 are the tokens' dropout keys, None for evaluation; ``site``
    names this dropout. Raises ValueError if shapes or dtypes do not fit, IndexError (on CPUs) if an
    index has no row.
    """
    indices, tables = (tokens, segments, positions), (token_table, segment_table, position_table)
    if tokens.dim() != 1 or any(i.shape != tokens.shape or i.dtype != torch.int64 for i in indices):
        seen = ", ".join(f"{i.dtype} {tuple(i.shape)}" for i in indices)
        raise ValueError(f"tokens, segments, positions are {seen}; they must be int64 (T,) each")
    rows = (*tables, weight[None], bias[None])
    if any(t.dim() != 2 or t.shape[1] != weight.numel() or t.dtype != weight.dtype for t in rows):
        seen = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in rows)
        raise ValueError(f"tables, weight and bias are {seen}; they must be of one width and dtype")
    return dropout.apply(embed_reference(indices, tables, weight, bias, eps), keys, site, dropout_p)
