"""Gradient clipping by the global norm."""

from __future__ import annotations

from torch import Tensor


def clipping_factor(square_sum: Tensor, most: float) -> Tensor:
    """The factor, at most 1, that scales gradients down to the norm ``most``: () like ``square_sum``.

    ``square_sum`` is the sum of the squares of all gradients (Pascanu, Mikolov and Bengio, "On the Difficulty of
    Training Recurrent Neural Networks", 2013, algorithm 1).
    """
    return (most / square_sum.sqrt()).clamp(max=1.0)
