"""Compiles every kernel for an H100, on a machine without one: the launching code runs, but nothing is launched.

This is a script because the tests' own process has Triton interpret the kernels. It prints a line for each kernel.
On a GPU, ``compute-sanitizer --tool racecheck python -m tests.tools.compile_kernels --launch`` launches them and
looks for races.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from kernels import backend, dropout
from kernels.accumulate import accumulate, make_places
from kernels.adam import Moments, adam_update
from kernels.attention import attention
from kernels.backend import triton
from kernels.bias_gelu import bias_gelu
from kernels.cross_entropy import cross_entropy
from kernels.embedding import embed, embed_sum
from kernels.flat import Flat, Piece, gradient_square_sum, make_layout
from kernels.lamb import lamb_begin, lamb_finish, trust_ratios
from kernels.layer_norm import dropout_add_layer_norm, layer_norm

HALF = torch.float16


def pretend(part: str) -> None:
    """Compile for compute capability 9.0 and launch nothing; the outputs stay unwritten."""
    from triton.backends.compiler import GPUTarget

    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(target)
    triton.knobs.runtime.interpret = True  # so that CPU tensors are accepted; the kernels exist already

    def compile_only(function: Any, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> Any:
            print(f"{part} {function.fn.__name__}\n", end="", flush=True)  # at once, because parts share the output
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
        (16, 16, torch.float32),  # a single launch handles all sizes
    ):
        cu_seqlens = torch.tensor([0, longest], dtype=torch.int32)
        keys = dropout.token_keys(0, 1, torch.zeros(1, dtype=torch.int64), torch.arange(longest), cu_seqlens)
        out = attention(draw(longest, 3, 4, size, dtype=dtype), cu_seqlens, longest, dropout_p=0.1, keys=keys, site=1)
        torch.autograd.backward(out.float().sum())


def run_rows() -> None:
    keys = torch.zeros(8, 2, dtype=torch.int32)
    x, residual, weight, bias = draw(8, 1024), draw(8, 1024), draw(1024), draw(1024)
    torch.autograd.backward(layer_norm(x, weight, bias, 1e-12).float().sum())
    b = draw(1024)
    outs = dropout_add_layer_norm(x, residual, weight, bias, 1e-12, x_bias=b, dropout_p=0.1, keys=keys, site=1)
    torch.autograd.backward((outs[0] + 2 * outs[1]).float().sum())
    outs = dropout_add_layer_norm(
        x, residual, weight, bias, 1e-12, x_bias=b, dropout_p=0.1, keys=keys, site=1, return_sum=True
    )
    torch.autograd.backward((outs[0] + 2 * outs[1]).float().sum())
    for form in ("none", "tanh"):
        torch.autograd.backward(bias_gelu(draw(8, 4096), draw(4096), form).float().sum())
    index = torch.zeros(8, dtype=torch.int64)
    tables = draw(100, 1024), draw(2, 1024), draw(512, 1024)
    out = embed(index, index, index, *tables, weight, bias, 1e-12, dropout_p=0.1, keys=keys, site=1)
    torch.autograd.backward(out.float().sum())
    torch.autograd.backward(embed_sum((index, index, index), tables).float().sum())
    loss, _ = cross_entropy(draw(8, 30528), index, 30522)
    torch.autograd.backward(loss)


def run_optimizers() -> None:
    size = 200_000
    pieces = [
        Piece(0, 100_000, 0.01, 0, True),
        Piece(100_000, 50_000, 0.01, 1, False),
        Piece(150_000, 9, 0.0, -1, True),
        Piece(160_000, 9_000, 0.01, 2, True),  # small enough for one launch, which takes seconds to compile
    ]
    factor, plain = torch.ones(()), Moments(0.9, 0.999, 1e-6, True)
    for dtype, held, moments in (
        (torch.float32, pieces[:3], plain),
        (HALF, pieces, replace(plain, lower=0.01, upper=0.3)),
    ):
        # as many programs as an H100 holds: the one-launch kernel is compiled for their number
        layout = replace(make_layout(held, size, torch.get_default_device()), programs=264)
        gradient = torch.ones(size, dtype=dtype)
        flat = Flat(torch.ones(size), torch.ones(size), torch.ones(size), gradient if dtype == HALF else None)
        gradient_square_sum(gradient, layout)
        places = make_places([0], [size], torch.get_default_device())
        accumulate(flat.master, [gradient], places)
        accumulate(gradient, [gradient], places, flat.master)
        adam_update(flat, gradient, layout, moments, 1, 1e-3, factor)
        sums = torch.ones(3, 2)
        lamb_begin(flat, gradient, layout, moments, 1, 1e-3, factor, sums)
        lamb_finish(flat, layout, moments, 1, 1e-3, trust_ratios(sums, moments))


PARTS: dict[str, Callable[[], None]] = {"attention": run_attention, "rows": run_rows, "optimizers": run_optimizers}


def compile_part(part: str) -> None:
    pretend(part)
    with backend.using("triton"):
        PARTS[part]()


def launch() -> None:
    torch.set_default_device("cuda")
    for part, run in PARTS.items():
        run()
        torch.cuda.synchronize()
        print(part, "launched", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--launch"]:
        launch()
        sys.exit()
    fork = multiprocessing.get_context("fork")  # workers share the imports
    processes = [fork.Process(target=compile_part, args=(part,)) for part in PARTS]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))
