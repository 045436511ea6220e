"""The loss scale against a simulated fp16: it finds the highest scale that works, and gives up with an explanation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.helpers import ranks
from trainer.engine.loss_scale import LossScale, next_scale
from trainer.errors import TrainerError


def run(state: LossScale, steps: int, largest: float) -> list[LossScale]:
    """``steps`` steps of gradients that overflow above a scale of ``largest``."""
    states = [state]
    for _ in range(steps):
        states.append(next_scale(states[-1], overflow=states[-1].scale > largest))
    return states


def test_it_halves_to_the_highest_scale_that_holds_and_probes_again() -> None:
    states = run(LossScale(2.0**16, growth_interval=5), 40, largest=2.0**12)
    assert [state.scale for state in states[:6]] == [2.0**16, 2.0**15, 2.0**14, 2.0**13, 2.0**12, 2.0**12]
    tail = [state.scale for state in states[4:]]
    assert tail[:13] == [2.0**12] * 5 + [2.0**13] + [2.0**12] * 5 + [2.0**13] + [2.0**12]
    assert all(math.log2(state.scale).is_integer() for state in states)


def test_an_overflow_starts_the_count_again() -> None:
    state = LossScale(8.0, good_steps=4, growth_interval=5)
    assert next_scale(state, overflow=True) == LossScale(4.0, good_steps=0, growth_interval=5)
    assert next_scale(state, overflow=False) == LossScale(16.0, good_steps=0, growth_interval=5)
    assert next_scale(LossScale(8.0, 3, 5), overflow=False) == LossScale(8.0, 4, 5)


def test_it_stops_at_the_ceiling() -> None:
    states = run(LossScale(2.0**22, growth_interval=1), 9, largest=math.inf)
    assert [state.scale for state in states[-3:]] == [2.0**24] * 3


def test_gradients_that_never_hold_end_the_run_with_a_remedy() -> None:
    states = run(LossScale(2.0**16), 16, largest=0)
    assert states[-1].scale == 1
    with pytest.raises(TrainerError, match=r"floor \(1\): lower the learning rate .* last checkpoint is intact$"):
        next_scale(states[-1], overflow=True)
    assert next_scale(states[-1], overflow=False).good_steps == 1


def test_the_floor_is_reached_whatever_the_start() -> None:
    assert next_scale(LossScale(3.0, floor=2.0), overflow=True).scale == 2.0


def test_ranks_that_meet_the_floor_end_together(tmp_path: Path) -> None:
    """fp16 on CPUs; one rank's gradients overflow at every scale."""
    arguments = (str(tmp_path / "out.pt"), "2", "1", "4", "precision=fp16", "scale=2", "poison=1:0,1:1,1:2")
    for code, output in ranks.finish(ranks.fork(2, "tests/helpers/engine_on_ranks.py", *arguments)):
        assert code == 1 and "gradients overflow at the loss scale's floor (1): lower the learning rate or" in output
    assert not (tmp_path / "out.pt").exists()
