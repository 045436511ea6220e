"""The training command: ``deepspeed --module trainer --config run.yaml [--set key=value …]``.

It also runs under torchrun, mpirun or srun, or as a single process.
"""

from __future__ import annotations

import argparse
import faulthandler
from functools import partial

import trainer.ranks.first_process  # noqa: F401  before the other imports, which take seconds
from data_prep.options import CommandParser
from data_prep.streams import write_whole_lines
from kernels import backend
from trainer.checkpoint.train_state import TrainState
from trainer.console import say
from trainer.exits import DONE, STOPPED
from trainer.plan.micro_batch import settle
from trainer.ranks.ending import fail, guard
from trainer.ranks.world import (
    World,
    leave,
)
from trainer.run.phases import Plan
from trainer.run.start import meet, prepare
from trainer.run.train import train


def main() -> None:
    """Read the configuration, join the other ranks, and train. The exit codes are in :mod:`trainer.exits`."""
    write_whole_lines()
    parser = CommandParser(prog="trainer", description="Pre-train BERT from a YAML configuration.")
    parser.add_argument("--config", required=True, help="the run's YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key; repeatable")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed's launcher adds it
    options = parser.parse_args()
    faulthandler.enable()  # NCCL's watchdog aborts a rank that waits too long: this prints where it was
    plan, world = prepare(options.config, options.set)
    state = guard(world, partial(_run, plan, world))
    if state.phase < len(plan.phases):
        said = f"lambert: stopped at step {state.step} and saved: run the same command to continue"
        fail(said if world.is_main else "", STOPPED)
    if world.is_main:
        say(f"done: {state.step} steps, {state.samples:,} samples, {state.tokens:,} tokens")
    leave(DONE)


def _run(plan: Plan, world: World) -> TrainState:
    meet(plan, world)
    plan = settle(plan, world, world.size)
    with backend.using(plan.config.engine.kernels):
        return train(plan, world)


if __name__ == "__main__":
    main()
