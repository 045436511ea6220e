"""For backward passes that kernels compute: autograd sees no graph in them, and must not take them for constants."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Gradients = tuple[Tensor | None, ...]


def first_derivative_only(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """A ``backward`` whose gradients raise RuntimeError where they are differentiated once more.

    PyTorch's ``once_differentiable`` refuses only where a gradient that comes in is differentiable; that of a loss
    which is linear in the result is a constant, and the second derivative would lack a part in silence.
    """
    refusing = once_differentiable(backward)

    @wraps(backward)
    def wrapper(ctx: Any, *d_outs: Tensor | None) -> Gradients:
        if torch.is_grad_enabled():  # the gradients' own graph is asked for: create_graph=True
            d_outs = tuple(
                d.detach().requires_grad_() if d is not None and d.is_floating_point() else d for d in d_outs
            )
        return refusing(ctx, *d_outs)

    return wrapper
