"""Compiles every kernel for an H100, without one: the launchers run, the launches do not.

A script, since the tests' own process has Triton interpret the kernels. Prints a line a kernel.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch

from kernels import backend, dropout
from kernels.adam import Moments, adam_update
from kernels.attention import attention
from kernels.backend import triton
from kernels.bias_gelu import bias_gelu
from kernels.cross_entropy import cross_entropy
from kernels.embedding import embed
from kernels.flat import Flat, Piece, gradient_square_sum, make_layout
from kernels.lamb import lamb_begin, lamb_finish, trust_ratios
from kernels.layer_norm import dropout_add_layer_norm, layer_norm

HALF = torch.float16


def pretend() -> None:
    """Compile for compute capability 9.0 and launch nothing; unwritten outputs are whatever they are."""
    from triton.backends.compiler import GPUTarget

    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(target)
    triton.knobs.runtime.interpret = True  # so that tensors of the CPU pass; the kernels are made already

    def compile_only(function: Any, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> Any:
            print(function.fn.__name__, flush=True)
            return function.warmup(*arguments, grid=grid, **options)

        return launch

    triton.runtime.jit.JITFunction.__getitem__ = compile_only


def draw(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def run_attention() -> None:
    for longest, size, dtype in (
        (16, 32, HALF),
        (128, 64, torch.bfloat16),
        (512, 64, HALF),
        (128, 64, torch.float32),
    ):
        cu_seqlens = torch.tensor([0, longest], dtype=torch.int32)
        keys = dropout.token_keys(0, 1, torch.zeros(1, dtype=torch.int64), torch.arange(longest), cu_seqlens)
        out = attention(draw(longest, 3, 4, size, dtype=dtype), cu_seqlens, longest, dropout_p=0.1, keys=keys, site=1)
        torch.autograd.backward(out.float().sum())


def run_rows() -> None:
    keys = torch.zeros(8, 2, dtype=torch.int32)
    x, residual, weight, bias = draw(8, 1024), draw(8, 1024), draw(1024), draw(1024)
    torch.autograd.backward(layer_norm(x, weight, bias, 1e-12).float().sum())
    out = dropout_add_layer_norm(x, residual, weight, bias, 1e-12, dropout_p=0.1, keys=keys, site=1)
    torch.autograd.backward(out.float().sum())
    for form in ("none", "tanh"):
        torch.autograd.backward(bias_gelu(draw(8, 4096), draw(4096), form).float().sum())
    index = torch.zeros(8, dtype=torch.int64)
    tables = draw(100, 1024), draw(2, 1024), draw(512, 1024)
    out = embed(index, index, index, *tables, weight, bias, 1e-12, dropout_p=0.1, keys=keys, site=1)
    torch.autograd.backward(out.float().sum())
    loss, _ = cross_entropy(draw(8, 30528), index, 30522)
    torch.autograd.backward(loss)


def run_optimizers() -> None:
    size = 200_000
    pieces = [
        Piece(0, 100_000, 0.01, 0, True),
        Piece(100_000, 50_000, 0.01, 1, False),
        Piece(150_000, 9, 0.0, -1, True),
    ]
    layout = make_layout(pieces, size, torch.device("cpu"))
    flat, factor = Flat(*(torch.ones(size) for _ in range(3))), torch.ones(())
    moments = Moments(0.9, 0.999, 1e-6, True)
    for dtype in (torch.float32, HALF):
        gradient = torch.ones(size, dtype=dtype)
        gradient_square_sum(gradient, layout)
        adam_update(flat, gradient, layout, moments, 1, 1e-3, factor)
        sums = torch.ones(2, 2)
        lamb_begin(flat, gradient, layout, moments, 1, 1e-3, factor, sums)
        lamb_finish(flat, layout, moments, 1, 1e-3, trust_ratios(sums))


if __name__ == "__main__":
    pretend()
    with backend.using("triton"):
        {"attention": run_attention, "rows": run_rows, "optimizers": run_optimizers}[sys.argv[1]]()
