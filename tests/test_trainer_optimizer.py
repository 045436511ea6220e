"""LAMB and Adam against implementations written from the papers, in NumPy and in fp64, in one process and on ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import prescribed_on_ranks as prescribed
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor

from kernels.lamb import trust_ratios
from trainer.model import Bert, ModelConfig
from trainer.optimizer import LambertOptimizer, OptimizerConfig, decays, make_optimizer
from trainer.partition import Buffer, Partition, Slice

RATE, STEPS = 0.01, 20


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shapes() -> dict[str, torch.Size]:
    return {"large": torch.Size([8, 4]), "small": torch.Size([4, 3]), "bias": torch.Size([5])}


def flat_partition(seed: int = 0, padding: float = 0.0) -> tuple[Partition, torch.Tensor]:
    """All of ``shapes`` in one flat buffer, as ZeRO 1 on one rank has them, with three elements of padding."""
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
    return Partition((Buffer(master, tuple(slices)),), shapes(), True), master


def gradient(step: int) -> torch.Tensor:
    return torch.randn(49 + 3, generator=torch.Generator().manual_seed(1000 + step))


def bound(config: OptimizerConfig, partition: Partition) -> LambertOptimizer:
    optimizer = make_optimizer(iter([partition.buffers[0].master]), config)
    optimizer.bind(partition)
    optimizer.rate = RATE
    return optimizer


def paper(
    config: OptimizerConfig, weights: dict[str, np.ndarray], gradients: Iterable[dict[str, np.ndarray]]
) -> list[float]:
    """You et al. 2020, Algorithm 2 (lamb) or Loshchilov & Hutter 2019, Algorithm 2 (adam), whole tensors, fp64.

    Changes ``weights``; returns the norm over all tensors of each step's gradients, which bounds them if asked for.
    """
    norms = []
    mean = {name: np.zeros_like(w) for name, w in weights.items()}
    square = {name: np.zeros_like(w) for name, w in weights.items()}
    for t, step in enumerate(gradients, 1):
        norms.append(math.sqrt(sum(float((g**2).sum()) for g in step.values())))
        factor = min(1.0, config.gradient_clipping / (norms[-1] + 1e-6)) if config.gradient_clipping else 1.0
        for name, g in step.items():
            g = factor * g
            mean[name] = config.beta1 * mean[name] + (1 - config.beta1) * g
            square[name] = config.beta2 * square[name] + (1 - config.beta2) * g * g
            m, v = mean[name], square[name]
            if config.bias_correction:
                m, v = m / (1 - config.beta1**t), v / (1 - config.beta2**t)
            update = m / (np.sqrt(v) + config.epsilon)
            ratio: float = 1.0
            if weights[name].ndim > 1:
                update = update + config.weight_decay * weights[name]
                if config.name == "lamb":
                    ratio = float(np.linalg.norm(weights[name]) / np.linalg.norm(update))
            weights[name] = weights[name] - RATE * ratio * update
    return norms


def cut(flat: torch.Tensor) -> dict[str, np.ndarray]:
    sizes = [shape.numel() for shape in shapes().values()]
    parts = torch.split(flat.detach().double()[: sum(sizes)], sizes)
    return {name: part.view(shape).numpy() for (name, shape), part in zip(shapes().items(), parts, strict=True)}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", ["lamb", "adam"])
@pytest.mark.parametrize("correction", [True, False])
def test_steps_are_the_papers(name: str, correction: bool) -> None:
    config = OptimizerConfig(name=name, bias_correction=correction)  # type: ignore[arg-type]
    partition, master = flat_partition()
    expected = cut(master)
    optimizer = bound(config, partition)
    for step in range(STEPS):
        master.grad = gradient(step)
        optimizer.step()
    paper(config, expected, [cut(gradient(step)) for step in range(STEPS)])
    for name_, weight in cut(master).items():
        error = np.linalg.norm(weight - expected[name_]) / np.linalg.norm(expected[name_])
        assert error < 1e-6, (name_, error)


@pytest.mark.usefixtures("group")
def test_poisoned_padding_never_enters_a_norm() -> None:
    clean, poisoned = flat_partition(), flat_partition(padding=float("nan"))
    for partition, master in (clean, poisoned):
        optimizer = bound(OptimizerConfig(gradient_clipping=1.0), partition)
        master.grad = gradient(0)
        if partition is poisoned[0]:
            master.grad[-3:] = float("nan")
        optimizer.step()
        assert torch.isfinite(optimizer.gradient_norm)
    assert torch.equal(clean[1][:-3], poisoned[1][:-3])


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


def test_trust_ratio_is_one_where_either_norm_is_zero() -> None:
    ratios = trust_ratios(torch.tensor([[4.0, 1.0], [0.0, 1.0], [4.0, 0.0], [0.0, 0.0]]))
    assert ratios.tolist() == [2.0, 1.0, 1.0, 1.0]


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


# ---- on ranks --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole() -> tuple[dict[str, Tensor], list[float]]:
    """Weights after the prescribed steps, and the gradient norms, by the paper."""
    start = Bert(prescribed.MODEL, seed=3).state_dict()
    weights = {name: weight.double().numpy() for name, weight in start.items()}
    steps = (
        {name: prescribed.gradient(step, name, weight.shape).double().numpy() for name, weight in start.items()}
        for step in range(prescribed.STEPS)
    )
    norms = paper(prescribed.OPTIMIZER, weights, steps)
    return {name: torch.from_numpy(weight) for name, weight in weights.items()}, norms


@pytest.mark.parametrize(
    ("size", "stages", "options", "bound"),
    [
        (1, "0,3", (), 1e-6),
        (2, "1,2,3", (), 1e-6),
        (3, "0,1,2,3", (), 1e-6),
        (4, "1,2,3", (), 1e-6),
        (3, "1,2,3", ("precision=fp16", "scales=1,256,65536"), 1e-3),
    ],
)
def test_every_stage_takes_the_papers_steps(
    whole: tuple[dict[str, Tensor], list[float]],
    tmp_path: Path,
    size: int,
    stages: str,
    options: tuple[str, ...],
    bound: float,
) -> None:
    """Prescribed gradients, padding of NaN: 20 clipped steps of LAMB through the engine, whatever the loss scale."""
    out = tmp_path / "out.pt"
    ended = ranks.finish(ranks.fork(size, "tests/prescribed_on_ranks.py", str(out), stages, *options))
    assert {code for code, _ in ended} == {0}, "\n".join(output for _, output in ended)
    told = torch.load(out, weights_only=True)
    assert list(told) == [int(stage) for stage in stages.split(",")]
    weights, norms = whole
    assert min(norms) > prescribed.OPTIMIZER.gradient_clipping
    for stage, found in told.items():
        assert found["norms"] == pytest.approx(norms, rel=bound), stage
        for name, theirs in weights.items():
            error = float((found["weights"][name] - theirs).norm() / theirs.norm())
            assert error < bound, (stage, name, error)
