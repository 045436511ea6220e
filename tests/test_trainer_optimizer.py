"""LAMB and Adam against implementations written from the papers, in NumPy and in fp64, in one process and on ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from kernels.dropout import token_keys
from tests.helpers import engine_on_ranks, ranks
from tests.helpers import prescribed_on_ranks as prescribed
from tests.test_trainer_engine import largest_difference, steps
from trainer.engine.optimizer import LambertOptimizer, OptimizerConfig, decays, make_optimizer
from trainer.engine.partition import Buffer, Partition, Slice, read_partition
from trainer.errors import TrainerError
from trainer.model.bert import Bert, ModelConfig

pytestmark = pytest.mark.slow

RATE, STEPS = 0.01, 20


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shapes() -> dict[str, torch.Size]:
    return {"large": torch.Size([8, 4]), "small": torch.Size([4, 3]), "bias": torch.Size([5])}


def flat_partition(seed: int = 0, padding: float = 0.0) -> tuple[Partition, torch.Tensor]:
    """Put all of ``shapes`` into one flat buffer, as ZeRO 1 on one rank has them, with three elements of padding."""
    generator = torch.Generator().manual_seed(seed)
    at, slices = 0, []
    for name, shape in shapes().items():
        slices.append(Slice(name, 0, at, shape.numel()))
        at += shape.numel()
    master = torch.randn(at + 3, generator=generator)
    master[:32] *= 100.0  # norms that differ by a factor of ten thousand
    master[32:44] *= 0.01
    master[at:] = padding
    master.requires_grad_(True)
    return Partition((Buffer(master, tuple(slices)),), shapes(), True, master.device), master


def gradient(step: int) -> torch.Tensor:
    return torch.randn(49 + 3, generator=torch.Generator().manual_seed(1000 + step))


def bound(config: OptimizerConfig, partition: Partition) -> LambertOptimizer:
    optimizer = make_optimizer(iter([partition.buffers[0].master]), config)
    optimizer.bind(partition)
    optimizer.rate = RATE
    return optimizer


def paper(
    config: OptimizerConfig,
    weights: dict[str, np.ndarray],
    gradients: Iterable[dict[str, np.ndarray]],
    ratios: dict[str, float] | None = None,
) -> list[float]:
    """You et al. 2020, Algorithm 2 (lamb) or Loshchilov & Hutter 2019, Algorithm 2 (adam), whole tensors, fp64.

    Changes ``weights``, and ``ratios`` to those of the last step; returns the norm over all tensors of each step's
    gradients, which bounds them if asked for, as NVLAMB's second step does for a bound of 1.
    """
    norms = []
    mean = {name: np.zeros_like(w) for name, w in weights.items()}
    square = {name: np.zeros_like(w) for name, w in weights.items()}
    most = np.inf if config.max_trust_ratio is None else config.max_trust_ratio
    for t, step in enumerate(gradients, 1):
        norms.append(math.sqrt(sum(float((g**2).sum()) for g in step.values())))
        divisor = max(1.0, norms[-1] / config.gradient_clipping) if config.gradient_clipping else 1.0
        for name, g in step.items():
            g = g / divisor
            mean[name] = config.beta1 * mean[name] + (1 - config.beta1) * g
            square[name] = config.beta2 * square[name] + (1 - config.beta2) * g * g
            m, v = mean[name], square[name]
            if config.bias_correction:
                m, v = m / (1 - config.beta1**t), v / (1 - config.beta2**t)
            update = m / (np.sqrt(v) + config.epsilon)
            matrix, ratio = weights[name].ndim > 1, 1.0
            if matrix:
                update = update + config.weight_decay * weights[name]
            if config.name == "lamb" and (matrix or config.adapted == "all"):
                both = [float(np.linalg.norm(tensor)) for tensor in (weights[name], update)]
                ratio = min(max(both[0] / both[1], config.min_trust_ratio), most) if min(both) > 0 else 1.0
                if ratios is not None:
                    ratios[name] = ratio
            weights[name] = weights[name] - RATE * ratio * update
    return norms


def cut(flat: torch.Tensor) -> dict[str, np.ndarray]:
    sizes = [shape.numel() for shape in shapes().values()]
    parts = torch.split(flat.detach().double()[: sum(sizes)], sizes)
    return {name: part.view(shape).numpy() for (name, shape), part in zip(shapes().items(), parts, strict=True)}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"bias_correction": False, "gradient_clipping": 1.0},  # of norms around 7
        {"adapted": "all"},
        {"min_trust_ratio": 0.5},
        {"max_trust_ratio": 2.0},
        {"min_trust_ratio": 0.05, "max_trust_ratio": 2.0, "adapted": "all", "weight_decay": 0.1},
        {"name": "adam"},
        {"name": "adam", "bias_correction": False, "gradient_clipping": 1.0},
    ],
    ids=str,
)
def test_steps_are_the_papers(choices: dict[str, Any]) -> None:
    config = OptimizerConfig(**choices)
    partition, master = flat_partition()
    expected, ratios = cut(master), dict[str, float]()
    optimizer = bound(config, partition)
    for step in range(STEPS):
        master.grad = gradient(step)
        optimizer.step()
    paper(config, expected, [cut(gradient(step)) for step in range(STEPS)], ratios)
    for name, weight in cut(master).items():
        error = np.linalg.norm(weight - expected[name]) / np.linalg.norm(expected[name])
        assert error < 1e-6, (name, error)
    if optimizer.trust is not None:
        assert optimizer.trust.tolist() == pytest.approx(list(ratios.values()), rel=1e-5)
        bounds = {config.min_trust_ratio or None, config.max_trust_ratio} - {None}
        assert bounds <= set(ratios.values()), "a bound that never binds"


@pytest.mark.usefixtures("group")
def test_choices_that_never_bind_change_nothing() -> None:
    """Bounds of the trust ratios and of the gradient norm, which NVLAMB allows up to 1, change no bit."""
    found = []
    for config in (
        OptimizerConfig(),
        OptimizerConfig(min_trust_ratio=1e-9, max_trust_ratio=1e9),
        OptimizerConfig(gradient_clipping=10.0),
    ):
        partition, master = flat_partition()
        optimizer = bound(config, partition)
        for step in range(3):
            master.grad = gradient(step)
            optimizer.step()
            assert float(optimizer.gradient_norm) < 10
        found.append(master.detach()[:-3])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.usefixtures("group")
def test_what_gets_no_gradient_only_decays_until_it_gets_one() -> None:
    """This is the case of position embeddings beyond 128 while all samples are shorter; the next phase uses them."""
    partition, master = flat_partition()
    optimizer, start, kept = bound(OptimizerConfig(), partition), master.detach().clone(), 1.0
    for step in range(5):
        master.grad = gradient(step)
        master.grad[16:32] = 0  # the last four rows of "large"
        optimizer.step()
        assert optimizer.trust is not None
        kept *= 1 - RATE * float(optimizer.trust[0]) * optimizer.config.weight_decay
    torch.testing.assert_close(master.detach()[16:32], start[16:32] * kept, rtol=1e-5, atol=0)
    assert not any(moment[16:32].any() for moment in optimizer.moments(partition.buffers[0]).values())
    before, master.grad = master.detach().clone(), gradient(5)
    optimizer.step()
    moved = float((master.detach() - before)[:32].norm() / before[:32].norm())
    assert moved == pytest.approx(RATE, rel=1e-4)  # the rate is LAMB's relative change of a tensor


@pytest.mark.usefixtures("group")
def test_poisoned_padding_never_enters_a_norm() -> None:
    """A buffer of nothing but padding does not either; a rank has one if no parameter is left for it."""
    clean, poisoned = flat_partition(), flat_partition(padding=float("nan"))
    nothing = torch.full((8,), float("nan"), requires_grad=True)
    for partition, master in (clean, poisoned):
        master.grad, nothing.grad = gradient(0), nothing.detach().clone()
        if partition is poisoned[0]:
            master.grad[-3:] = float("nan")
            partition = replace(partition, buffers=(Buffer(nothing, ()), *partition.buffers))
        optimizer = bound(OptimizerConfig(gradient_clipping=1.0), partition)
        optimizer.step()
        assert torch.isfinite(optimizer.gradient_norm)
    assert torch.equal(clean[1][:-3], poisoned[1][:-3]) and nothing.isnan().all()


@pytest.mark.usefixtures("group")
def test_norm_is_global_unscaled_and_before_clipping() -> None:
    partition, master = flat_partition()
    optimizer = bound(OptimizerConfig(gradient_clipping=1e-9), partition)
    optimizer.gradient_scale = 1024.0
    master.grad = gradient(0) * 1024.0
    optimizer.step()
    assert float(optimizer.gradient_norm) == pytest.approx(float(gradient(0)[:-3].norm()), rel=1e-6)


@pytest.mark.usefixtures("group")
def test_clipping_bounds_the_gradient_that_the_moments_see() -> None:
    partition, master = flat_partition()
    optimizer = bound(OptimizerConfig(name="adam", gradient_clipping=0.5, beta1=0.0), partition)
    master.grad = gradient(0)
    optimizer.step()
    seen = optimizer.moments(partition.buffers[0])["exp_avg"][:-3]
    assert float(seen.norm()) == pytest.approx(0.5, rel=1e-4)


def test_an_unbound_optimizer_does_nothing() -> None:
    """DeepSpeed's initialisation may call step on zero gradients; weights and step count stay."""
    partition, master = flat_partition()
    optimizer = make_optimizer(iter([master]), OptimizerConfig())
    before = master.detach().clone()
    master.grad = torch.zeros_like(master)
    optimizer.step()
    assert torch.equal(master, before) and optimizer.steps == 0


