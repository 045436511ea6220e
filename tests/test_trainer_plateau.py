"""The plateau at the unigram loss: which curves are on it, and the share of the variance that tells them apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.checkpoint.train_state import TrainState
from trainer.model.bert import ModelConfig
from trainer.model.variance import token_moments, variance_share
from trainer.monitor.metrics_log import METRICS_LOG, MetricsLog, newest_steps
from trainer.monitor.plateau import (
    BLOCK,
    LEARNING,
    PATIENCE,
    PLATEAU_STEPS,
    Baseline,
    Plateau,
    announcement,
    unigram_loss,
)

DROPOUT, UNIGRAM, CHANCE = 0.1, 7.1, math.log(2)
COLLAPSE, GUESSES = (BLOCK * PATIENCE[sign] for sign in ("collapsed", "unigram"))
Knots = Mapping[int, tuple[float, ...]]  # step: MLM loss, variance share, NSP loss
ADAM_COLLAPSED = {1: (7.15, 0.8, 0.69), 50: (6.52, 0.5, 0.69), 91: (7.21, 0.09, 0.693), 140: (7.06, 0.087, 0.693)}
LAMB_HEALTHY = {1: (7.15, 0.82, 0.693), 50: (6.54, 0.7, 0.65), 90: (6.34, 0.75, 0.6), 300: (4.52, 0.9, 0.4)}
LAMB_HALF = {1: (7.15, 0.8, 0.69), 50: (6.5, 0.12, 0.65), 600: (6.5, 0.12, 0.33)}
ADAM_GROWS = {1: (7.64, 0.8), 50: (7.2, 0.03), 100: (7.14, 0.1), 200: (7.1, 0.6), 900: (7.0, 0.8), 1100: (6.4, 0.9)}
SLOW = {1: (10.3, 0.8, 0.69), 100: (7.77, 0.3, 0.69), 200: (6.83, 0.4, 0.67), 300: (6.74, 0.5, 0.65)}


def curve(knots: Knots, steps: int) -> Iterable[dict[str, Any]]:
    """The records of ``steps`` steps, between the knots on straight lines; without pairs if a knot has no NSP loss."""
    marks = sorted(knots)
    for step in range(1, steps + 1):
        left = max(mark for mark in marks if mark <= step)
        right = min((mark for mark in marks if mark > step), default=left)
        share = (step - left) / (right - left) if right > left else 0.0
        values = [a + share * (b - a) for a, b in zip(knots[left], knots[right], strict=True)]
        named = dict(zip(("mlm_loss", "token_variance", "nsp_loss"), values, strict=False))
        yield {"event": "step", "time": float(step), "step": step, "unigram_loss": UNIGRAM, **named}


def follow(knots: Knots, steps: int, warmup: int = 0, on: bool = False) -> list[tuple[int, bool, str]]:
    """Step, state and sign of each change."""
    plateau = Plateau(DROPOUT)
    plateau.on = on
    events = [plateau.add(record) for record in curve(knots, steps) if record["step"] > warmup]
    return [(event["step"], event["on"], event["sign"]) for event in events if event is not None]


def test_a_collapsed_run_is_noticed_once_and_in_time() -> None:
    [(step, on, sign)] = follow(ADAM_COLLAPSED, 5000, warmup=60)
    assert on and sign == "collapsed" and 60 + COLLAPSE <= step <= 91 + COLLAPSE + 2 * BLOCK


@pytest.mark.parametrize("knots", [LAMB_HEALTHY, LAMB_HALF, ADAM_GROWS, SLOW])
def test_a_run_that_learns_is_left_alone(knots: Knots) -> None:
    """The half-collapsed one is not seen: it predicts better than word frequencies, and its pairs are learned."""
    assert follow(knots, 3000) == []


def test_guesses_of_words_and_pairs_are_noticed_without_a_collapse() -> None:
    """Only after much longer: a healthy run may stay there for hundreds of steps."""
    assert follow({1: (7.1, 0.8, CHANCE)}, 2000) == [(GUESSES, True, "unigram")]
    assert follow({1: (7.1, 0.8)}, 2000) == [(GUESSES, True, "unigram")]  # data without pairs
    assert follow({1: (7.1, 0.8, CHANCE - 0.05)}, 2000) == []  # pairs are learned
    assert follow({1: (7.4, 0.8, CHANCE)}, 2000) == []  # above the unigram loss: it still falls
    assert follow({1: (6.9, 0.8, CHANCE)}, 2000) == []


def test_a_collapse_is_noticed_above_the_unigram_loss_too() -> None:
    assert follow({1: (8.0, 0.08, 0.8)}, 1000) == [(COLLAPSE, True, "collapsed")]
    assert follow({1: (6.5, 0.08, CHANCE)}, 1000) == []  # such a loss needs context


def test_what_is_left_of_the_variance_is_the_noise_of_dropout() -> None:
    for dropout, on in ((0.1, False), (0.3, True)):
        plateau = Plateau(dropout)
        for record in curve({1: (7.1, 0.26, 0.6)}, COLLAPSE):
            plateau.add(record)
        assert plateau.on == on


def test_a_run_that_recovers_is_noticed_once() -> None:
    left = 1000
    events = follow({1: (7.1, 0.08, CHANCE), left: (7.1, 0.08, CHANCE), left + 1: (6.5, 0.7, 0.6)}, 3000)
    assert events == [(COLLAPSE, True, "collapsed"), (left + BLOCK * LEARNING, False, "")]


@pytest.mark.parametrize(("variance", "noticed"), [(0.086, COLLAPSE), (0.8, GUESSES)])
def test_spikes_neither_hide_nor_end_the_plateau(variance: float, noticed: int) -> None:
    plateau, changes = Plateau(DROPOUT), []
    for record in curve({1: (7.05, variance, CHANCE)}, 2000):
        if record["step"] % 100 < 9:
            record |= {"mlm_loss": 12.0, "token_variance": 0.5}
        changes.append(plateau.add(record))
    assert [event["step"] for event in changes if event is not None] == [noticed]


def test_a_run_has_left_the_plateau_only_if_it_keeps_learning() -> None:
    plateau = Plateau(DROPOUT)
    plateau.on = True
    for stuck, learning in zip(curve({1: (7.1, 0.08)}, 1000), curve({1: (6.5, 0.7)}, 1000), strict=True):
        half = stuck["step"] % (2 * BLOCK * (LEARNING - 1)) <= BLOCK * (LEARNING - 1)
        assert plateau.add(learning if half else stuck) is None


def test_steps_of_the_warm_up_and_skipped_ones_are_not_judged() -> None:
    steps = [
        record | {"applied": record["step"] % 2 == 0, "warming_up": record["step"] <= 100}
        for record in curve({1: (7.1, 0.08)}, 1000)
    ]
    assert [event["step"] for event in Plateau(DROPOUT).events(steps)] == [100 + 2 * COLLAPSE]
    by_steps, by_time = Baseline(7.1, 10), Baseline(7.1, 0, 2.0)
    assert [by_steps.warms_up(TrainState(phase_step=step)) for step in (10, 11)] == [True, False]
    assert [by_time.warms_up(TrainState(phase_step=9, milliseconds=n)) for n in (119_999, 120_000)] == [True, False]


def test_a_resumed_run_that_is_still_there_says_nothing_and_one_that_is_not_says_so() -> None:
    assert follow(ADAM_COLLAPSED, 3000, warmup=140, on=True) == []
    assert follow(LAMB_HEALTHY, 300, warmup=25, on=True) == [(25 + BLOCK * LEARNING, False, "")]


@pytest.mark.parametrize(("variance", "every", "noticed"), [(0.08, 190, COLLAPSE), (0.8, 900, GUESSES)])
def test_a_run_that_resumes_often_is_noticed_too(variance: float, every: int, noticed: int, tmp_path: Path) -> None:
    """Each attempt takes up the steps before it from the metrics log, but none that were rolled back."""
    path, events = tmp_path / METRICS_LOG, list[dict[str, Any]]()
    judged = {"applied": True, "warming_up": False}
    records = [record | judged for record in curve({1: (7.1, variance, CHANCE)}, 2000)]
    for begin in range(0, 2000, every):
        plateau = Plateau(DROPOUT)
        plateau.on = bool(events)
        before = newest_steps(path, PLATEAU_STEPS, begin)
        assert [record["step"] for record in before] == list(range(max(1, begin - PLATEAU_STEPS + 1), begin + 1))
        plateau.resume(before)
        events += plateau.events(records[begin : begin + every])
        MetricsLog(path).write(records[begin : begin + every])
        MetricsLog(path).write([{"event": "evaluated", "step": begin}])
    assert [event["step"] for event in events] == [pytest.approx(noticed, abs=BLOCK * len(range(0, noticed, every)))]


def test_one_line_names_the_losses_and_the_remedies_that_are_left() -> None:
    figures = {"mlm_loss": 7.06, "unigram_loss": 7.1, "token_variance": 0.087}
    event = {"event": "plateau", "on": True, "sign": "collapsed", **figures}
    text = announcement(event, ModelConfig(decoder_prior="zero"), 0.0)
    assert text.startswith("on the unigram plateau: ") and "\n" not in text
    for part in ("200 steps", "7.06", "7.10", "8.7%", "model.decoder_prior: unigram", "gradient_clipping: 1.0"):
        assert part in text
    text = announcement(event, ModelConfig(), 1.0)
    assert "decoder_prior" not in text and "clipping" not in text and "a lower learning_rate or" in text
    assert "1000 steps" in announcement(event | {"sign": "unigram"}, ModelConfig(), 0.0)
    assert announcement(event | {"on": False}, ModelConfig(), 0.0).startswith("left the unigram plateau")


def test_the_unigram_loss_is_the_entropy_of_the_counts() -> None:
    assert unigram_loss(torch.tensor([0, 10**6, 10**6, 0])) == pytest.approx(math.log(2), abs=1e-5)
    counts = torch.tensor([1, 5, 0, 94]) * 10**6
    assert unigram_loss(counts) == pytest.approx(-sum(p * math.log(p) for p in (0.01, 0.05, 0.94)), abs=1e-5)


# ---- the share of the variance -----------------------------------------------------------------------------------


def test_the_share_is_that_of_its_definition_however_the_tokens_are_split() -> None:
    x = torch.randn(60, 8, generator=torch.Generator().manual_seed(1)) + torch.arange(8.0)
    share = float((x - x.mean(0)).square().sum() / x.square().sum())
    for sizes in ([60], [20, 20, 20], [1, 59], [0, 60]):
        moments = torch.stack([token_moments(part).double() for part in torch.split(x, sizes)]).sum(0)
        assert float(variance_share(moments)) == pytest.approx(share, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equal_tokens_have_no_variance_and_centred_ones_nothing_else(dtype: torch.dtype) -> None:
    row = torch.linspace(-300, 300, 16).to(dtype)  # the squares overflow fp16
    assert float(variance_share(token_moments(row.expand(4096, 16)))) == pytest.approx(0, abs=1e-5)
    both = torch.stack([row, -row])
    assert float(variance_share(token_moments(both))) == pytest.approx(1, abs=1e-5)


def test_the_share_costs_no_gradient() -> None:
    assert not token_moments(torch.randn(3, 4, requires_grad=True)).requires_grad
