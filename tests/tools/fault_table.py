"""Runs two hosts under each launcher, injects faults, and prints tables of how each run ends.

    python -m tests.tools.fault_table [--only WORDS] [--keep FOLDER]

Prints two tables in Markdown. Needs root; each case has its own hosts. WORDS select the cases that contain
them. FOLDER gets each run's output.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from data_prep.build import build
from data_prep.settings import make_settings
from tests.helpers.corpora import write_corpus
from tests.helpers.launches import LAUNCHERS, SETTINGS, TIMEOUT, Started, losses, site
from tests.helpers.runs import lines, write_config
from tests.helpers.slurm import slurm
from tests.helpers.sshd import command_of, environment_of, wait_for

SETTLE = 60.0  # seconds after which a process that is left counts as an orphan
ONE = ("deepspeed, pdsh", "deepspeed, openmpi", "torchrun", "deploy.launch", "mpirun", "srun")
PASS_ON = ("mpirun", "srun")  # they forward SIGUSR1 to their ranks and wait; at a SIGTERM they abort, unlike the others
BIG = {"max_positions": 10_000, "hidden": 256, "intermediate": 64}  # large enough that a fault can hit a save
EVERY = 5  # steps between two checkpoints
UNHIT = "nothing"
COMPARED = ("launcher", "the command returned", "settings on both nodes", "losses of 12 steps")
HEAD = ("launcher", "hit by", "the command returned", "after", "said", "last step → saved", "left after 60 s")


@dataclass(frozen=True)
class Outcome:
    """One row of the table: a launcher, a fault, and how the run ended."""

    launcher: str
    fault: str
    codes: str
    seconds: str
    marker: str
    steps: str
    left: str


def terminate(run: Started) -> None:
    os.kill(run.pid(), signal.SIGTERM)


def terminate_twice(run: Started) -> None:
    """Send a second SIGTERM while a checkpoint is being written, if a command is still there to receive it."""
    target = run.pid()
    os.kill(target, signal.SIGTERM)
    wait_for(lambda: saving(run) or run.ended() and not run.ranks(), SETTLE)
    with contextlib.suppress(ProcessLookupError):
        if saving(run) and not run.ended():
            os.kill(target, signal.SIGTERM)


def use_signal_one(run: Started) -> None:
    os.kill(run.pid(), signal.SIGUSR1)


def kill_rank(run: Started) -> None:
    os.kill(run.ranks()[-1], signal.SIGKILL)


def kill_command(run: Started) -> None:
    os.kill(run.pid(), signal.SIGKILL)


def kill_node(run: Started) -> None:
    run.site.hosts[1].kill()


def lose_power(run: Started) -> None:
    run.site.hosts[1].cut()
    run.site.hosts[1].kill()


FAULTS: dict[str, Callable[[Started], None]] = {
    "SIGTERM to the command": terminate,
    "a second SIGTERM while it saves": terminate_twice,
    "SIGUSR1 to the command": use_signal_one,
    "SIGKILL of a rank": kill_rank,
    "SIGKILL of the command": kill_command,
    "SIGKILL of all on the other node": kill_node,
    "the other node loses power": lose_power,
}


def print_row(cells: Sequence[str], *rule: str) -> None:
    """Print a row of a Markdown table, and a rule below it if one is given."""
    for line in (cells, rule):
        if line:
            print("| " + " | ".join(line) + " |", flush=True)


def saving(run: Started) -> bool:
    """Whether a checkpoint is being written."""
    return any(run.folder.glob(".step-*.tmp"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Execute the table of faults.")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--keep", type=Path, help="a folder for what each run said")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        text, tokenizer = write_corpus(Path(folder), [18] * 36, 8, different=100)
        shards = Path(folder, "shards")
        with contextlib.redirect_stdout(None):
            build([text], tokenizer, shards, make_settings(32, samples_per_shard=64), processes=1)
        print_row(COMPARED, *["---"] * len(COMPARED))
        expected: list[dict[str, Any]] = []
        for number, launcher in enumerate(LAUNCHERS):
            if options.only in f"{launcher}: {UNHIT}":
                expected = compare(launcher, Path(folder, f"unhit-{number}"), shards, expected)
        print()
        print_row(HEAD, *["---"] * len(HEAD))
        cases = [(launcher, fault) for launcher in ONE for fault in FAULTS if options.only in f"{launcher}: {fault}"]
        cases = [(launcher, fault) for launcher, fault in cases if launcher in PASS_ON or "SIGUSR1" not in fault]
        for number, (launcher, fault) in enumerate(cases):
            place = Path(folder, str(number))
            print_row(astuple(execute(launcher, fault, place, shards)))
            if options.keep:
                options.keep.mkdir(parents=True, exist_ok=True)
                shutil.copy(place / "log", options.keep / f"{launcher}, {fault}.log")


def compare(launcher: str, folder: Path, shards: Path, expected: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Start a run, wait for its end, and print its row; returns its losses, which the next run must have, too."""
    folder.mkdir()
    config = write_config(folder, shards, 12, run={"device": "cpu"}, metrics={"log_every_steps": 1})
    with started(launcher, folder, config) as run:
        assert wait_for(lambda: len(run.ranks()) == 2 or run.ended(), TIMEOUT), run.output()
        given = [environment_of(rank) for rank in run.ranks()]
        arrived = [all(words.get(name) == value for name, value in SETTINGS.items()) for words in given]
        codes = ", ".join(str(code) for code in run.codes())
        found = losses(run.folder)
        same = "the same" if found == (expected or found) else "DIFFERENT"
        print_row((launcher, codes, "yes" if arrived == [True, True] else f"NO: {arrived}", f"{len(found)}, {same}"))
        return found


