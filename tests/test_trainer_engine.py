"""The engine: the cut does not matter, and DeepSpeed is what Lambert relies on."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import ranks
from tests.helpers.engine_on_ranks import MODEL
from trainer.engine.engine import EngineConfig, deepspeed_config, resolve_precision
from trainer.errors import TrainerError
from trainer.model.bert import Bert

pytestmark = pytest.mark.slow

# (ranks, ZeRO stage, micro-batches a rank): the same 16 pairs of very different lengths and mask counts,
# dropout 0.1, in 1 to 16 parts; 3 x 16 and 3 x 6 have empty parts
CUTS = [(1, 0, 2), (1, 2, 4), (1, 3, 1), (2, 1, 1), (2, 0, 2), (2, 2, 4), (2, 3, 4), (4, 2, 1), (4, 1, 2), (4, 3, 2)]
CUTS += [(4, 0, 4), (3, 2, 5), (3, 1, 16), (3, 3, 6)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four steps of LAMB over the batch in one piece, on one rank under ZeRO 1."""
    return steps(tmp_path_factory.mktemp("whole"), 1, 1, 1)


def run(folder: Path, size: int, stage: int, micro_batches: int, count: int = 4, **options: str) -> list[str]:
    """Run engine_on_ranks.py with OUT ``folder``/out.pt; returns each rank's output. Fails if a rank does."""
    start = ranks.start if options.get("device") == "cuda" else ranks.fork  # CUDA does not survive a fork
    arguments = [str(folder / "out.pt"), str(stage), str(micro_batches), str(count)]
    given = [f"{key}={value}" for key, value in options.items()]
    ended = ranks.finish(start(size, "tests/helpers/engine_on_ranks.py", *arguments, *given))
    assert {code for code, _ in ended} == {0}, "\n".join(output for _, output in ended)
    return [output for _, output in ended]


def steps(folder: Path, size: int, stage: int, micro_batches: int, count: int = 4, **options: str) -> dict[str, Any]:
    """The results of some steps of engine_on_ranks.py."""
    run(folder, size, stage, micro_batches, count, **options)
    loaded: dict[str, Any] = torch.load(folder / "out.pt", weights_only=True)
    return loaded


@pytest.mark.parametrize(("size", "stage", "micro_batches"), CUTS)
def test_any_cut_takes_the_same_steps(
    whole: dict[str, Any], tmp_path: Path, size: int, stage: int, micro_batches: int
) -> None:
    """The first gradients, and losses (held-out ones, too), norms and weights of four steps, agree within rounding."""
    cut = steps(tmp_path, size, stage, micro_batches)
    for name in ("losses", "norms", "heldout"):
        assert cut[name] == pytest.approx(whole[name], rel=2e-6), name
    assert largest_difference(cut["weights"], whole["weights"]) < 4e-6
    assert largest_difference(cut["gradients"], whole["gradients"]) < 1e-5  # nsp_bias: 16 pairs that nearly cancel
    assert cut["unaligned"] == []  # matrix products of others take twice as long on a GPU
    assert set(cut["parts"]) == {"forward", "backward", "reduce", "optimizer"} and min(cut["parts"].values()) > 0


def test_any_cut_of_a_pre_ln_model_takes_the_same_steps(whole: dict[str, Any], tmp_path: Path) -> None:
    one, cut = (steps(tmp_path, *where, layer_norm="before") for where in ((1, 1, 1), (2, 3, 4)))
    assert cut["losses"] == pytest.approx(one["losses"], rel=2e-6)
    assert largest_difference(cut["gradients"], one["gradients"]) < 1e-5
    assert (
        largest_difference(cut["weights"], one["weights"]) < 4e-5
    )  # some gradients nearly vanish; LAMB scales them up
    assert largest_difference(one["weights"], whole["weights"]) > 1e-4


def test_a_start_compiles_nothing_and_leaves_no_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's own start on CPUs, under its launcher, does both: a minute, and 64 MiB a rank until the next boot."""
    monkeypatch.setenv("LOCAL_SIZE", "2")  # as its launcher says it
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "compiled"))
    before = set(Path("/dev/shm").glob("deepspeed*"))
    run(tmp_path, 2, 1, 1, count=1)
    assert set(Path("/dev/shm").glob("deepspeed*")) <= before
    assert not (tmp_path / "compiled").exists()


