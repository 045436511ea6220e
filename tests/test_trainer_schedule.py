"""The learning rate at published points, a phase's length, and its batch settings derived from one another."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from data_prep.manifest import load_manifest
from tests.helpers.ranks import finish, fork
from tests.helpers.runs import write_config
from trainer.engine.schedule import BatchStage, Phase, batch_at, batch_of, learning_rate, resolve, samples_in
from trainer.errors import TrainerError
from trainer.model.bert import ModelConfig
from trainer.ranks.world import World
from trainer.run.config import Config, RunConfig
from trainer.run.phases import PhaseData, open_phases

BERT = Phase("bert", "shards", 128, 1_000_000, 1e-4, 256, 32, warmup_steps=10_000)  # Devlin et al., 2019, A.2
# NVIDIA DeepLearningExamples, PyTorch BERT-Large with LAMB: 28.43 % and 12.8 % of warm-up, square-root decay
NVIDIA_1 = Phase("one", "shards", 128, 7038, 6e-3, 65536, 64, warmup_steps=2001, power=0.5)
NVIDIA_2 = Phase("two", "shards", 512, 1563, 4e-3, 32768, 8, warmup_steps=200, power=0.5)
# DeepSpeedExamples, bing_bert, bert_large_lamb.json and its two scripts: rates 11e-3 and 2e-3, warm-up 6 % and 2 % of
# 7,500 steps, lr_offset 1e-3 and 0
DEEPSPEED_2 = Phase(
    "two", "shards", 512, 600, 2e-3, 32768, 16, warmup_steps=150, warmup_power=2,
    decay="exponential", decay_rate=0.9, decay_steps=150,
)  # fmt: skip
DEEPSPEED_1 = replace(
    DEEPSPEED_2, name="one", sequence_length=128, steps=6150, global_batch=65536, warmup_steps=450,
    start_learning_rate=1e-3, learning_rate=12e-3, end_learning_rate=1e-3, decay_steps=250,
)  # fmt: skip


def google(phase: Phase, global_step: int) -> float:
    """google-research/bert, optimization.py: ``global_step`` counts the steps taken before this one."""
    if global_step < phase.warmup_steps:
        return phase.learning_rate * global_step / phase.warmup_steps
    left = 1 - global_step / phase.steps
    return float((phase.learning_rate - phase.end_learning_rate) * left**phase.power + phase.end_learning_rate)


@pytest.mark.parametrize(
    ("phase", "step", "rate"),
    [
        (BERT, 1, 1e-8),
        (BERT, 5_000, 0.5e-4),
        (BERT, 10_000, 1e-4),
        (BERT, 10_001, 0.99e-4),  # the decay counts from the phase's start: a small drop after the peak
        (BERT, 500_001, 0.5e-4),
        (BERT, 1_000_000, 1e-10),
        (NVIDIA_1, 2001, 6e-3),
        (NVIDIA_1, 3520, 6e-3 * 0.5**0.5),
        (NVIDIA_2, 200, 4e-3),
        (NVIDIA_2, 1043, 4e-3 * (1 / 3) ** 0.5),
        (DEEPSPEED_1, 225, 1e-3 + 11e-3 / 4),
        (DEEPSPEED_1, 450, 12e-3),
        (DEEPSPEED_1, 451, 12e-3),
        (DEEPSPEED_1, 701, 1e-3 + 11e-3 * 0.9),
        (DEEPSPEED_1, 451 + 22 * 250, 1e-3 + 11e-3 * 0.9**22),
        (DEEPSPEED_2, 451, 2e-3 * 0.81),
    ],
)
def test_published_points(phase: Phase, step: int, rate: float) -> None:
    assert learning_rate(phase, step) == pytest.approx(rate, rel=1e-9)


@pytest.mark.parametrize("phase", [BERT, NVIDIA_1, NVIDIA_2, replace(NVIDIA_2, power=2, end_learning_rate=1e-3)])
def test_the_decay_is_googles(phase: Phase) -> None:
    for step in range(phase.warmup_steps + 1, phase.steps + 1, max(97, phase.steps // 499)):
        assert learning_rate(phase, step) == pytest.approx(google(phase, step - 1), rel=1e-12)


def deepspeed(phase: Phase, global_step: int, offset: float) -> float:
    """bing_bert, ``update_learning_rate`` with ``warmup_exp_decay_exp``; counts as google-research/bert does."""
    assert phase.decay_rate is not None and phase.decay_steps is not None
    x, warmup = global_step / 7500, phase.warmup_steps / 7500
    decayed = phase.decay_rate ** ((global_step - 7500 * warmup) / phase.decay_steps)
    return (phase.learning_rate - offset) * ((x / warmup) ** 2 if x < warmup else decayed) + offset


@pytest.mark.parametrize(("phase", "offset"), [(DEEPSPEED_1, 1e-3), (DEEPSPEED_2, 0.0)])
def test_the_exponential_decay_is_deepspeeds(phase: Phase, offset: float) -> None:
    for step in range(1, phase.warmup_steps):  # as with Google's, the first step is not wasted
        assert learning_rate(phase, step) == pytest.approx(deepspeed(phase, step, offset), rel=1e-12)
    for step in range(phase.warmup_steps + 1, phase.steps + 1, 17):
        assert learning_rate(phase, step) == pytest.approx(deepspeed(phase, step - 1, offset), rel=1e-12)


def test_the_first_step_is_not_wasted_on_a_rate_of_zero() -> None:
    assert google(NVIDIA_2, 0) == 0
    for step in range(1, NVIDIA_2.warmup_steps):
        assert learning_rate(NVIDIA_2, step) == google(NVIDIA_2, step)


KINDS: st.SearchStrategy[dict[str, float]] = st.one_of(
    st.builds(dict, power=st.floats(0, 4)),
    st.builds(dict, decay=st.just("exponential"), decay_rate=st.floats(1e-3, 1), decay_steps=st.integers(1, 50)),
)


@given(st.integers(1, 60), st.data(), KINDS, st.floats(0, 1), st.floats(0.1, 4))
def test_a_rate_stays_within_its_bounds(
    steps: int, data: st.DataObject, kind: dict[str, float], end: float, warm: float
) -> None:
    warmup = data.draw(st.integers(0, steps))
    bounds = {"warmup_steps": warmup, "warmup_power": warm if warmup else 1.0, "end_learning_rate": end}
    phase = Phase("p", "s", 8, steps, 1.0, 1, 1, **bounds, **kind)  # type: ignore[arg-type]
    assert phase.problems() == []
    rates = [learning_rate(phase, step) for step in range(1, steps + 1)]
    assert all(0 < rate <= 1 + 1e-12 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert all(rate >= end * (1 - 1e-12) for rate in rates[warmup:])


def test_a_minimum_of_1e_5_is_what_either_decay_ends_at() -> None:
    """Megatron's BERT: 1e-4 to --min-lr 1e-5."""
    linear = replace(BERT, end_learning_rate=1e-5)
    exponential = replace(linear, decay="exponential", decay_rate=0.5, decay_steps=10_000)
    for phase in (linear, exponential):
        assert learning_rate(phase, phase.steps) == pytest.approx(1e-5, rel=1e-4)
        assert learning_rate(phase, phase.steps) >= 1e-5


