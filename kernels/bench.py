"""Times every kernel, forward and backward, against what a user could run instead: python -m kernels.bench

Times are medians of the GPU time of a CUDA graph, which excludes launch overhead. Tensors are fp16, with BERT-Large's
shapes for 32,768 tokens, which are larger than the L2 cache. The floor is the longer of two times: moving the necessary
bytes at the rate of a device copy, and computing the matrix products at the rate of one product of BERT's size. Both
rates are measured first. Optimizers step over BERT-Large's 336 million fp32 parameters and are timed without a graph,
because some of them cannot be captured in one. Ours also unscales, takes the norm, clips, and writes the fp16 copy; the
others only update, except where the row says that the step is whole.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import apex, apex_layers, apex_optimizers, dropout
from kernels.adam import Moments, adam_update
from kernels.attention import attention
from kernels.backend import triton
from kernels.bias_gelu import bias_gelu
from kernels.cross_entropy import cross_entropy
from kernels.embedding import embed
from kernels.flat import Flat, Layout, Piece, gradient_square_sum, make_layout
from kernels.lamb import lamb_begin, lamb_finish, trust_ratios
from kernels.layer_norm import dropout_add_layer_norm, layer_norm

TOKENS, HIDDEN, INTERMEDIATE, HEADS, VOCABULARY, TARGETS = 32_768, 1024, 4096, 16, 30_528, 4864
P = 0.1


@dataclass(frozen=True)
class Operation:
    """One operation: bytes moved, operations computed, our target in ms, and the contenders to time."""

    name: str
    moved: float  # bytes
    computed: float  # floating-point operations of matrix products
    bar: float | None
    contenders: dict[str, Callable[[], object]]  # "Lambert" first
    graph: bool = True  # whether to time it as a CUDA graph


@dataclass(frozen=True)
class Ceilings:
    """The best rates of this GPU, as measured."""

    bandwidth: float  # bytes per second, read plus written, of a device copy
    products: float  # floating-point operations per second of a matrix product

    def floor(self, operation: Operation) -> float:
        """The least possible time of a row, in ms."""
        return max(operation.moved / self.bandwidth, operation.computed / self.products) * 1e3


def _draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda", dtype=torch.float16) * scale).requires_grad_()


def _both(function: Callable[..., Tensor], inputs: list[Tensor], towards: Tensor) -> Callable[[], object]:
    """Run forward, and backward for the gradients of all inputs."""
    return lambda: torch.autograd.grad(function(*inputs), inputs, towards)


def _token_keys(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Return (cumulative lengths, dropout keys) for sequences of these lengths."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in lengths])
    keys = dropout.token_keys(1, 2, torch.arange(len(lengths)), positions, cu_seqlens)
    return cu_seqlens.cuda(), keys.cuda()


def _real_lengths(longest: int) -> list[int]:
    """Uniformly drawn lengths up to ``longest``, half of it on average: about 32,768 tokens in all."""
    generator = torch.Generator().manual_seed(0)
    count = 2 * TOKENS // longest
    return torch.randint(8, longest + 1, (count,), generator=generator).tolist()


def attention_operation(lengths: list[int], bar: float | None) -> Operation:
    """Attention over sequences of these lengths. The libraries' dense attention also runs if all are equal."""
    from torch.nn.attention.varlen import varlen_attn  # imported here: not every machine that imports this file has it

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
    return Operation(f"attention, {shape}, {tokens} tokens", moved, 7 * 2 * pairs * HIDDEN, bar, contenders)


