"""LayerNorm, alone or fused with what precedes it in an encoder: a projection's bias, dropout, the residual.

    z = residual + dropout(x + x_bias)
    out = (z - mean(z)) / sqrt(var(z) + eps) * weight + bias       over the last dimension
(Ba, Kiros and Hinton, "Layer normalization", 2016, equations 3 and 4; var is the biased one.)

All tensors are (T, D), except ``weight``, ``bias`` and ``x_bias``, which are (D,). The sum z and the statistics are
fp32. The result is returned twice, once for the next projection and once as the next residual, so that backward can
add their two gradients as it reads them.

For backward, the kernels keep x, residual, and each row's mean and 1 / standard deviation in fp32. They compute z and
the dropout mask again. That moves as many bytes as keeping z (3 tensors forward, 5 backward, and one more for a second
gradient), and z is never rounded. For the gradients of weight, bias and x_bias, each program writes fp32 partial sums,
and a second kernel adds them in a fixed order. So every result errs by the rounding of its own dtype, and at most twice
as much as PyTorch's. The projection's bias is added here and not by the matrix product, because backward has the terms
of its gradient at hand. The reference keeps z, its mean and 1 / standard deviation per row, and the dropout multiplier.

A pre-LN encoder, whose residual is not normalized, takes z as the second result. Then z is rounded to its dtype, like
any result, before it is normalized, and the kernels keep it instead of x and residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import dropout
from kernels.backend import fused, tl, triton
from kernels.first_derivative import first_derivative_only
from kernels.partials import add_partials

Mask = tuple[int, int, float]  # site, cut and gain of a dropout, as kernel arguments


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm of ``x`` (T, D), in the dtype of ``weight``. ``x`` may have a wider dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    out = F.layer_norm(x.to(wide), weight.shape, weight.to(wide), bias.to(wide), eps)
    return out.to(weight.dtype)


def dropout_add_layer_norm_reference(
    x: Tensor,  # (T, D)
    x_bias: Tensor | None,  # (D,)
    residual: Tensor | None,  # (T, D)
    weight: Tensor,  # (D,)
    bias: Tensor,  # (D,)
    eps: float,
    dropout_p: float,
    keys: Tensor | None,  # (T, 2) int32
    site: int,
    return_sum: bool,
) -> tuple[Tensor, Tensor]:  # (T, D) each; the same tensor unless ``return_sum``
    """Return LayerNorm(z) twice, or with z, for z = residual + dropout(x + x_bias) in fp32."""
    z = x.to(torch.promote_types(x.dtype, torch.float32))
    z = dropout.apply(z if x_bias is None else z + x_bias, keys, site, dropout_p)
    z = z if residual is None else residual + z
    z = z.to(x.dtype) if return_sum else z
    out = layer_norm_reference(z, weight, bias, eps)
    return out, z if return_sum else out


@triton.jit
def normalised(
    z,  # (M, BLOCK) fp32
    inside,  # (1, BLOCK): the first WIDTH columns
    eps,
    WIDTH: tl.constexpr,
):
    """Return (normalized z, 0 from column WIDTH on; the mean of z; 1 / the standard deviation of z).

    From the same z, all kernels get the same bits, so that checkpointing can compute LayerNorm again with another one.
    """
    mean = tl.sum(z, 1) / WIDTH
    centred = tl.where(inside, z - mean[:, None], 0.0)
    # Round each square: the compiler may fuse only one of two squares with their sum, and not always the same one.
    squares = tl.fma(centred, centred, 0.0)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(squares, 1) / WIDTH + eps))  # correctly rounded, unlike rsqrt
    return centred * rstd[:, None], mean, rstd


@triton.jit
def gradient_of_z(
    d_out,  # (M, BLOCK) fp32, 0 from column WIDTH on
    unit,  # (M, BLOCK) fp32: normalized z, 0 from column WIDTH on
    w,  # (1, BLOCK) fp32: weight
    rstd,  # (M,) fp32
    WIDTH: tl.constexpr,
):
    """The gradient of LayerNorm's input z, (M, BLOCK) fp32."""
    d_unit = d_out * w
    along = tl.sum(d_unit * unit, 1) / WIDTH
    mean = tl.sum(d_unit, 1) / WIDTH
    return (d_unit - unit * along[:, None] - mean[:, None]) * rstd[:, None]


