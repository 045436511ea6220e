"""``deepspeed --module trainer --config run.yaml [--set key=value …]``; also under torchrun or alone."""

from __future__ import annotations

import argparse
import time
from typing import NoReturn

import trainer.first_process  # noqa: F401  before the others, which take seconds
from kernels import backend
from trainer.config import load
from trainer.data import open_phases
from trainer.engine import resolve_precision
from trainer.errors import TrainerError
from trainer.exits import INTERRUPTED, LOST, REFUSED, STOPPED
from trainer.train import train
from trainer.world import from_launcher, join, leave, lost_contact, say_last, speaks_first


def main() -> None:
    """Read the configuration, meet the other ranks, train.

    Its exit codes are in :mod:`trainer.exits`.
    """
    parser = argparse.ArgumentParser(prog="trainer", description="Pre-train BERT as a YAML file says.")
    parser.add_argument("--config", required=True, help="the run's YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key; repeatable")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed's launcher adds it
    options = parser.parse_args()
    try:
        config = load(options.config, options.set)
        world = from_launcher(config.run.device)
        resolve_precision(config.engine, world.device)
        with backend.using(config.engine.kernels):
            backend.resolve(world.device.type)
        phases = open_phases(config, world)
    except (TrainerError, backend.UnavailableError) as error:
        if not speaks_first():
            time.sleep(3)  # all ranks found the same, as a rule: the first one says it, and the launcher ends us
        _fail(f"trainer: error: {error}")
    try:
        join(world, config.run.timeout_seconds)
        with backend.using(config.engine.kernels):
            state = train(config, phases, world)
    except TrainerError as error:  # one without a text is another rank's, which says it
        _fail(f"trainer: rank {world.rank}: error: {error}" if str(error) else "")
    except OSError as error:
        _fail(f"trainer: rank {world.rank}: error: {error}")
    except KeyboardInterrupt:
        _fail("trainer: interrupted; the last checkpoint is intact" if world.is_main else "", INTERRUPTED)
    except RuntimeError as error:
        if not lost_contact(error):
            raise
        reason = str(error).strip().split("\n")[0].split(". ")[0]
        _fail(f"trainer: rank {world.rank}: lost contact with another rank, whose own line says why ({reason})", LOST)
    if state.phase < len(phases):
        said = f"lambert: stopped at step {state.step} and saved: the same command goes on"
        _fail(said if world.is_main else "", STOPPED)
    if world.is_main:
        print(f"lambert: done: {state.step} steps, {state.samples:,} samples, {state.tokens:,} tokens", flush=True)
    leave(0)


def _fail(message: str, code: int = REFUSED) -> NoReturn:
    if message:
        say_last(message)
    leave(code)


if __name__ == "__main__":
    main()
