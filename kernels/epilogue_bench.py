"""Times two things that could be fused into a projection: GELU, and the gradient of the projection's bias.

    python -m kernels.epilogue_bench

The first part times BERT-Large's first feed-forward product, (T, 1,024) @ (1,024, 4,096), for 32,768 tokens in fp16,
with GELU in its epilogue. Backward needs the value before GELU, so an epilogue must write two results. cuBLASLt's
epilogue has only the tanh form, and PyTorch's binding does not return the value before it, so its row is a bound and
not a candidate.

The second part times the gradient of a projection's bias, the sum of (T, N) over T: with PyTorch, and with a kernel in
two passes of several shapes. Reading the tensor once is timed as a bound. In the model, PyTorch computes the gradient
of qkv's bias; the LayerNorm and GELU kernels add up the other bias gradients as they read the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import tl, triton
from kernels.bias_gelu import bias_gelu
from kernels.partials import add_partials

TOKENS, HIDDEN, WIDE = 32_768, 1_024, 4_096


@triton.jit
def _matmul_gelu_kernel(
    x,  # (T, K)
    weight,  # (N, K)
    bias,  # (N,)
    before,  # (T, N)
    out,  # (T, N)
    T,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,  # row tiles that share the tiles of the weights in L2
):
    tile = tl.program_id(0)
    group = tile // (TOGETHER * (N // BLOCK_N))
    row = group * TOGETHER + tile % TOGETHER
    column = tile % (TOGETHER * (N // BLOCK_N)) // TOGETHER
    x_tiles = tl.make_tensor_descriptor(x, [T, K], [K, 1], [BLOCK_M, BLOCK_K])
    weight_tiles = tl.make_tensor_descriptor(weight, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        a, b = x_tiles.load([row * BLOCK_M, k]), weight_tiles.load([column * BLOCK_N, k])
        total = tl.dot(a, b.T, total)
    total += tl.load(bias + column * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.float32)[None, :]
    value = 0.5 * total * (1 + tl.erf(total * 0.7071067811865476))
    at = (row * BLOCK_M + tl.arange(0, BLOCK_M))[:, None] * N + (column * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    tl.store(before + at, total.to(tl.float16))
    tl.store(out + at, value.to(tl.float16))


def by_triton(x: Tensor, weight: Tensor, bias: Tensor, block: tuple[int, int, int], warps: int, stages: int) -> Tensor:
    assert len(x) % (8 * block[0]) == 0 == len(weight) % block[1]  # all tiles and groups are full
    before, out = x.new_empty(len(x), len(weight)), x.new_empty(len(x), len(weight))
    grid = (len(x) // block[0] * (len(weight) // block[1]),)
    _matmul_gelu_kernel[grid](
        *(x, weight, bias, before, out, len(x), len(weight), x.shape[1], *block, 8), num_warps=warps, num_stages=stages
    )
    return out


@triton.jit
def _column_sum_kernel(
    x,  # (T, N)
    partials,  # (1, ceil(T / STRIPE), N) fp32
    tokens,  # T
    WIDTH: tl.constexpr,  # N, a multiple of BLOCK
    BLOCK: tl.constexpr,  # columns per program
    ROWS: tl.constexpr,  # rows at a time
    STRIPE: tl.constexpr,  # rows per program
):
    columns = tl.program_id(0) % (WIDTH // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    stripe = tl.program_id(0) // (WIDTH // BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(0, STRIPE, ROWS):
        rows = stripe * STRIPE + begin + tl.arange(0, ROWS)[:, None]
        total += tl.load(x + rows.to(tl.int64) * WIDTH + columns[None, :], mask=rows < tokens, other=0.0).to(tl.float32)
    tl.store(partials + stripe.to(tl.int64) * WIDTH + columns, tl.sum(total, 0))


def column_sum(x: Tensor, block: int, rows: int, stripe: int) -> Tensor:
    tokens, width = x.shape
    assert width % block == 0 == stripe % rows
    partials = x.new_empty(1, triton.cdiv(tokens, stripe), width, dtype=torch.float32)
    grid = (width // block * partials.shape[1],)
    _column_sum_kernel[grid](x, partials, tokens, width, block, rows, stripe, num_warps=4)
    return add_partials(partials, x.dtype)[0]


def main() -> None:
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    torch.manual_seed(1)
    x, weight = torch.randn(TOKENS, HIDDEN).cuda().half(), (torch.randn(WIDE, HIDDEN) / 32).cuda().half()
    bias = torch.randn(WIDE).cuda().half()
    exact = F.gelu(F.linear(x.float(), weight.float(), bias.float()))
    rows = {
        "matrix product alone": lambda: F.linear(x, weight),
        "matrix product, then bias + GELU": lambda: bias_gelu(F.linear(x, weight), bias, "none"),
        "cuBLASLt's epilogue, tanh, one result": lambda: torch._addmm_activation(bias, x, weight.t(), use_gelu=True),
    }
    shapes = (((128, 256, 64), 8, 3), ((128, 256, 64), 8, 4), ((128, 128, 64), 4, 4), ((128, 128, 64), 8, 4))
    for block, warps, stages in (*shapes, ((256, 128, 64), 8, 3)):
        name = f"Triton's epilogue, two results, {'x'.join(map(str, block))}, {warps} warps, {stages} stages"
        rows[name] = lambda block=block, warps=warps, stages=stages: by_triton(x, weight, bias, block, warps, stages)  # type: ignore[misc]
    compare(rows, exact)
    for width in (HIDDEN, 3 * HIDDEN):
        compare_bias_gradients(torch.randn(TOKENS, width).cuda().half())


def compare_bias_gradients(given: Tensor) -> None:
    name = f"bias gradient alone, {given.shape[1]:,} wide"
    rows: dict[str, Callable[[], Tensor]] = {
        f"{name}, PyTorch": lambda: given.sum(0),
        f"{name}, read once": lambda: given.amax(),
    }
    for shape in ((128, 32, 512), (128, 64, 512), (256, 32, 256), (256, 16, 256), (512, 16, 128)):
        told = "{1} x {0} at a time, {2} rows per program".format(*shape)
        rows[f"{name}, Triton, {told}"] = partial(column_sum, given, *shape)
    compare(rows, given.double().sum(0))


def compare(rows: Mapping[str, Callable[[], Tensor]], exact: Tensor) -> None:
    """Print one line per row: its time, and its largest error if its result has the shape of ``exact``."""
    for name, run in rows.items():
        with torch.no_grad():
            out = run()
            off = f"{float((out - exact).abs().max()):.1e}" if out.shape == exact.shape else ""
            print(f"| {name} | {triton.testing.do_bench(run, return_mode='median'):.3f} ms | {off} |", flush=True)


if __name__ == "__main__":
    main()
