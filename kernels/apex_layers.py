"""Runs two layers with NVIDIA Apex's kernels, for kernels/bench.py: LayerNorm, and dense + GELU + dense.

    layer_norm         (csrc/layer_norm_cuda_kernel.cu) alone: no dropout, residual or bias before it is part of it
    dense_gelu_dense   (csrc/fused_dense_cuda.cu) gelu(x W1 + b1) W2 + b2, whose biases, GELU and their gradients are
                       done by cuBLASLt as it finishes the matrix products; its GELU is the tanh approximation

x is (T, D), and W1, W2 are (F, D) and (D, F), as in ``torch.nn.functional.linear``. Kept for backward: x, and per row
mean and 1 / deviation in fp32; x, gelu's input and its output. The model does not use them: on an H200 each is slower
than Lambert's kernels (docs/performance.md).

Apex's dense kernels do not report an error if cuBLASLt has no algorithm for a shape. It has for widths that are
multiples of 8, so other widths are refused here. fp32 is refused, too: there they err by more than twice as much as
PyTorch, which half precision hides.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.apex import extension
from kernels.first_derivative import first_derivative_only

WIDTHS = 8  # elements: 16 bytes in half precision
HALF = torch.float16, torch.bfloat16


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        x, ctx.eps = x.contiguous(), eps
        out, mean, inverse = extension("fused_layer_norm_cuda").forward_affine(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        return out  # type: ignore[no-any-return]

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, inverse = ctx.saved_tensors
        kept = mean, inverse, x, weight.shape, weight, bias, ctx.eps, False  # not its memory-efficient form
        return *extension("fused_layer_norm_cuda").backward_affine(d_out.contiguous(), *kept), None


class _DenseGeluDense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        x = x.contiguous()
        inner, out, entering = extension("fused_dense_cuda").linear_gelu_linear_forward(x, *parameters)
        ctx.save_for_backward(x, parameters[0], parameters[2], inner, entering)
        return out  # type: ignore[no-any-return]

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight1, weight2, inner, entering = ctx.saved_tensors
        apply = extension("fused_dense_cuda").linear_gelu_linear_backward
        return tuple(apply(x, entering, inner, weight1, weight2, d_out.contiguous()))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm of ``x`` (T, D), in the dtype of ``x``, with Apex's kernel, on a GPU.

    Raises UnavailableError if Apex is missing.
    """
    out: Tensor = _LayerNorm.apply(x, weight, bias, eps)
    return out


def dense_gelu_dense_reference(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    """Do what ``dense_gelu_dense`` does, in plain PyTorch."""
    return F.linear(F.gelu(F.linear(x, weight1, bias1), approximate="tanh"), weight2, bias2)


def dense_gelu_dense(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    """A two-layer MLP with the tanh approximation of GELU, (T, D), with Apex's kernels, on a GPU.

    ``weight1`` (F, D), ``bias1`` (F,), ``weight2`` (D, F), ``bias2`` (D,), all in the dtype of ``x`` (T, D), fp16 or
    bf16. Raises UnavailableError if Apex is missing, and ValueError for other shapes and dtypes.
    """
    inner, width = weight1.shape
    given = {"weight1": weight1, "bias1": bias1, "weight2": weight2, "bias2": bias2}
    fits = x.dim() == 2 and x.shape[1] == width and weight2.shape == (width, inner)
    if (
        not fits
        or bias1.shape != (inner,)
        or bias2.shape != (width,)
        or len({t.dtype for t in (x, *given.values())}) > 1
    ):
        seen = ", ".join(f"{name} {t.dtype} {tuple(t.shape)}" for name, t in ({"x": x} | given).items())
        raise ValueError(f"dense_gelu_dense got {seen}; x must be (T, D), the weights (F, D) and (D, F), of one dtype")
    if x.dtype not in HALF:
        raise ValueError(f"x is {x.dtype}; Apex's dense layers are exact enough in fp16 and bf16 only")
    if width % WIDTHS or inner % WIDTHS or not len(x):
        raise ValueError(f"x is {tuple(x.shape)}, with {inner} inside; Apex needs multiples of {WIDTHS}, and a row")
    out: Tensor = _DenseGeluDense.apply(x, weight1, bias1, weight2, bias2)
    return out
