"""What a run is at a step's border: all that decides its future besides weights and moments."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from data_prep.json_text import shown
from trainer.checkpoint.reading import Checkpoint
from trainer.data.loader import StepBatch
from trainer.engine.loss_scale import POWERS_OF_TWO
from trainer.engine.schedule import Phase
from trainer.errors import TrainerError


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


def state_of(found: Checkpoint) -> TrainState:
    """The state that a checkpoint's record holds. Raises TrainerError if no run can go on from that record."""
    record, names = found.record, {field.name for field in fields(TrainState)}
    try:
        counts = {name: record["state"][name] for name in names}
        counts |= {"good_steps": record["loss_scale"]["good_steps"], "steps": record["optimizer"]["steps"]}
        phases, scale = record["identity"]["phases"], record["loss_scale"]["scale"]
        figures = record.get("heldout", {})
    except (LookupError, TypeError) as error:
        raise TrainerError(f"checkpoint {found.folder} is damaged: its record lacks {error}") from None
    wrong = {name: value for name, value in counts.items() if type(value) is not int or not 0 <= value < 2**62}
    if scale not in POWERS_OF_TWO:
        wrong["loss scale"] = scale
    if not isinstance(figures, dict) or not all(isinstance(figure, float | int) for figure in figures.values()):
        wrong["heldout"] = figures
    if not wrong and counts["phase"] >= len(phases):
        wrong["phase"] = counts["phase"]
    if wrong:
        name, value = next(iter(wrong.items()))
        raise TrainerError(f"checkpoint {found.folder} is damaged: {name} of its record is {shown(value)}")
    return TrainState(**{name: counts[name] for name in names})
