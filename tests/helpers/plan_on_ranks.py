"""Counts the bytes of the floating-point tensors that an engine keeps; test_trainer_plan.py runs it on each rank.

    python tests/helpers/plan_on_ranks.py OUT PRECISION:STAGE:MICRO_BATCHES …

Writes rank 0's bytes after one step of each engine. The first engine's tensors are gone before the next is built.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.helpers.engine_on_ranks import MODEL, allow_fp16_on_cpus, cut
from trainer.engine.engine import Engine, EngineConfig
from trainer.engine.optimizer import OptimizerConfig
from trainer.model.bert import Bert
from trainer.ranks.world import World, from_launcher, join, leave

SMALL = 4096  # bytes: batches, sums per tensor, tables


def floats() -> dict[int, int]:
    """The size of every large floating-point storage that a tensor refers to, by address."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    storages = [each.untyped_storage() for each in tensors if each.is_floating_point() and not each.is_meta]
    return {each.data_ptr(): each.nbytes() for each in storages if each.nbytes() >= SMALL}


def measured(precision: str, stage: int, micro_batches: int, world: World) -> int:
    """The bytes that an engine keeps after a step."""
    before = floats()
    config: dict[str, Any] = {"zero_stage": stage, "precision": precision, "initial_loss_scale": 256.0}
    engine = Engine(EngineConfig(**config), Bert(MODEL, 3), OptimizerConfig(), world, 3)
    engine.step(*cut(0, world.rank, world.size, micro_batches), 0, 1e-3)
    after = floats()
    engine.close()
    return sum(size for address, size in after.items() if address not in before)


def main() -> None:
    out, *plans = sys.argv[1:]
    world = from_launcher("cpu")
    join(world, 60)
    allow_fp16_on_cpus()
    found = {}
    for plan in plans:
        precision, stage, micro_batches = plan.split(":")
        found[plan] = measured(precision, int(stage), int(micro_batches), world)
    if world.is_main:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    leave(0)


if __name__ == "__main__":
    main()
