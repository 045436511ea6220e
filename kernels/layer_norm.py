"""LayerNorm, alone and with what stands before it in a post-LN encoder: dropout and the residual.

    z = residual + dropout(x)
    out = (z - mean(z)) / sqrt(var(z) + eps) * weight + bias       over the last dimension
(Ba, Kiros and Hinton, "Layer normalization", 2016, equations 3 and 4; var is the biased one.)

All tensors are (T, D), ``weight`` and ``bias`` (D,). Kept for backward by the reference: z, its mean and
1 / standard deviation a row, and the dropout multiplier. The sum and the statistics are fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import dropout


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(T, D) -> (T, D) in the dtype of ``weight``; ``x`` may be wider than that."""
    wide = torch.promote_types(x.dtype, torch.float32)
    out = F.layer_norm(x.to(wide), weight.shape, weight.to(wide), bias.to(wide), eps)
    return out.to(weight.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm of ``x`` (T, D), in its dtype. Raises ValueError if shapes or dtypes do not fit."""
    _check(x, None, weight, bias)
    return layer_norm_reference(x, weight, bias, eps)


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    dropout_p: float = 0.0,
    keys: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """LayerNorm(residual + dropout(x)), (T, D), in the dtype of ``x``.

    ``residual`` None counts as zeros; ``keys`` (T, 2) int32 are the tokens' dropout keys, None for
    evaluation; ``site`` names this dropout. Raises ValueError if shapes or dtypes do not fit.
    """
    _check(x, residual, weight, bias)
    z = dropout.apply(x.to(torch.promote_types(x.dtype, torch.float32)), keys, site, dropout_p)
    return layer_norm_reference(z if residual is None else residual + z, weight, bias, eps)


def _check(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor) -> None:
    shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, bias {tuple(bias.shape)}"
    if x.dim() != 2 or weight.shape != x.shape[1:] or bias.shape != x.shape[1:]:
        raise ValueError(f"layer_norm got {shapes}; they must be (T, D), (D,), (D,)")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"layer_norm got {shapes}, residual {tuple(residual.shape)}; it must be as x")
    dtypes = {t.dtype for t in (x, residual, weight, bias) if t is not None}
    if len(dtypes) > 1:
        raise ValueError(f"layer_norm got dtypes {sorted(map(str, dtypes))}; they must be one")
