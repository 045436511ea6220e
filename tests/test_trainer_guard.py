"""The guard's judgement: what is a sign of trouble, what is done about it, and what a checkpoint keeps of it."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.checkpoint.reading import Checkpoint
from trainer.checkpoint.saving import Saved
from trainer.checkpoint.train_state import TrainState
from trainer.data.order import Gap
from trainer.errors import TrainerError
from trainer.monitor.guard import SLOW_SECONDS, Finding, Guard, GuardConfig, GuardState, Setback, spike
from trainer.monitor.metrics_log import Record

CONFIG = GuardConfig(spike="rollback", spike_steps=10, skip_before=2, most_rollbacks=2, rollback_steps=100)
EVEN = torch.ones(2)


def steps(losses: list[float], first: int = 1, phase: int = 0, **more: Any) -> list[Record]:
    """The records of steps of 8 samples with these losses."""
    shared = {"phase": phase, "batch": 8, "left_out": 0, "applied": True, "gradient_norm": 1.0, "loss_scale": 1.0}
    numbered = enumerate(losses, first)
    return [{**shared, "step": n, "position": 8 * n, "loss": loss, **more} for n, loss in numbered]


def judge(guard: Guard, records: list[Record], stuck: bool = False) -> list[Finding]:
    return guard.judge(records, EVEN, EVEN, stuck)


def found_in(record: dict[str, Any]) -> Checkpoint:
    return Checkpoint(Path("step-00000001"), {}, {}, json.loads(json.dumps(record)))


def test_a_spike_is_far_above_the_median_whatever_the_noise() -> None:
    rng = random.Random(3)
    for noise in (0.0, 0.01, 0.3):
        losses = [6 + rng.gauss(0, noise) for _ in range(100)]
        rise = 8 * max(0.05, noise)
        assert not spike(6 + 0.6 * rise, losses, 8) and spike(6 + 1.4 * rise, losses, 8)
        spoiled = losses[:80] + [12.0] * 20  # a median does not follow a spike
        assert spike(12.0, spoiled, 8)
    assert not spike(-100.0, [6.0] * 10, 8)
    assert spike(8.0, [6.0] * 9 + [7.0], 8) == "loss 8.000 is 40.0 deviations above the median 6.000 of 10 steps"


def test_the_gap_goes_from_before_the_first_bad_step_to_the_last_one() -> None:
    guard = Guard(CONFIG)
    assert not judge(guard, steps([5.0] * 7))
    [finding] = judge(guard, steps([5.0, 9.0, 8.0, 5.0], 8))
    assert (finding.sign, finding.action, finding.step) == ("spike", "rollback", 11)
    assert finding.gap == Gap(8 * 6, 8 * 4)  # steps 7 and 8, and the bad 9 and 10
    with pytest.raises(Setback, match="step 9: loss 9"):
        guard.act([finding])


def test_half_a_window_is_needed_and_a_phase_begins_anew() -> None:
    assert not judge(Guard(CONFIG), steps([5.0] * 4 + [9.0]))
    assert judge(Guard(CONFIG), steps([5.0] * 5 + [9.0]))
    guard = Guard(CONFIG)
    judge(guard, steps([5.0] * 20))
    assert not judge(guard, steps([9.0] * 9, 21, phase=1))
    [finding] = judge(guard, steps([math.nan], 1, phase=2))
    assert (finding.phase, finding.gap) == (2, Gap(0, 8))


@pytest.mark.parametrize("bad", [{"loss": math.nan}, {"loss": math.inf}, {"gradient_norm": math.inf}])
def test_numbers_that_are_not_finite_come_first(bad: dict[str, Any]) -> None:
    guard = Guard(replace(CONFIG, spike="stop"))
    found = judge(guard, [*steps([5.0] * 10 + [50.0]), *steps([5.0], 12, **bad)])
    assert [finding.sign for finding in found] == ["non_finite", "spike"]
    assert "training diverged; lower the learning rate" in found[0].what
    with pytest.raises(Setback):
        guard.act(found)
    overflow = steps([math.nan], 13, applied=False, gradient_norm=math.inf, loss_scale=64.0)
    assert not judge(guard, overflow)  # skipped


def test_only_the_first_of_several_spikes_is_reported() -> None:
    guard = Guard(replace(CONFIG, spike="warn", spike_steps=100))
    judge(guard, steps([5.0] * 90))
    assert len(judge(guard, steps([9.0] * 3, 91))) == 1
    assert not judge(guard, steps([9.0] * 3, 94))
    assert not judge(guard, steps([5.0] * 3, 97)) and judge(guard, steps([9.0], 100))


def test_a_lower_rate_ends_after_its_steps() -> None:
    guard = Guard(replace(CONFIG, spike="lower", lower_factor=0.25, lower_steps=3))
    found = judge(guard, steps([5.0] * 9 + [9.0, 5.0]))
    guard.act(found)
    assert [guard.rate(1.0, step) for step in range(11, 16)] == [0.25] * 3 + [1.0] * 2
    assert guard.told(found[0]).endswith("; lowering the learning rate for 3 steps")


def test_the_loss_scale_is_reported_when_it_reaches_its_floor() -> None:
    guard = Guard(CONFIG)
    fell = [steps([5.0], n, applied=False, loss_scale=scale)[0] for n, scale in enumerate((8.0, 4.0, 2.0))]
    [finding] = judge(guard, [*fell, *steps([5.0] * 3, 4)])
    assert (finding.sign, finding.action, finding.step) == ("loss_scale", "warn", 6)


def test_signs_that_stop() -> None:
    quiet, strict = Guard(), Guard(GuardConfig(plateau="stop", failed_save="stop", slow_rank="stop"))
    failed = Saved(7, "step-00000007", "rank 1: no room", 0, 0.0, 0.0, 0.0)
    slow = torch.tensor([1.0, 1.0, 2.0])
    for guard, expected in ((quiet, [["slow_rank"], [], []]), (strict, [["slow_rank"], ["plateau"], ["failed_save"]])):
        windows = [guard.judge(steps([5.0]), torch.ones(3) * SLOW_SECONDS / 3, slow, stuck=False) for _ in range(5)]
        assert [bool(found) for found in windows] == [False, False, True, False, False]  # once, and not at once
        found = [windows[2], judge(guard, steps([5.0]), stuck=True), guard.saved(failed)]
        assert [[finding.sign for finding in each] for each in found] == expected
        for each in found:
            guard.act(each)
    assert quiet.ending is None and strict.ending is not None and "rank 2 is slow" in strict.ending.what
    assert not strict.saved(replace(failed, failure=""))
    assert not Guard().judge(steps([5.0]), slow * SLOW_SECONDS, torch.ones(3), stuck=False)


def test_rollbacks_are_counted_in_a_window_and_kept() -> None:
    guard, before = Guard(replace(CONFIG, non_finite="rollback")), Guard(CONFIG)
    judge(before, steps([5.0] * 6))
    found = found_in({"guard": asdict(before.state)})

    def trouble(step: int) -> Finding:
        return guard.overflowed(TrainState(step=step, phase=1, position=step), step + 8, "no step (1): lower the rate")

    for step in (10, 20, 150):
        assert trouble(step).action == "rollback"
        guard.went_back(found, trouble(step))
    assert guard.state.recent == before.state.recent and guard.state.rollbacks == (10, 20, 150)
    assert guard.gaps(1) == (Gap(10, 8), Gap(20, 8), Gap(150, 8)) and guard.gaps(0) == ()
    guard.went_back(found, trouble(160))
    last = trouble(170)
    assert (last.action, last.what) == ("stop", "no step (1); it went back 2 times within 100 steps")
    with pytest.raises(Setback):  # nothing is saved, as after a rollback
        guard.act([last])


def test_one_spike_too_many_does_not_save() -> None:
    guard = Guard(CONFIG)
    judge(guard, steps([5.0] * 10))
    guard.state = replace(guard.state, rollbacks=(1, 2))
    [finding] = judge(guard, steps([9.0], 11))
    assert finding.action == "stop" and finding.what.endswith("; it went back 2 times within 100 steps")
    with pytest.raises(Setback):
        guard.act([finding])


def test_a_stop_comes_before_a_rollback() -> None:
    guard = Guard(replace(CONFIG, spike="stop", loss_scale="rollback"))
    floor = steps([5.0], 11, applied=False, loss_scale=2.0)
    found = judge(guard, [*steps([5.0] * 10), *floor, *steps([9.0], 12)])
    assert [finding.action for finding in found] == ["stop", "rollback"]
    guard.act(found)
    assert guard.ending is found[0]


def test_an_overflow_without_a_lower_scale_skips_its_own_step_too() -> None:
    guard = Guard(replace(CONFIG, non_finite="rollback"))
    judge(guard, steps([5.0] * 6))
    finding = guard.overflowed(TrainState(step=6, position=48), 56, "gradients overflow (1): lower the rate")
    assert (finding.gap, finding.what) == (Gap(32, 24), "gradients overflow (1)")


def test_a_checkpoint_holds_all_that_decides() -> None:
    """A guard that was saved and restored judges as one that was not."""
    rng = random.Random(5)
    losses = [5 + rng.gauss(0, 0.1) for _ in range(40)] + [9.0] * 4 + [5.0] * 4 + [9.0] * 4
    config = replace(CONFIG, spike="lower")
    whole = Guard(config)
    expected = [judge(whole, [record]) for record in steps(losses)]
    for cut in range(1, len(losses)):
        first, second = Guard(config), Guard(config)
        found = [judge(first, [record]) for record in steps(losses)[:cut]]
        second.state = GuardState.of(found_in({"guard": asdict(first.state)}))
        assert second.state == first.state
        assert found + [judge(second, [record]) for record in steps(losses)[cut:]] == expected
    assert GuardState.of(found_in({})) == GuardState()  # a checkpoint from before this key


@pytest.mark.parametrize(
    "change",
    [{"gaps": [[0, -1, 5]]}, {"gaps": [[0, 1]]}, {"recent": [[0, "low"]]}, {"rollbacks": 3}, {"phase": 1.5}],
)
def test_a_damaged_record_is_named(change: dict[str, Any]) -> None:
    with pytest.raises(TrainerError, match="checkpoint step-00000001 is damaged: guard in its record is "):
        GuardState.of(found_in({"guard": asdict(GuardState()) | change}))
    with pytest.raises(TrainerError, match="is damaged"):
        GuardState.of(found_in({"guard": ["x"]}))
