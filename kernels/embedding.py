"""Computes BERT's input: the sum of three table rows per token, then LayerNorm, then dropout.

    sum[t] = token_table[tokens[t]] + segment_table[segments[t]] + position_table[positions[t]]
    out = dropout(LayerNorm(sum))      (Devlin et al., "BERT", 2019, figure 2)
A pre-LN encoder takes the sum alone, and applies dropout and then LayerNorm by ``kernels.layer_norm``.

For backward, the kernels keep the indices, and each row's mean and 1 / standard deviation in fp32. They compute the sum
and the dropout mask again. The reference keeps the indices, the sum, its mean and 1 / standard deviation per row, and
the dropout multiplier.

The gradient of the sum is rounded to the dtype of the tables, as PyTorch does. The gradients of the tables are one
reduction without atomics. All indices, numbered consecutively over the three tables, are sorted once with a stable
sort. Each program adds a chunk of the sorted order in fp32, one sum per run of equal indices. If a run spans several
chunks ([SEP] occurs thousands of times), a second kernel adds the parts. The order of every sum depends only on the
indices. So a result errs by the roundings of its dtype, and at most twice as much as PyTorch's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import dropout
from kernels.backend import fused, tl, triton
from kernels.first_derivative import first_derivative_only
from kernels.layer_norm import Launch, Mask, gradient_of_z, layer_norm_reference, normalised
from kernels.partials import add_partials

_Tensors = tuple[Tensor, ...]  # three unless stated otherwise: for tokens, segments and positions


def embed_reference(
    indices: _Tensors,  # (T,) int64 each: tokens, segments, positions
    tables: _Tensors,  # (rows, D) each, in the same order
    weight: Tensor,  # (D,)
    bias: Tensor,  # (D,)
    eps: float,
) -> Tensor:  # (T, D)
    """Compute everything except the dropout, in the dtype of the tables."""
    return layer_norm_reference(_sum_reference(indices, tables), weight, bias, eps)


def _sum_reference(indices: _Tensors, tables: _Tensors) -> Tensor:
    """The sum of the table rows (T, D), in fp32 or wider."""
    wide = torch.promote_types(tables[0].dtype, torch.float32)
    token, segment, position = (F.embedding(i, t).to(wide) for i, t in zip(indices, tables, strict=True))
    return token + segment + position


@triton.jit
def _table_rows(
    indices,  # (T,) int64
    table,  # (COUNT, D)
    count,  # rows of the table
    rows,  # (M,)
    there,  # (M,): whether a row is below T
    columns,  # (1, BLOCK)
    WIDTH: tl.constexpr,
):
    """Load (M, BLOCK) fp32. An index out of range gives NaN and reads nothing."""
    index = tl.load(indices + rows, mask=there, other=0)
    has = (index >= 0) & (index < count)
    mask = (there & has)[:, None] & (columns < WIDTH)
    values = tl.load(table + index[:, None] * WIDTH + columns, mask=mask, other=0.0)
    return tl.where(has[:, None], values.to(tl.float32), float("nan"))


@triton.jit
def _embedding_forward_kernel(
    tokens,  # (T,) int64
    segments,  # (T,) int64
    positions,  # (T,) int64
    token_table,  # (V, D)
    segment_table,  # (rows, D)
    position_table,  # (rows, D)
    weight,  # (D,); None for the sum alone
    bias,  # (D,)
    keys,  # (T, 2) int32; None for no dropout
    out,  # (T, D)
    statistics,  # (2, T) fp32: means, and 1 / standard deviations; not written for the sum alone
    count,  # T
    token_count,  # the number of rows of each table
    segment_count,
    position_count,
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
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < count
    z = _table_rows(tokens, token_table, token_count, rows, there, columns, WIDTH)  # (ROWS, BLOCK)
    z += _table_rows(segments, segment_table, segment_count, rows, there, columns, WIDTH)
    z += _table_rows(positions, position_table, position_count, rows, there, columns, WIDTH)
    z = tl.where(inside, z, 0.0)
    y = z
    if weight is not None:
        unit, mean, rstd = normalised(z, inside, eps, WIDTH)
        w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        y = unit * w + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if keys is not None:
        first, second = dropout.row_keys(keys, rows, there, site)
        y = tl.where(dropout.kept(first, second, 0, cut, BLOCK), y * gain, 0.0)
    at = rows.to(tl.int64)[:, None] * WIDTH + columns
    tl.store(out + at, y.to(out.dtype.element_ty), mask=there[:, None] & inside)
    if weight is not None:
        tl.store(statistics + rows, mean, mask=there)
        tl.store(statistics + count + rows, rstd, mask=there)


@triton.jit
def _embedding_backward_kernel(
    d_out,  # (T, D)
    tokens,  # (T,) int64
    segments,  # (T,) int64
    positions,  # (T,) int64
    token_table,  # (V, D)
    segment_table,  # (rows, D)
    position_table,  # (rows, D)
    weight,  # (D,)
    keys,  # (T, 2) int32; None for no dropout
    statistics,  # (2, T) fp32, written by forward
    d_sum,  # (T, D): the gradient of the sum of three rows
    partials,  # (2, programs, D) fp32: partial gradients of weight and bias
    count,  # T
    token_count,
    segment_count,
    position_count,
    site,
    cut,
    gain,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # rows at a time
):
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < WIDTH
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros((1, BLOCK), tl.float32)
    d_bias = tl.zeros((1, BLOCK), tl.float32)
    for begin in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        rows = begin + tl.arange(0, ROWS)
        there = rows < count
        at = rows.to(tl.int64)[:, None] * WIDTH + columns
        mask = there[:, None] & inside
        z = _table_rows(tokens, token_table, token_count, rows, there, columns, WIDTH)  # (ROWS, BLOCK)
        z += _table_rows(segments, segment_table, segment_count, rows, there, columns, WIDTH)
        z += _table_rows(positions, position_table, position_count, rows, there, columns, WIDTH)
        mean = tl.load(statistics + rows, mask=there, other=0.0)
        rstd = tl.load(statistics + count + rows, mask=there, other=0.0)
        unit = tl.where(inside, (z - mean[:, None]) * rstd[:, None], 0.0)
        do = tl.load(d_out + at, mask=mask, other=0.0).to(tl.float32)
        if keys is not None:
            first, second = dropout.row_keys(keys, rows, there, site)
            do = tl.where(dropout.kept(first, second, 0, cut, BLOCK), do * gain, 0.0)
        dz = gradient_of_z(do, unit, w, rstd, WIDTH)
        tl.store(d_sum + at, dz.to(d_sum.dtype.element_ty), mask=mask)
        d_weight += tl.sum(do * unit, 0)[None, :]
        d_bias += tl.sum(do, 0)[None, :]
    at = partials + tl.program_id(0) * WIDTH + columns
    tl.store(at, d_weight, mask=inside)
    tl.store(at + tl.num_programs(0) * WIDTH, d_bias, mask=inside)


@triton.jit
def _embedding_runs_kernel(
    d_sum,  # (T, D)
    sorted_rows,  # (E,) int32: sorted row numbers, consecutive over all tables; E = 3T
    order,  # (E,) int64: the place of each before the sort
    grads,  # (R, D), zeros at first: the gradients of all tables
    ends,  # (2, ceil(E / CHUNK), D) fp32: sums of runs that began in an earlier chunk, or continue in the next one
    count,  # T
    row_count,  # R
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # columns per program
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    start = chunk * CHUNK
    stop = tl.minimum(start + CHUNK, 3 * count)
    row = tl.load(sorted_rows + start)
    begun = tl.load(sorted_rows + start - 1, mask=start > 0, other=-1) != row  # whether the run began in this chunk
    token = tl.load(order + start).to(tl.int32) % count
    values = tl.load(d_sum + token.to(tl.int64) * WIDTH + columns, mask=inside, other=0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    lost = tl.zeros((BLOCK,), tl.float32)  # what rounding lost (Kahan summation): adding one by one is the worst order
    for entry in range(start, stop):
        added = values.to(tl.float32) - lost
        larger = total + added
        lost = (larger - total) - added
        total = larger
        # Load the next values before using the current ones.
        token = tl.load(order + entry + 1, mask=entry + 1 < stop, other=0).to(tl.int32) % count
        values = tl.load(d_sum + token.to(tl.int64) * WIDTH + columns, mask=inside, other=0.0)
        after = tl.load(sorted_rows + entry + 1, mask=entry + 1 < 3 * count, other=-1)
        done = after != row
        if done & begun & (row >= 0) & (row < row_count):
            at = row.to(tl.int64) * WIDTH + columns
            tl.store(grads + at, total.to(grads.dtype.element_ty), mask=inside)
        elif done | (entry + 1 == stop):
            at = (begun.to(tl.int64) * tl.num_programs(0) + chunk) * WIDTH + columns
            tl.store(ends + at, total, mask=inside)
        total, lost = tl.where(done, 0.0, total), tl.where(done, 0.0, lost)
        begun = begun | done
        row = after


@triton.jit
def _embedding_long_runs_kernel(
    sorted_rows,  # (E,) int32
    ends,  # (2, ceil(E / CHUNK), D) fp32, written by _embedding_runs_kernel
    grads,  # (R, D)
    count,  # T
    row_count,  # R
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # columns per program
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,  # chunks at a time
):
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    row = tl.load(sorted_rows + (chunk + 1) * CHUNK, mask=chunk + 1 < chunks, other=-1)
    last = tl.load(sorted_rows + (chunk + 1) * CHUNK - 1, mask=chunk + 1 < chunks, other=-1)
    before = tl.load(sorted_rows + chunk * CHUNK - 1, mask=chunk > 0, other=-1)
    # One program handles the run that begins in this chunk and continues in the next, if there is one.
    if (row == last) & (row != before) & (row >= 0) & (row < row_count):
        total = tl.load(ends + (chunks + chunk).to(tl.int64) * WIDTH + columns, mask=inside, other=0.0)
        parts = chunk + 1 + tl.arange(0, PARTS)
        same = tl.load(sorted_rows + parts * CHUNK, mask=parts < chunks, other=-1) == row
        while tl.max(same.to(tl.int32), 0) > 0:
            at = parts.to(tl.int64)[:, None] * WIDTH + columns[None, :]
            total += tl.sum(tl.load(ends + at, mask=same[:, None] & inside[None, :], other=0.0), 0)
            parts += PARTS
            same = tl.load(sorted_rows + parts * CHUNK, mask=parts < chunks, other=-1) == row
        tl.store(grads + row.to(tl.int64) * WIDTH + columns, total.to(grads.dtype.element_ty), mask=inside)


def _forward(
    indices: _Tensors, tables: _Tensors, norm: tuple[Tensor | None, ...], eps: float, keys: Tensor | None, mask: Mask
) -> tuple[Tensor, Tensor]:
    """Return (out (T, D), statistics (2, T) fp32). ``norm``: weight and bias, or None twice for the sum alone."""
    count, width = indices[0].numel(), tables[0].shape[1]
    out, statistics = tables[0].new_empty(count, width), tables[0].new_empty(2, count, dtype=torch.float32)
    if out.numel():
        launch = Launch.of(width)
        _embedding_forward_kernel[(triton.cdiv(count, launch.rows),)](
            *indices, *tables, *norm, keys, out, statistics, count, *(t.shape[0] for t in tables), eps, *mask,
            WIDTH=width, BLOCK=launch.block, ROWS=launch.rows, num_warps=launch.warps,
        )  # fmt: skip
    return out, statistics


def _backward(d_out: Tensor, indices: _Tensors, tables: _Tensors, rest: tuple[Any, ...], mask: Mask) -> _Tensors:
    """The gradients of the sum, (T, D), of weight, and of bias."""
    weight, keys, statistics = rest
    count, width = d_out.shape
    d_sum = torch.empty_like(d_out)
    if not d_out.numel():
        return d_sum, torch.zeros_like(weight), torch.zeros_like(weight)
    launch = Launch.of(width)
    programs = launch.programs(count, d_out.device)
    partials = d_out.new_empty(2, programs, width, dtype=torch.float32)
    _embedding_backward_kernel[(programs,)](
        d_out, *indices, *tables, weight, keys, statistics, d_sum, partials, count,
        *(t.shape[0] for t in tables), *mask,
        WIDTH=width, BLOCK=launch.block, ROWS=launch.rows, num_warps=launch.warps,
    )  # fmt: skip
    return d_sum, *add_partials(partials, weight.dtype).unbind()


def table_gradients(d_sum: Tensor, indices: _Tensors, rows: tuple[int, ...], chunk: int = 128) -> tuple[Tensor, ...]:
    """The gradients of the three tables, (rows, D) each: for each row, the sum of its tokens' ``d_sum`` (T, D).

    Each program adds ``chunk`` rows of ``d_sum``, in the order of the sorted indices.
    """
    count, width = d_sum.shape
    grads = d_sum.new_zeros(sum(rows), width)
    if d_sum.numel():
        tokens, segments, positions = indices
        numbered = torch.cat([tokens, segments + rows[0], positions + (rows[0] + rows[1])]).to(torch.int32)
        sorted_rows, order = numbered.sort(stable=True)  # (3T,)
        block = min(1024, max(16, triton.next_power_of_2(width)))
        grid = triton.cdiv(3 * count, chunk), triton.cdiv(width, block)
        ends = d_sum.new_empty(2, grid[0], width, dtype=torch.float32)
        sizes = {"WIDTH": width, "CHUNK": chunk}
        _embedding_runs_kernel[grid](d_sum, sorted_rows, order, grads, ends, count, sum(rows), BLOCK=block, **sizes)
        grid = grid[0], triton.cdiv(width, 128)
        _embedding_long_runs_kernel[grid](sorted_rows, ends, grads, count, sum(rows), BLOCK=128, PARTS=32, **sizes)
    return tuple(grads.split(rows))


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """Run the kernel. ``arguments`` are those of ``embed``, in the same order."""
        *given, eps, dropout_p, keys, site = arguments
        tensors = tuple(t.contiguous() for t in given)
        keys = None if keys is None or dropout_p == 0 else keys.contiguous()
        ctx.mask = site, *dropout.kernel_constants(keys, dropout_p)
        indices, tables, (weight, bias) = tensors[:3], tensors[3:6], tensors[6:]
        out, statistics = _forward(indices, tables, (weight, bias), eps, keys, ctx.mask)
        ctx.save_for_backward(*indices, *tables, weight, keys, statistics)
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        indices, tables, rest = ctx.saved_tensors[:3], ctx.saved_tensors[3:6], ctx.saved_tensors[6:]
        d_sum, d_weight, d_bias = _backward(d_out.contiguous(), indices, tables, rest, ctx.mask)
        needed = any(ctx.needs_input_grad[3:6])
        d_tables = table_gradients(d_sum, indices, tuple(t.shape[0] for t in tables)) if needed else (None, None, None)
        return None, None, None, *d_tables, d_weight, d_bias, None, None, None, None


class _EmbedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Tensor) -> Tensor:
        """Run the kernel. ``arguments`` are the indices and tables of ``embed_sum``, in the same order."""
        tensors = tuple(t.contiguous() for t in arguments)
        indices, tables = tensors[:3], tensors[3:]
        ctx.save_for_backward(*indices)
        ctx.rows = tuple(t.shape[0] for t in tables)
        return _forward(indices, tables, (None, None), 0.0, None, (0, *dropout.kernel_constants(None, 0.0)))[0]

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, d_sum: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *table_gradients(d_sum.contiguous(), ctx.saved_tensors, ctx.rows)


def embed_sum(indices: _Tensors, tables: _Tensors) -> Tensor:
    """Return the sum of three table rows per token, (T, D), in the dtype of the tables.

    ``indices`` are tokens, segments and positions, (T,) int64 each, and ``tables`` their tables, (rows, D) each. Raises
    what ``embed`` raises.
    """
    _check(indices, tables)
    if fused(tables[0]):
        out: Tensor = _EmbedSum.apply(*indices, *tables)
        return out
    return _sum_reference(indices, tables).to(tables[0].dtype)


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
    """Return the encoder's input (T, D), in the dtype of the tables.

    ``tokens``, ``segments`` and ``positions`` are (T,) int64, the tables (rows, D), and the LayerNorm's ``weight``
    and ``bias`` (D,). ``keys`` (T, 2) int32 are the tokens' dropout keys, None for evaluation; ``site`` identifies
    this dropout. Raises ValueError if shapes or dtypes do not fit. For an index out of range, the reference raises
    IndexError, and the kernels give NaN.
    """
    indices, tables = (tokens, segments, positions), (token_table, segment_table, position_table)
    _check(indices, (*tables, weight[None], bias[None]))
    dropout.check_keys(keys, tokens.numel())
    if fused(weight):
        out: Tensor = _Embed.apply(*indices, *tables, weight, bias, eps, dropout_p, keys, site)
        return out
    return dropout.apply(embed_reference(indices, tables, weight, bias, eps), keys, site, dropout_p)


def _check(indices: _Tensors, rows: _Tensors) -> None:
    """``rows``: the tables, and the weight and bias as tables of one row."""
    first = rows[0]
    if indices[0].dim() != 1 or any(i.shape != indices[0].shape or i.dtype != torch.int64 for i in indices):
        seen = ", ".join(f"{i.dtype} {tuple(i.shape)}" for i in indices)
        raise ValueError(f"tokens, segments, positions are {seen}; each must be int64 (T,)")
    if any(t.dim() != 2 or t.shape[1] != first.shape[1] or t.dtype != first.dtype for t in rows):
        seen = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in rows)
        raise ValueError(f"tables, weight and bias are {seen}; they must have one width and one dtype")
