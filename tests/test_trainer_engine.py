"""The engine: the cut does not matter, and DeepSpeed is what Lambert relies on."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
import torch

from trainer.engine import EngineConfig, deepspeed_config, resolve_precision
from trainer.errors import TrainerError

# (ranks, ZeRO stage, micro-batches a rank): the same 16 pairs of very different lengths and mask counts,
# dropout 0.1, in 1 to 16 parts; 3 x 16 has empty parts
CUTS = [(1, 0, 2), (1, 2, 4), (2, 1, 1), (2, 0, 2), (2, 2, 4), (4, 2, 1), (4, 1, 2), (4, 0, 4), (3, 2, 5), (3, 1, 16)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Four steps of LAMB over the batch in one piece, on one rank under ZeRO 1."""
    return steps(tmp_path_factory.mktemp("whole"), 1, 1, 1)


def steps(
    folder: Path, size: int, stage: int, micro_batches: int, optimizer: str = "lamb", *rest: str
) -> dict[str, object]:
    """First gradients, and losses, norms and weights of four steps; ``rest`` is device, precision and loss scale."""
    out = folder / "out.pt"
    start = ranks.start if "cuda" in rest else ranks.fork  # CUDA does not survive a fork
    script = "tests/engine_on_ranks.py"
    ended = ranks.finish(start(size, script, str(out), str(stage), str(micro_batches), "4", optimizer, *rest))
    assert {code for code, _ in ended} == {0}, "\n".join(output for _, output in ended)
    loaded: dict[str, object] = torch.load(out, weights_only=True)
    return loaded


@pytest.mark.parametrize(("size", "stage", "micro_batches"), CUTS)
def test_any_cut_takes_the_same_steps(
    whole: dict[str, object], tmp_path: Path, size: int, stage: int, micro_batches: int
) -> None:
    """The first gradients, and losses, gradient norms and weights of four steps, agree within fp32 rounding."""
    cut = steps(tmp_path, size, stage, micro_batches)
    for name in ("losses", "norms"):
        assert cut[name] == pytest.approx(whole[name], rel=2e-6), name
    assert largest_difference(cut["weights"], whole["weights"]) < 2e-6
    assert largest_difference(cut["gradients"], whole["gradients"]) < 1e-5  # nsp_bias: 16 pairs that nearly cancel


def test_lamb_and_adam_differ(whole: dict[str, object], tmp_path: Path) -> None:
    """The comparison above can tell optimizers apart."""
    adam = steps(tmp_path, 1, 1, 1, "adam")
    assert largest_difference(adam["weights"], whole["weights"]) > 1e-3


def largest_difference(ours: object, theirs: object) -> float:
    """Over tensors: ‖ours - theirs‖ / ‖theirs‖.

    The key bias is left out: its gradient is zero in exact arithmetic, and the optimizers normalise its
    rounding noise.
    """
    assert isinstance(ours, dict) and isinstance(theirs, dict)
    worst = 0.0
    for name, tensor in theirs.items():
        other = ours[name]
        if name.endswith("qkv_bias"):
            query, _, value = (part.chunk(3) for part in (tensor, tensor, tensor))
            tensor, other = torch.cat([query[0], value[2]]), torch.cat([other.chunk(3)[0], other.chunk(3)[2]])
        worst = max(worst, float((tensor - other).norm() / tensor.norm().clamp(min=1e-6)))
    return worst


def test_fp16_on_a_cpu_is_refused_in_one_line() -> None:
    with pytest.raises(TrainerError, match="engine.precision is fp16 but this run is on CPUs"):
        resolve_precision(EngineConfig(precision="fp16"), torch.device("cpu"))


def test_auto_precision_is_fp32_on_cpus_and_fp16_on_gpus() -> None:
    assert resolve_precision(EngineConfig(), torch.device("cpu")) == "fp32"
    assert resolve_precision(EngineConfig(), torch.device("cuda", 0)) == "fp16"


def test_deepspeed_config_states_what_deepspeed_would_default() -> None:
    derived = deepspeed_config(EngineConfig(zero_stage=2), "fp16", ranks=4, parameters=1001)
    assert derived["gradient_clipping"] == 0.0  # DeepSpeed: 1.0
    assert derived["gradient_allreduce_op"] == "sum"  # DeepSpeed: mean
    assert derived["fp16"] == {"enabled": True, "loss_scale": 1.0}  # static
    assert derived["train_batch_size"] == 4
    assert derived["zero_optimization"]["stage"] == 2
    assert derived["zero_optimization"]["reduce_bucket_size"] == 1002  # even, holds all parameters


def test_deepspeed_is_the_one_that_was_read() -> None:
    """What the design relies on in DeepSpeed's source; a version that differs is noticed here."""
    import deepspeed
    from deepspeed.runtime import constants
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    assert deepspeed.__version__.startswith("0.19.8")
    assert constants.GRADIENT_CLIPPING_DEFAULT == 1.0
    assert not DeepSpeedZeroConfig().round_robin_gradients
    assert hasattr(DeepSpeedZeroOptimizer, "update_lp_params")
    assert hasattr(DeepSpeedEngine, "set_gradient_accumulation_boundary")
