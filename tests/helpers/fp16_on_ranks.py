"""Runs the trainer in fp16 on CPUs; some steps overflow. test_trainer_fp16_run.py runs it on each rank.

    python tests/helpers/fp16_on_ranks.py ATTEMPTS NOTES AIMS TRAINER-ARGUMENTS…

ATTEMPTS is a JSON list of the steps to overflow, counted from the run's beginning as attempts. The other arguments are
those of trainer_on_ranks.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch

import trainer.run.start as start
from tests.helpers import engine_on_ranks, trainer_on_ranks
from trainer.engine.engine import Engine, StepResult
from trainer.model.batch import GlobalCounts, MicroBatch
from trainer.model.bert import Bert


def overflow(attempts: list[int]) -> None:
    """Make an element of the gradient infinite in these attempts."""
    take = Engine.step

    def step(
        self: Engine[Bert], batches: Sequence[MicroBatch], counts: GlobalCounts, number: int, rate: float
    ) -> StepResult:
        if number not in attempts:
            return take(self, batches, counts, number, rate)
        hook = self.model.mlm_bias.register_hook(lambda gradient: gradient + torch.inf)  # type: ignore[no-untyped-call]
        try:
            return take(self, batches, counts, number, rate)
        finally:
            hook.remove()

    Engine.step = step  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    engine_on_ranks.allow_fp16_on_cpus()
    start.resolve_precision = lambda config, device: config.precision  # type: ignore[attr-defined]
    overflow(json.loads(sys.argv.pop(1)))
    trainer_on_ranks.main()
