"""What only a GPU can show; CI has none, and docs/lab.md holds the last results. Run: pytest -m gpu"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_trainer_engine import largest_difference, steps

from kernels.dropout import keep, token_keys
from trainer.export import random_batch
from trainer.model import Bert, ModelConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def test_dropout_masks_are_the_cpus() -> None:
    batch = random_batch(ModelConfig(max_positions=64, vocab_size=90), seed=1)
    masks = []
    for device in ("cpu", "cuda"):
        b = batch.to(torch.device(device))
        keys = token_keys(3, 7, b.samples, b.positions, b.cu_seqlens)
        masks.append(torch.stack([keep(keys, site, 101, 0.1).cpu() for site in (0, 5, 1 << 16)]))
    assert torch.equal(*masks)


def test_model_is_the_cpus_with_dropout_on() -> None:
    model = ModelConfig(layers=2, hidden=64, heads=2, intermediate=128, max_positions=64, vocab_size=90)
    batch = random_batch(model, seed=1)
    losses = []
    for device in ("cpu", "cuda"):
        b = batch.to(torch.device(device))
        bert = Bert(model, seed=1).to(device)
        out = bert(b, token_keys(3, 7, b.samples, b.positions, b.cu_seqlens))
        losses.append([float(out.mlm_loss), float(out.nsp_loss)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """fp32 on the CPU, one rank, one micro-batch: what everything here is held against."""
    return steps(tmp_path_factory.mktemp("whole"), 1, 1, 1)


@pytest.mark.parametrize(
    ("size", "stage", "micro_batches"),
    [(1, 1, 1), (1, 2, 5), *(pytest.param(2, stage, n, marks=two) for stage in (1, 2) for n in (1, 5))],
)
def test_fp16_steps_are_the_fp32_steps_within_rounding(
    whole: dict[str, object], tmp_path: Path, size: int, stage: int, micro_batches: int
) -> None:
    cut = steps(tmp_path, size, stage, micro_batches, "lamb", "cuda", "fp16")
    assert cut["losses"] == pytest.approx(whole["losses"], rel=2e-3)
    assert cut["norms"] == pytest.approx(whole["norms"], rel=1e-2)
    assert largest_difference(cut["weights"], whole["weights"]) < 2e-2


@pytest.mark.parametrize("stage", [1, 2])
def test_the_loss_scale_does_not_matter(tmp_path: Path, stage: int) -> None:
    """A scale of 2^6 and one of 2^14 give the same steps: the scale is taken out by the number it was put in."""
    low = steps(tmp_path, 1, stage, 3, "lamb", "cuda", "fp16", "64")
    high = steps(tmp_path, 1, stage, 3, "lamb", "cuda", "fp16", "16384")
    assert low["losses"] == pytest.approx(high["losses"], rel=1e-3)
    assert low["norms"] == pytest.approx(high["norms"], rel=1e-3)
    assert largest_difference(low["weights"], high["weights"]) < 1e-2


@pytest.mark.parametrize("stage", [1, 2])
def test_repeated_steps_are_bit_identical(tmp_path: Path, stage: int) -> None:
    size = min(2, torch.cuda.device_count())
    first, second = (steps(tmp_path, size, stage, 3, "lamb", "cuda", "fp16") for _ in range(2))
    assert first["losses"] == second["losses"]
    assert largest_difference(first["weights"], second["weights"]) == 0.0
