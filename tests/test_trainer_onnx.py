"""ONNX: the same model for onnxruntime, for any batch and length, and nothing where it is not."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.convert import onnx
from trainer.convert.folder import random_batch
from trainer.errors import TrainerError
from trainer.model.batch import MicroBatch
from trainer.model.bert import Bert, ModelConfig

pytestmark = pytest.mark.slow

MODEL = ModelConfig(layers=2, hidden=16, heads=2, intermediate=40, max_positions=24, vocab_size=70, gelu="tanh")


@pytest.fixture(scope="module", params=["after", "before"])
def bert(request: pytest.FixtureRequest) -> Bert:
    """Weights as training leaves them: no bias is zero, no LayerNorm is one."""
    model, generator = Bert(replace(MODEL, layer_norm=request.param), seed=2), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model.eval()


@pytest.fixture
def batch() -> MicroBatch:
    """Sequences of 1 to 24 tokens."""
    return random_batch(MODEL, 0)


def test_onnxruntime_gives_the_models_own_outputs(bert: Bert, batch: MicroBatch, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    path = tmp_path / "model.onnx"
    worst = onnx.export_checked(bert.state_dict(), bert.model, "fill-mask", path, batch)
    assert 0 < worst <= 1e-5
    session = importlib.import_module("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [(each.name, each.shape) for each in session.get_inputs()] == [
        (name, ["batch", "sequence"]) for name in onnx.INPUTS
    ]
    assert [(each.name, each.shape) for each in session.get_outputs()] == [
        ("logits", ["batch", "sequence", 70]),
        ("seq_relationship_logits", ["batch", 2]),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]  # with its weights
    exact = Bert(replace(bert.model, gelu="none"))  # the other GELU is within 5e-4 of this one, everywhere
    exact.load_state_dict(bert.state_dict())
    with pytest.raises(TrainerError, match=r"outputs differ from Lambert's by .*; only 0.0001 is allowed"):
        onnx.check(path, exact.eval(), "fill-mask", batch)


@torch.no_grad()
@pytest.mark.parametrize("task", onnx.OUTPUTS)
def test_padding_changes_nothing(bert: Bert, batch: MicroBatch, task: str) -> None:
    """The module before its export: its outputs at real tokens are those of the unpadded model."""
    lengths = batch.cu_seqlens.diff()
    present = torch.arange(batch.max_seqlen) < lengths[:, None]
    tokens, segments = (
        torch.full(present.shape, fill).masked_scatter(present, each)
        for fill, each in ((9, batch.tokens), (1, batch.segments))
    )
    found, pooled = onnx.Padded(bert, task)(tokens, present.long(), segments)
    for ours, theirs in zip(onnx._ours(bert, task, batch), (found[present], pooled), strict=True):
        assert ours.shape == theirs.shape and float((ours - theirs).abs().max() / ours.abs().max()) <= 1e-5


def test_a_library_that_is_not_there_is_one_line(
    bert: Bert, batch: MicroBatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known: Any = importlib.util.find_spec
    monkeypatch.setattr(onnx, "find_spec", lambda name: None if name.startswith("onnx") else known(name))
    with pytest.raises(TrainerError, match="--onnx needs onnx and onnxscript and onnxruntime: pip install onnx onnxs"):
        onnx.export_checked(bert.state_dict(), MODEL, "fill-mask", tmp_path / "model.onnx", batch)
    assert not list(tmp_path.iterdir())
