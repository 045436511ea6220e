"""Run by test_trainer_minutes.py on each rank: the trainer, with a clock that runs faster on all ranks but rank 0.

    python tests/helpers/minutes_on_ranks.py NOTES TRAINER-ARGUMENTS…

NOTES is a folder. Rank R writes the learning rate of each step that it takes to a line of rates-R.txt.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import trainer.__main__ as program
from trainer.engine.engine import Engine, StepResult
from trainer.model.batch import GlobalCounts, MicroBatch
from trainer.model.bert import Bert
from trainer.monitor import metrics


def main() -> None:
    rank, notes = int(os.environ["RANK"]), Path(sys.argv.pop(1))
    fast = SimpleNamespace(**vars(time) | {"perf_counter": lambda: (1 + rank) * time.perf_counter()})
    metrics.time = fast  # type: ignore[assignment, attr-defined]
    take = Engine.step

    def step(
        self: Engine[Bert], batches: Sequence[MicroBatch], counts: GlobalCounts, number: int, rate: float
    ) -> StepResult:
        with (notes / f"rates-{rank}.txt").open("a") as file:
            file.write(f"{rate}\n")
        return take(self, batches, counts, number, rate)

    Engine.step = step  # type: ignore[assignment, method-assign]
    program.main()


if __name__ == "__main__":
    main()
