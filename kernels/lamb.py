"""Computes the LAMB step over flat fp32 buffers (You et al. 2020, "Large Batch Optimization", Alg. 2, φ = identity).

    u = Adam's direction + λ x              (kernels/adam.py)
    x ← x - η · (‖x‖ / ‖u‖) · u             one ratio per tensor, within bounds; 1 if either norm is zero

A flat buffer may hold only part of a tensor, because ZeRO partitions cut through tensors. So a step takes
two calls. The first computes partial sums of squares, and the caller adds these over ranks in between:

    lamb_begin → sums (K, 2) → all-reduce → trust_ratios → lamb_finish

Two plain passes would move 40 bytes per element with an fp16 gradient and an fp16 copy, since the second
pass must read x, m and v again. So the first call finishes every tensor that is wholly in the buffer and
not too large. The kernel for these "closed" tensors keeps u of one unit in registers and waits until all
programs that work on the tensor have written their partial sums. It then reads only x again, mostly from
the cache: 28 bytes per element, or 29.5 as counted on an H100. The wait cannot deadlock, because all
programs run at the same time (the driver rejects a cooperative launch that does not fit on the GPU) and
each takes its units in the order of the tensors. The counters for this wait are the only atomics. All
sums are added in a fixed order, so results repeat bit for bit. This kernel is limited by instructions as
well as by memory, so every extra instruction per element costs time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.adam import Moments, adam_direction, adam_step, direction_of, new_direction, new_moments, step_units
from kernels.backend import fused, tl, triton
from kernels.flat import BLOCKS, HELD, TABLE, WARPS, Flat, Layout, add_tensor_sums, check, check_all, cut, edges, run


def square_sums(weight: Tensor, direction: Tensor) -> Tensor:
    """The sums of squares, (2,) fp32, of a part of a weight and of its direction."""
    return torch.stack([weight.dot(weight), direction.dot(direction)])


def trust_ratios(sums: Tensor, moments: Moments) -> Tensor:
    """Ratios ‖x‖ / ‖u‖, (K,) fp32, within bounds, from complete sums of squares (K, 2); 1 if either is zero."""
    weight, direction = sums.sqrt().unbind(1)  # (K,), (K,)
    ratios = (weight / direction).clamp(moments.lower, moments.upper)  # NaN stays NaN
    return torch.where((weight == 0) | (direction == 0), torch.ones_like(weight), ratios)


def lamb_step(weight: Tensor, direction: Tensor, ratio: Tensor, rate: float) -> None:
    """Move part of one fp32 tensor in place: ``x ← x - η · ratio · u``. ``ratio`` is a scalar."""
    weight.sub_(direction * ratio, alpha=rate)


def lamb_begin_reference(
    flat: Flat, gradient: Tensor, layout: Layout, moments: Moments, step: int, rate: float, factor: Tensor, sums: Tensor
) -> None:
    """Do what ``lamb_begin`` does, in plain PyTorch. This finishes no adapted tensor."""
    for piece in layout.pieces:
        weight, mean, square = (cut(buffer, piece) for buffer in flat[:3])
        direction = adam_direction(cut(gradient, piece).float() * factor, mean, square, moments, step)
        if piece.row >= 0:
            sums[piece.row] += square_sums(weight, direction.add_(weight, alpha=piece.decay))
            continue
        adam_step(weight, direction, rate, piece.decay)
        if flat.copy is not None:
            cut(flat.copy, piece).copy_(weight)


def lamb_finish_reference(flat: Flat, layout: Layout, moments: Moments, step: int, rate: float, ratios: Tensor) -> None:
    """Do what ``lamb_finish`` does, in plain PyTorch."""
    for piece in layout.pieces:
        if piece.row >= 0:
            weight, mean, square = (cut(buffer, piece) for buffer in flat[:3])
            direction = direction_of(mean, square, moments, step).add_(weight, alpha=piece.decay)
            lamb_step(weight, direction, ratios[piece.row], rate)
            if flat.copy is not None:
                cut(flat.copy, piece).copy_(weight)


@triton.jit
def _load(master, gradient, mean, square, at, mask, KEEP: tl.constexpr):
    """Load (g, m, v, x) of the elements at ``at``, 0 where masked. KEEP is the cache eviction policy for x."""
    g = tl.load(gradient + at, mask=mask, other=0.0, eviction_policy="evict_first")
    m = tl.load(mean + at, mask=mask, other=0.0, eviction_policy="evict_first")
    v = tl.load(square + at, mask=mask, other=0.0, eviction_policy="evict_first")
    return g, m, v, tl.load(master + at, mask=mask, other=0.0, eviction_policy=KEEP)


@triton.jit
def _first(mean, square, at, mask, g, m, v, x, factor, decay, constants):
    """Do the first pass over the elements at ``at``: store the moments and return u, 0 where masked."""
    m, v = new_moments(g.to(tl.float32) * factor, m, v, constants)
    tl.store(mean + at, m, mask=mask, eviction_policy="evict_first")
    tl.store(square + at, v, mask=mask, eviction_policy="evict_first")
    return new_direction(m, v, constants) + decay * x


@triton.jit
def _move(master, copy, at, mask, x, u, pace, COPY: tl.constexpr):
    """Store x ← x - pace · u, where pace is η times the ratio."""
    x -= pace * u
    tl.store(master + at, x, mask=mask, eviction_policy="evict_first")
    if COPY:
        tl.store(copy + at, x.to(copy.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def _second(master, mean, square, copy, at, mask, decay, pace, constants, COPY: tl.constexpr):
    """Do the second pass over the elements at ``at``, from the moments that the first pass stored."""
    m = tl.load(mean + at, mask=mask, other=0.0, eviction_policy="evict_first")
    v = tl.load(square + at, mask=mask, other=0.0, eviction_policy="evict_first")
    x = tl.load(master + at, mask=mask, other=0.0, eviction_policy="evict_first")
    _move(master, copy, at, mask, x, new_direction(m, v, constants) + decay * x, pace, COPY)


@triton.jit
def _gather(partial, begin, count, MOST: tl.constexpr):
    """Sum what ``count`` programs have written. The loads bypass the L1 cache, which may hold old values."""
    other = tl.arange(0, MOST)
    parts = partial + (begin + other) * 2
    weights = tl.load(parts, mask=other < count, other=0.0, cache_modifier=".cg")
    directions = tl.load(parts + 1, mask=other < count, other=0.0, cache_modifier=".cg")
    return tl.sum(weights, 0), tl.sum(directions, 0)


@triton.jit
def _ratio(weights, directions, LOWER: tl.constexpr, UPPER: tl.constexpr, BOUNDED: tl.constexpr):
    """‖x‖ / ‖u‖ from sums of squares, within bounds; 1 if either is zero. The comparisons let NaN through."""
    zero = (weights == 0) | (directions == 0)
    ratio = tl.div_rn(tl.sqrt_rn(weights), tl.sqrt_rn(tl.where(zero, 1.0, directions)))
    if BOUNDED:
        ratio = tl.where(ratio < LOWER, LOWER, tl.where(ratio > UPPER, UPPER, ratio))
    return tl.where(zero, 1.0, ratio)


@triton.jit
def _lamb_closed_kernel(
    master,  # (size,) fp32, like mean and square
    gradient,  # (size,) fp32, fp16 or bf16
    mean,
    square,
    copy,  # (size,) fp16 or bf16; not used without COPY
    table,  # (U, COLUMNS) int64
    decays,  # (U,) fp32
    tensors,  # (R, 3) int64: row, first unit, number of units
    partial,  # (U, 2) fp32, where programs write their sums for each other
    arrived,  # (R,) int32, zeros: counts the units of each tensor that are written
    sums,  # (K, 2) fp32, added to
    factor,  # () fp32
    units,  # U
    rate,
    constants,  # Moments.constants
    COPY: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,  # a power of two; no tensor has more units
    LOWER: tl.constexpr,  # bounds of the ratios
    UPPER: tl.constexpr,
    BOUNDED: tl.constexpr,  # whether the bounds can take effect
):
    by = tl.load(factor)
    lane = tl.arange(0, BLOCK)
    start, length = run(table, tl.program_id(0))
    # Load two blocks ahead, even into the next unit, because the compiler cannot move loads across stores.
    near = _load(master, gradient, mean, square, start + lane, lane < length, "evict_last")
    far = _load(master, gradient, mean, square, start + BLOCK + lane, BLOCK + lane < length, "evict_last")
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        decay = tl.load(decays + unit)
        tensor = tl.load(table + unit * TABLE + 6)
        entry = tensors + tensor * 3
        begin, count = tl.load(entry + 1), tl.load(entry + 2)
        weights, directions = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        held = ()
        for first in tl.static_range(0, UNIT, BLOCK):
            g, m, v, x = near
            near = far
            if first + 2 * BLOCK < UNIT:
                at, mask = start + first + 2 * BLOCK + lane, first + 2 * BLOCK + lane < length
                far = _load(master, gradient, mean, square, at, mask, "evict_last")
            at, mask = start + first + lane, first + lane < length
            u = _first(mean, square, at, mask, g, m, v, x, by, decay, constants)
            weights += x * x
            directions += u * u
            held = held + (u,)  # type: ignore[assignment]
        place, rim = edges(table, unit)
        edge_g, edge_m, edge_v, edge_x = _load(master, gradient, mean, square, place, rim, "evict_last")
        edge_u = _first(mean, square, place, rim, edge_g, edge_m, edge_v, edge_x, by, decay, constants)
        tl.store(partial + unit * 2, tl.sum(weights, 0) + tl.sum(edge_x * edge_x, 0))
        tl.store(partial + unit * 2 + 1, tl.sum(directions, 0) + tl.sum(edge_u * edge_u, 0))
        tl.debug_barrier()
        seen = tl.atomic_add(arrived + tensor, 1, sem="acq_rel", scope="gpu") + 1
        # Start loading the next unit before waiting for this one. After its last unit, a program loads another
        # program's unit and does not use it.
        ahead, ahead_length = run(table, tl.minimum(unit + tl.num_programs(0), units - 1))
        near = _load(master, gradient, mean, square, ahead + lane, lane < ahead_length, "evict_last")
        at, mask = ahead + BLOCK + lane, BLOCK + lane < ahead_length
        far = _load(master, gradient, mean, square, at, mask, "evict_last")
        while seen < count:
            seen = tl.atomic_add(arrived + tensor, 0, sem="acq_rel", scope="gpu")
        weight, direction = _gather(partial, begin, count, MOST)
        if unit == begin:
            total = sums + tl.load(entry) * 2
            tl.store(total, tl.load(total) + weight)
            tl.store(total + 1, tl.load(total + 1) + direction)
        pace = rate * _ratio(weight, direction, LOWER, UPPER, BOUNDED)
        soon = tl.load(master + start + lane, mask=lane < length, other=0.0)
        for block in tl.static_range(UNIT // BLOCK):
            x = soon
            at, mask = start + block * BLOCK + lane, block * BLOCK + lane < length
            if block + 1 < UNIT // BLOCK:
                soon = tl.load(master + at + BLOCK, mask=(block + 1) * BLOCK + lane < length, other=0.0)
            _move(master, copy, at, mask, x, held[block], pace, COPY)
        _move(master, copy, place, rim, edge_x, edge_u, pace, COPY)
        start, length = ahead, ahead_length


@triton.jit
def _lamb_begin_kernel(
    master,  # (size,) fp32, like mean and square
    gradient,  # (size,) fp32, fp16 or bf16
    mean,
    square,
    table,  # (U, COLUMNS) int64
    decays,  # (U,) fp32
    partial,  # (U, 2) fp32, written
    factor,  # () fp32
    constants,  # Moments.constants
    BLOCK: tl.constexpr,
):
    unit = tl.program_id(0)
    start, length = run(table, unit)
    decay, by = tl.load(decays + unit), tl.load(factor)
    weights, directions = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, length, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask, at = at < length, start + at
        g, m, v, x = _load(master, gradient, mean, square, at, mask, "")
        u = _first(mean, square, at, mask, g, m, v, x, by, decay, constants)
        weights += x * x
        directions += u * u
    place, rim = edges(table, unit)
    g, m, v, edge_x = _load(master, gradient, mean, square, place, rim, "")
    edge_u = _first(mean, square, place, rim, g, m, v, edge_x, by, decay, constants)
    tl.store(partial + unit * 2, tl.sum(weights, 0) + tl.sum(edge_x * edge_x, 0))
    tl.store(partial + unit * 2 + 1, tl.sum(directions, 0) + tl.sum(edge_u * edge_u, 0))


@triton.jit
def _lamb_finish_kernel(
    master,  # (size,) fp32, like mean and square
    mean,
    square,
    copy,  # (size,) fp16 or bf16; not used without COPY
    table,  # (U, COLUMNS) int64
    decays,  # (U,) fp32
    tensors,  # (R, 3) int64
    ratios,  # (K,) fp32
    rate,
    constants,  # Moments.constants
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Go from the last unit to the first: the first pass has left the last units in the cache.
    unit = tl.num_programs(0) - 1 - tl.program_id(0)
    start, length = run(table, unit)
    decay = tl.load(decays + unit)
    pace = rate * tl.load(ratios + tl.load(tensors + tl.load(table + unit * TABLE + 6) * 3))
    for first in range(0, length, BLOCK):
        at = first + tl.arange(0, BLOCK)
        _second(master, mean, square, copy, start + at, at < length, decay, pace, constants, COPY)
    at, mask = edges(table, unit)
    _second(master, mean, square, copy, at, mask, decay, pace, constants, COPY)


def _begin_closed(
    flat: Flat, gradient: Tensor, layout: Layout, moments: Moments, step: int, rate: float, factor: Tensor, sums: Tensor
) -> None:
    units = layout.closed
    if len(units) == 0:
        return
    partial = torch.empty(len(units), 2, dtype=torch.float32, device=sums.device)
    arrived = torch.zeros(len(units.tensors), dtype=torch.int32, device=sums.device)
    copy = flat.master if flat.copy is None else flat.copy
    tables = units.table, units.decays, units.tensors
    buffers = flat.master, gradient, flat.mean, flat.square, copy, *tables, partial, arrived, sums, factor
    unit = HELD * layout.unit
    shape = {"UNIT": unit, "BLOCK": unit // 16, "MOST": triton.next_power_of_2(layout.programs)}
    shape |= {"LOWER": moments.lower, "UPPER": moments.upper, "BOUNDED": moments.bounded, "COPY": flat.copy is not None}
    # 4 elements per thread in a full unit's block. 128 is 65,536 registers / (RESIDENT programs * 256 threads).
    resident = {"num_warps": 8, "maxnreg": 128, "launch_cooperative_grid": True}
    grid = (min(layout.programs, len(units)),)
    _lamb_closed_kernel[grid](*buffers, len(units), rate, moments.constants(step), **shape, **resident)


def _begin_open(
    flat: Flat, gradient: Tensor, layout: Layout, constants: tuple[float, ...], factor: Tensor, sums: Tensor
) -> None:
    units = layout.open
    if len(units) == 0:
        return
    partial = torch.empty(len(units), 2, dtype=torch.float32, device=sums.device)
    buffers = flat.master, gradient, flat.mean, flat.square, units.table, units.decays, partial, factor
    shape = {"BLOCK": layout.unit // BLOCKS, "num_warps": WARPS}
    _lamb_begin_kernel[(len(units),)](*buffers, constants, **shape)
    add_tensor_sums(partial, units, sums)


def lamb_begin(
    flat: Flat, gradient: Tensor, layout: Layout, moments: Moments, step: int, rate: float, factor: Tensor, sums: Tensor
) -> None:
    """Do the first part of a LAMB step over a flat buffer: moments, norms, and all weights that can be finished.

    ``gradient`` (size,) is fp32, fp16 or bf16. The step uses it times ``factor``, () fp32, and does not change it.
    The sums of squares of the weights and directions of all adapted pieces are added to ``sums`` (K, 2) fp32, in
    the row that each piece names. Until ``lamb_finish``, some weights are old and some are new. Raises ValueError
    if ``step`` is below 1, or if buffers or rows do not fit the layout.
    """
    check_all(flat, layout)
    check(gradient, layout, "gradient")
    _check_rows(sums, layout, "sums", (2,))
    if not (fused(flat.master) and fused(gradient)):
        lamb_begin_reference(flat, gradient, layout, moments, step, rate, factor, sums)
        return
    constants = moments.constants(step)
    _begin_closed(flat, gradient, layout, moments, step, rate, factor, sums)
    step_units(flat, gradient, layout, layout.plain, constants, rate, factor)
    _begin_open(flat, gradient, layout, constants, factor, sums)


def lamb_finish(flat: Flat, layout: Layout, moments: Moments, step: int, rate: float, ratios: Tensor) -> None:
    """Do the rest of the step, with the ``trust_ratios`` (K,) of the complete sums.

    ``moments``, ``step`` and ``rate`` must be those given to ``lamb_begin``. Afterwards ``flat.copy`` holds all
    weights, rounded. Raises ValueError if ``step`` is below 1, or if buffers or rows do not fit the layout.
    """
    check_all(flat, layout)
    _check_rows(ratios, layout, "ratios", ())
    if not fused(flat.master):
        lamb_finish_reference(flat, layout, moments, step, rate, ratios)
        return
    units = layout.open
    if len(units) == 0:
        return
    copy = flat.master if flat.copy is None else flat.copy
    tables = units.table, units.decays, units.tensors
    buffers = flat.master, flat.mean, flat.square, copy, *tables, ratios
    shape = {"BLOCK": layout.unit // BLOCKS, "num_warps": WARPS}
    _lamb_finish_kernel[(len(units),)](*buffers, rate, moments.constants(step), COPY=flat.copy is not None, **shape)


def _check_rows(given: Tensor, layout: Layout, name: str, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless ``given`` is contiguous fp32, (K, *shape), and has a row for every piece."""
    rows = 1 + max((piece.row for piece in layout.pieces), default=-1)
    fits = given.dim() == 1 + len(shape) and given.shape[1:] == shape and len(given) >= rows
    if not fits or given.dtype != torch.float32 or not given.is_contiguous():
        seen = f"{name} is {tuple(given.shape)} of {given.dtype}, strides {given.stride()}"
        raise ValueError(f"{seen}; it must be contiguous torch.float32, with at least {rows} rows of shape {shape}")
