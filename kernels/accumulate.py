"""Adds many tensors' gradients into one flat buffer, in one launch that reads and writes everything once.

    out[place … place + n] ← gradient, rounded                    the first of several, or the only one
    out[place … place + n] ← total[place … place + n] + gradient  the next ones; ``total`` may be ``out``

Sums are fp32, whatever the dtypes. What does not come in eights would be read a number at a time, so PyTorch moves it:
up to 7 elements at a tensor's end, and a tensor whose place is no multiple of 8 or whose memory begins anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backend import fused, tl, triton

BLOCK = 4096  # elements of a program
ALIGNED, BYTES = 8, 16


@dataclass
class Places:
    """Where tensors lie in a flat buffer. Made by ``make_places``."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    end: int  # of the last of them: no buffer is shorter
    table: Tensor  # (U, 4) int64: tensor, its block, its place / ALIGNED, its length / ALIGNED
    pointers: Tensor  # (K,) int64, where the gradients are
    seen: list[int]  # what the pointers were made from: they go to the device only where they change


def make_places(offsets: Sequence[int], lengths: Sequence[int], device: torch.device) -> Places:
    """The table of tensors that begin at ``offsets`` and have so many elements."""
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
    """See above; no gradient is one of zeros."""
    for gradient, offset, length in zip(gradients, places.offsets, places.lengths, strict=True):
        _move(out, gradient, offset, length, total)


def _move(out: Tensor, gradient: Tensor | None, offset: int, length: int, total: Tensor | None, first: int = 0) -> None:
    """A tensor's elements from ``first`` on."""
    own = slice(offset + first, offset + length)
    value = torch.zeros((), device=out.device) if gradient is None else gradient.reshape(-1)[first:].float()
    out[own].copy_(value if total is None else total[own].float() + value)


@triton.jit
def _accumulate_kernel(
    out,  # (size,) fp32, fp16 or bf16
    total,  # (size,) fp32; not read without ADD
    pointers,  # (K,) int64; 0: no gradient, or one that PyTorch moves
    table,  # (U, 4) int64
    SOURCE: tl.constexpr,  # the gradients' dtype
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = table + tl.program_id(0) * 4
    address = tl.load(pointers + tl.load(row))
    start = tl.load(row + 1) * BLOCK
    at = start + tl.arange(0, BLOCK)
    mask = at < tl.load(row + 3) * 8  # so written, the compiler knows that eight elements are in it or none
    gradient = tl.multiple_of(address.to(tl.pointer_type(SOURCE)), 16)  # true of every address here, 0 among them
    value = tl.load(gradient + at, mask=mask & (address != 0), other=0.0).to(tl.float32)
    place = tl.load(row + 2) * 8 + at
    if ADD:
        value += tl.load(total + place, mask=mask)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)


def accumulate(out: Tensor, gradients: Sequence[Tensor | None], places: Places, total: Tensor | None = None) -> None:
    """Set ``out`` (size,) to ``total`` (size,) fp32, or to nothing, plus the gradients, contiguous and of one dtype.

    None is a gradient of zeros. What lies between the tensors is left as it is. Raises ValueError for buffers that are
    too short or not contiguous, and for gradients that are not as long as their places, or, where the kernel is to read
    them, not contiguous or of several dtypes.
    """
    for name, buffer in (("out", out), ("total", out if total is None else total)):
        if buffer.shape != out.shape or buffer.dim() != 1 or len(buffer) < places.end or not buffer.is_contiguous():
            seen = f"{name} is {tuple(buffer.shape)}, strides {buffer.stride()}"
            raise ValueError(f"{seen}; out and total must be contiguous, of one shape, and {places.end} long or more")
    by_triton = fused(out)
    given = [(g, length) for g, length in zip(gradients, places.lengths, strict=True) if g is not None]
    dtypes = {g.dtype for g, _ in given} or {out.dtype}
    fit = all(g.numel() == length and (g.is_contiguous() or not by_triton) for g, length in given)
    if not fit or (by_triton and len(dtypes) > 1):
        seen = f"gradients are of {sorted(map(str, dtypes))}"
        raise ValueError(f"{seen}; they must be contiguous, as long as their places, and of one dtype")
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
        told = torch.tensor(held, device="cpu")
        places.pointers.copy_(told.pin_memory() if out.is_cuda else told, non_blocking=True)
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
