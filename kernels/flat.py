"""Describes a flat buffer that holds parts of many tensors, as an optimizer under ZeRO sees it.

A ``Layout`` says which elements belong to which tensor. The rest is padding, which is never read or written.
The layout also holds the tables that tell the kernels of kernels/adam.py and kernels/lamb.py where their
elements are. Each row of a table is one unit of work: at most ``unit`` elements of one piece. Pieces can start
anywhere, but wide loads need alignment, so a unit consists of three runs of elements:

    start … start + length     both are multiples of ALIGN
    head  … head + heads       up to ALIGN - 1 elements before the aligned run; only in a piece's first unit
    tail  … tail + tails       up to ALIGN - 1 elements after the aligned run; only in a piece's first unit

Each program writes one partial sum for one or a few units. The partial sums are added in a fixed order and
without atomics, so results repeat bit for bit. This file also computes the sum of squares of a flat gradient:

    sum over all pieces of  g²     fp32, whatever the gradient's dtype
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import fused, tl, triton

ALIGN = 64  # elements; a line of the cache in fp16
UNIT = 4096  # elements
BLOCKS, WARPS = 2, 16  # blocks per unit and warps per program: 4 elements per thread
HELD = 4  # units whose directions a program of kernels/lamb.py keeps in registers
RESIDENT = 2  # programs of that kind that run on a multiprocessor at once
COLUMNS = 8  # columns of a table: start / ALIGN, length / ALIGN, head, heads, tail, tails, tensor, 0
LANES, TABLE = tl.constexpr(ALIGN), tl.constexpr(COLUMNS)  # the same, for kernels


@dataclass(frozen=True)
class Piece:
    """Elements ``offset … offset + length`` of a flat buffer: a tensor, or the part of it in this buffer."""

    offset: int
    length: int
    decay: float = 0.0  # weight decay
    row: int = -1  # row in LAMB's sums; -1: LAMB does not adapt this tensor and takes Adam's step
    whole: bool = False  # whether this piece is the whole tensor


class Flat(NamedTuple):
    """The buffers that an optimizer changes: (size,) each, contiguous, and on one device."""

    master: Tensor  # fp32, the weights
    mean: Tensor  # fp32, the moving average of the gradient
    square: Tensor  # fp32, the moving average of its square
    copy: Tensor | None = None  # fp16 or bf16, gets the new weights, rounded


@dataclass(frozen=True)
class Units:
    """Tables of units of work on the device, and of the tensors that they belong to."""

    table: Tensor  # (U, COLUMNS) int64
    decays: Tensor  # (U,) fp32
    tensors: Tensor  # (R, 3) int64: row, first unit, number of units

    def __len__(self) -> int:
        return int(self.table.shape[0])


@dataclass(frozen=True)
class Layout:
    """The contents of a flat buffer of ``size`` elements, for one device. Use ``make_layout`` to make one."""

    pieces: tuple[Piece, ...]  # the non-empty ones, ordered by offset
    size: int
    unit: int
    programs: int  # how many programs run on the device at once
    every: Units  # all pieces
    plain: Units  # pieces that LAMB does not adapt
    closed: Units  # pieces that LAMB adapts and can finish in one kernel, in units of HELD * unit
    open: Units  # adapted pieces whose norms need other ranks, or that are too large for one kernel


def make_layout(pieces: Sequence[Piece], size: int, device: torch.device, unit: int = UNIT) -> Layout:
    """Make the layout of a flat buffer of ``size`` elements. Pieces of length 0 are left out.

    ``unit`` must be a multiple of 128; only tests change it. Raises ValueError if pieces overlap or do not fit
    the buffer.
    """
    held = tuple(sorted((p for p in pieces if p.length != 0), key=lambda p: p.offset))
    for piece in held:
        if piece.offset < 0 or piece.length < 0 or piece.offset + piece.length > size or piece.row < -1:
            raise ValueError(f"{piece} does not fit a flat buffer of {size} elements")
    for before, after in pairwise(held):
        if before.offset + before.length > after.offset:
            raise ValueError(f"{before} and {after} overlap in a flat buffer")
    if unit % (BLOCKS * ALIGN) != 0 or unit < 1:
        raise ValueError(f"unit is {unit}; it must be a multiple of {BLOCKS * ALIGN}")
    programs = 1
    if device.type == "cuda":
        programs = RESIDENT * torch.cuda.get_device_properties(device).multi_processor_count
    rows = [piece.row for piece in held]
    plain, closed, rest = [], [], []
    for piece in held:
        if piece.row < 0:
            plain.append(piece)
        elif piece.whole and rows.count(piece.row) == 1 and len(_cut(piece, HELD * unit)) <= programs:
            closed.append(piece)
        else:
            rest.append(piece)
    every, unadapted, two_passes = (_units(group, unit, device) for group in (held, plain, rest))
    return Layout(held, size, unit, programs, every, unadapted, _units(closed, HELD * unit, device), two_passes)


def gradient_square_sum_reference(gradient: Tensor, layout: Layout) -> Tensor:
    """Do what ``gradient_square_sum`` does, in plain PyTorch."""
    total = torch.zeros((), dtype=torch.float32, device=gradient.device)
    for piece in layout.pieces:
        part = cut(gradient, piece).float()
        total += part.dot(part)
    return total


@triton.jit
def run(table, unit):
    """The aligned run of a unit: (offset, length). The compiler can see that both are multiples of ALIGN."""
    row = table + unit * TABLE
    return tl.load(row) * LANES, tl.load(row + 1) * LANES


@triton.jit
def edges(table, unit):
    """The elements before and after the aligned run: (offsets, mask), (2 ALIGN,) each."""
    row = table + unit * TABLE
    lane = tl.arange(0, 2 * LANES)
    first = lane < LANES
    at = tl.where(first, tl.load(row + 2) + lane, tl.load(row + 4) + lane - LANES)
    return at, tl.where(first, lane < tl.load(row + 3), lane - LANES < tl.load(row + 5))


@triton.jit
def _square_sum_kernel(
    gradient,  # (size,) fp32, fp16 or bf16
    table,  # (U, COLUMNS) int64
    partial,  # (programs,) fp32, written
    units,  # U
    EACH: tl.constexpr,  # units per program
    BLOCK: tl.constexpr,
):
    first_unit = tl.program_id(0) * EACH
    squares = tl.zeros((BLOCK,), tl.float32)
    rim_squares = tl.zeros((2 * LANES,), tl.float32)
    for unit in range(first_unit, tl.minimum(first_unit + EACH, units)):
        start, length = run(table, unit)
        for first in range(0, length, BLOCK):
            at = first + tl.arange(0, BLOCK)
            g = tl.load(gradient + start + at, mask=at < length, other=0.0).to(tl.float32)
            squares += g * g
        place, rim = edges(table, unit)
        g = tl.load(gradient + place, mask=rim, other=0.0).to(tl.float32)
        rim_squares += g * g
    tl.store(partial + tl.program_id(0), tl.sum(squares, 0) + tl.sum(rim_squares, 0))


@triton.jit
def _tensor_sums_kernel(
    partial,  # (U, 2) fp32
    tensors,  # (R, 3) int64
    sums,  # (K, 2) fp32, added to
    BLOCK: tl.constexpr,
):
    """Add the partial sums of one tensor per program."""
    entry = tensors + tl.program_id(0) * 3
    row, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    weights = tl.zeros((BLOCK,), tl.float32)
    directions = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        unit = start + tl.arange(0, BLOCK)
        at = partial + (first + unit) * 2
        weights += tl.load(at, mask=unit < count, other=0.0)
        directions += tl.load(at + 1, mask=unit < count, other=0.0)
    tl.store(sums + row * 2, tl.load(sums + row * 2) + tl.sum(weights, 0))
    tl.store(sums + row * 2 + 1, tl.load(sums + row * 2 + 1) + tl.sum(directions, 0))


def gradient_square_sum(gradient: Tensor, layout: Layout) -> Tensor:
    """The sum of squares, () fp32, of ``gradient`` (size,), fp32, fp16 or bf16. Padding is left out.

    The sum is not finite if an element is not finite, or if a square or the sum overflows fp32. Raises ValueError
    if the gradient does not fit the layout.
    """
    check(gradient, layout, "gradient")
    if not fused(gradient):
        return gradient_square_sum_reference(gradient, layout)
    units, each = len(layout.every), HELD
    partial = torch.empty(triton.cdiv(units, each), dtype=torch.float32, device=gradient.device)
    if units > 0:
        shape = {"EACH": each, "BLOCK": layout.unit // BLOCKS, "num_warps": WARPS // 4}
        _square_sum_kernel[(len(partial),)](gradient, layout.every.table, partial, units, **shape)
    return partial.sum()


def add_tensor_sums(partial: Tensor, units: Units, sums: Tensor) -> None:
    """Add the partial sums (U, 2) of units, tensor by tensor, to ``sums`` (K, 2). It runs on Triton only."""
    if len(units) > 0:
        _tensor_sums_kernel[(len(units.tensors),)](partial, units.tensors, sums, BLOCK=512, num_warps=4)


def check(buffer: Tensor, layout: Layout, name: str) -> None:
    """Raise ValueError unless ``buffer`` has the size and the device of the layout and is contiguous."""
    where = layout.every.table.device
    if buffer.shape != (layout.size,) or not buffer.is_contiguous() or buffer.device != where:
        seen = f"{name} is {tuple(buffer.shape)} on {buffer.device}"
        raise ValueError(f"{seen}; it must be contiguous, ({layout.size},), and on {where}")


def check_all(flat: Flat, layout: Layout) -> None:
    """Raise ValueError unless all buffers fit the layout and ``master``, ``mean`` and ``square`` are fp32."""
    for name in ("master", "mean", "square"):
        buffer = getattr(flat, name)
        check(buffer, layout, name)
        if buffer.dtype != torch.float32:
            raise ValueError(f"{name} is {buffer.dtype}; it must be torch.float32")
    if flat.copy is not None:
        check(flat.copy, layout, "copy")


def cut(buffer: Tensor, piece: Piece) -> Tensor:
    """A view of a piece's elements."""
    return buffer[piece.offset : piece.offset + piece.length]


