"""Run by test_trainer_checkpoint.py on each rank: train, save, restore.

    python tests/checkpoint_on_ranks.py ROOT ZERO_STAGE STEPS

Restores the newest checkpoint under ROOT if there is one, takes STEPS steps, saves, and on rank 0 writes
the losses of its steps to ROOT/losses-<first step>.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import engine_on_ranks as tiny
import torch.distributed as dist

from trainer import checkpoint
from trainer.engine import Engine, EngineConfig
from trainer.errors import TrainerError
from trainer.optimizer import OptimizerConfig
from trainer.world import from_launcher, join, leave, together


def main() -> None:
    root, stage, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    world = from_launcher("cpu")
    join(world, 60)
    engine = Engine(EngineConfig(zero_stage=stage, precision="fp32"), tiny.MODEL, OptimizerConfig(), world, seed=3)  # type: ignore[arg-type]
    found, _ = checkpoint.newest(root)
    first = 0
    try:
        if found is not None:
            together(lambda: checkpoint.restore(found, engine.optimizer, world), world)
            engine.refresh_weights()
            first = int(found.record["step"])
        losses = []
        for step in range(first, first + steps):
            batches, counts = tiny.cut(step, world.rank, world.size, 2)
            sums = engine.step(batches, counts, step, 1e-3).sums
            dist.all_reduce(sums)
            losses.append(float(sums[0] / counts.targets + sums[1] / counts.pairs))
        record = {"step": first + steps, "optimizer": {"steps": engine.optimizer.steps}}
        checkpoint.save(root, first + steps, engine.optimizer, record, 3, world)
    except TrainerError as error:
        print(f"error: {error}" if str(error) else "", flush=True)
        leave(2)
    if world.is_main:
        (root / f"losses-{first}.json").write_text(json.dumps(losses))
    leave(0)


if __name__ == "__main__":
    main()
