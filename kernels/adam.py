"""Computes Adam's direction and the AdamW step over a flat fp32 buffer (Loshchilov & Hutter 2019, Algorithm 2).

    g ← factor · gradient
    m ← β₁ m + (1 - β₁) g          v ← β₂ v + (1 - β₂) g²
    u = m̂ / (√v̂ + ε)              m̂ = m / (1 - β₁ᵗ), v̂ = v / (1 - β₂ᵗ), or m, v without correction
    x ← x - η (u + λ x)

Without bias correction, this is the optimizer of google-research/bert. ``factor`` unscales and clips the
gradient. It is a () fp32 tensor on the device, so no step waits for the GPU. The kernel reads and writes
everything once: 28 bytes per element with an fp16 gradient and an fp16 copy. All arithmetic is fp32. The
square root and the quotient use the GPU's fast instructions, which err by at most two units in the last
place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from kernels.backend import fused, tl, triton
from kernels.flat import BLOCKS, WARPS, Flat, Layout, Units, check, check_all, cut, edges, run


@dataclass(frozen=True)
class Moments:
    """The constants of the moving averages and of LAMB's trust ratios. Its methods count steps from 1."""

    beta1: float
    beta2: float
    epsilon: float
    bias_correction: bool
    lower: float = 0.0  # bounds of the trust ratios: min_coeff and max_coeff of DeepSpeed's FusedLamb
    upper: float = math.inf

    @property
    def bounded(self) -> bool:
        """Whether the trust ratios have a bound that can take effect."""
        return self.lower > 0 or self.upper < math.inf

    def corrections(self, step: int) -> tuple[float, float]:
        """The divisors of m and v. Raises ValueError if ``step`` is below 1."""
        if step < 1:
            raise ValueError(f"step is {step}; it must be 1 or more")
        return (1 - self.beta1**step, 1 - self.beta2**step) if self.bias_correction else (1.0, 1.0)

    def constants(self, step: int) -> tuple[float, ...]:
        """The kernels' constants: weights of m and g, weights of v and g², 1 / corrections, epsilon."""
        correct1, correct2 = self.corrections(step)
        weights = self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2
        return *weights, 1 / correct1, 1 / correct2, self.epsilon


def adam_direction(gradient: Tensor, mean: Tensor, square: Tensor, moments: Moments, step: int) -> Tensor:
    """Update ``mean`` and ``square`` in place and return the direction u.

    All tensors are fp32 and have one shape. Raises ValueError if ``step`` is below 1.
    """
    moments.corrections(step)
    mean.mul_(moments.beta1).add_(gradient, alpha=1 - moments.beta1)
    square.mul_(moments.beta2).addcmul_(gradient, gradient, value=1 - moments.beta2)
    return direction_of(mean, square, moments, step)


def direction_of(mean: Tensor, square: Tensor, moments: Moments, step: int) -> Tensor:
    """The direction u, from moments that already include this step's gradient."""
    correct1, correct2 = moments.corrections(step)
    root = (square / correct2).sqrt_().add_(moments.epsilon)
    return mean.div(root).div_(correct1)


def adam_step(weight: Tensor, direction: Tensor, rate: float, decay: float) -> None:
    """Move ``weight`` in place: ``x ← x - η (u + λ x)``. Both tensors are fp32 and have one shape."""
    weight.sub_(direction.add(weight, alpha=decay), alpha=rate)


def adam_update_reference(
    flat: Flat, gradient: Tensor, layout: Layout, moments: Moments, step: int, rate: float, factor: Tensor
) -> None:
    """Do what ``adam_update`` does, in plain PyTorch."""
    for piece in layout.pieces:
        weight, mean, square = (cut(buffer, piece) for buffer in flat[:3])
        direction = adam_direction(cut(gradient, piece).float() * factor, mean, square, moments, step)
        adam_step(weight, direction, rate, piece.decay)
        if flat.copy is not None:
            cut(flat.copy, piece).copy_(weight)


