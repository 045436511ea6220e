"""Adds the gradients of many tensors into one flat buffer, in one launch that reads and writes everything once.

    out[place … place + n] ← gradient, rounded                    for the first gradient, or the only one
    out[place … place + n] ← total[place … place + n] + gradient  for the later ones; ``total`` may be ``out``

Sums are fp32, whatever the dtypes. The kernel moves aligned groups of 8 elements. It would have to read anything else
one element at a time, so PyTorch moves the rest: up to 7 elements at the end of a tensor, and every tensor whose place
is not a multiple of 8 or whose memory is not aligned to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backend import fused, tl, triton

BLOCK = 4096  # elements per program
ALIGNED, BYTES = 8, 16  # elements in an aligned group; the alignment of its address in bytes


@dataclass
class Places:
    """The places of tensors in a flat buffer. Use ``make_places`` to make one."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    end: int  # where the last tensor ends: the least length of a buffer
    table: Tensor  # (U, 4) int64: tensor, block, place of the tensor / ALIGNED, length of the tensor / ALIGNED
    pointers: Tensor  # (K,) int64: addresses of the gradients
    seen: list[int]  # the addresses last copied to ``pointers``: they are copied again only if they change


def make_places(offsets: Sequence[int], lengths: Sequence[int], device: torch.device) -> Places:
    """Make the table of tensors that begin at ``offsets`` and have ``lengths`` elements."""
    rows = [
        [tensor, block, offset // ALIGNED, length // ALIGNED]
        for tensor, (offset, length) in enumerate(zip(offsets, lengths, strict=True))
        if offset % ALIGNED == 0
        for block in range(-(-(length // ALIGNED * ALIGNED) // BLOCK))
    ]
    table = torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 4)
    end = max((offset + length for offset, length in zip(offsets, lengths, strict=True)), default=0)
    pointers = torch.zeros(len(lengths), dtype=torch.int64, device=device)
    return Places(tuple(offsets), tuple(lengths), end, table, pointers, [])


def accumulate_reference(out: Tensor, gradients: Sequence[Tensor | None], places: Places, total: Tensor | None) -> None:
    """Do what ``accumulate`` does, in plain PyTorch. A gradient that is None counts as zeros."""
    for gradient, offset, length in zip(gradients, places.offsets, places.lengths, strict=True):
        _move(out, gradient, offset, length, total)


def _move(out: Tensor, gradient: Tensor | None, offset: int, length: int, total: Tensor | None, first: int = 0) -> None:
    """Add or copy one tensor's gradient, from its element ``first`` to its end."""
    own = slice(offset + first, offset + length)
    value = torch.zeros((), device=out.device) if gradient is None else gradient.reshape(-1)[first:].float()
    out[own].copy_(value if total is None else total[own].float() + value)


@triton.jit
def _accumulate_kernel(
    out,  # (size,) fp32, fp16 or bf16
    total,  # (size,) fp32; not read without ADD
    pointers,  # (K,) int64; 0: no gradient, or PyTorch moves it
    table,  # (U, 4) int64
    SOURCE: tl.constexpr,  # the gradients' dtype
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = table + tl.program_id(0) * 4
    address = tl.load(pointers + tl.load(row))
    start = tl.load(row + 1) * BLOCK
    at = start + tl.arange(0, BLOCK)
    mask = at < tl.load(row + 3) * 8  # "* 8" tells the compiler that groups of 8 are masked together
    gradient = tl.multiple_of(address.to(tl.pointer_type(SOURCE)), 16)  # true for every address here, also for 0
    value = tl.load(gradient + at, mask=mask & (address != 0), other=0.0).to(tl.float32)
    place = tl.load(row + 2) * 8 + at
    if ADD:
        value += tl.load(total + place, mask=mask)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)


def accumulate(out: Tensor, gradients: Sequence[Tensor | None], places: Places, total: Tensor | None = None) -> None:
    """Write the gradients to ``out`` (size,), added to ``total`` (size,) fp32 if it is given.

    A gradient that is None counts as zeros. Elements between the tensors do not change. Raises ValueError if a buffer
    is too short or not contiguous, or if a gradient's length is not that of its place. The Triton kernel also needs
    contiguous gradients of one dtype, and raises ValueError for any others.
    """
    for name, buffer in (("out", out), ("total", out if total is None else total)):
        if buffer.shape != out.shape or buffer.dim() != 1 or len(buffer) < places.end or not buffer.is_contiguous():
            seen = f"{name} is {tuple(buffer.shape)}, strides {buffer.stride()}"
            raise ValueError(f"{seen}; out and total must be contiguous, of one shape, and at least {places.end} long")
    by_triton = fused(out)
    given = [(g, length) for g, length in zip(gradients, places.lengths, strict=True) if g is not None]
    dtypes = {g.dtype for g, _ in given} or {out.dtype}
    fit = all(g.numel() == length and (g.is_contiguous() or not by_triton) for g, length in given)
    if not fit or (by_triton and len(dtypes) > 1):
        seen = f"gradients have dtypes {sorted(map(str, dtypes))}"
        raise ValueError(f"{seen}; they must be contiguous, of one dtype, and as long as their places")
    if not by_triton:
        accumulate_reference(out, gradients, places, total)
        return
    addresses = [0 if gradient is None else gradient.data_ptr() for gradient in gradients]
    by_kernel = [
        address % BYTES == 0 and offset % ALIGNED == 0
        for address, offset in zip(addresses, places.offsets, strict=True)
    ]
    if addresses != places.seen:
        held = [address if fits else 0 for address, fits in zip(addresses, by_kernel, strict=True)]
        host_pointers = torch.tensor(held, device="cpu")
        places.pointers.copy_(host_pointers.pin_memory() if out.is_cuda else host_pointers, non_blocking=True)
        places.seen = addresses
    if len(places.table) > 0:
        buffers = out, out if total is None else total, places.pointers, places.table
        source = getattr(tl, str(dtypes.pop()).removeprefix("torch."))
        _accumulate_kernel[(len(places.table),)](
            *buffers, SOURCE=source, ADD=total is not None, BLOCK=BLOCK, num_warps=8
        )
    for gradient, offset, length, fits in zip(gradients, places.offsets, places.lengths, by_kernel, strict=True):
        done = length // ALIGNED * ALIGNED if fits else 0
        if done < length:
            _move(out, gradient, offset, length, total, done)
