"""Submits deploy/slurm/train.sbatch to a real Slurm, injects faults, and prints how each job ends.

    python -m tests.tools.job_table [--only WORDS] [--keep FOLDER]

Prints Markdown. Needs root. Exits with an error if a job ends in another way than its case says.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.build import build
from data_prep.settings import make_settings
from tests.helpers.corpora import write_corpus
from tests.helpers.launches import PYTHON, SETTINGS, Site, is_rank, losses, site
from tests.helpers.ranks import ROOT
from tests.helpers.runs import lines, write_config
from tests.helpers.slurm import ask, slurm
from tests.helpers.sshd import wait_for

PATIENCE = 600.0  # seconds
STEPS, EVERY = 120, 10
SCRIPT = str(ROOT / "deploy/slurm/train.sbatch")
HEAD = ("the job is hit by", "at step", "goes on from", "ends as", "restarts", "losses")


@dataclass(frozen=True)
class Job:
    """A submitted job."""

    site: Site
    number: str
    folder: Path

    def state(self, key: str = "JobState") -> str:
        """The job's state according to Slurm, which remembers a job for some minutes."""
        said = ask(self.site, "scontrol", "show", "job", self.number).split()
        return dict(word.split("=", 1) for word in said if "=" in word).get(key, "")

    def ranks(self) -> list[int]:
        """The processes that train."""
        return [pid for host in self.site.hosts for pid in host.pids() if is_rank(pid)]

    def steps(self) -> list[int]:
        """The numbers of the steps taken so far; a repeated step is listed again."""
        return [int(line["step"]) for line in lines(self.folder / "run", "step")]


def signal_job(job: Job) -> None:
    ask(job.site, "scancel", "--signal=TERM", job.number)


def end_time(job: Job) -> None:
    """Move its time limit to a minute from now, so that `--signal=TERM@60` sends the signal at once."""
    ask(job.site, "scontrol", "update", f"JobId={job.number}", "TimeLimit=1")
    require(wait_for(lambda: job.state() == "PENDING", PATIENCE), job)
    ask(job.site, "scontrol", "update", f"JobId={job.number}", "TimeLimit=30")  # or the next attempt ends like this one


def kill_rank(job: Job) -> None:
    os.kill(job.ranks()[-1], signal.SIGKILL)


def cancel(job: Job) -> None:
    ask(job.site, "scancel", job.number)


def requeue(job: Job) -> None:
    ask(job.site, "scontrol", "requeue", job.number)


def nothing(job: Job) -> None:
    pass


CASES: dict[str, tuple[Callable[[Job], None], str]] = {  # the fault; the job's final state
    "nothing": (nothing, "COMPLETED"),
    "`scancel --signal=TERM JOB`": (signal_job, "COMPLETED"),
    "its time limit": (end_time, "COMPLETED"),
    "SIGKILL of a rank": (kill_rank, "COMPLETED"),
    "`scontrol requeue JOB`, as a preemption does": (requeue, "COMPLETED"),
    "`scancel JOB`": (cancel, "CANCELLED"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Execute the table of jobs.")
    parser.add_argument("--only", default="", help="cases whose names contain this, after the first")
    parser.add_argument("--keep", type=Path, help="a folder for what each job said")
    options = parser.parse_args()
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
    with tempfile.TemporaryDirectory(prefix="jobs-") as folder:
        text, tokenizer = write_corpus(Path(folder), [18] * 36, 8, different=100)
        shards = Path(folder, "shards")
        with contextlib.redirect_stdout(None):
            build([text], tokenizer, shards, make_settings(32, samples_per_shard=64), processes=1)
        expected: list[dict[str, Any]] = []
        for name in CASES:
            if name == "nothing" or options.only in name:
                place = Path(folder, str(list(CASES).index(name)))
                expected = execute(name, place, shards, expected) or expected
                if options.keep:
                    options.keep.mkdir(parents=True, exist_ok=True)
                    shutil.copy(place / "log", options.keep / f"{name}.log")


def execute(name: str, folder: Path, shards: Path, expected: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Submit the job, inject the fault, wait for its end and print its row; returns an undisturbed job's losses."""
    folder.mkdir()
    sections: dict[str, dict[str, Any]] = {"run": {"device": "cpu"}, "checkpoint": {"every_steps": EVERY}}
    config = write_config(folder, shards, STEPS, **sections, metrics={"log_every_steps": 1})
    hit, end = CASES[name]
    with site(folder / "site") as place, slurm(place):
        job = submit(place, folder, config)
        require(wait_for(lambda: hit is nothing or len(job.steps()) > EVERY + 5, PATIENCE), job)
        at = 0 if hit is nothing else job.steps()[-1]
        hit(job)
        states = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL")
        require(wait_for(lambda: job.state() in states and not job.ranks(), PATIENCE), job)
        restarts, state = job.state("Restarts"), job.state()
    require(state == end, job)
    resumed = re.findall(r"resumed from \S+ at step (\d+)", (folder / "log").read_text())
    found = {line["step"]: {key: line[key] for key in line if key != "restarts"} for line in losses(folder / "run")}
    last = {line["step"]: {key: line[key] for key in line if key != "restarts"} for line in expected}
    same = "the same" if all(found[step] == last.get(step, found[step]) for step in found) else "DIFFERENT"
    cells = (name, str(at), ", ".join(resumed), f"{state} at step {max(found)} of {STEPS}", restarts, same)
    print("| " + " | ".join(cells) + " |", flush=True)
    return losses(folder / "run") if hit is nothing else []


def submit(place: Site, folder: Path, config: Path) -> Job:
    """Submit with the options in the script's head, except for one rank per node and a user's environment."""
    given = place.environ() | SETTINGS | {"PYTHON": PYTHON}
    words = ["sbatch", "--parsable", f"--chdir={ROOT}", f"--output={folder}/log", "--ntasks-per-node=1"]
    words += ["--gpus-per-node=1", "--cpus-per-task=1", "--time=30", "--signal=TERM@60"]
    words += ["--export=" + ",".join(f"{key}={value}" for key, value in given.items()), SCRIPT, "--config", str(config)]
    return Job(place, ask(place, *words), folder)


def require(holds: bool, job: Job) -> None:
    if not holds:
        sys.exit(f"job {job.number}: {job.state()}\n{(job.folder / 'log').read_text()}")


if __name__ == "__main__":
    main()
