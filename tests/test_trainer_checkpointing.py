"""Activation checkpointing: a layer keeps less for backward, and every result has the same bits."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels import backend
from tests.helpers import ranks
from tests.test_trainer_model import keys_of
from trainer.bench.checkpointing import largest
from trainer.bench.model import micro_batch
from trainer.convert.folder import random_batch
from trainer.model.batch import MicroBatch
from trainer.model.bert import Bert, ModelConfig
from trainer.model.checkpointing import Checkpointing

pytestmark = pytest.mark.slow

KINDS: tuple[Checkpointing, ...] = get_args(Checkpointing)
MODEL = ModelConfig(layers=2, hidden=16, heads=2, intermediate=64, max_positions=8, vocab_size=90)
BOTH = pytest.mark.parametrize("layer_norm", ["after", "before"])


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the memory of every tensor that is made in it, and counts the matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = 0
        self.made: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket.__name__ in ("mm", "addmm", "bmm")
        self.made += [weakref.ref(t.untyped_storage()) for t in tree_leaves(out) if isinstance(t, Tensor)]
        return out

    def bytes(self, parameters: Iterator[Tensor]) -> int:
        """The size of what is still there, without the parameters."""
        own = {p.untyped_storage().data_ptr() for p in parameters}
        alive = {s.data_ptr(): s.nbytes() for ref in self.made if (s := ref()) is not None}
        return sum(size for at, size in alive.items() if at not in own)


def results(bert: Bert, batch: MicroBatch, kind: Checkpointing) -> list[Tensor]:
    """The losses and all gradients, with dropout."""
    bert.zero_grad()
    bert.checkpointing = kind
    out = bert(batch, keys_of(batch))
    torch.autograd.backward(out.mlm_loss + out.nsp_loss)
    return [out.mlm_loss.detach(), out.nsp_loss.detach(), *(p.grad for p in bert.parameters() if p.grad is not None)]


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_have_the_same_bits(layer_norm: Any, dtype: torch.dtype) -> None:
    model = replace(MODEL, layer_norm=layer_norm)
    bert, batch = Bert(model, 1).to(dtype), random_batch(model, 2)
    expected, *others = (results(bert, batch, kind) for kind in KINDS)
    assert len(expected) == 2 + len(list(bert.parameters()))
    for found in others:
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@BOTH
def test_what_a_layer_keeps_under_the_kernels(layer_norm: Any) -> None:
    """These are the numbers per token in docs/performance.md. The outputs and gradients have the same bits."""
    model = replace(MODEL, layer_norm=layer_norm)
    width, size = model.hidden, torch.half.itemsize
    batch = micro_batch([3, 2], model)
    tokens, keys = batch.tokens.numel(), keys_of(batch)
    statistics = 4 * (model.heads + 2 * 2)  # bytes per token: attention's logarithms, and those of two LayerNorms
    layers = Bert(model, 1).half().layers
    start = torch.randn(tokens, width, dtype=torch.half, generator=torch.Generator().manual_seed(0))
    kept = dict[Checkpointing, float]()
    found: list[list[Tensor]] = []
    with backend.using("triton"):
        for kind in KINDS:
            layers.zero_grad()
            x = residual = start.clone().requires_grad_()
            sizes = []
            with Watch() as watch:
                for layer in layers:
                    x, residual = layer(x, residual, batch, keys, kind)
                    sizes.append(watch.bytes(layers.parameters()))
            kept[kind] = (sizes[1] - sizes[0]) / tokens
            with ThreadPoolExecutor(1) as thread:  # as on a GPU, where autograd has its own
                thread.submit(torch.autograd.backward, x.square().sum()).result()
            found.append([x.detach(), *(p.grad for p in layers.parameters() if p.grad is not None)])
    inputs = 1 if layer_norm == "after" else 2
    assert kept["none"] == 16 * width * size + statistics
    assert kept["cheap"] == 11 * width * size + statistics
    assert kept["full"] == inputs * width * size
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_only_full_repeats_matrix_products() -> None:
    bert, batch = Bert(MODEL, 1), random_batch(MODEL, 2)
    products = {}
    for kind in KINDS:
        with Watch() as watch:
            results(bert, batch, kind)
        products[kind] = watch.products
    assert products["cheap"] == products["none"] < products["full"]


def test_evaluation_has_the_same_bits() -> None:
    bert, batch = Bert(MODEL, 1), random_batch(MODEL, 2)
    found = []
    for kind in KINDS:
        bert.checkpointing = kind
        with torch.no_grad():
            found.append(bert.logits(batch))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_steps_have_the_same_bits_under_every_stage(tmp_path: Path) -> None:
    """Two steps of two micro-batches on two ranks. ZeRO 3 has the weights of a layer only while it needs them."""
    cases = ["0/fp32/after", "1/bf16/after", "2/fp32/before", "3/fp32/before", "3/bf16/after"]
    out = tmp_path / "out.pt"
    require_same_steps(ranks.fork(2, "tests/helpers/checkpointing_on_ranks.py", str(out), "cpu", *cases), out, cases)


def require_same_steps(started: list[Any], out: Path, cases: list[str]) -> None:
    """Wait for the ranks of checkpointing_on_ranks.py; fail if a kind of checkpointing changes a bit of its cases."""
    ended = ranks.finish(started)
    assert {code for code, _ in ended} == {0}, "\n".join(output for _, output in ended)
    record = torch.load(out, weights_only=True)
    assert list(record) == cases
    for case, kinds in record.items():
        none = kinds.pop("none")
        for kind, found in kinds.items():
            assert all(torch.equal(a, b) for a, b in zip(none["numbers"], found["numbers"], strict=True)), (case, kind)
            different = [n for n, w in none["weights"].items() if not torch.equal(w, found["weights"][n])]
            assert different == [], (case, kind)
            assert found["calls"] == none["calls"] + 2 * 2 * 2, (case, kind)  # each step, micro-batch and layer


def test_the_largest_micro_batch_is_found_and_ran() -> None:
    """Even if the line through two small ones points too high or too low, or these do not fit."""
    for most in (1, 2, 3, 100, 1234):
        for each in (10, 90, 100, 110):
            tried = set[int]()

            def peak(sequences: int, most: int = most, each: int = each, tried: set[int] = tried) -> int | None:
                tried.add(sequences)
                return 5 + each * sequences if sequences <= most else None

            found = largest(peak, 4, 5 + 100 * most)
            assert found == 1 or found in tried
            assert most - max(1, found // 32) <= found <= most, (most, each, found)
