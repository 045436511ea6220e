"""Bias and GELU: gelu(x + bias), in its exact form or in the tanh approximation.

    "none":  gelu(u) = u / 2 * (1 + erf(u / sqrt(2)))
    "tanh":  gelu(u) = u / 2 * (1 + tanh(sqrt(2 / pi) * (u + 0.044715 u^3)))
(Hendrycks and Gimpel, "Gaussian error linear units", 2016, section 2.) The two differ by up to 4.7e-4,
so a model names the one it was trained with, and its export does too.

``x`` (T, F), ``bias`` (F,). Kept for backward by the reference: x + bias. Computed in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

APPROXIMATIONS = ("none", "tanh")


def bias_gelu_reference(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """(T, F) -> (T, F) in the dtype of ``x``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.gelu(x.to(wide) + bias.to(wide), approximate=approximate).to(x.dtype)


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """gelu(x + bias) of ``x`` (T, F) and ``bias`` (F,). Raises ValueError if an argument does not fit."""
    if x.dim() != 2 or bias.shape != x.shape[1:] or bias.dtype != x.dtype:
        seen = f"x {x.dtype} {tuple(x.shape)}, bias {bias.dtype} {tuple(bias.shape)}"
        raise ValueError(f"bias_gelu got {seen}; they must be (T, F) and (F,) of one dtype")
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"bias_gelu got approximate {approximate!r}; it must be one of {APPROXIMATIONS}")
    return bias_gelu_reference(x, bias, approximate)