# ---- what runs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        ({"steps": 7}, 7),
        ({"samples": 403_000_000}, 6150),  # DeepSpeed's 64K, rounded up
        ({"samples": 65536}, 1),
        ({"samples": 65537}, 2),
        ({"epochs": 1}, 16),  # of a million
        ({"epochs": 40}, 611),
        ({"epochs": 0.5}, 8),
        ({"epochs": 1e-9}, 1),
    ],
)
def test_a_length_is_resolved_to_steps(length: dict[str, float], steps: int) -> None:
    phase = replace(NVIDIA_1, warmup_steps=0, **{"steps": 0} | length)  # type: ignore[arg-type]
    runs = resolve(phase, 65536, 1_000_000)
    assert runs == replace(NVIDIA_1, steps=steps, warmup_steps=0)
    assert runs.problems() == phase.problems() == [] and resolve(runs, 65536, 1_000_000) == runs


def test_rates_grow_with_the_root_of_the_batch() -> None:
    """You et al. 2020, Table 4: LAMB for BERT without tuning, 5 / (2^k · 10^3) at 512 · 4^(3 - k) sequences."""
    stated = replace(NVIDIA_1, learning_rate=5e-3, start_learning_rate=1e-3, end_learning_rate=5e-4, warmup_steps=2000)
    for double in range(7):
        batch, rate = 512 * 2**double, 5e-3 / 2 ** (3 - double / 2)
        runs = resolve(replace(stated, reference_batch=32768), batch, 1)
        assert [learning_rate(runs, step) for step in (2000, 7038)] == pytest.approx(
            [rate, learning_rate(stated, 7038) * rate / 5e-3], rel=1e-12
        )
        assert runs.start_learning_rate == pytest.approx(rate / 5) and runs.reference_batch is None
    assert resolve(replace(stated, reference_batch=32768), 32768, 1) == stated


