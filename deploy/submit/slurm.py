"""Submits a run to Slurm: sbatch with deploy/slurm/train.sbatch and a copy of the configuration."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from data_prep.atomic import replacing
from data_prep.json_text import shown
from data_prep.options import check_folder
from deploy.submit.order import ROOT, Order, SubmitError, ask, planned, require_program, tell, yaml_of
from trainer.console import print_result
from trainer.exits import FAILED
from trainer.plan.estimate import Plan
from trainer.plan.micro_batch import AUTO, stored
from trainer.preflight import foresee
from trainer.ranks.world import World
from trainer.run.config import Config
from trainer.run.home import working_folder
from trainer.run.phases import open_phases

SCRIPT = ROOT / "deploy/slurm/train.sbatch"
COPIES = Path("submitted")  # configurations of submitted jobs, in the current folder
LOG = "%x-%j.log"  # the job's name and number


def submit(order: Order) -> None:
    """Check the run, then submit or print it. Raises SubmitError, TrainerError or DataError."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,63}", order.name, re.ASCII):
        raise SubmitError(f"run.name is {order.name!r}: a job's name takes letters, digits, ., _ and -: change it")
    _check_words(order)
    if not order.options.dry_run:
        require_program("sbatch", "run this on a login node of the cluster, or with --dry-run")
    _check(order, planned(order, order.config))
    text = yaml_of(order.given)
    copy = COPIES / f"{order.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.yaml"
    words = command(order, copy)
    if order.options.dry_run:
        print_result(printed(words, copy, text))
        return
    with _kept(copy, text):
        said = ask(words, environment())
    print_result(summary(order, *job_of(said)))


def command(order: Order, copy: Path) -> list[str]:
    """The words of sbatch."""
    options = order.options
    size = [f"--nodes={options.nodes}", f"--gpus-per-node={options.gpus}"]
    if order.on_cpus:
        size = [f"--nodes={options.nodes}", "--gpus-per-node=0", f"--ntasks-per-node={options.gpus}"]
    own = ["sbatch", "--parsable", "--export=ALL", f"--job-name={order.name}", *size, f"--output={LOG}"]
    return [*own, *order.more, str(SCRIPT), "--config", str(copy)]


def environment() -> dict[str, str]:
    """The variables that the script reads: this Python, unless PYTHON names another, and this checkout."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHON": os.environ.get("PYTHON", sys.executable), "PYTHONPATH": ":".join(dict.fromkeys(paths))}


def printed(words: list[str], copy: Path, text: str) -> str:
    """Everything that would be submitted, as a shell takes it; the script is in comments."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in environment().items()]
    script = "".join(f"# {line}\n" for line in SCRIPT.read_text(encoding="utf-8").splitlines())
    return (
        f"mkdir -p {COPIES}; cat > {shlex.quote(str(copy))} <<'END_OF_CONFIGURATION'\n{text}END_OF_CONFIGURATION\n"
        f"{' '.join(variables)} {shlex.join(words)}\n\n# {SCRIPT}:\n{script}"
    ).rstrip()


def job_of(said: str) -> tuple[str, str]:
    """The job's number in what sbatch --parsable prints, and its cluster, or an empty text if it names none.

    A site's own sbatch may print other lines, too. Raises SubmitError if none is a job's number.
    """
    found = re.findall(r"^(\d+)(?:;(.*))?$", said, re.MULTILINE)
    if not found:
        raise SubmitError(
            f"sbatch printed {shown(said)} and no job's number: look for the job with squeue --me", FAILED
        )
    job, cluster = found[-1]
    return job, cluster


def summary(order: Order, job: str, cluster: str) -> str:
    """The job's number, and how to watch and stop it."""
    where = f" --clusters={cluster}" if cluster else ""
    [*_, log] = [LOG, *(word.removeprefix("--output=") for word in order.more if word.startswith("--output="))]
    log = log.replace("%x", order.name).replace("%j", job)
    return (
        f"submitted {order.name} as job {job}: {order.size()}\n"
        f"  watch   squeue{where} --jobs {job}\n"
        f"          tail -F {shlex.quote(log)}\n"
        f"          python -m trainer.runs {shlex.quote(order.config.run.folder)}\n"
        f"  stop    scontrol{where} update JobId={job} Requeue=0 && scancel{where} --signal=TERM {job}\n"
        f"          it saves and ends; without Requeue=0 it requeues itself\n"
        f"  cancel  scancel{where} {job}"
    )


def _check_words(order: Order) -> None:
    gpus = order.options.gpus
    if not any(re.fullmatch(rf"--gpus-per-node=([^:]+:)?{gpus}", word) for word in order.more):
        order.refuse_words(r"--gpus-per-n", "the run is planned for --gpus: give --gpus-per-node=TYPE:NUMBER")
    order.refuse_words(r"(--nodes|-N)", "the run is planned for --nodes: give it before --")
    order.refuse_words(r"(--job-name|-J)", "the job has the run's name: use --set run.name=NAME")
    order.refuse_words(r"(--gpus(=|$)|-G|--ntasks|-n)", "the script starts one rank per GPU: give --gpus before --")
    order.refuse_words(r"(--chdir|-D)", "paths in the configuration are relative to this folder: leave it out")
    order.refuse_words(r"--export(?!=ALL\b)", "the script needs PYTHON and PYTHONPATH: use --export=ALL,NAME=VALUE")
    order.refuse_words(r"-o", "write it as --output=FILE")
    order.refuse_words(r"(--wait$|-W|--test-only)", "this command submits and does not wait: leave it out")
    order.refuse_words(r"(--wrap|--array|-a|[^-]|--?$)", "only options for one job go here, as words such as --time=60")


def _check(order: Order, plan: Plan | None) -> None:
    """Check all that the run will check, as far as it needs no ranks: shards, folder, checkpoint, room for one."""
    config = numbered(order.config, plan)
    world = World(0, order.ranks, 0, order.options.gpus, torch.device("cpu"))
    if config.run.ranks not in (None, order.ranks):
        raise SubmitError(f"run.ranks is {config.run.ranks}, but --nodes and --gpus make {order.ranks}: change either")
    opened = open_phases(config, world)
    check_folder("run.folder", working_folder(config))
    foresee(opened, tell)
    tell("checked: the configuration, the shards and run.folder; the job checks its nodes when it starts")


def numbered(config: Config, plan: Plan | None) -> Config:
    """The configuration with what `micro_batch: auto` will become: the number in the run's checkpoint, or the plan's.

    Without either it stays auto.
    """
    known = {} if plan is None else {each.name: each.micro_batch.sequences for each in plan.phases}
    known |= {name: number for name, number in stored(config).items() if number is not None}
    phases = (
        replace(phase, micro_batch=known.get(phase.name, AUTO)) if phase.micro_batch == AUTO else phase
        for phase in config.phases
    )
    return replace(config, phases=tuple(phases))


@contextmanager
def _kept(path: Path, text: str) -> Iterator[None]:
    """Write a file, and remove it again if the block raises SubmitError, unless it was there before."""
    there, parent = path.exists(), path.parent.exists()
    try:
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as file:
            os.fchmod(file.fileno(), 0o600)  # an address may contain a password
            file.write(text.encode())
    except OSError as error:
        raise SubmitError(f"{path} cannot be written ({error.strerror}): submit from a folder that you own") from None
    try:
        yield
    except SubmitError:  # not Ctrl-C: the job may exist
        if not there:
            path.unlink(missing_ok=True)
        if not parent:
            with suppress(OSError):  # another submission uses it
                path.parent.rmdir()
        raise