@triton.jit
def _plus(total, tensor, at, mask):
    """``total`` (M, BLOCK) fp32, plus ``tensor`` (T, D) at these offsets unless it is None."""
    if tensor is not None:
        total += tl.load(tensor + at, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _layer_norm_summed(
    x,  # (T, D)
    x_bias,  # (D,) or None
    residual,  # (T, D) or None
    keys,  # (T, 2) int32; None for no dropout
    rows,  # (M,)
    there,  # (M,): whether a row is below T
    at,  # (M, BLOCK): offsets into a (T, D) tensor
    mask,  # (M, BLOCK): whether an offset is inside it
    site,
    cut,
    gain,
    SUMMED: tl.constexpr,  # whether x is the sum already
    WIDTH: tl.constexpr,  # D
    BLOCK: tl.constexpr,
):
    """Return residual + dropout(x + x_bias), (M, BLOCK) fp32, and the mask of what dropout keeps."""
    z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    stays = mask  # not read without keys
    if x_bias is not None and not SUMMED:
        columns = tl.arange(0, BLOCK)[None, :]
        z += tl.load(x_bias + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    if keys is not None:
        first, second = dropout.row_keys(keys, rows, there, site)
        stays = dropout.kept(first, second, 0, cut, BLOCK)
        if not SUMMED:
            z = tl.where(stays, z * gain, 0.0)
    return _plus(z, residual, at, mask), stays


@triton.jit
def _layer_norm_forward_kernel(
    x,  # (T, D)
    x_bias,  # (D,) or None
    residual,  # (T, D) or None
    weight,  # (D,)
    bias,  # (D,)
    keys,  # (T, 2) int32; None for no dropout
    out,  # (T, D)
    sums,  # (T, D): z; None if not needed
    statistics,  # (2, T) fp32: means, and 1 / standard deviations
    tokens,  # T
    eps,
    site,  # identifies this dropout
    cut,  # the dropout threshold: see dropout.kept
    gain,  # 1 / (1 - p)
    WIDTH: tl.constexpr,  # D
    BLOCK: tl.constexpr,  # D, rounded up to a power of two
    ROWS: tl.constexpr,  # rows per program
):
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < WIDTH
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < tokens
    at = rows.to(tl.int64)[:, None] * WIDTH + columns
    mask = there[:, None] & inside
    z, _ = _layer_norm_summed(x, x_bias, residual, keys, rows, there, at, mask, site, cut, gain, False, WIDTH, BLOCK)
    if sums is not None:
        rounded = z.to(sums.dtype.element_ty)
        tl.store(sums + at, rounded, mask=mask)
        z = rounded.to(tl.float32)
    unit, mean, rstd = normalised(z, inside, eps, WIDTH)
    tl.store(out + at, (unit * w + b).to(out.dtype.element_ty), mask=mask)
    tl.store(statistics + rows, mean, mask=there)
    tl.store(statistics + tokens + rows, rstd, mask=there)


@triton.jit
def _layer_norm_backward_kernel(
    d_out,  # (T, D)
    d_again,  # (T, D): a second gradient of the result; None if there is only one
    d_sum,  # (T, D): a gradient of z; None if there is none
    x,  # (T, D); z if SUMMED
    x_bias,  # (D,) or None
    residual,  # (T, D) or None; None if SUMMED
    weight,  # (D,)
    keys,  # (T, 2) int32; None for no dropout
    statistics,  # (2, T) fp32: means, and 1 / standard deviations
    d_x,  # (T, D); None if not needed
    d_residual,  # (T, D); None if not needed, or if it equals d_x
    partials,  # (2 or 3, programs, D) fp32: partial gradients of weight, bias and x_bias; None if not needed
    tokens,  # T
    site,
    cut,
    gain,
    SUMMED: tl.constexpr,  # whether forward stored z
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # rows at a time
):
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < WIDTH
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros((1, BLOCK), tl.float32)
    d_bias = tl.zeros((1, BLOCK), tl.float32)
    d_x_bias = tl.zeros((1, BLOCK), tl.float32)
    for begin in range(tl.program_id(0) * ROWS, tokens, tl.num_programs(0) * ROWS):
        rows = begin + tl.arange(0, ROWS)
        there = rows < tokens
        at = rows.to(tl.int64)[:, None] * WIDTH + columns
        mask = there[:, None] & inside
        z, stays = _layer_norm_summed(
            x, x_bias, residual, keys, rows, there, at, mask, site, cut, gain, SUMMED, WIDTH, BLOCK
        )
        do = tl.load(d_out + at, mask=mask, other=0.0).to(tl.float32)  # (ROWS, BLOCK)
        do = _plus(do, d_again, at, mask)
        mean = tl.load(statistics + rows, mask=there, other=0.0)
        rstd = tl.load(statistics + tokens + rows, mask=there, other=0.0)
        unit = tl.where(inside, (z - mean[:, None]) * rstd[:, None], 0.0)
        dz = _plus(gradient_of_z(do, unit, w, rstd, WIDTH), d_sum, at, mask)
        if d_residual is not None:
            tl.store(d_residual + at, dz.to(d_residual.dtype.element_ty), mask=mask)
        if keys is not None:
            dz = tl.where(stays, dz * gain, 0.0)
        if d_x is not None:
            tl.store(d_x + at, dz.to(d_x.dtype.element_ty), mask=mask)
        if partials is not None:
            d_weight += tl.sum(do * unit, 0)[None, :]
            d_bias += tl.sum(do, 0)[None, :]
            if x_bias is not None:
                d_x_bias += tl.sum(dz, 0)[None, :]
    if partials is not None:
        at = partials + tl.program_id(0) * WIDTH + columns
        tl.store(at, d_weight, mask=inside)
        tl.store(at + tl.num_programs(0) * WIDTH, d_bias, mask=inside)
        if x_bias is not None:
            tl.store(at + 2 * tl.num_programs(0) * WIDTH, d_x_bias, mask=inside)


class Launch(NamedTuple):
    """The launch configuration of a kernel over rows, a pure function of the width."""

    block: int  # columns, a power of two
    rows: int  # rows at a time
    warps: int

    @classmethod
    def of(cls, width: int) -> Launch:
        """All warps share a row, with 8 columns (16 bytes in fp16) per thread, so column sums stay in one thread."""
        block = max(16, triton.next_power_of_2(width))
        return cls(block, 2 if block <= 1024 else 1, max(1, min(32, block // 256)))

    def programs(self, tokens: int, device: torch.device) -> int:
        """Programs of a backward pass: as many as run at once, because each writes partial sums for its rows."""
        cuda = device.type == "cuda"
        processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1
        return min(-(-tokens // self.rows), processors * max(1, 16 // self.warps))


Parts = tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]  # x, x_bias, residual, weight, bias


def _forward(
    parts: Parts, eps: float, keys: Tensor | None, mask: Mask, return_sum: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return (out (T, D), z (T, D) or None, statistics (2, T) fp32)."""
    tokens, width = parts[0].shape
    out, statistics = torch.empty_like(parts[0]), parts[0].new_empty(2, tokens, dtype=torch.float32)
    sums = torch.empty_like(out) if return_sum else None
    if out.numel():
        launch = Launch.of(width)
        _layer_norm_forward_kernel[(triton.cdiv(tokens, launch.rows),)](
            *parts, keys, out, sums, statistics, tokens, eps, *mask,
            WIDTH=width, BLOCK=launch.block, ROWS=launch.rows, num_warps=launch.warps,
        )  # fmt: skip
    return out, sums, statistics


def _backward(
    d_outs: Sequence[Tensor | None], saved: tuple[Any, ...], mask: Mask, summed: bool, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients of the ``Parts``, in order. ``needed`` says which are needed; the others may be None.

    ``d_outs``: the kernel's d_out, d_again and d_sum. ``summed``: whether x, among the ``saved``, is z.
    """
    x, x_bias, residual, weight, keys, statistics = saved
    tokens, width = x.shape
    if not x.numel():
        parts = x, x_bias, x, weight, weight
        return tuple(torch.zeros_like(t) if wanted else None for t, wanted in zip(parts, needed, strict=False))
    launch = Launch.of(width)
    programs = launch.programs(tokens, x.device)
    d_x = torch.empty_like(x) if needed[0] else None
    one = keys is None and d_x is not None  # without dropout, x and residual have the same gradient
    d_residual = torch.empty_like(x) if needed[2] and not one else None  # never needed if residual is None
    groups = 2 if x_bias is None else 3
    reduced = needed[1] or needed[3] or needed[4]
    partials = x.new_empty(groups, programs, width, dtype=torch.float32) if reduced else None
    _layer_norm_backward_kernel[(programs,)](
        *d_outs, x, x_bias, residual, weight, keys, statistics, d_x, d_residual, partials, tokens, *mask,
        SUMMED=summed, WIDTH=width, BLOCK=launch.block, ROWS=launch.rows, num_warps=launch.warps,
    )  # fmt: skip
    sums = () if partials is None else add_partials(partials, x.dtype).unbind()
    d_weight, d_bias, d_x_bias = (*sums, None, None, None)[:3]
    return d_x, d_x_bias, d_x if one and needed[2] else d_residual, d_weight, d_bias


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Run the kernel. ``arguments`` are those of the reference, in the same order."""
        *given, eps, dropout_p, keys, site, return_sum = arguments
        parts: Any = tuple(None if t is None else t.contiguous() for t in given)
        keys = None if keys is None or dropout_p == 0 else keys.contiguous()
        ctx.mask = site, *dropout.kernel_constants(keys, dropout_p)
        out, sums, statistics = _forward(parts, eps, keys, ctx.mask, return_sum)
        x, x_bias, residual, weight, _ = parts
        kept = (x, residual) if sums is None else (sums, None)
        ctx.save_for_backward(kept[0], x_bias, kept[1], weight, keys, statistics)
        ctx.set_materialize_grads(False)
        ctx.summed = return_sum
        return out, out.view_as(out) if sums is None else sums  # a view, so that autograd rejects in-place changes

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *d_outs: Tensor | None) -> tuple[Tensor | None, ...]:
        there = [d.contiguous() for d in d_outs if d is not None]  # an unused result has no gradient
        if not there:
            return (None,) * 10
        if not ctx.summed:
            towards = (*there, None, None)[:3]
        elif d_outs[0] is None:
            towards = torch.zeros_like(there[0]), None, there[0]
        else:
            towards = there[0], None, (*there, None)[1]
        grads = _backward(towards, ctx.saved_tensors, ctx.mask, ctx.summed, ctx.needs_input_grad)
        return *grads, None, None, None, None, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm of ``x`` (T, D), in the dtype of ``x``. Raises ValueError if shapes or dtypes do not fit."""
    return dropout_add_layer_norm(x, None, weight, bias, eps)[0]


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    x_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    keys: Tensor | None = None,
    site: int = 0,
    return_sum: bool = False,
) -> tuple[Tensor, Tensor]:
    """LayerNorm(residual + dropout(x + x_bias)), (T, D), in the dtype of ``x``, as two results that share memory.

    With ``return_sum``, the second result is the sum itself, rounded to the dtype of ``x``. ``residual`` and ``x_bias``
    count as zeros if they are None. ``keys`` (T, 2) int32 are the tokens' dropout keys, None for evaluation; ``site``
    identifies this dropout. Raises ValueError if shapes or dtypes do not fit.
    """
    _check(x, x_bias, residual, weight, bias, keys)
    arguments = x, x_bias, residual, weight, bias, eps, dropout_p, keys, site, return_sum
    if fused(x):
        outs: tuple[Tensor, Tensor] = _LayerNorm.apply(*arguments)
        return outs
    return dropout_add_layer_norm_reference(*arguments)


def _check(
    x: Tensor, x_bias: Tensor | None, residual: Tensor | None, weight: Tensor, bias: Tensor, keys: Tensor | None
) -> None:
    rows = {"weight": weight, "bias": bias} | ({} if x_bias is None else {"x_bias": x_bias})
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in ({"x": x} | rows).items())
    if x.dim() != 2 or any(t.shape != x.shape[1:] for t in rows.values()):
        raise ValueError(f"layer_norm got {shapes}; x must be (T, D), the others (D,)")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"layer_norm got {shapes}, residual {tuple(residual.shape)}; residual must have x's shape")
    dtypes = {t.dtype for t in (x, residual, *rows.values()) if t is not None}
    if len(dtypes) > 1:
        raise ValueError(f"layer_norm got dtypes {sorted(map(str, dtypes))}; they must be the same")
    dropout.check_keys(keys, x.shape[0])