@contextlib.contextmanager
def started(launcher: str, folder: Path, config: Path) -> Iterator[Started]:
    """Start a run on two hosts of its own, with a Slurm if it needs one."""
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(site(folder / "site"))
        if launcher == "srun":
            stack.enter_context(slurm(place))
        run = Started(place, LAUNCHERS[launcher](), config, folder / "log")
        stack.callback(run.clear)
        yield run


def execute(launcher: str, fault: str, folder: Path, shards: Path) -> Outcome:
    """Start a run, inject the fault after its first checkpoint, and observe how it ends."""
    folder.mkdir()
    sections: dict[str, dict[str, Any]] = {
        "run": {"device": "cpu", "timeout_seconds": 30},
        "model": BIG,
        "checkpoint": {"every_steps": EVERY},
        "metrics": {"log_every_steps": 1},
    }
    config = write_config(folder, shards, 1_000_000, **sections)
    with started(launcher, folder, config) as run:
        assert wait_for(lambda: trained(run), TIMEOUT), run.output()
        hit = time.monotonic()
        FAULTS[fault](run)
        wait_for(run.ended, SETTLE)
        ended = time.monotonic() - hit
        wait_for(lambda: not run.pids(), hit + SETTLE - time.monotonic())
        gone = time.monotonic() - hit
        codes = ", ".join("still runs" if command.poll() is None else str(command.poll()) for command in run.commands)
        left = "; ".join(command_of(pid)[:40].strip() for pid in run.pids())
        seconds = f"{ended:.0f} s"
        if gone - ended >= 1 and not left:
            seconds += f"; all gone after {gone:.0f} s"
        return Outcome(launcher, fault, codes, seconds, marker(run), steps(run), f"{len(run.pids())} {left}".strip())


def trained(run: Started) -> bool:
    """Whether the run is some steps beyond its first checkpoint."""
    assert not run.ended(), run.output()
    done = lines(run.folder, "step")
    return bool(done) and int(done[-1]["step"]) > EVERY + 2 and not saving(run)


def marker(run: Started) -> str:
    path = run.folder / "ended.json"
    return str(json.loads(path.read_text())["how"]) if path.exists() else "nothing"


def steps(run: Started) -> str:
    """The last step taken, and the step of the newest checkpoint."""
    saved = [int(path.parent.name.split("-")[1]) for path in run.folder.glob("step-*/checkpoint.json")]
    return f"{lines(run.folder, 'step')[-1]['step']} → {max(saved)}"


if __name__ == "__main__":
    main()
