"""Decides which implementation of the kernels runs, and says why. Only this file imports Triton.

Every operation in this package has two implementations: a plain PyTorch reference, which is its
specification and runs on CPUs, and Triton kernels, which run on GPUs. Each call asks this file which one
to run. Nothing falls back silently.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

CHOICES = ("auto", "triton", "torch")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # what the Triton kernels take

_choice: ContextVar[str] = ContextVar("kernels", default="auto")


class UnavailableError(RuntimeError):
    """The requested kernels cannot run here. The message says what to change."""


@dataclass(frozen=True)
class Backend:
    """The implementation that this process uses. It is logged once and exported as metric labels."""

    name: str  # "triton" or "torch"
    reason: str  # why this implementation was chosen


def resolve(device: str) -> Backend:
    """The backend of every function in this package for tensors on ``device``, "cuda" or "cpu".

    Raises UnavailableError if Triton is requested, or a GPU needs it, but cannot run.
    """
    name = _name(device)
    if name == "torch":
        reason = "requested" if _choice.get() == "torch" else f"the kernels are plain PyTorch on {device}"
    else:
        reason = f"Triton {triton.__version__}, {'in its interpreter' if _interpreted() else 'compiled'}"
    return Backend(name, reason)


@contextmanager
def using(choice: str) -> Iterator[None]:
    """Use the kernels named by ``choice``, one of CHOICES, inside this context. Raises ValueError for any other."""
    if choice not in CHOICES:
        raise ValueError(f"kernels is {choice!r}; it must be one of {', '.join(CHOICES)}")
    token = _choice.set(choice)
    try:
        yield
    finally:
        _choice.reset(token)


def fused(x: Tensor) -> bool:
    """Whether ``x`` goes to a Triton kernel.

    Raises UnavailableError as ``resolve`` does, and TypeError if the kernels do not take the dtype.
    """
    if _name(x.device.type) == "torch":
        return False
    if x.dtype not in DTYPES:
        raise TypeError(f"the Triton kernels take fp16, bf16 and fp32, not {x.dtype}: set kernels to torch for it")
    return True


def _import_triton() -> tuple[Any, Any, str]:
    """Import Triton. Returns (triton, triton.language, "").

    If Triton cannot be used, returns stand-ins that only let the kernel files import, and the error. A broken or
    renamed Triton can fail in more ways than ImportError, so this also looks up the names that the kernels use.
    """
    try:
        import triton
        import triton.language as tl

        needed = (triton.jit, triton.cdiv, triton.next_power_of_2, tl.constexpr, tl.dot, tl.erf, tl.exp2, tl.rsqrt)
        assert needed
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        absent = SimpleNamespace(jit=lambda function: function), SimpleNamespace(constexpr=lambda value: value)
        return *absent, f"{type(error).__name__}: {error}"
    return triton, tl, ""


triton, tl, TRITON_MISSING = _import_triton()


def _name(device: str) -> str:
    choice = _choice.get()
    if choice == "torch" or (choice == "auto" and device != "cuda"):
        return "torch"
    if TRITON_MISSING:
        raise UnavailableError(
            f"the kernels need Triton on a GPU ({TRITON_MISSING}): install Triton, or set kernels to torch"
        )
    if device != "cuda" and not _interpreted():
        raise UnavailableError(f"Triton does not run on {device}: set kernels to auto or torch, or TRITON_INTERPRET=1")
    return "triton"


def _interpreted() -> bool:
    return not TRITON_MISSING and bool(triton.knobs.runtime.interpret)
