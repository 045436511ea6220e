"""Does the steps of Adam and LAMB over a flat fp32 buffer with NVIDIA Apex's FusedAdam and FusedLAMB.

Both call Apex's multi-tensor kernels (csrc/multi_tensor_adam.cu and csrc/multi_tensor_lamb.cu) on views of the buffer,
once for each weight decay. Their formulas are those of kernels/adam.py and kernels/lamb.py: decoupled weight decay,
epsilon outside the root, a ratio of 1 if a norm is zero. What differs:

    gradient     Apex reads fp32, so a scaled fp32 copy of it is made first: 4 bytes per element, until the step is done
    clipping     done here, by ``factor``; FusedLAMB's own is never in effect
    LAMB         ratios have no bounds, and a tensor must be whole: norms and update are one call
    arithmetic   compiled with --use_fast_math, so results are not equal bit for bit
    beta2        rounded to fp32 before it is subtracted from 1, so v gets 1.3e-5 less of g² at 0.999

FusedLAMB adapts the tensors that have weight decay, or, with ``use_nvlamb``, all. Here ``Piece.row`` decides, as in
kernels/lamb.py, and ``use_nvlamb`` is set for those tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.adam import Moments
from kernels.apex import extension
from kernels.flat import Flat, Layout, Piece, check, check_all, cut
from kernels.lamb import trust_ratios

CHUNK = 2048 * 32  # elements per block, as in apex/multi_tensor_apply/__init__.py
DECOUPLED = 1  # ADAM_MODE_1 and MOMENT_MODE_1: weight decay is not part of the gradient
AVERAGED = 1  # grad_averaging: m gets (1 - beta1) g


def adam_update(
    flat: Flat, gradient: Tensor, layout: Layout, moments: Moments, step: int, rate: float, factor: Tensor
) -> None:
    """Do what ``kernels.adam.adam_update`` does, with Apex's FusedAdam, on a GPU.

    Raises UnavailableError if Apex is missing, and ValueError if ``step`` is below 1 or a buffer does not fit.
    """
    amp, scaled = _start(flat, gradient, layout, moments, step, factor)
    for (decay, _), pieces in _groups(layout).items():
        parts = _parts((scaled, *flat[:3]), pieces)
        constants = rate, moments.beta1, moments.beta2, moments.epsilon, step, DECOUPLED, moments.bias_correction
        amp.multi_tensor_adam(CHUNK, _flag(flat), parts, *constants, decay)
    _round(amp, flat, layout)


def lamb_update(
    flat: Flat, gradient: Tensor, layout: Layout, moments: Moments, step: int, rate: float, factor: Tensor
) -> dict[int, Tensor]:
    """Do a whole LAMB step with Apex's FusedLAMB, on a GPU; return each adapted tensor's trust ratio, () fp32, by row.

    The arguments are those of ``kernels.lamb.lamb_begin``. Raises UnavailableError if Apex is missing, and ValueError
    if the ratios have bounds, an adapted tensor is not whole, ``step`` is below 1, or a buffer does not fit.
    """
    if moments.bounded:
        raise ValueError(f"trust ratios are bounded by {moments.lower} and {moments.upper}; FusedLAMB has no bounds")
    if cut_up := [piece for piece in layout.pieces if piece.row >= 0 and not piece.whole]:
        raise ValueError(f"{cut_up[0]} is part of a tensor; FusedLAMB needs whole ones")
    amp, scaled = _start(flat, gradient, layout, moments, step, factor)
    unclipped = torch.zeros_like(factor), 1.0  # the global norm, and the largest one allowed
    ratios: dict[int, Tensor] = {}
    for (decay, adapted), pieces in _groups(layout).items():
        parts = _parts((scaled, *flat[:3]), pieces)
        weights = _norms(amp, parts[1], flat) if adapted else None
        constants = rate, moments.beta1, moments.beta2, moments.epsilon, step, moments.bias_correction, decay
        amp.multi_tensor_lamb(CHUNK, _flag(flat), parts, *constants, AVERAGED, DECOUPLED, *unclipped, adapted)
        if weights is not None:  # the kernel left the directions in the gradient's place
            both = torch.stack([weights, _norms(amp, parts[0], flat)], 1)  # (tensors, 2)
            found = trust_ratios(both.square(), moments).unbind()
            ratios |= dict(zip((piece.row for piece in pieces), found, strict=True))
    _round(amp, flat, layout)
    return ratios


def _start(
    flat: Flat, gradient: Tensor, layout: Layout, moments: Moments, step: int, factor: Tensor
) -> tuple[Any, Tensor]:
    """Check the arguments; return Apex's extension, and the gradient times ``factor`` as a new fp32 tensor."""
    check_all(flat, layout)
    check(gradient, layout, "gradient")
    moments.corrections(step)
    return extension("amp_C"), gradient.to(torch.float32, copy=True).mul_(factor)


def _groups(layout: Layout) -> dict[tuple[float, bool], list[Piece]]:
    """The pieces by weight decay and by whether LAMB adapts them: Apex takes one value of each per call."""
    groups: dict[tuple[float, bool], list[Piece]] = {}
    for piece in layout.pieces:
        groups.setdefault((piece.decay, piece.row >= 0), []).append(piece)
    return groups


def _parts(buffers: Sequence[Tensor], pieces: Sequence[Piece]) -> list[list[Tensor]]:
    """The pieces of each buffer, as Apex's lists of tensors."""
    return [[cut(buffer, piece) for piece in pieces] for buffer in buffers]


def _flag(flat: Flat) -> Tensor:
    """The flag that Apex's kernels set if a value is not finite. It is not read: the engine checks before the step."""
    return torch.zeros(1, dtype=torch.int32, device=flat.master.device)


def _norms(amp: Any, tensors: list[Tensor], flat: Flat) -> Tensor:
    """The L2 norm of each tensor, (tensors,) fp32."""
    norms: Tensor = amp.multi_tensor_l2norm(CHUNK, _flag(flat), [tensors], True)[1]
    return norms


def _round(amp: Any, flat: Flat, layout: Layout) -> None:
    """Write the weights to the copy, rounded, if there is one."""
    if flat.copy is not None and layout.pieces:
        amp.multi_tensor_scale(CHUNK, _flag(flat), _parts((flat.master, flat.copy), layout.pieces), 1.0)