GROWING = Phase(
    "grows", "shards", 128, 20, 0.1, 100, 8, batch_warmup=(BatchStage(3, 10), BatchStage(4, 40)), warmup_steps=5
)


def test_the_batch_grows_in_its_stages_and_the_micro_batches_follow() -> None:
    assert GROWING.problems() == []
    grown = [batch_at(GROWING, step, 2) for step in range(1, 21)]
    assert grown == [(10, 1)] * 3 + [(40, 3)] * 4 + [(100, 7)] * 13  # micro-batches of at most 8 on each of two ranks
    assert {batch_at(GROWING, step, 16) for step in (1, 20)} == {(10, 1), (100, 1)}
    assert [samples_in(GROWING, steps, 100) for steps in (0, 2, 3, 5, 7, 9)] == [0, 20, 30, 110, 190, 390]


def test_a_growing_batch_leaves_the_rate_alone() -> None:
    steady = replace(GROWING, batch_warmup=())
    assert [learning_rate(GROWING, n) for n in range(1, 21)] == [learning_rate(steady, n) for n in range(1, 21)]
    ours, theirs = (resolve(replace(each, reference_batch=25), 100, 1) for each in (GROWING, steady))
    assert ours.learning_rate == theirs.learning_rate == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("samples", "steps"), [(1, 1), (30, 3), (31, 4), (190, 7), (191, 8), (290, 8), (291, 9), (1490, 20)]
)
def test_a_length_in_samples_counts_the_smaller_steps(samples: int, steps: int) -> None:
    for stated in ({"samples": samples}, {"epochs": samples / 1000}):
        runs = resolve(replace(GROWING, steps=0, warmup_steps=0, **stated), 100, 1000)
        assert runs.steps == steps and samples_in(runs, steps, 100) >= samples > samples_in(runs, steps - 1, 100)
        assert bool(runs.problems()) == (steps <= 7)  # no step would have the whole batch


@pytest.mark.parametrize(
    ("stated", "messages"),
    [
        (
            {"batch_warmup": (BatchStage(3, 40), BatchStage(4, 40)), "global_batch": 30},
            ["batch_warmup: the batches up to global_batch are 40, 40, 30: each must exceed the one before"],
        ),
        (
            {"batch_warmup": (BatchStage(1, 100),)},
            ["batch_warmup: the batches up to global_batch are 100, 100: each must exceed the one before"],
        ),
        (
            {"steps": 7},
            [
                "batch_warmup takes 7 steps, but the phase has only 7: shorten it, so that steps with global_batch "
                "follow"
            ],
        ),
        (
            {"micro_batch": None, "accumulation": 5},
            ["batch_warmup needs global_batch and micro_batch: set these two, and not accumulation"],
        ),
        (
            {"global_batch": None, "accumulation": 5, "batch_warmup": (BatchStage(30, 2), BatchStage(2, 1))},
            [
                "batch_warmup needs global_batch and micro_batch: set these two, and not accumulation",
                "batch_warmup: the batches up to global_batch are 2, 1: each must exceed the one before",
                "batch_warmup takes 32 steps, but the phase has only 20: shorten it, so that steps with global_batch "
                "follow",
            ],
        ),
    ],
)
def test_a_batch_that_cannot_grow_is_refused(stated: dict[str, int], messages: list[str]) -> None:
    assert replace(GROWING, **stated).problems() == messages  # type: ignore[arg-type]


