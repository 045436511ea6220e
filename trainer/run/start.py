"""Start a rank: read the configuration, open the shards and join the other ranks.

The training command (:mod:`trainer.__main__`) and :mod:`trainer.preflight` share it.
"""

from __future__ import annotations

import time

import torch

from kernels import backend
from trainer.console import say, warn
from trainer.engine.engine import resolve_precision
from trainer.engine.optimizer import require_implementation
from trainer.errors import TrainerError, exit_code
from trainer.monitor.trackers import require_packages
from trainer.ranks.ending import error_text, fail
from trainer.ranks.network import ports
from trainer.ranks.world import (
    World,
    from_launcher,
    join,
    may_change,
    settings,
    speaks_first,
)
from trainer.run.config import Config, load
from trainer.run.phases import Plan, open_phases
from trainer.run.rank_agreement import facts


def prepare(path: str, overrides: list[str], ranks: int | None = None) -> tuple[Plan, World]:
    """Do everything that needs no other rank: read the configuration, find this rank's place, open the shards.

    ``ranks``: how many will be started later, if this process runs alone. Ends the process with an error line if
    something is wrong.
    """
    try:
        config = load(path, overrides)
        world = from_launcher(config.run.device)
        started = ranks if ranks is not None and world.size == 1 else world.size
        require_fitting(config, started, world.device)
        if may_change():
            require_any_size(config)
        return open_phases(config, world), world
    except (TrainerError, backend.UnavailableError, OSError, MemoryError) as error:
        if not speaks_first():
            time.sleep(3)  # usually all ranks fail alike: the first one reports it and the launcher ends us
        fail(f"trainer: error: {error_text(error)}", exit_code(error))


def require_fitting(config: Config, ranks: int, device: torch.device) -> None:
    """Raise TrainerError or UnavailableError if the run cannot work on so many ranks, or on this machine."""
    if config.run.ranks not in (None, ranks):
        raise TrainerError(
            f"{ranks} rank(s) were started but run.ranks is {config.run.ranks}: start that many or change it"
        )
    resolve_precision(config.engine, device)
    require_implementation(config.optimizer, config.engine.zero_stage, ranks, device)
    require_packages(config.metrics.trackers)
    with backend.using(config.engine.kernels):
        backend.resolve(device.type)


def require_any_size(config: Config) -> None:
    """Raise TrainerError if the run could not restart on another number of ranks with the same batches.

    Otherwise it would be refused only when the first node is lost, perhaps at night.
    """
    problems = []
    if config.run.ranks is not None:
        problems.append(f"run.ranks is {config.run.ranks}: remove it")
    if config.run.resume == "never":
        problems.append("run.resume is never: set it to auto")
    problems += [
        f"phases.{index} has accumulation: set global_batch and micro_batch in its place"
        for index, phase in enumerate(config.phases)
        if phase.accumulation is not None
    ]
    if problems:
        raise TrainerError(f"with --nnodes MIN:MAX the run may restart on other ranks: {'; '.join(problems)}")


def meet(plan: Plan, world: World) -> None:
    """Join the other ranks; report the environment settings, and warn if they differ between ranks."""
    if world.is_main:
        listed = ", ".join(f"{name}={value}" for name, value in sorted(settings().items()))  # join adds its own
        say(f"settings: {listed or 'none'}; InfiniBand: {', '.join(ports()) or 'no port is up'}")
    for difference in join(world, plan.config.run.timeout_seconds, facts(plan, world)):
        warn(f"not the same on all ranks: {difference}")
