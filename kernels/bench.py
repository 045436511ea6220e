"""Times every kernel, forward and backward, beside what a user could run instead: python -m kernels.bench

GPU time of a CUDA graph, so that no launch is waited for; medians; fp16, BERT-Large's shapes of 32,768 tokens,
whose tensors are larger than the L2 cache. The floor is the longer of two times: the bytes that must be moved
at 2.96 TB/s (an H100's device copy), and the products at 690 TFLOP/s (its matrix product at these sizes).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import dropout
from kernels.attention import attention
from kernels.backend import triton
from kernels.bias_gelu import bias_gelu
from kernels.cross_entropy import cross_entropy
from kernels.embedding import embed
from kernels.layer_norm import dropout_add_layer_norm

TOKENS, HIDDEN, INTERMEDIATE, HEADS, VOCABULARY, TARGETS = 32_768, 1024, 4096, 16, 30_528, 4864
BANDWIDTH, PRODUCTS = 2.96e12, 690e12  # bytes, and floating-point operations, a second
P = 0.1


@dataclass(frozen=True)
class Row:
    """One operation: what moves, what is computed, our bar in ms, and who does it, forward and backward."""

    name: str
    moved: float  # bytes
    computed: float  # floating-point operations of matrix products
    bar: float | None
    contenders: dict[str, Callable[[], object]]  # "Lambert" first

    @property
    def floor(self) -> float:
        """The least time in ms."""
        return max(self.moved / BANDWIDTH, self.computed / PRODUCTS) * 1e3


def _draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda", dtype=torch.float16) * scale).requires_grad_()


def _both(function: Callable[..., Tensor], inputs: list[Tensor], towards: Tensor) -> Callable[[], object]:
    """A forward and a backward, for the gradients of all inputs."""
    return lambda: torch.autograd.grad(function(*inputs), inputs, towards)


def _token_keys(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """(cumulative lengths, dropout keys) of sequences of these lengths."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in lengths])
    keys = dropout.token_keys(1, 2, torch.arange(len(lengths)), positions, cu_seqlens)
    return cu_seqlens.cuda(), keys.cuda()


def _real_lengths(longest: int) -> list[int]:
    """Lengths of some 32,768 tokens, evenly spread up to ``longest``: about half of it on average."""
    generator = torch.Generator().manual_seed(0)
    count = 2 * TOKENS // longest
    return torch.randint(8, longest + 1, (count,), generator=generator).tolist()


def attention_row(lengths: list[int], bar: float | None) -> Row:
    """Attention over sequences of these lengths; the libraries' dense forms run where all are equal."""
    from torch.nn.attention.varlen import varlen_attn  # not everywhere where this file is only imported

    longest, size, tokens = max(lengths), HIDDEN // HEADS, sum(lengths)
    cu_seqlens, keys = _token_keys(lengths)
    qkv, towards = _draw(tokens, 3, HEADS, size), torch.randn(tokens, HEADS, size, device="cuda").half()

    def ours(x: Tensor) -> Tensor:
        return attention(x, cu_seqlens, longest, dropout_p=P, keys=keys)

    def varlen(x: Tensor) -> Tensor:
        out = varlen_attn(x[:, 0], x[:, 1], x[:, 2], cu_seqlens, cu_seqlens, longest, longest)
        assert isinstance(out, Tensor)
        return out

    contenders = {
        "Lambert": _both(ours, [qkv], towards),
        "torch varlen, no dropout": _both(varlen, [qkv], towards),
    }
    if min(lengths) == longest:
        split = [_draw(len(lengths), HEADS, longest, size) for _ in range(3)]
        dense_towards = torch.randn_like(split[0])
        for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):

            def dense(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend = backend) -> Tensor:
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v, dropout_p=P)

            contenders[name] = _both(dense, split, dense_towards)
    pairs = sum(length * length for length in lengths)
    moved = tokens * HIDDEN * 2 * (3 + 1 + 3 + 1 + 3)  # qkv, out; qkv, d_out, d_qkv
    shape = f"{len(lengths)} of {longest}" if min(lengths) == longest else f"{len(lengths)} of up to {longest}"
    return Row(f"attention, {shape}, {tokens} tokens", moved, 7 * 2 * pairs * HIDDEN, bar, contenders)


