"""The dynamic loss scale of fp16, as a pure state machine.

DeepSpeed runs with a static scale of 1, and Lambert does the scaling, because DeepSpeed 0.19.8 grows the scale before
it unscales that step's gradients. Here a step is scaled and unscaled by the same number, and the next scale is
chosen after the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer.errors import NotFiniteError

POWERS_OF_TWO = tuple(2.0**power for power in range(25))


@dataclass(frozen=True)
class LossScale:
    """The scale of the next step, and the state that decides its growth. Powers of two, so scaling is exact."""

    scale: float
    good_steps: int = 0  # since the last change or overflow
    growth_interval: int = 1000
    floor: float = POWERS_OF_TWO[0]
    ceiling: float = POWERS_OF_TWO[-1]


def next_scale(state: LossScale, overflow: bool) -> LossScale:
    """Halve after an overflow, double after ``growth_interval`` good steps in a row.

    Raises NotFiniteError on an overflow at the floor: the gradients themselves are not finite.
    """
    if overflow:
        if state.scale <= state.floor:
            raise NotFiniteError(
                f"gradients overflow at the loss scale's floor ({state.floor:g}): lower the learning rate or "
                "train with engine.precision=bf16; the last checkpoint is intact"
            )
        return replace(state, scale=max(state.scale / 2, state.floor), good_steps=0)
    if state.good_steps + 1 < state.growth_interval:
        return replace(state, good_steps=state.good_steps + 1)
    return replace(state, scale=min(state.scale * 2, state.ceiling), good_steps=0)