def test_every_bias_and_layer_norm_is_undecayed_and_every_matrix_decayed() -> None:
    model = Bert(ModelConfig(layers=1, hidden=16, heads=2, intermediate=32, vocab_size=50))
    undecayed = {name for name, p in model.named_parameters() if not decays(p.shape)}
    assert undecayed == {name for name, _ in model.named_parameters() if name.endswith("bias") or "norm" in name}


# ---- DeepSpeed's partitions ------------------------------------------------------------------------------------


def partitioned(stage: int, **changed: Any) -> dict[str, Any]:
    """The arguments of ``read_partition`` after DeepSpeed has initialized two parameters on one rank."""
    row = torch.arange(12.0)
    module = nn.Module()
    module.a, module.b = nn.Parameter(row[:6].view(2, 3)), nn.Parameter(row[6:11])
    both = [module.a, module.b]
    optimizer: Any = SimpleNamespace(param_groups=[{"params": [changed.pop("master", row.clone())]}])
    zero: Any = {"fp16_groups": [both], "fp32_partitioned_groups_flat": [row[:11].clone()]}
    for parameter in both if stage == 3 else ():
        parameter.ds_tensor = parameter.detach().flatten()  # type: ignore[attr-defined]
    if "moved" in changed:
        module.b.data = changed.pop("moved")
    shapes = {name: p.shape for name, p in module.named_parameters()}
    return {"module": module, "optimizer": optimizer, "zero": SimpleNamespace(**zero | changed), "shapes": shapes}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("stage", "changed", "what"),
    [
        (1, {"moved": torch.zeros(5)}, "weights in one row"),
        (2, {"master": torch.arange(11.0)}, "partition sizes"),
        (2, {"master": torch.arange(1.0, 13.0)}, "masters of other weights"),
        (1, {"master": torch.arange(12.0).half()}, "fp32 partitions"),
        (3, {"fp16_groups": [[], []]}, "several sub-groups"),
        (3, {"fp32_partitioned_groups_flat": [torch.arange(12.0)]}, "partition sizes"),
        (3, {"fp32_partitioned_groups_flat": [torch.arange(10.0, -1.0, -1.0)]}, "masters of other weights"),
    ],
)
def test_a_layout_that_is_not_tested_is_refused_in_one_line(stage: int, changed: dict[str, Any], what: str) -> None:
    [buffer] = read_partition(**partitioned(stage), zero_stage=stage).buffers
    assert [(part.name, part.offset, part.length) for part in buffer.slices] == [("a", 0, 6), ("b", 6, 5)]
    with pytest.raises(TrainerError) as error:
        read_partition(**partitioned(stage, **changed), zero_stage=stage)
    assert f"({what})" in str(error.value) and "requirements.lock" in str(error.value) and "\n" not in str(error.value)