@triton.jit
def new_moments(g, m, v, constants):
    """m and v after one more gradient. ``constants`` is ``Moments.constants``."""
    return m * constants[0] + g * constants[1], v * constants[2] + g * g * constants[3]


@triton.jit
def new_direction(m, v, constants):
    """The direction u, from moments that already include this step's gradient."""
    return m * constants[4] / (tl.sqrt(v * constants[5]) + constants[6])


@triton.jit
def _elements(master, gradient, mean, square, copy, at, mask, factor, rate, decay, constants, COPY: tl.constexpr):
    """Do Adam's step for the elements at ``at``."""
    g = tl.load(gradient + at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32) * factor
    m = tl.load(mean + at, mask=mask, other=0.0, eviction_policy="evict_first")
    v = tl.load(square + at, mask=mask, other=0.0, eviction_policy="evict_first")
    x = tl.load(master + at, mask=mask, other=0.0, eviction_policy="evict_first")
    m, v = new_moments(g, m, v, constants)
    x -= rate * (new_direction(m, v, constants) + decay * x)
    tl.store(mean + at, m, mask=mask, eviction_policy="evict_first")
    tl.store(square + at, v, mask=mask, eviction_policy="evict_first")
    tl.store(master + at, x, mask=mask, eviction_policy="evict_first")
    if COPY:
        tl.store(copy + at, x.to(copy.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def _adam_kernel(
    master,  # (size,) fp32, like mean and square
    gradient,  # (size,) fp32, fp16 or bf16
    mean,
    square,
    copy,  # (size,) fp16 or bf16; not used without COPY
    table,  # (U, COLUMNS) int64
    decays,  # (U,) fp32
    factor,  # () fp32
    rate,
    constants,  # Moments.constants
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Go from the last unit to the first: the gradient's square sum has left the last units in the cache.
    unit = tl.num_programs(0) - 1 - tl.program_id(0)
    start, length = run(table, unit)
    decay, by = tl.load(decays + unit), tl.load(factor)
    for first in range(0, length, BLOCK):
        at = first + tl.arange(0, BLOCK)
        _elements(
            master, gradient, mean, square, copy, start + at, at < length, by, rate, decay, constants, COPY
        )  # fmt: skip
    at, mask = edges(table, unit)
    _elements(master, gradient, mean, square, copy, at, mask, by, rate, decay, constants, COPY)


def step_units(
    flat: Flat,
    gradient: Tensor,
    layout: Layout,
    units: Units,
    constants: tuple[float, ...],
    rate: float,
    factor: Tensor,
) -> None:
    """Do Adam's step for some units of a layout. It runs on Triton only."""
    if len(units) == 0:
        return
    copy = flat.master if flat.copy is None else flat.copy
    buffers = flat.master, gradient, flat.mean, flat.square, copy, units.table, units.decays, factor
    shape = {"BLOCK": layout.unit // BLOCKS, "num_warps": WARPS}
    _adam_kernel[(len(units),)](*buffers, rate, constants, COPY=flat.copy is not None, **shape)


def adam_update(
    flat: Flat, gradient: Tensor, layout: Layout, moments: Moments, step: int, rate: float, factor: Tensor
) -> None:
    """Do one AdamW step over all pieces of a flat buffer, in place. ``flat.copy`` gets the rounded weights.

    ``gradient`` (size,) is fp32, fp16 or bf16. The step uses it times ``factor``, () fp32, and does not change it.
    Raises ValueError if ``step`` is below 1 or a buffer does not fit the layout.
    """
    check_all(flat, layout)
    check(gradient, layout, "gradient")
    if not (fused(flat.master) and fused(gradient)):
        adam_update_reference(flat, gradient, layout, moments, step, rate, factor)
        return
    step_units(flat, gradient, layout, layout.every, moments.constants(step), rate, factor)
