"""What a run is at a step's border: all that decides its future besides weights and moments."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer.loader import StepBatch
from trainer.schedule import Phase


@dataclass(frozen=True)
class TrainState:
    """Counted since the run's beginning, over restarts. Dropout and order are functions of it."""

    attempts: int = 0  # steps tried; keys the dropout
    step: int = 0  # optimizer steps taken
    phase: int = 0  # index of the current phase
    phase_step: int = 0  # steps taken in it; the schedule counts these
    position: int = 0  # samples read of its shards: the next sample number
    samples: int = 0  # trained on, of all phases
    tokens: int = 0  # valid tokens of them
    skipped: int = 0  # steps whose gradients overflowed
    restarts: int = 0

    def after(self, batch: StepBatch, applied: bool) -> TrainState:
        """The state after a step. One that overflowed moves the data position and nothing else."""
        moved = replace(self, attempts=self.attempts + 1, position=self.position + batch.samples)
        if not applied:
            return replace(moved, skipped=self.skipped + 1)
        return replace(
            moved,
            step=self.step + 1,
            phase_step=self.phase_step + 1,
            samples=self.samples + batch.samples,
            tokens=self.tokens + batch.counts.tokens,
        )

    def entering(self, phases: tuple[Phase, ...]) -> TrainState:
        """The state with finished phases left behind: the next one has a schedule of its own.

        Over the same shards it reads on where the last one ended, so that each epoch still has each sample once.
        """
        state = self
        while state.phase < len(phases) and state.phase_step >= phases[state.phase].steps:
            ended, ahead = phases[state.phase], phases[state.phase + 1 : state.phase + 2]
            goes_on = [phase.train for phase in ahead] == [ended.train]
            state = replace(state, phase=state.phase + 1, phase_step=0, position=state.position if goes_on else 0)
        return state
