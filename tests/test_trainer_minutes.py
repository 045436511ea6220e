"""Phases that end by time: the rate follows the time, all ranks agree on it, and a resume continues it."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers import ranks
from tests.helpers.runs import lines, wait_for, write_config
from trainer.checkpoint import reading as checkpoint
from trainer.checkpoint.train_state import TrainState, state_of
from trainer.engine.schedule import BatchStage, Phase, batch_at, learning_rate, resolve
from trainer.exits import DONE, STOPPED

HOUR = Phase(
    "hour", "shards", 32, 0, 0.1, 8, 4, minutes=60, warmup_minutes=15, start_learning_rate=0.02, end_learning_rate=0.01
)


# ---- the schedule --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("minutes", "rate"), [(0, 0.02), (7.5, 0.06), (15, 0.01 + 0.09 * 0.75), (30, 0.055), (60, 0.01), (70, 0.01)]
)
def test_the_rate_follows_the_time(minutes: float, rate: float) -> None:
    assert HOUR.problems() == [] and resolve(HOUR, 8, 100) == HOUR
    for step in (1, 500):
        assert learning_rate(HOUR, step, 60 * minutes) == pytest.approx(rate)
    assert TrainState(milliseconds=round(60_000 * minutes)).rate(HOUR) == pytest.approx(rate)


def test_powers_shape_the_rate_over_time_too() -> None:
    curved = replace(HOUR, warmup_power=2.0, power=0.5)
    assert learning_rate(curved, 1, 60 * 7.5) == pytest.approx(0.02 + 0.08 * 0.25)
    assert learning_rate(curved, 1, 60 * 45) == pytest.approx(0.01 + 0.09 * 0.5)
    assert learning_rate(replace(HOUR, warmup_minutes=0, start_learning_rate=0), 1, 0.0) == 0.1


def test_a_phase_ends_when_its_time_is_over() -> None:
    state = TrainState(attempts=9, step=9, phase_step=9, position=72, milliseconds=3_599_999)
    phases = (HOUR, replace(HOUR, name="steps", minutes=None, warmup_minutes=0, steps=4))
    assert not state.finished(HOUR) and state.entering(phases) == state
    over = replace(state, milliseconds=3_600_000)
    assert over.entering(phases) == replace(over, phase=1, phase_step=0, milliseconds=0)
    assert replace(state, phase_step=4).finished(phases[1])


def test_the_batch_grows_by_steps_all_the_same() -> None:
    grows = replace(HOUR, batch_warmup=(BatchStage(3, 4),))
    assert grows.problems() == []
    assert [batch_at(grows, step, 1) for step in (3, 4, 10**6)] == [(4, 1), (8, 2), (8, 2)]


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        ({"steps": 5}, "steps, samples, epochs, minutes: set exactly one of them"),
        ({"minutes": 0}, "minutes is 0: must be above 0"),
        ({"warmup_steps": 5}, "warmup_steps counts steps, but minutes sets the length: set warmup_minutes in its"),
        ({"warmup_minutes": 61}, "warmup_minutes is 61: must be between 0 and minutes (60)"),
        ({"minutes": None, "steps": 5}, "warmup_minutes needs minutes, but the phase has none: set warmup_steps in"),
        (
            {"decay": "exponential", "decay_rate": 0.9, "decay_steps": 5},
            "decay is exponential, which counts steps, but minutes sets the length: use polynomial",
        ),
    ],
)
def test_what_does_not_go_with_minutes_is_refused(stated: dict[str, float], problem: str) -> None:
    found = replace(HOUR, **stated).problems()  # type: ignore[arg-type]
    assert any(line.startswith(problem) for line in found), found


# ---- a run ---------------------------------------------------------------------------------------------------


def start(folder: Path, shards: Path, seconds: float, size: int = 2) -> list[ranks.Forked]:
    config = write_config(folder, shards, 0, checkpoint={"every_steps": 5}, metrics={"log_every_steps": 4})
    sets = (
        f"phases.0.minutes={seconds / 60}",
        f"phases.0.warmup_minutes={seconds / 180}",
        f"phases.0.heldout={shards}",
    )
    options = [word for each in sets for word in ("--set", each)]
    return ranks.fork(size, "tests/helpers/minutes_on_ranks.py", str(folder), "--config", str(config), *options)


def elapsed(run: Path, step: int) -> int:
    """The milliseconds of training in the checkpoint of a step."""
    return state_of(checkpoint.read(run / f"step-{step:08d}")).milliseconds


@pytest.mark.slow
def test_a_run_ends_after_its_minutes_with_a_checkpoint_and_an_evaluation(tiny_shards: Path, tmp_path: Path) -> None:
    ended = ranks.finish(start(tmp_path, tiny_shards, 3))
    assert [code for code, _ in ended] == [DONE, DONE], ended
    run, said = tmp_path / "run", ended[0][1]
    assert "note: these phases end by time, so repeating or resuming them does not give equal bits: only" in said
    taken = lines(run, "step")
    last = taken[-1]["step"]
    assert json.loads((run / "ended.json").read_text()) == {"how": "done", "step": last}
    assert [line["step"] for line in lines(run, "heldout")] == [last] == [lines(run, "checkpoint")[-1]["step"]]
    assert all(line["learning_rate"] > 0 for line in taken[1:4])  # before the first logged step
    trained = sum(line["seconds"] for line in taken)
    assert trained == pytest.approx(elapsed(run, last) / 1000, abs=0.1) and trained >= 3
    assert elapsed(run, last) - 3000 < 1000 * sum(line["seconds"] for line in taken[-6:])  # it ends when it is over
    rates = [(tmp_path / f"rates-{rank}.txt").read_text().split() for rank in (0, 1)]
    assert rates[0] == rates[1] == [str(line["learning_rate"]) for line in taken]
    reported = [float(rate) for rate in rates[0]]
    peak = reported.index(max(reported))
    assert reported[:peak] == sorted(reported[:peak]) and reported[peak:] == sorted(reported[peak:], reverse=True)
    assert reported[0] == 0 and max(reported) > 0.005 and reported[-1] < 0.002
    assert "/" not in said.split("lambert: step ")[1].split("loss")[0]  # no number of steps is known


@pytest.mark.slow
def test_a_resume_continues_the_time_without_the_pause(tiny_shards: Path, tmp_path: Path) -> None:
    """Stopped after half of 6 s; a kill comes later, and takes back the time since the checkpoint before it."""
    run = tmp_path / "run"

    def trained() -> float:
        return float(sum(line["seconds"] for line in lines(run, "step")))

    forked = start(tmp_path, tiny_shards, 6, size=1)
    wait_for(lambda: trained() > 2.5, *forked)
    forked[0].send_signal(signal.SIGTERM)
    assert [code for code, _ in ranks.finish(forked)] == [STOPPED]
    at = lines(run, "step")[-1]["step"]
    assert elapsed(run, at) == pytest.approx(1000 * trained(), abs=50)
    time.sleep(2)

    forked = start(tmp_path, tiny_shards, 6, size=1)
    wait_for(lambda: trained() > 4.5, *forked)
    forked[0].kill()
    ranks.finish(forked)
    found, _ = checkpoint.newest(run)
    assert found is not None
    kept = [line for line in lines(run, "step") if line["step"] <= state_of(found).step]
    assert state_of(found).milliseconds == pytest.approx(1000 * sum(line["seconds"] for line in kept), abs=50)

    [(code, said)] = ranks.finish(start(tmp_path, tiny_shards, 6, size=1))
    assert code == DONE, said
    last = {line["step"]: line for line in lines(run, "step")}  # of a step that was taken again, the last
    whole = sum(line["seconds"] for line in last.values())
    assert 6000 <= elapsed(run, max(last)) < 7500
    assert elapsed(run, max(last)) == pytest.approx(1000 * whole, abs=100)
    first_again = last[state_of(found).step + 1]
    assert first_again["learning_rate"] == state_of(found).rate(
        Phase("only", "s", 32, 0, 0.01, 30, 8, minutes=6 / 60, warmup_minutes=6 / 180)
    )