def _cut(piece: Piece, unit: int) -> list[list[int]]:
    """The table rows of one piece. The caller fills in the tensor's number."""
    end = piece.offset + piece.length
    begin = min(-(-piece.offset // ALIGN) * ALIGN, end)
    stop = max(begin, end // ALIGN * ALIGN)
    starts = range(begin, stop, unit) or range(begin, begin + 1)  # a piece without an aligned run still has a unit
    rows = [[start // ALIGN, (min(start + unit, stop) - start) // ALIGN, 0, 0, 0, 0, 0, 0] for start in starts]
    rows[0][2:6] = [piece.offset, begin - piece.offset, stop, end - stop]
    return rows


def _units(pieces: Sequence[Piece], unit: int, device: torch.device) -> Units:
    """Make the tables of some pieces. Pieces of one tensor are adjacent."""
    table: list[list[int]] = []
    decays: list[float] = []
    tensors: list[list[int]] = []
    for piece in sorted(pieces, key=lambda p: (p.row, p.offset)):
        if not tensors or tensors[-1][0] != piece.row:
            tensors.append([piece.row, len(table), 0])
        rows = _cut(piece, unit)
        for row in rows:
            row[6] = len(tensors) - 1
        tensors[-1][2] += len(rows)
        table += rows
        decays += [piece.decay] * len(rows)
    return Units(
        torch.tensor(table, dtype=torch.int64, device=device).view(-1, COLUMNS),
        torch.tensor(decays, dtype=torch.float32, device=device),
        torch.tensor(tensors, dtype=torch.int64, device=device).view(-1, 3),
    )
