"""Fine-tunes in fp16 on CPUs, like finetune_on_ranks.py, but some steps overflow; a test runs it on each rank.

The loss scale starts at 2^10, too low for any other step to overflow, and doubles after four good steps. Each step
prints its own: ``scale STEP SCALE``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

import trainer.engine.engine
from tests.helpers import engine_on_ranks, finetune_on_ranks
from trainer.engine.engine import Engine, EngineConfig, StepResult
from trainer.finetune.__main__ import main
from trainer.model.batch import Rows

OVERFLOW = (2, 5, 7, 17)  # these tries do
TAKE = Engine.step


def step(self: Engine[Any], batches: Sequence[Rows], counts: Any, number: int, rate: float) -> StepResult:
    """Take a step; its gradients are infinite if it is one of OVERFLOW."""
    print(f"scale {number} {self.loss_scale.scale:g}", flush=True)
    hook = self.model.head_bias.register_hook(lambda g: g + torch.inf) if number in OVERFLOW else None
    try:
        return TAKE(self, batches, counts, number, rate)
    finally:
        if hook is not None:
            hook.remove()


if __name__ == "__main__":
    engine_on_ranks.allow_fp16_on_cpus()
    patch("trainer.finetune.__main__.resolve_precision", trainer.engine.engine.resolve_precision).start()
    scaled = partial(EngineConfig, initial_loss_scale=2.0**10, loss_scale_growth_interval=4)
    patch("trainer.finetune.run.EngineConfig", scaled).start()
    Engine.step = finetune_on_ranks.TAKE = step  # type: ignore[assignment, method-assign]
    aim, *arguments = sys.argv[1:]
    if aim != "-":
        finetune_on_ranks.aim_at(*map(int, aim.split(":")))
    main(arguments)
