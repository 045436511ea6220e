"""Gradients in halves, from backward to the weights: exact sums, whatever the stage, the cut and the step before."""

from __future__ import annotations

import json
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers import gradients_on_ranks as toys
from tests.helpers import ranks
from tests.test_trainer_optimizer import RATE, paper
from trainer.engine import gradients
from trainer.engine.gradients import Gradients
from trainer.engine.partition import Weights

pytestmark = pytest.mark.slow

# Micro-batches of the steps, and who overflows in which of them: the first, the last, the only one.
PLAN = [(1, ""), (3, ""), (3, "0:0"), (2, ""), (2, "last:1"), (1, ""), (1, "0:0"), (3, "")]
HALVES = ["fp16:1", "fp16:2", "bf16:2"]
OFFLOADED = ["fp16:1:offload", "fp16:2:offload", "bf16:1:offload"]
EXACT = [f"adam:{each}" for each in [*HALVES, "fp32:1", "fp32:2"]]  # fp32 goes through DeepSpeed
ENGINES = {  # by number of ranks: those of exact steps, and others
    1: (EXACT[:2] + EXACT[3:4], ["adam:fp16:1:triton", "lamb:fp16:2:triton"]),
    2: (
        [*EXACT, *(f"adam:{each}" for each in OFFLOADED), "adam:fp16:3", "adam:fp16:3:offload"],
        ["lamb:fp16:1", "lamb:fp16:2"],
    ),
    3: (EXACT[:2] + EXACT[3:4], ["lamb:fp16:2", "tiny:fp16:1", "tiny:fp16:2"]),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The reports of the engines, by number of ranks."""
    folder = tmp_path_factory.mktemp("gradients")

    @cache
    def run(size: int) -> dict[str, Any]:
        out, plan = folder / f"{size}.pt", json.dumps([(n, who.replace("last", str(size - 1))) for n, who in PLAN])
        ended = ranks.finish(
            ranks.fork(size, "tests/helpers/gradients_on_ranks.py", str(out), plan, *sum(ENGINES[size], [])),
            timeout=100,
        )
        assert {code for code, _ in ended} == {0}, "\n".join(output for _, output in ended)
        loaded: dict[str, Any] = torch.load(out, weights_only=True)
        return loaded

    return run


def good(engine: dict[str, Any]) -> list[dict[str, Any]]:
    """The states after the steps that were taken."""
    return [state for state, result in zip(engine["states"], engine["results"], strict=True) if result[1]]


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    return ours["steps"] == theirs["steps"] and all(
        torch.equal(tensor, theirs[kind][name]) for kind in kinds for name, tensor in ours[kind].items()
    )


@pytest.mark.parametrize("size", ENGINES)
def test_halves_step_as_deepspeed_does_in_fp32_to_the_last_bit(recorded: Any, size: int) -> None:
    """Adam without clipping has no norm that an order of adding could round: masters, moments and step counts."""
    reference = good(recorded(size)["adam:fp32:1"])
    assert len(reference) == sum(not who for _, who in PLAN)
    for name in ENGINES[size][0]:
        states = good(recorded(size)[name])
        assert [same(*pair) for pair in zip(states, reference, strict=True)] == [True] * len(reference), name


@pytest.mark.parametrize("size", ENGINES)
def test_clipped_steps_and_norms_are_the_papers(recorded: Any, size: int) -> None:
    """This holds even if no parameter is left for the last rank's share."""
    assert RATE == toys.RATE
    for name in ENGINES[size][1]:
        kind, engine = name.split(":")[0], recorded(size)[name]
        taken = [(step, parts) for step, (parts, who) in enumerate(PLAN) if not who]
        weights = {n: w.double().numpy() for n, w in toys.drawn(kind).items()}
        sums = [[toys.gradient(kind, step, part, parts) for part in range(parts * size)] for step, parts in taken]
        whole = [{n: sum(g[n] for g in parts).double().numpy() for n in weights} for parts in sums]  # type: ignore[union-attr]
        norms = paper(toys.OPTIMIZERS[kind], weights, whole)
        assert max(norms) > toys.OPTIMIZERS[kind].gradient_clipping
        assert [r[3] for r in engine["results"] if r[1]] == pytest.approx(norms, rel=1e-6), name
        for n, w in weights.items():
            error = float((good(engine)[-1]["weight"][n].double() - torch.from_numpy(w)).norm() / np.linalg.norm(w))
            assert error < 1e-6, (name, n)


@pytest.mark.parametrize("size", ENGINES)
def test_an_overflow_moves_nothing_and_is_forgotten(recorded: Any, size: int) -> None:
    """This holds for any rank and any micro-batch: moments, step count and masters stay; the scale halves."""
    for name in (name for name in sum(ENGINES[size], []) if ":fp16:" in name):
        states, results = recorded(size)[name]["states"], recorded(size)[name]["results"]
        assert [applied for _, applied, *_ in results] == [not who for _, who in PLAN], name
        assert results[-1][2] == toys.SCALE / 2 ** sum(bool(who) for _, who in PLAN)
        skipped = [step for step, applied, *_ in results if not applied]
        assert all(same(states[step], states[step - 1]) and results[step][3] == float("inf") for step in skipped), name


@pytest.mark.parametrize("size", ENGINES)
def test_weights_are_the_rounding_of_the_masters_on_every_rank(recorded: Any, size: int) -> None:
    """This holds at the start, after each step, taken or skipped, after a refill of the masters, and a step later."""
    for name in sum(ENGINES[size], []):
        assert recorded(size)[name]["unrounded"] == [], name
        assert recorded(size)[name]["left"] == [] or ":fp32:" in name, name  # no gradient is kept


def test_a_closed_engine_keeps_no_row(recorded: Any) -> None:
    assert recorded(1)["alive"] == 0


@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_reduced_is_neither_read_nor_written_before_it_is_there(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reduction overlaps the next micro-batch on GPUs; here, two ranks have equal gradients."""
    waited = list[int]()

    def reduce_scatter(out: Tensor, row: Tensor, async_op: bool) -> Any:
        given = row.clone()
        out.fill_(torch.nan)

        def wait() -> None:
            assert async_op and torch.equal(row, given)
            out.copy_(2 * given[: len(out)])
            waited.append(len(waited))

        return SimpleNamespace(wait=wait)

    monkeypatch.setattr(gradients, "dist", SimpleNamespace(get_rank=lambda: 0, reduce_scatter_tensor=reduce_scatter))
    flat = torch.zeros(64, dtype=torch.float16)
    parameter = torch.nn.Parameter(flat[:40].view(5, 8))
    own = Gradients(Weights(flat, flat[:32], ((parameter, 0),)), stage, SimpleNamespace(copies=None))  # type: ignore[arg-type]
    own.scatters, own.reduced = True, torch.empty(32, dtype=torch.float16)
    for micro_batches in (3, 1, 2):
        draws = [torch.randint(-9, 9, (5, 8)).half() for _ in range(micro_batches)]
        for number, drawn in enumerate(draws, 1):
            parameter.grad = drawn.clone()
            own.add(number == 1, number == micro_batches)
        assert own.own is not None and torch.equal(own.own.float(), 2 * sum(draws).view(-1)[:32].float())  # type: ignore[union-attr]
    assert len(waited) == (3 if stage == 1 else 6)
