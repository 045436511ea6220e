"""Computes gelu(x + bias), in the exact form or the tanh approximation.

    "none":  gelu(u) = u / 2 * (1 + erf(u / sqrt(2)))
    "tanh":  gelu(u) = u / 2 * (1 + tanh(sqrt(2 / pi) * (u + 0.044715 u^3)))
(Hendrycks and Gimpel, "Gaussian error linear units", 2016, section 2.) The two differ by up to 4.7e-4,
so a model names the one it was trained with, and so does its export.

``x`` is (T, F) and ``bias`` (F,). All arithmetic is fp32. The kernels keep x and bias for backward; the reference keeps
x + bias. For the gradient of the bias, each program writes fp32 partial sums over a stripe of rows, and a second kernel
adds them in a fixed order. So every result errs by the rounding of its own dtype, and at most twice as much as
PyTorch's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import fused, tl, triton
from kernels.first_derivative import first_derivative_only
from kernels.partials import add_partials

APPROXIMATIONS = ("none", "tanh")

_STRIPE = 64  # rows per backward program


def bias_gelu_reference(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """Return gelu(x + bias), (T, F), in the dtype of ``x``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.gelu(x.to(wide) + bias.to(wide), approximate=approximate).to(x.dtype)


@triton.jit
def _share_and_slope(
    u,  # fp32
    TANH: tl.constexpr,
    HALF: tl.constexpr,  # whether the results will be rounded to fp16 or bf16
):
    """Return gelu(u) / u, which rises from 0 to 1, and its derivative."""
    if TANH:  # (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)); the first factor is -2 * sqrt(2 / pi) * log2(e)
        fall = tl.exp2(-2.302208198 * tl.abs(u) * (1.0 + 0.044715 * u * u))  # never above 1
        above = 1.0 / (1.0 + fall)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * u * u) * fall * above * above
        return tl.where(u < 0.0, fall * above, above), slope
    density = 0.3989422804014327 * tl.exp2(-0.7213475204444817 * u * u)  # exp(-u^2 / 2) / sqrt(2 pi)
    if HALF:
        # Compute the tail of the normal distribution as density * Mills' ratio: erf takes so many instructions that
        # the kernel would no longer be bound by memory. The ratio is a minimax polynomial in t, with a relative error
        # of 8.3e-6 up to |u| = 14, 1/60 of fp16's rounding. Beyond that, even u times the tail rounds to 0.
        t = 1.0 / (1.0 + 0.3 * tl.abs(u))
        ratio = -0.19325338 * t + 0.54152020
        ratio = ratio * t - 0.04247670
        ratio = ratio * t + 0.36144323
        ratio = ratio * t + 0.28510969
        tail = density * t * (ratio * t + 0.30098137)
        return tl.where(u < 0.0, tail, 1.0 - tail), density
    return 0.5 + 0.5 * tl.erf(u * 0.7071067811865476), density


