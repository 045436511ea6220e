"""Dropout whose mask is a pure function of an element's identity, not of the state of a random generator.

An element is identified by (run seed, optimizer step, sample number, position, site, head, column). So the
mask does not depend on how a global batch is cut into micro-batches and ranks, and backward or a recomputed
forward generates it again instead of storing it.

The mask is hashed in three stages, from strong and rare to cheap and frequent. All use wrap-around integer
arithmetic with logical right shifts, so a GPU kernel can repeat the last two in uint32 bit for bit:

1. ``token_keys`` runs once per micro-batch. It hashes (seed, step, sample, position) to 64 bits per token with
   the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
   2014, figure 17), chained: h = mix64((h ^ part) + GAMMA).
2. Each token and site gets a row key (a, b): a = mix32(key[0] + site * STEP_A), b = mix32(key[1] + site *
   STEP_B). mix32 is C. Wellons' ``lowbias32`` ("Prospecting for hash functions", 2018). In attention, each head
   has its own row, with the site ``site + head * HEAD``.
3. Columns 4j to 4j + 3 share two words. Each is mix32 of j * STEP_A + a, with b added after the first
   multiplication; the second word uses OTHER as the last multiplier. The low half of word i decides column
   4j + 2i, the high half decides the next column. An element is kept if its half, read as a signed 16-bit
   number, is at least round(p * 65536) - 32768.

So p is quantized to 1/65536. The scale 1 / (1 - p) uses the quantized p, so the expectation is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import tl, triton

HEAD = 1 << 16  # the step between the sites of attention's heads; all other sites are below it
HEAD_SITE = tl.constexpr(HEAD)  # the same, for kernels

_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)  # constants are signed because torch's integers are
_MIX64 = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_MIX32 = (0x7FEB352D, 0x846CA68B - (1 << 32))
# The multiplier for the second word, from Wellons' ``triple32``. Over all h, for p from 0.1 to 0.5, the frequency of
# any pattern of four columns is within 1e-3 of its expected value. For smaller p, the frequency of dropping all four
# is further from p^4, but the frequency of dropping a pair is not.
_OTHER = 0xAC4C1B51 - (1 << 32)
_STEP_A = 0x9E3779B9 - (1 << 32)
_STEP_B = 0x85EBCA6B - (1 << 32)


def token_keys(seed: int, step: int, samples: Tensor, positions: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The dropout keys of a micro-batch's tokens in one optimizer step.

    ``samples`` (B,) int64 are sample numbers in the run's order. ``positions`` (T,) int64 count from 0 in each
    sequence. ``cu_seqlens`` (B + 1,) int32 are cumulative lengths. Returns (T, 2) int32.
    """
    run = torch.full((1,), _wrap(seed, 64), dtype=torch.int64, device=samples.device)
    run = _mix64(_mix64(run.add_(_GAMMA)).bitwise_xor_(step).add_(_GAMMA))  # (1,)
    sequence = _mix64((run ^ samples).add_(_GAMMA))  # (B,)
    token = torch.repeat_interleave(sequence, cu_seqlens.diff(), output_size=positions.numel())  # (T,)
    return _mix64((token ^ positions).add_(_GAMMA)).view(torch.int32).view(-1, 2)  # (T, 2)


def keep(keys: Tensor, site: int | Tensor, columns: int, p: float) -> Tensor:
    """The mask, (..., columns) bool, for rows with ``keys`` (..., 2) int32: True where an element is kept.

    ``site`` is an int, or an int32 tensor that broadcasts against the rows, such as attention's sites per head.
    """
    return _halves(keys, site, columns) >= threshold(p) - 32768


def multiplier(keys: Tensor, site: int | Tensor, columns: int, p: float, dtype: torch.dtype) -> Tensor:
    """The factors that ``apply`` uses, (..., columns): 0 where dropped, 1 / (1 - p) where kept."""
    cut = threshold(p)
    # An in-place comparison stays int16. On CPUs, torch vectorizes it, but not a comparison that returns bools.
    kept = _halves(keys, site, columns).ge_(cut - 32768)
    return kept.to(dtype).mul_(65536 / (65536 - cut))


def apply(x: Tensor, keys: Tensor | None, site: int | Tensor, p: float) -> Tensor:
    """Apply dropout to ``x`` (..., C) with ``keys`` (..., 2) int32. Return ``x`` if keys is None or p is 0."""
    if keys is None or p == 0:
        return x
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x * multiplier(keys, site, x.shape[-1], p, wide)).to(x.dtype)


def check_keys(keys: Tensor | None, tokens: int) -> None:
    """Raise ValueError unless ``keys`` is None or (tokens, 2) int32."""
    if keys is not None and (keys.shape != (tokens, 2) or keys.dtype != torch.int32):
        raise ValueError(f"dropout keys are {keys.dtype} {tuple(keys.shape)}; they must be int32 ({tokens}, 2)")


def threshold(p: float) -> int:
    """``p`` as a number of 65536ths. Raises ValueError if ``p`` is negative or would drop everything."""
    cut = round(p * 65536)
    if not 0 <= cut < 65536:
        raise ValueError(f"dropout is {p}; it must be at least 0 and below 1")
    return cut


