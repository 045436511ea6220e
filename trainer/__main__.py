"""``deepspeed --module trainer --config run.yaml [--set key=value …]``; also under torchrun, mpirun, srun, or alone."""

from __future__ import annotations

import argparse
import faulthandler
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeVar

import trainer.first_process  # noqa: F401  before the others, which take seconds
from data_prep.streams import write_whole_lines
from kernels import backend
from trainer.config import Config, load
from trainer.data import PhaseData, open_phases
from trainer.engine import resolve_precision
from trainer.errors import TrainerError, exit_code, explain
from trainer.exits import DONE, FAILED, INTERRUPTED, LOST, REFUSED, STOPPED
from trainer.facts import facts
from trainer.journal import say
from trainer.network import ports
from trainer.options import OneLineParser
from trainer.state import TrainState
from trainer.train import train
from trainer.world import (
    World,
    from_launcher,
    join,
    leave,
    lost_contact,
    nccl_reason,
    operation,
    say_last,
    settings,
    speaks_first,
)

Result = TypeVar("Result")


def main() -> None:
    """Read the configuration, meet the other ranks, train. The exit codes are in :mod:`trainer.exits`."""
    write_whole_lines()
    parser = OneLineParser(prog="trainer", description="Pre-train BERT as a YAML file says.")
    parser.add_argument("--config", required=True, help="the run's YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key; repeatable")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed's launcher adds it
    options = parser.parse_args()
    faulthandler.enable()  # NCCL's watchdog aborts a rank that waits too long: where, then
    config, phases, world = prepare(options.config, options.set)
    state = guard(world, partial(_run, config, phases, world))
    if state.phase < len(phases):
        said = f"lambert: stopped at step {state.step} and saved: the same command goes on"
        fail(said if world.is_main else "", STOPPED)
    if world.is_main:
        say(f"done: {state.step} steps, {state.samples:,} samples, {state.tokens:,} tokens")
    leave(DONE)


def prepare(path: str, overrides: list[str], ranks: int | None = None) -> tuple[Config, list[PhaseData], World]:
    """All that a rank finds out by itself; ``ranks``: those that will be started, where this is one alone.

    Ends the process with a line where something is wrong.
    """
    try:
        config = load(path, overrides)
        world = from_launcher(config.run.device)
        started = ranks if ranks is not None and world.size == 1 else world.size
        if config.run.ranks not in (None, started):
            raise TrainerError(
                f"{started} rank(s) were started but run.ranks is {config.run.ranks}: mend the one or the other"
            )
        resolve_precision(config.engine, world.device)
        with backend.using(config.engine.kernels):
            backend.resolve(world.device.type)
        return config, open_phases(config, world), world
    except (TrainerError, backend.UnavailableError, OSError, MemoryError) as error:
        if not speaks_first():
            time.sleep(3)  # all ranks found the same, as a rule: the first one says it, and the launcher ends us
        fail(f"trainer: error: {_text(error)}", exit_code(error))


def meet(config: Config, phases: list[PhaseData], world: World) -> None:
    """Join the other ranks, and say what is set for them, and what they have unlike one another."""
    if world.is_main:
        told = ", ".join(f"{name}={value}" for name, value in sorted(settings().items()))  # before join adds its own
        say(f"settings: {told or 'none'}; InfiniBand: {', '.join(ports()) or 'no port is up'}")
    for difference in join(world, config.run.timeout_seconds, facts(config, phases, world)):
        say(f"warning: not the same on all ranks: {difference}")


def _run(config: Config, phases: list[PhaseData], world: World) -> TrainState:
    meet(config, phases, world)
    with backend.using(config.engine.kernels):
        return train(config, phases, world)


def guard(world: World, action: Callable[[], Result]) -> Result:
    """``action()`` among the other ranks. Ends the process with a line, and the code that tells why, where it fails."""
    try:
        return action()
    except TrainerError as error:  # one without a text is another rank's, which says it
        said = f"trainer: rank {world.rank}: error: {_text(error)}" if str(error) else ""
        fail(said, exit_code(error))
    except (OSError, MemoryError) as error:
        fail(f"trainer: rank {world.rank}: error: {explain(error)}", exit_code(error))
    except KeyboardInterrupt:
        fail("trainer: interrupted; the last checkpoint is intact" if world.is_main else "", INTERRUPTED)
    except RuntimeError as error:
        if not lost_contact(error):
            raise
        where = ", ".join([*getattr(error, "__notes__", []), operation(error)])
        reason = str(error).strip().split("\n")[0].split(". ")[0]
        said = f"lost contact with another rank, whose own line may say why ({where}: {reason}{nccl_reason(error)})"
        fail(f"trainer: rank {world.rank}: {said}", LOST)


def _text(error: Exception) -> str:
    """Its own lines, which may be a list of problems, unless it tells of a shortage."""
    return explain(error) if exit_code(error) == FAILED else str(error)


def fail(message: str, code: int = REFUSED) -> NoReturn:
    """End this rank with its last line, where it has one to say."""
    if message:
        say_last(message)
    leave(code)


if __name__ == "__main__":
    main()
