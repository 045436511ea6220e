"""Tests that need a GPU; CI has none, and docs/lab.md has the last results. Run: pytest -m gpu"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels import apex
from kernels.dropout import keep, token_keys
from tests.helpers import prescribed_on_ranks as prescribed
from tests.helpers import ranks
from tests.helpers.corpora import contents
from tests.test_trainer_checkpoint import losses, train
from tests.test_trainer_checkpointing import KINDS, require_same_steps, results
from tests.test_trainer_engine import largest_difference, mean_difference, steps
from tests.test_trainer_optimizer import paper
from trainer.bench.model import micro_batch
from trainer.convert.folder import random_batch
from trainer.model.bert import Bert, ModelConfig

pytestmark = [
    pytest.mark.slow,
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


@pytest.mark.parametrize("layer_norm", ["after", "before"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [128, 300])
def test_checkpointing_changes_no_bit(layer_norm: Any, dtype: torch.dtype, length: int) -> None:
    model = ModelConfig(layers=3, hidden=384, heads=6, intermediate=1536, vocab_size=900, layer_norm=layer_norm)
    bert, batch = Bert(model, 1).to("cuda", dtype), micro_batch([length] * 30 + [7], model).to(torch.device("cuda"))
    none, *others = (results(bert, batch, kind) for kind in KINDS)
    assert len(none) == 2 + len(list(bert.parameters()))
    for found in others:
        assert all(torch.equal(a, b) for a, b in zip(none, found, strict=True))


# ---- the engine ------------------------------------------------------------------------------------------------

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


def gpus() -> int:
    """The number of ranks that a test may use: two if there are two GPUs."""
    return min(2, torch.cuda.device_count())


def test_checkpointing_changes_no_bit_of_a_step(tmp_path: Path) -> None:
    out, cases = tmp_path / "out.pt", ["1/fp16/after", "2/fp16/before", "3/fp16/after"]
    started = ranks.start(gpus(), "tests/helpers/checkpointing_on_ranks.py", str(out), "cuda", *cases)
    require_same_steps(started, out, cases)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """fp32 on the CPU, one rank, one micro-batch: what everything here is held against."""
    return steps(tmp_path_factory.mktemp("whole"), 1, 1, 1)


@pytest.mark.parametrize(
    ("size", "stage", "micro_batches", "precision"),
    [
        *((1, stage, stage, precision) for stage in (1, 2, 3) for precision in ("fp16", "bf16")),
        *(pytest.param(2, stage, 5, "fp16", marks=two) for stage in (1, 2, 3)),
    ],
)
def test_steps_are_the_fp32_steps_within_rounding(
    whole: dict[str, Any], tmp_path: Path, size: int, stage: int, micro_batches: int, precision: str
) -> None:
    cut = steps(tmp_path, size, stage, micro_batches, device="cuda", precision=precision)
    coarse = 8 if precision == "bf16" else 1  # three bits fewer
    for name in ("losses", "heldout"):
        assert cut[name] == pytest.approx(whole[name], rel=2e-3 * coarse), name
    assert cut["norms"] == pytest.approx(whole["norms"], rel=1e-2 * coarse)
    assert largest_difference(cut["weights"], whole["weights"]) < 2e-2 * coarse
    assert largest_difference(cut["start"], whole["start"]) == 0  # the masters are not the rounded weights
    assert cut["steps"] == 4 and cut["applied"] == [True] * 4


@pytest.mark.skipif(apex.find() is None, reason="needs NVIDIA's Apex")
@pytest.mark.parametrize(
    ("optimizer", "stage", "precision"),
    [("adam", 0, "fp32"), ("adam", 1, "fp16"), ("adam", 3, "bf16"), ("lamb", 0, "fp32"), ("lamb", 1, "fp16")],
)
def test_apex_takes_the_same_steps(tmp_path: Path, optimizer: str, stage: int, precision: str) -> None:
    ours, apexs = (
        steps(tmp_path, 1, stage, 2, device="cuda", precision=precision, optimizer=optimizer, implementation=whose)
        for whose in ("lambert", "apex")
    )
    bound = 1e-5 if precision == "fp32" else 2e-3
    for name in ("losses", "heldout", "norms"):
        assert apexs[name] == pytest.approx(ours[name], rel=bound), name
    assert largest_difference(apexs["weights"], ours["weights"]) < 10 * bound
    assert largest_difference(apexs["weights"], ours["weights"]) > 0  # it was Apex


@STAGES
def test_repeated_steps_are_bit_identical(tmp_path: Path, stage: int) -> None:
    first, second = (steps(tmp_path, gpus(), stage, 3, device="cuda", precision="fp16") for _ in range(2))
    assert all(first[name] == second[name] for name in ("losses", "norms", "heldout"))
    assert largest_difference(first["weights"], second["weights"]) == 0


@STAGES
def test_a_scale_that_grows_leaves_the_steps_as_they_are(tmp_path: Path, stage: int) -> None:
    fixed = steps(tmp_path, gpus(), stage, 3, device="cuda", precision="fp16", scale="1024")
    grown = steps(tmp_path, gpus(), stage, 3, device="cuda", precision="fp16", scale="1024", growth="1")
    assert fixed["scales"] == [1024] * 4 and grown["scales"] == [1024, 2048, 4096, 8192]
    assert grown["norms"] == pytest.approx(fixed["norms"], rel=1e-3)
    assert grown["losses"] == pytest.approx(fixed["losses"], rel=1e-3)
    assert largest_difference(grown["weights"], fixed["weights"]) < 1e-2


@STAGES
def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path, stage: int) -> None:
    record = steps(tmp_path, gpus(), stage, 2, device="cuda", precision="fp16", scale="1024", poison="0:1")
    assert record["applied"] == [True, False, True, True] and record["steps"] == 3
    assert record["scales"] == [1024, 1024, 512, 512]
    assert record["norms"][1] == float("inf") and max(record["norms"][2:]) < 100
    assert record["heldout"][1] == record["heldout"][0] != record["heldout"][2]  # no weight has moved


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """The gradients of a batch of 64 in one piece: in fp32 on the CPU, in the others on one GPU."""
    folder = tmp_path_factory.mktemp("large")
    return {"fp32": steps(folder, 1, 1, 1, 1, batch="64")["gradients"]} | {
        precision: steps(folder, 1, 2, 1, 1, batch="64", device="cuda", precision=precision)["gradients"]
        for precision in ("fp16", "bf16")
    }


@STAGES
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_gradients_of_micro_batches_add_up_in_fp32(
    large: dict[str, dict[str, torch.Tensor]], tmp_path: Path, stage: int, precision: str
) -> None:
    """64 micro-batches err no more than one large one does."""
    parts = 64 // gpus()
    cut = steps(tmp_path, gpus(), stage, parts, 1, batch="64", device="cuda", precision=precision)["gradients"]
    small, one = (mean_difference(ours, large["fp32"]) for ours in (cut, large[precision]))
    assert small < 1.2 * one


@pytest.mark.parametrize(
    ("precision", "scales", "stages", "bound"),
    [
        ("fp32", "1", "0,1,2,3", 2e-6),
        *(("fp16", scales, "1,2,3", 1e-3) for scales in ("1", "65536", "1,256,65536")),
        ("bf16", "1", "1,2,3", 1e-2),
    ],
)
@pytest.mark.parametrize("offload", ["", "1"])
def test_every_stage_takes_the_papers_steps(
    tmp_path: Path, precision: str, scales: str, stages: str, bound: float, offload: str
) -> None:
    """Prescribed gradients, padding of NaN, any loss scale: 20 clipped steps of LAMB through the engine."""
    script, out = "tests/helpers/prescribed_on_ranks.py", tmp_path / "out.pt"
    stages = stages.removeprefix("0,") if offload else stages
    options = ("device=cuda", f"precision={precision}", f"scales={scales}", f"offload={offload}")
    ended = ranks.finish(ranks.start(gpus(), script, str(out), stages, *options))
    assert {code for code, _ in ended} == {0}, "\n".join(output for _, output in ended)
    start = Bert(prescribed.MODEL, seed=3).state_dict()
    weights: dict[str, np.ndarray] = {name: weight.double().numpy() for name, weight in start.items()}
    steps_ = (
        {name: prescribed.gradient(step, name, weight.shape).double().numpy() for name, weight in start.items()}
        for step in range(prescribed.STEPS)
    )
    norms = paper(prescribed.OPTIMIZER, weights, steps_)
    for stage, found in torch.load(out, weights_only=True).items():
        assert found["norms"] == pytest.approx(norms, rel=bound), stage
        for name, theirs in weights.items():
            error = np.linalg.norm(found["weights"][name].double().numpy() - theirs) / np.linalg.norm(theirs)
            assert error < bound, (stage, name, error)


@STAGES
@pytest.mark.parametrize("offload", ["", "offload=optimizer"])
def test_a_resumed_run_is_the_straight_one_bit_for_bit(tmp_path: Path, stage: int, offload: str) -> None:
    """Runs in fp16, while the loss scale changes."""
    options = ("device=cuda", "precision=fp16", *filter(None, [offload]))
    straight, halves = tmp_path / "straight", tmp_path / "halves"
    for root, parts in ((straight, (6,)), (halves, (3, 3))):
        root.mkdir()
        for count in parts:
            ended = train(root, gpus(), stage, count, *options)
            assert {code for code, _ in ended} == {0}, "\n".join(output for _, output in ended)
    assert losses(halves, 0) + losses(halves, 3) == losses(straight, 0)
    assert contents(halves / "step-00000006") == contents(straight / "step-00000006")