@triton.jit
def row_keys(
    keys,  # (T, 2) int32
    rows,  # row numbers below T, of any shape
    mask,  # like rows: where it is False, nothing is read
    site,  # int: the site, including a head's offset
):
    """Stage 2 in a kernel. Returns (a, b), uint32, in the shape of ``rows``."""
    a = tl.load(keys + rows * 2, mask=mask, other=0).to(tl.uint32, bitcast=True)
    b = tl.load(keys + rows * 2 + 1, mask=mask, other=0).to(tl.uint32, bitcast=True)
    site = (rows * 0 + site).to(tl.uint32)  # a tensor, even if the launcher made it a constant
    return mix32(a + site * 0x9E3779B9), mix32(b + site * 0x85EBCA6B)


@triton.jit
def kept(
    a,  # (M,) uint32, from row_keys
    b,  # (M,) uint32, from row_keys
    first,  # the first column, a multiple of four
    cut,  # int: (threshold(p) - 32768) * 65536
    COLUMNS: tl.constexpr,  # their number: a power of two, 4 or more
):
    """Stage 3 in a kernel. Returns (M, COLUMNS), True where an element is kept."""
    return numbers(a, b, first, COLUMNS).reshape(a.shape[0], COLUMNS) >= cut


@triton.jit
def kept_spread(a, b, first, cut, COLUMNS: tl.constexpr):
    """Do the same as ``kept`` for the columns ``first + spread(COLUMNS)``, in that order."""
    own = numbers(a, b, first, COLUMNS).reshape(a.shape[0], COLUMNS // 16, 4, 2, 2)
    return tl.permute(own, 0, 1, 3, 2, 4).reshape(a.shape[0], COLUMNS) >= cut


@triton.jit
def spread(COLUMNS: tl.constexpr):
    """A permutation of 0 to COLUMNS - 1, (COLUMNS,) int32, that gives each thread four columns with one hash.

    Within each group of sixteen, columns 4j to 4j + 3 are at places 2j, 2j + 1, 2j + 8 and 2j + 9, which one thread
    holds in a tensor core's product.
    """
    at = tl.arange(0, COLUMNS)
    return (at & -16) + (at & 6) * 2 + (at & 8) // 4 + (at & 1)


@triton.jit
def numbers(a, b, first, COLUMNS: tl.constexpr):
    """Stage 3's numbers to compare with ``cut``, (M, COLUMNS / 4, 2, 2) int32: halves above, 16 bits of noise below."""
    fours = (first // 4 + tl.arange(0, COLUMNS // 4)).to(tl.uint32) * 0x9E3779B9
    h = fours[None, :] + a[:, None]
    h = (h ^ (h >> 16)) * 0x7FEB352D + b[:, None]
    h = h ^ (h >> 15)  # (M, COLUMNS / 4)
    words = tl.join(h * 0x846CA68B, h * 0xAC4C1B51)
    # The last step of mix32 changes only the low half. Do it while shifting that half to the top.
    return tl.join(words ^ (words << 16), words).to(tl.int32, bitcast=True)


@triton.jit
def mix32(h):
    """Return lowbias32 of ``h``, uint32."""
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


def kernel_constants(keys: Tensor | None, p: float) -> tuple[int, float]:
    """Return (``cut`` for ``kept``, the scale of kept elements). No keys or p = 0 keeps everything, unscaled."""
    cut = 0 if keys is None else threshold(p)
    return (cut - 32768) * 65536, 65536 / (65536 - cut)


def _halves(keys: Tensor, site: int | Tensor, columns: int) -> Tensor:
    """Stages 2 and 3. Returns (..., columns) int16, uniform over all 65,536 values."""
    if keys.dtype != torch.int32 or keys.shape[-1] != 2:
        raise ValueError(f"dropout keys are {keys.dtype} {tuple(keys.shape)}; they must be int32 (..., 2)")
    steps = (_STEP_A, _STEP_B)
    shifts = [site * s if isinstance(site, Tensor) else _wrap(site * s, 32) for s in steps]
    a = _mix32(keys[..., 0] + shifts[0])
    b = _mix32(keys[..., 1] + shifts[1])
    fours = torch.arange((columns + 3) // 4, dtype=torch.int32, device=keys.device).mul_(_STEP_A)
    h = _half_mixed(a[..., None] + fours, b[..., None])  # (..., ceil(columns / 4))
    words = _xor_shift(torch.stack([h * _MIX32[1], h * _OTHER], -1), 16, 32)  # (..., ceil(columns / 4), 2)
    return words.flatten(-2).view(torch.int16)[..., :columns]  # a word's low half comes first


def _mix32(h: Tensor) -> Tensor:
    """Apply lowbias32 to ``h``, int32, in place."""
    return _xor_shift(_half_mixed(h, None).mul_(_MIX32[1]), 16, 32)


def _half_mixed(h: Tensor, key: Tensor | None) -> Tensor:
    """The steps of lowbias32 before the last multiplication, with ``key`` added after the first one."""
    h = _xor_shift(h, 16, 32).mul_(_MIX32[0])
    if key is not None:
        h.add_(key)
    return _xor_shift(h, 15, 32)


def _mix64(h: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64 to ``h``, int64, in place."""
    h = _xor_shift(h, 30, 64).mul_(_MIX64[0])
    h = _xor_shift(h, 27, 64).mul_(_MIX64[1])
    return _xor_shift(h, 31, 64)


def _wrap(value: int, bits: int) -> int:
    """Return ``value`` wrapped to a signed number of ``bits`` bits."""
    half = 1 << (bits - 1)
    return (value + half) % (2 * half) - half


def _xor_shift(h: Tensor, by: int, bits: int) -> Tensor:
    """h ^= h >>> by, in place. Torch's shift copies the sign bit of signed numbers, so the copies are masked out."""
    return h.bitwise_xor_((h >> by).bitwise_and_((1 << (bits - by)) - 1))