def test_lamb_and_adam_differ(whole: dict[str, Any], tmp_path: Path) -> None:
    """The comparison above is precise enough to distinguish optimizers."""
    adam = steps(tmp_path, 1, 1, 1, optimizer="adam")
    assert largest_difference(adam["weights"], whole["weights"]) > 1e-3


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest ‖ours - theirs‖ / ‖theirs‖ over tensors.

    The key bias is left out: its gradient is zero in exact arithmetic, and the optimizers normalise its
    rounding noise.
    """
    worst = 0.0
    for name, tensor in theirs.items():
        other = ours[name]
        if name.endswith("qkv_bias"):
            query, _, value = (part.chunk(3) for part in (tensor, tensor, tensor))
            tensor, other = torch.cat([query[0], value[2]]), torch.cat([other.chunk(3)[0], other.chunk(3)[2]])
        worst = max(worst, float((tensor - other).norm() / tensor.norm().clamp(min=1e-6)))
    return worst


# ---- precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")])
def test_the_loss_scale_is_no_part_of_the_step(tmp_path: Path, stage: int, precision: str) -> None:
    """2^0, 2^8 and 2^16, one after the other: bit for bit the gradients, norms and weights of 2^0 alone."""
    plain, scaled = (steps(tmp_path, 2, stage, 2, precision=precision, scales=s) for s in ("1", "1,256,65536"))
    assert scaled["scales"] == [1, 256, 65536, 1]
    assert all(scaled[name] == plain[name] for name in ("losses", "norms", "heldout", "steps"))
    for kind in ("gradients", "weights"):
        assert all(torch.equal(scaled[kind][name], tensor) for name, tensor in plain[kind].items())
    drawn = Bert(MODEL, seed=3).state_dict()  # DeepSpeed has changed no weight, and taken no step
    assert all(torch.equal(plain["start"][name], drawn[name]) for name in drawn) and plain["steps"] == 4


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """The gradients of a batch of 64 in one piece, by precision."""
    folder = tmp_path_factory.mktemp("large")
    return {p: steps(folder, 1, 2, 1, 1, batch="64", precision=p)["gradients"] for p in ("fp32", "bf16")}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_micro_batches_add_up_in_fp32(
    large: dict[str, dict[str, torch.Tensor]], tmp_path: Path, stage: int
) -> None:
    """64 micro-batches in bf16 err no more than one large one does; added up in bf16, they err twice as much."""
    cut = steps(tmp_path, 2, stage, 32, 1, batch="64", precision="bf16")["gradients"]
    small, one = (mean_difference(ours, large["fp32"]) for ours in (cut, large["bf16"]))
    assert 1e-3 < one and small < 1.1 * one


def mean_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The mean ‖ours - theirs‖ / ‖theirs‖ over tensors, without the key bias."""
    return float(torch.tensor([largest_difference({n: ours[n]}, {n: theirs[n]}) for n in theirs]).mean())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path, stage: int) -> None:
    """The scale then halves, and doubles after two good steps, which the norms do not show. fp16 on CPUs."""
    options = {"precision": "fp16", "scale": "1024", "growth": "2"}
    record = steps(tmp_path, 2, stage, 2, 5, **options, poison="0:1")
    assert record["applied"] == [True, False, True, True, True] and record["steps"] == 4
    assert record["scales"] == [1024, 1024, 512, 512, 1024]
    assert record["heldout"][1] == record["heldout"][0] != record["heldout"][2]  # no weight has moved
    fixed = steps(tmp_path, 2, stage, 2, 5, **options, poison="0:1", scales="512")
    assert record["norms"][1] == fixed["norms"][1] == float("inf")
    assert record["norms"] == pytest.approx(fixed["norms"], rel=1e-3)
    assert record["losses"] == pytest.approx(fixed["losses"], rel=1e-3)


@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (2, "bf16"), (0, "fp32"), (1, "fp32"), (3, "fp32")])
def test_gradients_that_are_not_finite_end_the_run_on_all_ranks(tmp_path: Path, stage: int, precision: str) -> None:
    """DeepSpeed would skip the step, and every one after it."""
    arguments = (str(tmp_path / "out.pt"), str(stage), "2", "4", f"precision={precision}", "poison=0:1")
    for code, output in ranks.finish(ranks.fork(2, "tests/helpers/engine_on_ranks.py", *arguments)):
        assert code == 1 and "the gradients are not finite: training diverged; lower the learning rate" in output


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_low_precision_at_stage_0_is_refused_in_one_line(precision: str) -> None:
    [problem] = EngineConfig(0, precision).problems()  # type: ignore[arg-type]
    assert (
        problem.startswith(f"precision {precision} does not work with zero_stage 0")
        and "set zero_stage to 1" in problem
    )
    assert all(EngineConfig(stage, precision).problems() == [] for stage in (1, 2, 3))  # type: ignore[arg-type]


def test_an_optimizer_in_the_hosts_memory_is_refused_where_it_cannot_be() -> None:
    [problem] = EngineConfig(0, offload_optimizer=True).problems()
    assert problem == "offload_optimizer does not work with zero_stage 0: set zero_stage to 1, 2 or 3, or remove it"
    [problem] = EngineConfig(1, offload_optimizer=True, kernels="triton").problems()
    assert problem.startswith(
        "offload_optimizer runs the optimizer on the CPU, where Triton does not run: set kernels to auto"
    )


def test_fp16_on_a_cpu_is_refused_in_one_line() -> None:
    with pytest.raises(TrainerError, match="engine.precision is fp16, but this run is on CPUs"):
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
    assert derived["zero_optimization"]["offload_optimizer"]["device"] == "none"
    assert derived["zero_optimization"]["reduce_bucket_size"] == 1002  # even, holds all parameters


def test_stage_3_is_one_sub_group_and_a_mean_that_is_taken_back() -> None:
    derived = deepspeed_config(EngineConfig(zero_stage=3), "fp16", ranks=3, parameters=400_000_000)
    assert derived["gradient_allreduce_op"] == "mean"  # sum is refused
    assert derived["zero_optimization"]["sub_group_size"] > 400_000_000  # the optimizer is called once a step
    assert derived["zero_optimization"]["reduce_bucket_size"] < 400_000_000


def test_settings_that_deepspeed_refuses_end_a_start_in_one_line(tmp_path: Path) -> None:
    """A release that no longer knows one of them says so on ten lines."""
    code = (
        "import trainer.engine.engine as engine; from tests.helpers import engine_on_ranks as helper\n"
        "made = engine.deepspeed_config\n"
        "def unknown(*given):\n    tree = made(*given)\n    tree['zero_optimization']['new'] = 1\n    return tree\n"
        "engine.deepspeed_config = unknown\n"
        "helper.main()\n"
    )
    [(ended, output)] = ranks.finish(ranks.fork(1, "-c", code, str(tmp_path / "out.pt"), "1", "1", "1"))
    assert ended == 1 and f"DeepSpeed {version('deepspeed')} refuses Lambert's settings for it: install" in output
    assert "new\n  Extra inputs are not permitted" in output