def layer_norm_row() -> Row:
    """Dropout, residual and LayerNorm."""
    x, residual, weight, bias = _draw(TOKENS, HIDDEN), _draw(TOKENS, HIDDEN), _draw(HIDDEN), _draw(HIDDEN)
    _, keys = _token_keys([128] * (TOKENS // 128))

    def ours(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return dropout_add_layer_norm(x, residual, weight, bias, 1e-12, dropout_p=P, keys=keys)

    def eager(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(residual + F.dropout(x, P), (HIDDEN,), weight, bias, 1e-12)

    inputs, towards = [x, residual, weight, bias], torch.randn_like(x)
    moved = TOKENS * HIDDEN * 2 * (3 + 4)  # x, residual, out; d_out, what is normalised, d_x, d_residual
    return Row("dropout + residual + LayerNorm", moved, 0, 0.25, _three(ours, eager, inputs, towards))


def bias_gelu_row() -> Row:
    """Bias and exact GELU."""
    inputs = [_draw(TOKENS, INTERMEDIATE), _draw(INTERMEDIATE)]
    towards = torch.randn_like(inputs[0])
    moved = TOKENS * INTERMEDIATE * 2 * (2 + 3)  # x, out; x, d_out, d_x
    contenders = _three(bias_gelu, lambda x, bias: F.gelu(x + bias), inputs, towards)
    return Row(f"bias + GELU, {INTERMEDIATE} wide", moved, 0, 0.55, contenders)


def cross_entropy_row() -> Row:
    """The MLM loss over the masked rows."""
    logits = _draw(TARGETS, VOCABULARY)
    labels = torch.randint(0, VOCABULARY, (TARGETS,), device="cuda")

    def ours(x: Tensor) -> Tensor:
        return cross_entropy(x, labels)[0]

    def eager(x: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), labels, reduction="sum")

    moved = TARGETS * VOCABULARY * 2 * 3  # logits; logits, d_logits
    contenders = _three(ours, eager, [logits], torch.ones((), device="cuda"))
    return Row(f"cross-entropy, {TARGETS} x {VOCABULARY}", moved, 0, 0.40, contenders)


def embedding_row() -> Row:
    """Three tables, LayerNorm, dropout."""
    generator = torch.Generator().manual_seed(0)
    tokens = (VOCABULARY * torch.rand(TOKENS, generator=generator) ** 4).long().cuda()  # some words are frequent
    segments, positions = torch.arange(TOKENS, device="cuda") // 64 % 2, torch.arange(TOKENS, device="cuda") % 128
    tables = [_draw(rows, HIDDEN) for rows in (VOCABULARY, 2, 512)]
    inputs = [*tables, _draw(HIDDEN), _draw(HIDDEN)]
    _, keys = _token_keys([128] * (TOKENS // 128))

    def ours(token: Tensor, segment: Tensor, position: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        tables = token, segment, position
        return embed(tokens, segments, positions, *tables, weight, bias, 1e-12, dropout_p=P, keys=keys)

    def eager(token: Tensor, segment: Tensor, position: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = F.embedding(tokens, token) + F.embedding(segments, segment) + F.embedding(positions, position)
        return F.dropout(F.layer_norm(rows, (HIDDEN,), weight, bias, 1e-12), P)

    towards = torch.randn(TOKENS, HIDDEN, device="cuda").half()
    moved = TOKENS * HIDDEN * 2 * (2 + 3) + VOCABULARY * HIDDEN * 2  # rows, out; d_out, rows, their gradient, tables
    return Row("embedding + LayerNorm + dropout", moved, 0, None, _three(ours, eager, inputs, towards))


def _three(
    ours: Callable[..., Tensor], eager: Callable[..., Tensor], inputs: list[Tensor], towards: Tensor
) -> dict[str, Callable[[], object]]:
    return {
        "Lambert": _both(ours, inputs, towards),
        "eager": _both(eager, inputs, towards),
        "compile": _both(torch.compile(eager, dynamic=False), inputs, towards),
    }


ROWS: dict[str, Callable[[], Iterator[Row]]] = {
    "attention": lambda: (
        attention_row(lengths, bar)
        for lengths, bar in (
            ([128] * 256, 0.43),
            (_real_lengths(128), None),
            ([512] * 64, 0.70),
            (_real_lengths(512), None),
        )
    ),
    "layer_norm": lambda: iter([layer_norm_row()]),
    "bias_gelu": lambda: iter([bias_gelu_row()]),
    "cross_entropy": lambda: iter([cross_entropy_row()]),
    "embedding": lambda: iter([embedding_row()]),
}


def report(row: Row) -> list[str]:
    """The row's lines of the table: a contender each."""
    lines = []
    for name, run in row.contenders.items():
        milliseconds = triton.testing.do_bench_cudagraph(run, rep=100, return_mode="median")
        rate = f"{row.moved / milliseconds / 1e9:.2f} TB/s"
        if row.computed:
            rate += f", {row.computed / milliseconds / 1e9:.0f} TFLOP/s"
        bar = f"{row.bar:.2f}" if row.bar and name == "Lambert" else ""
        cells = [row.name, name, f"{milliseconds:.3f}", bar, rate, f"{row.floor / milliseconds:.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Print the table, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description="Times every kernel beside others.")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="these kernels alone")
    names = parser.parse_args().only
    if not torch.cuda.is_available():
        raise SystemExit("kernels.bench: error: no CUDA device: kernels are timed on a GPU only")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, fp16\n")
    print(
        "| kernel, forward + backward | who | ms | bar | rate | of the floor |\n|---|---|---|---|---|---|", flush=True
    )
    for name in names:
        for row in ROWS[name]():
            print("\n".join(report(row)), flush=True)


if __name__ == "__main__":
    main()
