"""Runs the trainer with poisoned samples: test_trainer_rollback.py runs it on each rank.

    python tests/helpers/poisoned_on_ranks.py POISON FIRST END TRAINER-ARGUMENTS…

A step that reads one of the samples FIRST … END - 1 is poisoned. POISON is "inf" (an element of its gradient is
infinite), "spike" (its loss is high, and its weights jump), "hang" (rank 1 never ends it) or "full" (from then on,
rank 1 has no disk space for a checkpoint).
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

import trainer.__main__ as program
import trainer.run.start as start
from tests.helpers import engine_on_ranks
from trainer.checkpoint import part
from trainer.engine.engine import Engine, StepResult
from trainer.model.batch import GlobalCounts, MicroBatch
from trainer.model.bert import Bert


def poison(kind: str, samples: range) -> None:
    """Make the steps that read any of ``samples`` on any rank go wrong."""
    take = Engine.step

    def step(
        self: Engine[Bert], batches: Sequence[MicroBatch], counts: GlobalCounts, number: int, rate: float
    ) -> StepResult:
        own = [sample for batch in batches if batch.masked.numel() for sample in batch.samples.tolist()]
        seen = torch.tensor(any(sample in samples for sample in own), dtype=torch.int32)
        torch.distributed.all_reduce(seen)
        if not seen:
            return take(self, batches, counts, number, rate)
        if self.world.rank == 1:
            if kind == "full":
                part.save_file = fail  # type: ignore[attr-defined]
            while kind == "hang":
                time.sleep(1)
        if kind == "inf":
            spoil: Any = self.model.mlm_bias.register_hook
            hook = spoil(lambda gradient: gradient + torch.inf)
            try:
                return take(self, batches, counts, number, rate)
            finally:
                hook.remove()
        result = take(self, batches, counts, number, rate)
        if kind == "spike":
            result.sums[0] += 100 * counts.targets
            for buffer in self.partition.buffers:
                buffer.master.data.mul_(1.5)
            self.refresh_weights()
        return result

    Engine.step = step  # type: ignore[assignment, method-assign]


def fail(*arguments: object, **options: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


if __name__ == "__main__":
    kind, first, end = sys.argv[1:4]
    del sys.argv[1:4]
    engine_on_ranks.allow_fp16_on_cpus()
    start.resolve_precision = lambda config, device: config.precision  # type: ignore[attr-defined]
    poison(kind, range(int(first), int(end)))
    program.main()
