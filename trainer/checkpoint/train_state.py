"""The state of a run at a step boundary: everything that determines how it continues, except weights and moments."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from data_prep.json_text import shown
from trainer.checkpoint.reading import Checkpoint
from trainer.data.loader import StepBatch
from trainer.engine.loss_scale import POWERS_OF_TWO
from trainer.engine.schedule import Phase, learning_rate
from trainer.errors import TrainerError


@dataclass(frozen=True)
class TrainState:
    """Counters since the start of the run, over restarts. Dropout and sample order depend only on them."""

    attempts: int = 0  # steps tried; seeds the dropout
    step: int = 0  # optimizer steps taken
    phase: int = 0  # index of the current phase
    phase_step: int = 0  # steps taken in this phase; the schedule counts these
    position: int = 0  # samples read from the phase's shards: the next sample number
    samples: int = 0  # samples trained on, in all phases
    tokens: int = 0  # valid tokens in those samples
    skipped: int = 0  # steps skipped because gradients overflowed
    restarts: int = 0
    milliseconds: int = 0  # training time in this phase, if the phase ends by time; by rank 0's clock

    def rate(self, phase: Phase) -> float:
        """The learning rate of the next step."""
        return learning_rate(phase, self.phase_step + 1, self.milliseconds / 1000)

    def finished(self, phase: Phase) -> bool:
        """Whether the phase, which is the current one, is over."""
        if phase.minutes is not None:
            return self.milliseconds >= 60_000 * phase.minutes
        return self.phase_step >= phase.steps

    def after(self, batch: StepBatch, applied: bool) -> TrainState:
        """The state after a step. A step that overflowed advances only the data position and the step attempts."""
        moved = replace(self, attempts=self.attempts + 1, position=batch.following)
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
        """The state moved past finished phases; each phase has its own schedule.

        If the next phase has the same shards, it reads on where the last one ended, so each epoch still has each sample
        once.
        """
        state = self
        while state.phase < len(phases) and state.finished(phases[state.phase]):
            ended, ahead = phases[state.phase], phases[state.phase + 1 : state.phase + 2]
            goes_on = [phase.train for phase in ahead] == [ended.train]
            position = state.position if goes_on else 0
            state = replace(state, phase=state.phase + 1, phase_step=0, milliseconds=0, position=position)
        return state


def state_of(found: Checkpoint) -> TrainState:
    """The state in a checkpoint's record. Raises TrainerError if a run cannot resume from that record."""
    record, names = found.record, {field.name for field in fields(TrainState)}
    try:
        state = {"milliseconds": 0} | record["state"]  # a checkpoint from before this key has none
        counts = {name: state[name] for name in names}
        counts |= {"good_steps": record["loss_scale"]["good_steps"], "steps": record["optimizer"]["steps"]}
        phases, scale = record["identity"]["phases"], record["loss_scale"]["scale"]
        metrics = record.get("heldout", {})
    except (LookupError, TypeError) as error:
        raise TrainerError(f"checkpoint {found.folder} is damaged: its record lacks {error}") from None
    wrong = {name: value for name, value in counts.items() if type(value) is not int or not 0 <= value < 2**62}
    if scale not in POWERS_OF_TWO:
        wrong["loss scale"] = scale
    if not isinstance(metrics, dict) or not all(isinstance(metric, float | int) for metric in metrics.values()):
        wrong["heldout"] = metrics
    if not wrong and counts["phase"] >= len(phases):
        wrong["phase"] = counts["phase"]
    if wrong:
        name, value = next(iter(wrong.items()))
        raise TrainerError(f"checkpoint {found.folder} is damaged: {name} in its record is {shown(value)}")
    return TrainState(**{name: counts[name] for name in names})