@triton.jit
def _bias_gelu_forward_kernel(
    x,  # (T, F)
    bias,  # (F,)
    out,  # (T, F)
    tokens,  # T
    WIDTH: tl.constexpr,  # F
    BLOCK: tl.constexpr,  # columns per program
    ROWS: tl.constexpr,  # rows per program
    TANH: tl.constexpr,
):
    TILES: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    columns = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)[None, :]
    rows = tl.program_id(0) // TILES * ROWS + tl.arange(0, ROWS)[:, None]
    inside = columns < WIDTH
    mask = (rows < tokens) & inside
    at = rows.to(tl.int64) * WIDTH + columns
    u = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)  # (ROWS, BLOCK)
    u += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    share, _ = _share_and_slope(u, TANH, out.dtype.element_ty != tl.float32)
    tl.store(out + at, (u * share).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _bias_gelu_backward_kernel(
    d_out,  # (T, F)
    x,  # (T, F)
    bias,  # (F,)
    d_x,  # (T, F)
    partials,  # (1, ceil(T / STRIPE), F) fp32: partial gradients of the bias; None if not needed
    tokens,  # T
    WIDTH: tl.constexpr,  # F
    BLOCK: tl.constexpr,  # columns per program
    ROWS: tl.constexpr,  # rows at a time
    STRIPE: tl.constexpr,  # rows per program
    TANH: tl.constexpr,
):
    TILES: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    columns = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)[None, :]
    stripe = tl.program_id(0) // TILES
    inside = columns < WIDTH
    b = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    d_bias = tl.zeros((1, BLOCK), tl.float32)
    for begin in range(0, STRIPE, ROWS):
        rows = stripe * STRIPE + begin + tl.arange(0, ROWS)[:, None]
        mask = (rows < tokens) & inside
        at = rows.to(tl.int64) * WIDTH + columns
        u = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) + b  # (ROWS, BLOCK)
        do = tl.load(d_out + at, mask=mask, other=0.0).to(tl.float32)
        share, slope = _share_and_slope(u, TANH, x.dtype.element_ty != tl.float32)
        du = do * (share + u * slope)
        tl.store(d_x + at, du.to(d_x.dtype.element_ty), mask=mask)
        d_bias += tl.sum(du, 0)[None, :]
    if partials is not None:
        tl.store(partials + stripe.to(tl.int64) * WIDTH + columns, d_bias, mask=inside)


def _forward(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    tokens, width = x.shape
    out = torch.empty_like(x)
    if out.numel():
        block, rows = _tile(width, 1)
        _bias_gelu_forward_kernel[(triton.cdiv(width, block) * triton.cdiv(tokens, rows),)](
            x, bias, out, tokens, WIDTH=width, BLOCK=block, ROWS=rows, TANH=approximate == "tanh", num_warps=4
        )
    return out


def _backward(
    d_out: Tensor, x: Tensor, bias: Tensor, approximate: str, needed: tuple[bool, ...]
) -> tuple[Tensor, Tensor | None]:
    """The gradient of x, and the gradient of the bias if it is ``needed``."""
    tokens, width = x.shape
    d_x = torch.empty_like(x)
    if not x.numel():
        return d_x, torch.zeros_like(bias)
    block, rows = _tile(width, 2)
    stripes = triton.cdiv(tokens, _STRIPE)
    partials = x.new_empty(1, stripes, width, dtype=torch.float32) if needed[1] else None
    _bias_gelu_backward_kernel[(triton.cdiv(width, block) * stripes,)](
        d_out, x, bias, d_x, partials, tokens,
        WIDTH=width, BLOCK=block, ROWS=rows, STRIPE=_STRIPE, TANH=approximate == "tanh", num_warps=4,
    )  # fmt: skip
    return d_x, None if partials is None else add_partials(partials, x.dtype)[0]


def _tile(width: int, rows: int) -> tuple[int, int]:
    """(columns, rows) per program. With 1,024 columns, each thread of 4 warps takes 8: 16 bytes in fp16."""
    block = min(1024, max(16, triton.next_power_of_2(width)))
    return block, min(32, rows * 1024 // block)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, approximate: str) -> Tensor:
        x, bias = x.contiguous(), bias.contiguous()
        ctx.save_for_backward(x, bias)
        ctx.approximate = approximate
        return _forward(x, bias, approximate)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        return *_backward(d_out.contiguous(), x, bias, ctx.approximate, ctx.needs_input_grad), None


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """Return gelu(x + bias) for ``x`` (T, F) and ``bias`` (F,). Raises ValueError if an argument does not fit."""
    if x.dim() != 2 or bias.shape != x.shape[1:] or bias.dtype != x.dtype:
        seen = f"x {x.dtype} {tuple(x.shape)}, bias {bias.dtype} {tuple(bias.shape)}"
        raise ValueError(f"bias_gelu got {seen}; they must be (T, F) and (F,), of one dtype")
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"bias_gelu got approximate {approximate!r}; it must be one of {APPROXIMATIONS}")
    if fused(x):
        out: Tensor = _BiasGelu.apply(x, bias, approximate)
        return out
    return bias_gelu_reference(x, bias, approximate)