def opened(model: ModelConfig, *phases: Phase) -> tuple[PhaseData, ...]:
    world = World(1, 3, 1, 3, torch.device("cpu"))
    return open_phases(Config(RunConfig("r", "unused"), model, phases), world).phases


def test_phases_open_with_their_length_in_steps(tiny_shards: Path, tiny_model: ModelConfig) -> None:
    samples = sum(shard.samples for shard in load_manifest(tiny_shards).shards)
    base = Phase("a", str(tiny_shards), 32, learning_rate=0.01, micro_batch=4, accumulation=2, epochs=2.5)
    one, two = opened(tiny_model, base, replace(base, name="b", epochs=None, samples=100, reference_batch=6))
    assert (one.global_batch, one.phase) == (24, replace(base, epochs=None, steps=math.ceil(2.5 * samples / 24)))
    assert two.phase == replace(base, name="b", epochs=None, steps=5, learning_rate=0.02)
    grows = replace(base, accumulation=None, global_batch=24, batch_warmup=(BatchStage(4, 6), BatchStage(2, 12)))
    [three] = opened(tiny_model, replace(grows, epochs=None, samples=100))
    assert (three.global_batch, three.phase.steps) == (24, 9)  # 24 + 24 + 3 * 24 samples
    assert [three.batch(taken) for taken in (0, 3, 4, 5, 6, 8)] == [(6, 1)] * 2 + [(12, 1)] * 2 + [(24, 2)] * 2
    with pytest.raises(TrainerError, match=r"phases\.0\.batch_warmup takes 6 steps, but the phase has only 5"):
        opened(tiny_model, replace(grows, epochs=None, samples=36))
    long = replace(base, warmup_steps=60)
    with pytest.raises(TrainerError) as error:
        opened(tiny_model, long, replace(long, name="b", epochs=1))
    steps = -(-samples // 24)
    assert str(error.value).split("\n  - ")[1:] == [
        f"phases.0.warmup_steps is 60: must be between 0 and steps ({one.phase.steps})",
        f"phases.1.warmup_steps is 60: must be between 0 and steps ({steps})",
    ]


@pytest.mark.parametrize(
    ("stated", "ranks", "expected"),
    [
        ({"global_batch": 10, "micro_batch": 2}, 1, (10, 5)),
        ({"global_batch": 10, "micro_batch": 2}, 3, (10, 2)),  # shares of 4, 3, 3 in two parts each
        ({"global_batch": 256, "micro_batch": 2}, 7, (256, 19)),
        ({"global_batch": 64, "accumulation": 4}, 3, (64, 4)),
        ({"micro_batch": 2, "accumulation": 4}, 3, (24, 4)),
        ({"global_batch": 2, "micro_batch": 8}, 5, (2, 1)),
    ],
)
def test_two_numbers_and_the_ranks_give_the_third(
    stated: dict[str, int], ranks: int, expected: tuple[int, int]
) -> None:
    phase = Phase("p", "s", 8, 1, 1.0, **stated)  # type: ignore[arg-type]
    assert phase.problems() == [] and batch_of(phase, ranks) == expected


@given(st.integers(1, 5000), st.integers(1, 70), st.integers(1, 40))
def test_no_part_is_larger_than_the_micro_batch_and_none_is_too_many(batch: int, micro: int, ranks: int) -> None:
    whole, parts = batch_of(Phase("p", "s", 8, 1, 1.0, batch, micro), ranks)
    assert whole == batch
    assert -(-batch // (ranks * parts)) <= micro  # parts differ by one at most: this is the largest
    assert parts == 1 or ranks * (parts - 1) * micro < batch


@pytest.mark.parametrize(
    "stated",
    [
        {"global_batch": 10},
        {"micro_batch": 2},
        {"accumulation": 4},
        {},
        {"global_batch": 10, "micro_batch": 2, "accumulation": 4},
    ],
)
def test_not_two_numbers_are_refused(stated: dict[str, int]) -> None:
    phase = Phase("p", "s", 8, 1, 1.0, **stated)  # type: ignore[arg-type]
    assert [line for line in phase.problems() if "set exactly two of them" in line] == phase.problems() != []


def test_what_cannot_be_is_reported_at_once() -> None:
    phase = Phase("p", "s", 0, -1, 0.0, 0, -1, power=-1, warmup_steps=-1, end_learning_rate=1, warmup_power=0)
    assert [line.split(" is ")[0] for line in phase.problems()] == [
        *("sequence_length", "global_batch", "micro_batch", "steps"),
        *("learning_rate", "end_learning_rate", "warmup_steps", "warmup_power", "power"),
    ]
    phase = Phase(
        "p", "s", 8, 0, 1.0, 1, 1, samples=0, epochs=0, reference_batch=0, start_learning_rate=2, warmup_steps=1
    )
    assert [line.split(" is ")[0].split(":")[0] for line in phase.problems()] == [
        *("steps, samples, epochs, minutes", "samples", "reference_batch", "epochs", "start_learning_rate"),
    ]


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({}, "steps, samples, epochs, minutes: set exactly one of them"),
        ({"steps": 5, "mlm_weight": 0.0, "nsp_weight": 0.0}, "mlm_weight, nsp_weight are both 0: raise one of them"),
        ({"steps": 5, "nsp_weight": -1.0}, "nsp_weight is -1.0: must be 0 or more"),
        ({"steps": 5, "epochs": 2.0}, "steps, samples, epochs, minutes: set exactly one of them"),
        ({"samples": 5, "epochs": 2.0}, "steps, samples, epochs, minutes: set exactly one of them"),
        ({"steps": 5, "decay_rate": 0.9}, "decay_rate, decay_steps: set both for decay: exponential"),
        ({"steps": 5, "decay": "exponential"}, "decay_rate, decay_steps: set both"),
        ({"steps": 5, "decay": "exponential", "decay_steps": 3}, "decay_rate, decay_steps: set both"),
        (
            {"steps": 5, "decay": "exponential", "decay_rate": 0.9, "decay_steps": 3, "power": 0.5},
            "power is for decay: polynomial, but decay is exponential: remove it",
        ),
        ({"steps": 5, "decay": "exponential", "decay_rate": 1.1, "decay_steps": 3}, "decay_rate is 1.1: must be"),
        (
            {"steps": 5, "warmup_power": 2.0},
            "start_learning_rate, warmup_power need a warm-up, but warmup_steps is 0",
        ),
        ({"steps": 5, "start_learning_rate": 0.5}, "start_learning_rate, warmup_power need a warm-up"),
        ({"steps": 5, "warmup_steps": 6}, "warmup_steps is 6: must be between 0 and steps (5)"),
        ({"epochs": 5.0, "warmup_steps": -6}, "warmup_steps is -6: must be between 0 and the length of the phase"),
    ],
)
def test_a_contradiction_is_one_line(stated: dict[str, float], message: str) -> None:
    phase = Phase("p", "s", 8, learning_rate=1.0, global_batch=8, micro_batch=8, **stated)  # type: ignore[arg-type]
    [problem] = phase.problems()
    assert problem.startswith(message)


def test_a_run_ends_after_the_samples_that_were_asked_for(tiny_shards: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path, tiny_shards, 5)
    asked = ("--set", "phases.0.steps=0", "--set", "phases.0.samples=70")
    [(code, said)] = finish(fork(1, "trainer/__main__.py", "--config", str(path), *asked))
    assert code == 0 and "lambert: step 3/3" in said and "lambert: done: 3 steps, 90 samples" in said, said
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["phases"][0]["steps"] == 3