def layer_norm_operation() -> Operation:
    """Dropout, residual and LayerNorm with one gradient. The model also has a bias and a second gradient."""
    x, residual, weight, bias = _draw(TOKENS, HIDDEN), _draw(TOKENS, HIDDEN), _draw(HIDDEN), _draw(HIDDEN)
    _, keys = _token_keys([128] * (TOKENS // 128))

    def ours(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return dropout_add_layer_norm(x, residual, weight, bias, 1e-12, dropout_p=P, keys=keys)[0]

    def eager(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(residual + F.dropout(x, P), (HIDDEN,), weight, bias, 1e-12)

    inputs, towards = [x, residual, weight, bias], torch.randn_like(x)
    moved = TOKENS * HIDDEN * 2 * (3 + 4)  # x, residual, out; d_out, the normalized input, d_x, d_residual
    contenders = _three(ours, eager, inputs, towards)
    if liger := _installed("liger_kernel.transformers.functional", "liger_layer_norm"):

        def ligers(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            out: Tensor = liger(residual + F.dropout(x, P), weight, bias, 1e-12)
            return out

        contenders["eager, Liger's LayerNorm"] = _both(ligers, inputs, towards)
    if _apex_has("fused_layer_norm_cuda"):

        def apexes(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return apex_layers.layer_norm(residual + F.dropout(x, P), weight, bias, 1e-12)

        contenders["eager, Apex's LayerNorm"] = _both(apexes, inputs, towards)
    return Operation("dropout + residual + LayerNorm", moved, 0, 0.25, contenders)


def bias_gelu_operation() -> Operation:
    """Bias and exact GELU."""
    inputs = [_draw(TOKENS, INTERMEDIATE), _draw(INTERMEDIATE)]
    towards = torch.randn_like(inputs[0])
    moved = TOKENS * INTERMEDIATE * 2 * (2 + 3)  # x, out; x, d_out, d_x
    contenders = _three(bias_gelu, lambda x, bias: F.gelu(x + bias), inputs, towards)
    return Operation(f"bias + GELU, {INTERMEDIATE} wide", moved, 0, 0.55, contenders)


def plain_layer_norm_operation() -> Operation:
    """LayerNorm alone, as in the MLM head."""
    inputs = [_draw(TOKENS, HIDDEN), _draw(HIDDEN), _draw(HIDDEN)]
    towards = torch.randn_like(inputs[0])

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return layer_norm(x, weight, bias, 1e-12)

    def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (HIDDEN,), weight, bias, 1e-12)

    contenders = _three(ours, eager, inputs, towards)
    if _apex_has("fused_layer_norm_cuda"):
        contenders["Apex"] = _both(lambda x, w, b: apex_layers.layer_norm(x, w, b, 1e-12), inputs, towards)
    return Operation("LayerNorm alone", TOKENS * HIDDEN * 2 * (2 + 3), 0, None, contenders)


def mlp_operation() -> Operation:
    """A layer's two matrix products with the bias and the tanh approximation of GELU between them."""
    x, towards = _draw(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN, device="cuda").half()
    weights = [_draw(INTERMEDIATE, HIDDEN, scale=0.02), _draw(HIDDEN, INTERMEDIATE, scale=0.02)]
    inputs = [x, weights[0], _draw(INTERMEDIATE), weights[1], _draw(HIDDEN)]

    def ours(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
        return F.linear(bias_gelu(F.linear(x, weight1), bias1, "tanh"), weight2, bias2)

    contenders = _three(ours, apex_layers.dense_gelu_dense_reference, inputs, towards)
    if _apex_has("fused_dense_cuda"):
        contenders["Apex"] = _both(apex_layers.dense_gelu_dense, inputs, towards)
    computed = 3 * 2 * 2 * TOKENS * HIDDEN * INTERMEDIATE
    return Operation("dense + tanh GELU + dense", TOKENS * HIDDEN * 2 * 4, computed, None, contenders)


def cross_entropy_operation() -> Operation:
    """The MLM loss over the masked rows."""
    logits = _draw(TARGETS, VOCABULARY)
    labels = torch.randint(0, VOCABULARY, (TARGETS,), device="cuda")

    def ours(x: Tensor) -> Tensor:
        return cross_entropy(x, labels)[0]

    def eager(x: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), labels, reduction="sum")

    moved = TARGETS * VOCABULARY * 2 * 3  # logits; logits, d_logits
    contenders, one = _three(ours, eager, [logits], torch.ones((), device="cuda")), torch.ones((), device="cuda")
    if liger := _installed("liger_kernel.transformers.functional", "liger_cross_entropy"):
        contenders["Liger"] = _both(lambda x: liger(x, labels, reduction="sum"), [logits], one)
    return Operation(f"cross-entropy, {TARGETS} x {VOCABULARY}", moved, 0, 0.40, contenders)


def embedding_operation() -> Operation:
    """The sum of three table rows, LayerNorm and dropout."""
    generator = torch.Generator().manual_seed(0)
    tokens = (VOCABULARY * torch.rand(TOKENS, generator=generator) ** 4).long().cuda()  # some tokens are frequent
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
    return Operation("embedding + LayerNorm + dropout", moved, 0, None, _three(ours, eager, inputs, towards))


def _parameters() -> list[tuple[Tensor, bool]]:
    """BERT-Large's fp32 parameters, and whether each is a matrix: only matrices are decayed and adapted."""
    layer = [(3 * HIDDEN, HIDDEN), (3 * HIDDEN,), (HIDDEN, HIDDEN), *[(HIDDEN,)] * 3]
    layer += [(INTERMEDIATE, HIDDEN), (INTERMEDIATE,), (HIDDEN, INTERMEDIATE), *[(HIDDEN,)] * 3]
    tables, heads = [(VOCABULARY, HIDDEN), (2, HIDDEN), (512, HIDDEN)], [(HIDDEN, HIDDEN)] * 2 + [(VOCABULARY,)]
    return [(torch.randn(*shape, device="cuda") / 50, len(shape) > 1) for shape in [*tables, *layer * 24, *heads]]


def _lamb_update(
    flat: Flat, gradient: Tensor, layout: Layout, moments: Moments, step: int, rate: float, factor: Tensor
) -> None:
    """Both parts of a LAMB step on one rank."""
    sums = torch.zeros(max(piece.row for piece in layout.pieces) + 1, 2, device="cuda")
    lamb_begin(flat, gradient, layout, moments, step, rate, factor, sums)
    lamb_finish(flat, layout, moments, step, rate, trust_ratios(sums, moments))


def _optimizer_step(
    flat: Flat, gradient: Tensor, pieces: list[Piece], update: Callable[..., object]
) -> Callable[[], object]:
    """The whole step of trainer/engine/optimizer.py on one rank, clipped to a global norm of 1."""
    layout, moments = make_layout(pieces, len(gradient), gradient.device), Moments(0.9, 0.999, 1e-6, True)

    def run() -> None:
        norm = gradient_square_sum(gradient, layout).sqrt()
        update(flat, gradient, layout, moments, 10, 1e-4, (1 / norm).clamp(max=1.0))

    return run


def optimizer_operation(name: str, bar: float) -> Operation:
    """One step of LAMB or Adam over the same parameters."""
    named, at, pieces = _parameters(), 0, []
    for row, (tensor, matrix) in enumerate(named):
        pieces.append(Piece(at, tensor.numel(), 0.01 * matrix, row if matrix and name == "LAMB" else -1, True))
        at += tensor.numel()
    master = torch.cat([tensor.flatten() for tensor, _ in named])
    flat = Flat(master, torch.zeros_like(master), torch.zeros_like(master), torch.empty_like(master, dtype=torch.half))
    lamb, gradient = name == "LAMB", torch.randn_like(master).half()
    contenders = {"Lambert": _optimizer_step(flat, gradient, pieces, _lamb_update if lamb else adam_update)}
    if _apex_has("amp_C"):
        apexes = apex_optimizers.lamb_update if lamb else apex_optimizers.adam_update
        contenders[f"Apex Fused{name}, whole step"] = _optimizer_step(flat, gradient, pieces, apexes)
    for who, make in _other_optimizers(name).items():
        if make is not None:
            tensors = [tensor.requires_grad_() for tensor, _ in named]
            for tensor in tensors:
                tensor.grad = torch.randn_like(tensor)
            contenders[who] = make(tensors).step
    again = 4 if lamb else 0  # the weights are read again once the norms of their tensor are known
    return Operation(f"{name}, {at:,} parameters", at * (28 + again), 0, bar, contenders, graph=False)


def _installed(module: str, name: str) -> Any:
    """Return ``name`` from a library if it is installed. Lambert does not need it: it is only a contender."""
    apex.keep_foreign_out()  # DeepSpeed imports whatever has that name
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _apex_has(extension: str) -> bool:
    """Whether NVIDIA's Apex is installed with this extension."""
    found = apex.find()
    return found is not None and found.has(extension)


def _other_optimizers(name: str) -> dict[str, Any]:
    """Optimizers of other libraries, whose steps only update; None for those that are not installed."""
    deepspeed = f"Fused{name.capitalize()}"  # FusedAdam, FusedLamb
    found = {
        f"DeepSpeed {deepspeed}": _installed(f"deepspeed.ops.{name.lower()}", deepspeed),
        f"Apex Fused{name}": _installed("apex.optimizers", f"Fused{name}") if _apex_has("amp_C") else None,
    }
    return found if name == "LAMB" else {"torch AdamW, fused": partial(torch.optim.AdamW, fused=True)} | found


def _three(
    ours: Callable[..., Tensor], eager: Callable[..., Tensor], inputs: list[Tensor], towards: Tensor
) -> dict[str, Callable[[], object]]:
    return {
        "Lambert": _both(ours, inputs, towards),
        "eager": _both(eager, inputs, towards),
        "compile": _both(torch.compile(eager, dynamic=False), inputs, towards),
    }


OPERATIONS: dict[str, Callable[[], Iterator[Operation]]] = {
    "attention": lambda: (
        attention_operation(lengths, bar)
        for lengths, bar in (
            ([128] * 256, 0.43),
            (_real_lengths(128), None),
            ([512] * 64, 0.70),
            (_real_lengths(512), None),
        )
    ),
    "layer_norm": lambda: iter([layer_norm_operation(), plain_layer_norm_operation()]),
    "mlp": lambda: iter([mlp_operation()]),
    "bias_gelu": lambda: iter([bias_gelu_operation()]),
    "cross_entropy": lambda: iter([cross_entropy_operation()]),
    "embedding": lambda: iter([embedding_operation()]),
    "adam": lambda: iter([optimizer_operation("Adam", 3.6)]),
    "lamb": lambda: iter([optimizer_operation("LAMB", 4.2)]),
}


def ceilings() -> Ceilings:
    """Measure the GPU: a device copy of 2 GB, and one of BERT-Large's medium-sized matrix products."""
    source = torch.empty(1 << 30, dtype=torch.half, device="cuda").normal_()
    target, time = torch.empty_like(source), triton.testing.do_bench
    copied = time(lambda: target.copy_(source), return_mode="median")
    a, b = torch.randn(TOKENS, HIDDEN, device="cuda").half(), torch.randn(HIDDEN, INTERMEDIATE, device="cuda").half()
    multiplied = time(lambda: a @ b, return_mode="median")
    return Ceilings(2 * source.nbytes / copied * 1e3, 2 * TOKENS * HIDDEN * INTERMEDIATE / multiplied * 1e3)


def report(operation: Operation, best: Ceilings) -> list[str]:
    """The table lines of a row, one per contender."""
    lines = []
    for name, run in operation.contenders.items():
        graph = operation.graph and name != "Liger"  # Liger reads a number back, so it cannot be captured
        time = triton.testing.do_bench_cudagraph if graph else triton.testing.do_bench
        milliseconds = time(run, rep=100, return_mode="median")
        rate = f"{operation.moved / milliseconds / 1e9:.2f} TB/s"
        if operation.computed:
            rate += f", {operation.computed / milliseconds / 1e9:.0f} TFLOP/s"
        bar = f"{operation.bar:.2f}" if operation.bar and name == "Lambert" else ""
        cells = [operation.name, name, f"{milliseconds:.3f}", bar, rate, f"{best.floor(operation) / milliseconds:.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Print the table, each row as soon as it is measured."""
    about = "Time every kernel against the alternatives that a user could run."
    usage = argparse.SUPPRESS  # so that an error takes one line
    parser = argparse.ArgumentParser("kernels.bench", description=about, usage=usage, allow_abbrev=False)
    parser.add_argument(
        "--only", nargs="+", choices=OPERATIONS, default=list(OPERATIONS), help="time only these kernels"
    )
    names = parser.parse_args().only
    if not torch.cuda.is_available():
        raise SystemExit("kernels.bench: error: no CUDA device: run this on a machine with a GPU")
    torch.manual_seed(0)
    best, card = ceilings(), torch.cuda.get_device_name()
    print(f"{card}, torch {torch.__version__}, Triton {triton.__version__}, fp16; Apex: {apex.describe(used=True)}")
    print(f"device copy {best.bandwidth / 1e12:.2f} TB/s, matmul {best.products / 1e12:.0f} TFLOP/s; targets: H100\n")
    print(
        "| kernel, forward + backward | implementation | ms | target | rate | floor / time |\n"
        "|---|---|---|---|---|---|",
        flush=True,
    )
    for name in names:
        for operation in OPERATIONS[name]():
            print("\n".join(report(operation, best)), flush=True)


if __name__ == "__main__":
    main()
