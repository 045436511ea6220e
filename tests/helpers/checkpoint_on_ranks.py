"""Trains, saves and restores; test_trainer_checkpoint.py, test_trainer_weights.py and test_gpu.py run it on each rank.

    python tests/helpers/checkpoint_on_ranks.py ROOT ZERO_STAGE STEPS [key=value …]

Restores the newest checkpoint under ROOT if there is one, or starts from ``weights=PATH``; takes STEPS steps;
saves ``every=N`` of them and the last; writes the losses of its steps to ROOT/losses-<first step>.json on rank 0
and prints how each save ended. ``asynchronous=false``: training waits for each save. ``full=RANK:FIRST:LAST,…``:
the disk of one rank takes no file of more than 10 kB while these steps are saved. ``slow=SECONDS``: the
publication of a checkpoint takes that long. ``timeout=SECONDS``: a collective may take no longer. ``device=cuda`` and
``precision=fp16``: the loss scale starts at 2^10 and doubles every other step.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.helpers import engine_on_ranks as tiny
from trainer.checkpoint import reading as checkpoint
from trainer.checkpoint import saving, shared_folder
from trainer.checkpoint.reading import CheckpointConfig
from trainer.convert import weights as plain_weights
from trainer.engine.engine import Engine, EngineConfig
from trainer.engine.loss_scale import LossScale
from trainer.engine.optimizer import OptimizerConfig
from trainer.errors import TrainerError
from trainer.model.bert import Bert
from trainer.ranks.world import World, from_launcher, join, leave, together


def main() -> None:
    root, stage, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    options = dict(option.split("=", 1) for option in sys.argv[4:])
    world = from_launcher(options.get("device", "cpu"))
    join(world, 60)
    if world.device.type == "cpu":
        tiny.allow_fp16_on_cpus()
    made = EngineConfig(
        zero_stage=stage,  # type: ignore[arg-type]
        precision=options.get("precision", "fp32"),  # type: ignore[arg-type]
        offload_optimizer="offload" in options,
        initial_loss_scale=2.0**10,
        loss_scale_growth_interval=2,
    )
    engine = Engine(made, Bert(tiny.MODEL, 3), OptimizerConfig(), world, seed=3)
    slow_down(float(options.get("slow", 0)), int(options.get("timeout", 60)))
    config = CheckpointConfig(asynchronous=options.get("asynchronous") != "false")
    saver = saving.Saver(shared_folder.SharedFolder(root), config, engine.optimizer, world)
    try:
        first = restore(root, engine, world, options.get("weights"))
        losses = []
        for step in range(first, first + steps):
            batches, counts = tiny.cut(step, world.rank, world.size, 2)
            sums = engine.step(batches, counts, step, 1e-3).sums
            dist.all_reduce(sums)
            losses.append(float(sums[0] / counts.targets + sums[1] / counts.pairs))
            if (step + 1 - first) % int(options.get("every", steps)) == 0:
                save(saver, step + 1, engine, options.get("full"), world)
            else:
                tell(saver.look(), world)
        if steps == 0:
            save(saver, first, engine, None, world)
        tell(saver.finish(), world)
    except TrainerError as error:
        print(f"error: {error}" if str(error) else "", flush=True)
        leave(2)
    if world.is_main:
        (root / f"losses-{first}.json").write_text(json.dumps(losses))
    leave(0)


def slow_down(seconds: float, timeout: int) -> None:
    """Make publications take ``seconds`` longer, and let collectives take ``timeout``."""
    publish = shared_folder._publish

    def slowly(*arguments: Any) -> Any:
        time.sleep(seconds)
        return publish(*arguments)

    shared_folder._publish = slowly  # type: ignore[assignment]
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), dist.group.WORLD)


def restore(root: Path, engine: Engine[Bert], world: World, path: str | None) -> int:
    """Restore the newest checkpoint, if there is one; returns the step to begin with."""
    found, _ = checkpoint.newest(root)
    if found is not None:
        together(lambda: checkpoint.verify(found, world.rank, world.size), world)
        together(lambda: checkpoint.restore(found, engine.optimizer), world)
        engine.loss_scale = LossScale(**found.record["loss_scale"])
    elif path is not None:
        together(lambda: plain_weights.start_from(Path(path), tiny.MODEL, engine.optimizer, print), world)
    engine.refresh_weights()
    return int(found.record["step"]) if found is not None else 0


def save(saver: saving.Saver, step: int, engine: Engine[Bert], full: str | None, world: World) -> None:
    """Save one step, on a disk that may be full on one rank."""
    times = [tuple(map(int, part.split(":"))) for part in full.split(",")] if full else []
    limited = any(world.rank == rank and first <= step <= last for rank, first, last in times)
    model = {"model": asdict(tiny.MODEL)}
    record = {"step": step, "optimizer": {"steps": engine.optimizer.steps}, "config": model}
    record |= {"loss_scale": asdict(engine.loss_scale)}
    tell(saver.finish(), world)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000 if limited else resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    tell(saver.save(step, record), world)


def tell(ended: list[saving.Saved], world: World) -> None:
    for saved in ended:
        print(f"step {saved.step}: {saved.failure or 'whole'}", flush=True)
        if saved.leftover and world.is_main:
            print(f"left behind: {saved.leftover}", flush=True)


if __name__ == "__main__":
    main()
