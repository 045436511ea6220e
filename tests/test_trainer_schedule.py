"""The learning rate at published points, and global batch, micro-batch and accumulation from one another."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.schedule import Phase, batch_of, learning_rate

BERT = Phase("bert", "shards", 128, 1_000_000, 1e-4, 256, 32, warmup_steps=10_000)  # Devlin et al., 2019, A.2
# NVIDIA DeepLearningExamples, PyTorch BERT-Large with LAMB: 28.43 % and 12.8 % of warm-up, square-root decay
NVIDIA_1 = Phase("one", "shards", 128, 7038, 6e-3, 65536, 64, warmup_steps=2001, power=0.5)
NVIDIA_2 = Phase("two", "shards", 512, 1563, 4e-3, 32768, 8, warmup_steps=200, power=0.5)


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
    ],
)
def test_published_points(phase: Phase, step: int, rate: float) -> None:
    assert learning_rate(phase, step) == pytest.approx(rate, rel=1e-9)


@pytest.mark.parametrize("phase", [BERT, NVIDIA_1, NVIDIA_2, replace(NVIDIA_2, power=2, end_learning_rate=1e-3)])
def test_the_decay_is_googles(phase: Phase) -> None:
    for step in range(phase.warmup_steps + 1, phase.steps + 1, 97):
        assert learning_rate(phase, step) == pytest.approx(google(phase, step - 1), rel=1e-12)


def test_the_first_step_is_not_wasted_on_a_rate_of_zero() -> None:
    assert google(NVIDIA_2, 0) == 0
    for step in range(1, NVIDIA_2.warmup_steps):
        assert learning_rate(NVIDIA_2, step) == google(NVIDIA_2, step)


@given(st.integers(1, 60), st.data(), st.floats(0, 4), st.floats(0, 1))
def test_a_rate_stays_within_its_bounds(steps: int, data: st.DataObject, power: float, end: float) -> None:
    warmup = data.draw(st.integers(0, steps))
    phase = Phase("p", "s", 8, steps, 1.0, 1, 1, warmup_steps=warmup, power=power, end_learning_rate=end)
    assert phase.problems() == []
    rates = [learning_rate(phase, step) for step in range(1, steps + 1)]
    assert all(0 < rate <= 1 + 1e-12 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert all(rate >= end * (1 - 1e-12) for rate in rates[warmup:])


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
    assert [line for line in phase.problems() if "state exactly two of them" in line] == phase.problems() != []


def test_what_cannot_be_is_told_at_once() -> None:
    phase = Phase("p", "s", 0, 0, 0.0, 0, -1, power=-1, warmup_steps=1, end_learning_rate=1)
    starts = [line.split(" is ")[0] for line in phase.problems()]
    assert starts == [
        *("steps", "sequence_length", "global_batch", "micro_batch"),
        *("learning_rate", "end_learning_rate", "warmup_steps", "power"),
    ]
