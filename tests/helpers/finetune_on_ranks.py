"""Runs ``trainer.finetune`` and sends it a signal at an aim; the fine-tuning tests run it on each rank.

    python tests/helpers/finetune_on_ranks.py AIM ARGUMENTS…

AIM is ``SIGNAL:STEPS`` or ``-``: each rank sends itself the signal of that number after that many attempted steps.
``poison:RATE`` makes the third step's gradients infinite in runs at that rate, and counts the engines that are alive
after each run.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from trainer.engine.engine import Engine, StepResult
from trainer.finetune import sweep
from trainer.finetune.__main__ import main
from trainer.model.batch import Rows

TAKE = Engine.step


def aim_at(signal: int, steps: int) -> None:
    """Make this process send itself a signal after that many steps."""
    taken = 0

    def step(self: Engine[Any], batches: Sequence[Rows], counts: Any, number: int, rate: float) -> StepResult:
        nonlocal taken
        result = TAKE(self, batches, counts, number, rate)
        taken += 1
        if taken == steps:
            os.kill(os.getpid(), signal)
        return result

    Engine.step = step  # type: ignore[assignment, method-assign]


def poison(peak: float) -> None:
    """Make the third step's gradients infinite if the rate is above a quarter of ``peak``."""
    let_go = sweep._let_go

    def step(self: Engine[Any], batches: Sequence[Rows], counts: Any, number: int, rate: float) -> StepResult:
        hook = None
        if number == 2 and rate > peak / 4:
            hook = self.model.head_bias.register_hook(lambda gradient: gradient + torch.inf)
        try:
            return TAKE(self, batches, counts, number, rate)
        finally:
            if hook is not None:
                hook.remove()

    def count() -> None:
        let_go()
        print("engines alive:", sum(isinstance(one, Engine) for one in gc.get_objects()), flush=True)

    sweep._let_go = count
    Engine.step = step  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    aim, *arguments = sys.argv[1:]
    kind, _, value = aim.partition(":")
    if kind == "poison":
        poison(float(value))
    elif value:
        aim_at(int(kind), int(value))
    main(arguments)
