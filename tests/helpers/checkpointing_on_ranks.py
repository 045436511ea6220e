"""Takes the same engine steps with each kind of activation checkpointing; two tests run it on each rank.

python tests/helpers/checkpointing_on_ranks.py OUT DEVICE STAGE/PRECISION/LAYER_NORM …
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, get_args
from unittest.mock import patch

import torch

from kernels.bias_gelu import bias_gelu
from tests.helpers.engine_on_ranks import MODEL, cut, whole
from trainer.engine.engine import Engine, EngineConfig
from trainer.engine.optimizer import OptimizerConfig
from trainer.model.bert import Bert
from trainer.model.checkpointing import Checkpointing
from trainer.ranks.world import World, from_launcher, join, leave


def steps(case: str, kind: Checkpointing, world: World) -> dict[str, Any]:
    """Two steps: the numbers of each, the weights after both, and how often GELU was computed."""
    stage, precision, layer_norm = case.split("/")
    config = EngineConfig(int(stage), precision, checkpointing=kind, initial_loss_scale=256)  # type: ignore[arg-type]
    model = replace(MODEL, layer_norm=layer_norm)  # type: ignore[arg-type]
    numbers = []
    with patch("trainer.model.bert.bias_gelu", wraps=bias_gelu) as gelu:
        engine = Engine(config, Bert(model, 3), OptimizerConfig(), world, 3)
        for step in range(2):
            batches, counts = cut(step, world.rank, world.size, 2)
            result = engine.step(batches, counts, step, 0.01)
            numbers.append(torch.cat([result.sums.flatten(), result.gradient_norm.double().flatten()]).cpu())
    found = {"numbers": numbers, "weights": whole(engine, "weight"), "calls": gelu.call_count}
    engine.close()
    return found


def main() -> None:
    out, device, *cases = sys.argv[1:]
    world = from_launcher(device)
    join(world, 60)
    record = {case: {kind: steps(case, kind, world) for kind in get_args(Checkpointing)} for case in cases}
    if world.is_main:
        torch.save(record, out)
    leave(0)


if __name__ == "__main__":
    main()
