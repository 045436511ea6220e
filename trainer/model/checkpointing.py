"""Activation checkpointing: forward keeps less, and backward computes the rest again.

Dropout is keyed (kernels/dropout.py), so the same bits come out again. With the Triton kernels, a layer of width D with
an MLP of 4 D keeps this many numbers per token, and 4 bytes for each head and 16 for its two LayerNorms:

    none   16 D  input, qkv (3 D), attention's output, first projection, LayerNorm's output, GELU's input and output
                 (4 D each), second projection
    cheap  11 D  all of these but LayerNorm's output and GELU's output
    full      D  input, and none of those bytes

A pre-LN layer keeps sums instead of the projections. It has two inputs, so "full" keeps 2 D. The PyTorch references
keep more, and "cheap" saves almost nothing there: they do not keep what it computes the two outputs from.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

Checkpointing = Literal["none", "cheap", "full"]


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of ``function``. Autograd keeps only the arguments, and calls it again in backward."""
    run = copy_context().run  # which kernels to use: on a GPU, backward has a thread of its own
    return checkpoint(run, function, *arguments, use_reentrant=False, preserve_rng_state=False)


def forgetting(value: Tensor, again: Callable[[], Tensor]) -> saved_tensors_hooks:
    """A context in which autograd keeps ``again`` instead of ``value``, and calls it in backward.

    ``again`` must return the same bits as ``value``, and not refer to it.
    """
    known = value.data_ptr(), value.shape  # autograd passes another object for the same memory
    run = copy_context().run

    def pack(saved: Tensor) -> Any:
        return again if (saved.data_ptr(), saved.shape) == known else saved

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return run(again)

    return saved_tensors_hooks(pack, unpack)
