"""DeepSpeed's private names: the installed release has each, and without it a run trains, or is refused in one line."""

from __future__ import annotations

import json
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers import ranks
from trainer.engine.exact_sums import require_exact_sums
from trainer.engine.optimizer import OptimizerConfig, make_optimizer
from trainer.engine.partition import Buffer, Partition, Slice
from trainer.engine.private_names import (
    HOOKS,
    MASTERS,
    NAMES,
    NORM,
    OPS,
    ORDER,
    REDUCE,
    SHARD,
    TESTED,
    PrivateName,
    find,
)
from trainer.errors import TrainerError

pytestmark = pytest.mark.slow

PLAN = [(1, ""), (3, ""), (2, "1:1"), (3, "")]  # micro-batches of each step, and who overflows in which of them
WITHOUT = {  # the engines that train without a name
    HOOKS: ["adam:fp16:1", "adam:fp16:2", "adam:bf16:2", "lamb:fp16:2"],
    REDUCE: ["adam:fp32:1"],
    OPS: ["adam:fp16:1"],
    NORM: ["adam:fp32:1"],
}
REFUSED = {  # the engine that is refused without a name, and the end of the reason
    HOOKS: ("adam:fp16:1:offload", "which offload_optimizer needs", "set it to false"),
    ORDER: ("adam:fp16:3", "which zero_stage 3 needs", "set zero_stage to 2"),
    MASTERS: ("adam:fp16:3", "which zero_stage 3 needs", "set zero_stage to 2"),
    SHARD: ("adam:fp16:3", "which zero_stage 3 needs", "set zero_stage to 2"),
}
WRONG = "adam:fp16:1:mean"  # an engine whose own sums are wrong
CASES = [(engine, name) for name, engines in WITHOUT.items() for engine in engines]
Recorded = tuple[dict[str, Any], list[list[str]]]


def text(engine: str, name: PrivateName) -> str:
    return f"{engine}:without={name.name}"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The reports of the engines with and without each name on two ranks, and each rank's lines."""
    out = tmp_path_factory.mktemp("names") / "out.pt"
    whole = dict.fromkeys([*(engine for engine, _ in CASES), "adam:fp16:3"])
    engines = [*whole, *(text(*case) for case in CASES), *(text(engine, n) for n, (engine, *_) in REFUSED.items())]
    engines.append(text(WRONG, HOOKS))
    script = "tests/helpers/gradients_on_ranks.py"
    ended = ranks.finish(ranks.fork(2, script, str(out), json.dumps(PLAN), *engines), timeout=100)
    assert {code for code, _ in ended} == {0}, "\n".join(output for _, output in ended)
    printed = [[line for line in output.splitlines() if line.startswith("lambert: ")] for _, output in ended]
    return torch.load(out, weights_only=True), printed


def lacks(name: PrivateName) -> str:
    return f"DeepSpeed {version('deepspeed')} lacks the {name.name} that Lambert knows, in {name.owner}"


def test_every_name_is_in_the_installed_deepspeed(recorded: Recorded) -> None:
    """An engine prints a line only if it lacks a name, and only on rank 0."""
    assert version("deepspeed") in TESTED
    assert {*WITHOUT, *REFUSED} == set(NAMES)
    every = [*(name for _, name in CASES), HOOKS]  # the last one for the engine whose sums are wrong
    said = [f"lambert: warning: {lacks(n)}: {n.without} (tested: {', '.join(TESTED)})" for n in every]
    assert recorded[1] == [said, []]


@pytest.mark.parametrize(("engine", "name"), CASES, ids=lambda value: getattr(value, "name", value))
def test_without_a_name_the_same_steps_are_taken(recorded: Recorded, engine: str, name: PrivateName) -> None:
    """Masters, moments and norms are the same to the last bit, and so is the loss scale after an overflow."""
    ours, theirs = recorded[0][text(engine, name)], recorded[0][engine]
    assert ours["results"] == theirs["results"] and ours["unrounded"] == theirs["unrounded"] == []
    for own, other in zip(ours["states"], theirs["states"], strict=True):
        assert own["steps"] == other["steps"]
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            assert all(torch.equal(own[kind][n], tensor) for n, tensor in other[kind].items()), kind


@pytest.mark.parametrize("name", REFUSED, ids=lambda name: name.name)
def test_without_a_name_a_run_that_needs_it_is_refused_in_one_line(recorded: Recorded, name: PrivateName) -> None:
    engine, which, instead = REFUSED[name]
    expected = f"{lacks(name)}, {which}: install deepspeed=={TESTED[-1]}, or {instead}"
    assert recorded[0][text(engine, name)] == expected


def test_without_hooks_wrong_sums_are_refused_in_one_line(recorded: Recorded) -> None:
    expected = f"{lacks(HOOKS)}, and its own sums of gradients are not exact: install deepspeed=={TESTED[-1]}, or "
    assert recorded[0][text(WRONG, HOOKS)] == f"{expected}set zero_stage to 3"


def test_a_name_that_holds_too_little_is_lacking() -> None:
    """One hook left in place would take a gradient away unseen."""
    hooks, said = [object(), object()], list[str]()
    assert find(SimpleNamespace(_grad_acc_hooks=hooks), HOOKS, said.append, 2) == hooks and said == []
    assert find(SimpleNamespace(_grad_acc_hooks=hooks), HOOKS, said.append, 3) is None
    assert len(said) == 1 and said[0].endswith(f"{HOOKS.without} (tested: {', '.join(TESTED)})")


class Sums:
    """DeepSpeed's engine on one rank, as far as its sums go: it adds gradients up in ``dtype``."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
        self.module, self.optimizer = module, optimizer
        self.sums = [torch.zeros(p.numel(), dtype=dtype) for p in module.parameters()]

    def set_gradient_accumulation_boundary(self, last: bool) -> None:
        pass

    def backward(self, loss: Tensor, scale_wrt_gas: bool) -> None:
        torch.autograd.backward(loss)
        for own, parameter in zip(self.sums, self.module.parameters(), strict=True):
            assert parameter.grad is not None
            own += parameter.grad.view(-1)
            parameter.grad = None

    def step(self) -> None:
        [master] = self.optimizer.param_groups[0]["params"]
        master.grad = torch.cat(self.sums).float()
        self.optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums_that_are_not_exact_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    module = nn.Linear(3, 2).half()
    master = nn.Parameter(torch.zeros(8))
    optimizer = make_optimizer(iter([master]), OptimizerConfig())
    shapes = {name: p.shape for name, p in module.named_parameters()}
    slices = Slice("weight", 0, 0, 6), Slice("bias", 0, 6, 2)
    partition = Partition((Buffer(master, slices),), shapes, True, torch.device("cpu"))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with nullcontext() if dtype == torch.float32 else pytest.raises(TrainerError, match="sums .* are not exact: "):
            require_exact_sums(Sums(module, optimizer, dtype), module, optimizer, partition)
    finally:
        dist.destroy_process_group()
    assert not master.any() and optimizer.steps == 0