# ---- on ranks --------------------------------------------------------------------------------------------------


@cache
def whole(optimizer: str, count: int) -> tuple[dict[str, Tensor], list[float]]:
    """Weights after the prescribed steps, and the gradient norms, by the paper."""
    start = Bert(prescribed.MODEL, seed=3).state_dict()
    weights = {name: weight.double().numpy() for name, weight in start.items()}
    gradients = (
        {name: prescribed.gradient(step, name, weight.shape).double().numpy() for name, weight in start.items()}
        for step in range(count)
    )
    config, ratios = prescribed.OPTIMIZERS[optimizer], dict[str, float]()
    norms = paper(config, weights, gradients, ratios)
    assert min(norms) > config.gradient_clipping
    if optimizer == "bounded":
        assert {config.min_trust_ratio, config.max_trust_ratio} < set(ratios.values())
    return {name: torch.from_numpy(weight) for name, weight in weights.items()}, norms


@pytest.mark.parametrize(
    ("size", "stages", "optimizer", "count", "options", "bound"),
    [
        (1, "0", "lamb", 20, (), 1e-6),
        (2, "1,2,3", "lamb", 20, (), 1e-6),
        (3, "1,2,3", "lamb", 5, (), 1e-6),
        (4, "1,2,3", "lamb", 5, (), 1e-6),
        (2, "0,1,3", "bounded", 5, (), 1e-6),
        (2, "1,3", "adam", 5, (), 1e-6),
        (2, "1,2,3", "lamb", 6, ("precision=fp16", "scales=1,256,65536"), 1e-3),
        (2, "1,2,3", "lamb", 3, ("offload=1",), 1e-6),
        (2, "1,2,3", "lamb", 3, ("offload=1", "precision=fp16", "scales=1,256,65536"), 1e-3),
    ],
)
def test_every_stage_takes_the_papers_steps(
    tmp_path: Path, size: int, stages: str, optimizer: str, count: int, options: tuple[str, ...], bound: float
) -> None:
    """Prescribed gradients, padding of NaN: clipped steps through the engine, whatever the loss scale."""
    out = tmp_path / "out.pt"
    options += (f"optimizer={optimizer}", f"steps={count}")
    ended = ranks.finish(ranks.fork(size, "tests/helpers/prescribed_on_ranks.py", str(out), stages, *options))
    assert {code for code, _ in ended} == {0}, "\n".join(output for _, output in ended)
    record = torch.load(out, weights_only=True)
    assert list(record) == [int(stage) for stage in stages.split(",")]
    weights, norms = whole(optimizer, count)
    for stage, found in record.items():
        assert found["norms"] == pytest.approx(norms, rel=bound), stage
        for name, theirs in weights.items():
            error = float((found["weights"][name] - theirs).norm() / theirs.norm())
            assert error < bound, (stage, name, error)


def test_the_gradients_are_those_of_plain_autograd(tmp_path: Path) -> None:
    """Two ranks, stage 3, two micro-batches; also of the matrix that is the embedding and, tied to it, the head."""
    model = engine_on_ranks.MODEL
    [batch], counts = engine_on_ranks.cut(0, 0, 1, 1)
    bare = Bert(model, seed=3)
    out = bare(batch, token_keys(3, 0, batch.samples, batch.positions, batch.cu_seqlens))
    torch.autograd.backward(out.mlm_loss / counts.targets + out.nsp_loss / counts.pairs)
    expected = {name: p.grad for name, p in bare.named_parameters() if p.grad is not None}
    unread = torch.ones(model.vocab_size, dtype=torch.bool).index_fill(0, batch.tokens, False)
    assert unread.any() and bool(expected["token_table"][: model.vocab_size][unread].any(1).all())  # from the head
    taken = steps(tmp_path, 2, 3, 2, 1)["gradients"]
    assert taken.keys() == expected.keys()
    assert largest_difference({name: g / (1 - 0.9) for name, g in taken.items()}, expected) < 1e-5
