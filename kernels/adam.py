"""Adam's direction over a flat fp32 buffer, and the AdamW step (Loshchilov & Hutter 2019, Algorithm 2).

    m ← β₁ m + (1 - β₁) g          v ← β₂ v + (1 - β₂) g²
    u = m̂ / (√v̂ + ε)              m̂ = m / (1 - β₁ᵗ), v̂ = v / (1 - β₂ᵗ), or m, v without correction
    x ← x - η (u + λ x)

Without the bias correction this is the optimizer of google-research/bert. Plain PyTorch: it is the
reference and the CPU path.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """The constants of the moving averages; ``step`` counts from 1."""

    beta1: float
    beta2: float
    epsilon: float
    bias_correction: bool


def adam_direction(gradient: Tensor, mean: Tensor, square: Tensor, moments: Moments, step: int) -> Tensor:
    """Update ``mean`` and ``square`` in place and return the direction u.

    All tensors fp32 of one shape. Raises ValueError when ``step`` is below 1.
    """
    if step < 1:
        raise ValueError(f"step is {step}: the first step is 1")
    mean.mul_(moments.beta1).add_(gradient, alpha=1 - moments.beta1)
    square.mul_(moments.beta2).addcmul_(gradient, gradient, value=1 - moments.beta2)
    correct1 = 1 - moments.beta1**step if moments.bias_correction else 1.0
    correct2 = 1 - moments.beta2**step if moments.bias_correction else 1.0
    root = (square / correct2).sqrt_().add_(moments.epsilon)
    return mean.div(root).div_(correct1)


def adam_step(weight: Tensor, direction: Tensor, rate: float, decay: float) -> None:
    """Move ``weight`` in place: ``x ← x - η (u + λ x)``. fp32, one shape."""
    weight.sub_(direction.add(weight, alpha=decay), alpha=rate)
