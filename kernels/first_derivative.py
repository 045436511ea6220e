"""Makes second derivatives fail for backward passes that kernels compute.

Autograd sees no graph inside a kernel and must not mistake its gradients for constants.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Gradients = tuple[Tensor | None, ...]


def first_derivative_only(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Wrap a ``backward`` so that differentiating its gradients raises RuntimeError.

    PyTorch's ``once_differentiable`` raises only if an incoming gradient is differentiable. If the loss is linear in
    the result, the incoming gradient is a constant, and the second derivative would silently miss a term.
    """
    refusing = once_differentiable(backward)

    @wraps(backward)
    def wrapper(ctx: Any, *d_outs: Tensor | None) -> Gradients:
        if torch.is_grad_enabled():  # the caller wants the graph of the gradients: create_graph=True
            d_outs = tuple(
                d.detach().requires_grad_() if d is not None and d.is_floating_point() else d for d in d_outs
            )
        return refusing(ctx, *d_outs)

    return wrapper
