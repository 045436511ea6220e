"""The state of a run at a step boundary: what an applied step, a skipped step and a phase's last step change."""

from __future__ import annotations

from dataclasses import replace

from trainer.checkpoint.train_state import TrainState
from trainer.data.loader import StepBatch
from trainer.engine.schedule import Phase
from trainer.model.batch import GlobalCounts

BATCH = StepBatch(position=24, samples=8, micro_batches=(), counts=GlobalCounts(30, 8, 200, 5000))
MIDWAY = TrainState(
    attempts=9, step=7, phase=1, phase_step=3, position=24, samples=60, tokens=1500, skipped=2, restarts=1
)
PHASES = tuple(Phase(name, f"shards-{name}", 32, steps, 1e-3, 8, 8) for name, steps in (("a", 4), ("b", 6)))


def test_an_applied_step_counts_everywhere() -> None:
    assert MIDWAY.after(BATCH, applied=True) == TrainState(
        attempts=10, step=8, phase=1, phase_step=4, position=32, samples=68, tokens=1700, skipped=2, restarts=1
    )


def test_a_skipped_step_moves_the_data_and_nothing_else() -> None:
    skipped = MIDWAY.after(BATCH, applied=False)
    assert skipped == replace(MIDWAY, attempts=10, position=32, skipped=3)


def test_the_position_is_the_next_sample_number_at_every_step() -> None:
    state = TrainState()
    for applied in (True, False, False, True, True):
        batch = replace(BATCH, position=state.position)
        state = state.after(batch, applied)
        assert state.position == batch.position + batch.samples
    assert (state.step, state.skipped, state.attempts, state.samples) == (3, 2, 5, 24)


def test_a_finished_phase_is_left_for_the_next_ones_beginning() -> None:
    state = TrainState(attempts=5, step=4, phase=0, phase_step=4, position=40, samples=32, tokens=800, skipped=1)
    entered = state.entering(PHASES)
    assert entered == replace(state, phase=1, phase_step=0, position=0)
    assert entered.entering(PHASES) == entered
    assert replace(state, phase_step=3).entering(PHASES) == replace(state, phase_step=3)
    assert replace(entered, phase_step=6).entering(PHASES).phase == 2 == len(PHASES)


def test_a_phase_over_the_same_shards_reads_on_where_the_last_one_ended() -> None:
    """Otherwise, phases shorter than an epoch would read the same samples again and again, with the same masks."""
    state = TrainState(attempts=5, step=4, phase=0, phase_step=4, position=40, samples=32, tokens=800, skipped=1)
    again = (PHASES[0], replace(PHASES[1], train=PHASES[0].train))
    assert state.entering(again) == replace(state, phase=1, phase_step=0)
