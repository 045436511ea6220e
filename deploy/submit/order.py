"""A run to be submitted, the planner's verdict on it, and the program that takes it."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.console import teller
from trainer.exits import FAILED, REFUSED
from trainer.monitor.quantities import duration
from trainer.plan.estimate import Plan
from trainer.plan.memory import GIB
from trainer.plan.options import hardware_of, plan_of
from trainer.run.config import Config

ROOT = Path(__file__).resolve().parent.parent.parent  # of the checkout
tell = teller("deploy.submit")


class SubmitError(Exception):
    """Ends the command with one line and an exit code; nothing is left submitted."""

    def __init__(self, text: str, code: int = REFUSED) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Order:
    """A run and where it should run."""

    options: argparse.Namespace
    config: Config
    given: Mapping[str, Any]  # what the file and --set say, without defaults
    more: tuple[str, ...]  # words after --

    @property
    def name(self) -> str:
        """The run's name, and the job's."""
        return self.config.run.name

    @property
    def ranks(self) -> int:
        """The ranks of all nodes."""
        return int(self.options.nodes * self.options.gpus)

    @property
    def on_cpus(self) -> bool:
        """Whether the run asks for CPUs; then --gpus is its number of ranks per node."""
        return self.config.run.device == "cpu"

    def size(self) -> str:
        """The number of nodes and ranks, as text."""
        nodes = "1 node" if self.options.nodes == 1 else f"{self.options.nodes} nodes"
        return f"{nodes}, {self.ranks} rank{'s'[: self.ranks > 1]}"

    def refuse_words(self, pattern: str, advice: str) -> None:
        """Raise SubmitError if a word after -- matches: it would contradict what was planned."""
        for word in self.more:
            if re.match(pattern, word):
                raise SubmitError(f"{word} after --: {advice}")


def yaml_of(tree: Mapping[str, Any]) -> str:
    """A configuration as YAML."""
    return yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True)


def planned(order: Order, config: Config) -> Plan | None:
    """The plan, after its verdict is printed; None if there is none. Raises TrainerError if the run does not fit.

    ``config``: the order's, with the places where its data sets are here.
    """
    if order.on_cpus or order.options.no_plan:
        tell(f"no plan: {'run.device is cpu' if order.on_cpus else '--no-plan'}")
        return None
    plan = plan_of(config, hardware_of(order.options))
    tell(verdict(plan))
    return plan


def verdict(plan: Plan) -> str:
    """The planner's verdict on a run that fits, in one line."""
    need = sum(plan.memory_bytes[plan.zero_stage].values()) / GIB
    cost = "" if plan.cost is None else f", cost {plan.cost:,.2f}"
    return (
        f"{plan.name} fits: {need:.1f} of {plan.card_bytes / GIB:.1f} GiB of each {plan.card}; {plan.steps:,} steps "
        f"take about {duration(plan.wall_seconds)}, {plan.gpu_hours:,.1f} GPU-hours{cost}"
    )


def require_program(name: str, where: str) -> None:
    """Raise SubmitError if there is no such program."""
    if shutil.which(name) is None:
        raise SubmitError(f"there is no {name} on the PATH: {where}")


def ask(words: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
    """Run a program, print its warnings, and return its standard output.

    Raises SubmitError with its error and exit code if it fails.
    """
    done = run(words, environ)
    if done.returncode != 0:
        raise failure(done)
    for line in filter(None, done.stderr.splitlines()):
        tell(line)
    return done.stdout


def run(words: Sequence[str], environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    environ = {**os.environ, **(environ or {})}
    return subprocess.run(words, env=environ, capture_output=True, encoding="utf-8", errors="replace", check=False)


def failure(done: subprocess.CompletedProcess[str]) -> SubmitError:
    """A program's own error in one line, with its exit code."""
    program = Path(done.args[0]).name
    prefix = rf"(?i)({program}: )?error: |^(Use --debug flag|level=|WARNING: ).*"
    lines = [re.sub(prefix, "", line).strip() for line in (done.stderr or done.stdout).splitlines()]
    said = "; ".join(filter(None, lines)).replace(":; ", ": ") or f"ended with code {done.returncode}"
    return SubmitError(f"{program}: {said}", done.returncode if done.returncode > 0 else FAILED)
