"""Profile a run's steps: ``python -m trainer.profile --config run.yaml [--steps 20] [--out FOLDER]``.

It also runs under deepspeed's launcher, torchrun, mpirun or srun, as the run does. The steps are the trainer's own, on
the run's shards, from random weights. The run's folder is not touched; everything is written to a new folder.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import socket
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import trainer.ranks.first_process  # noqa: F401  before the other imports, which take seconds
from data_prep.atomic import replacing
from data_prep.options import CommandParser
from data_prep.streams import write_whole_lines
from kernels import backend
from trainer.console import print_result, say, silent
from trainer.errors import TrainerError
from trainer.exits import DONE
from trainer.model.flops import peak_flops
from trainer.plan.micro_batch import settle
from trainer.profile import report, timeline
from trainer.profile.advice import Setting
from trainer.profile.breakdown import break_down
from trainer.profile.events import Recording, read_trace, recording_of, spans_of_marks
from trainer.profile.report import RankTimes
from trainer.profile.steps import Size, Steps, Timing, device_name
from trainer.ranks.ending import guard
from trainer.ranks.world import World, gather_texts, leave, together
from trainer.run.home import working_folder
from trainer.run.phases import Plan
from trainer.run.start import meet, prepare

TABLE, PICTURE, TRACE = "profile.txt", "timeline.png", "trace-rank-{}.json.gz"
MOST_STEPS = 1000


def main() -> None:
    """Profile and report. Exit code 0, or 2 with one line if something is wrong."""
    write_whole_lines()
    parser = CommandParser(prog="python -m trainer.profile", description=__doc__.split("\n")[0])
    parser.add_argument("--config", required=True, help="the run's YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key; repeatable")
    parser.add_argument("--phase", help="name of the phase to profile; the first one if not given")
    parser.add_argument("--steps", type=int, default=20, help="steps with the profiler, and as many without (20)")
    parser.add_argument(
        "--micro-batches", type=int, default=8, help="most micro-batches per step and rank: a trace is large (8)"
    )
    parser.add_argument("--out", type=Path, default=Path("profile"), help="a new folder for the results (profile)")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed's launcher adds it
    options = parser.parse_args()
    for option, value in (("--steps", options.steps), ("--micro-batches", options.micro_batches)):
        if not 1 <= value <= MOST_STEPS:
            parser.error(f"{option} {value}: must be between 1 and {MOST_STEPS:,}")
    plan, world = prepare(options.config, options.set)
    guard(world, partial(_profile, plan, world, options))
    leave(DONE)


def _profile(plan: Plan, world: World, options: argparse.Namespace) -> None:
    meet(plan, world)
    phase = together(partial(_phase, plan, options.phase), world)
    out: Path = options.out
    together(lambda: _claim(out, working_folder(plan.config)) if world.is_local_main else None, world)
    plan = settle(plan, world, world.size)
    size = Size.of(plan.phases[phase], world.size, options.micro_batches)
    with (
        backend.using(plan.config.engine.kernels),
        TemporaryDirectory(prefix=f".rank-{world.rank}-", dir=out) as folder,
    ):
        steps = Steps(plan, phase, size, world, Path(folder), say if world.is_main else silent)
        raw = Path(folder) / "trace.json"
        timing = steps.measured(options.steps, raw)
        recording = together(partial(_record, raw, out / TRACE.format(world.rank), world.device.type == "cuda"), world)
    found = break_down(recording)
    own = RankTimes(world.rank, socket.gethostname(), found.own)
    ranks = [RankTimes(**json.loads(text)) for text in gather_texts(json.dumps(asdict(own)), world)]
    if world.is_main:
        setting = _setting(plan, phase, size, timing, world)
        name = _name(plan, phase, options.steps, world)
        said = report.lines(name, found, timing, setting, ranks)
        (out / TABLE).write_text("\n".join(said) + "\n", encoding="utf-8")
        timeline.draw(recording, name, out / PICTURE)
        traces = TRACE.format("*" if world.size > 1 else world.rank)
        files = {"table": TABLE, "picture": PICTURE, "trace": traces}
        said += ["", *(f"{kind:10}{out / file}" for kind, file in files.items())]
        print_result("\n".join(said) + ", for https://ui.perfetto.dev")


def _phase(plan: Plan, name: str | None) -> int:
    """The index of the phase of this name. Raises TrainerError if there is none."""
    names = [phase.name for phase in plan.config.phases]
    if name is not None and name not in names:
        raise TrainerError(f"--phase {name}: the run has no such phase: name one of {', '.join(names)}")
    return 0 if name is None else names.index(name)


def _claim(out: Path, run: Path) -> None:
    """Create the folder for the results. Raises TrainerError if anything is in it, or if it is the run's."""
    if run.resolve() in (out.resolve(), *out.resolve().parents):
        raise TrainerError(
            f"--out {out} is inside run.folder, {run}, which a profile leaves alone: name another folder"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        taken = any(not name.startswith(".rank-") for name in os.listdir(out))
    except OSError as error:
        raise TrainerError(f"--out {out}: the folder cannot be created ({error.strerror}): name another") from None
    if taken:
        raise TrainerError(f"--out {out} is not empty: name a new folder, or remove it")


def _record(raw: Path, path: Path, cuda: bool) -> Recording:
    """Read the profiler's trace, add what the host does as a row of its own, and write it to ``path``."""
    tree = read_trace(raw, cuda)
    recording = recording_of(tree, cuda)
    tree["traceEvents"] += spans_of_marks(tree, recording)
    with replacing(path) as file, gzip.open(file, "wb", compresslevel=5) as packed:
        packed.write(json.dumps(tree, separators=(",", ":")).encode())  # much faster than json.dump
    return recording


def _setting(plan: Plan, phase: int, size: Size, timing: Timing, world: World) -> Setting:
    pieces, cuda = world.size * size.micro_batches, world.device.type == "cuda"
    return Setting(
        where=f"phases.{phase}",
        cuda=cuda,
        peak=peak_flops(device_name(world)) if cuda else 0.0,
        ranks=world.size,
        sequences=-(-size.global_batch // pieces),
        tokens=timing.tokens / pieces,
        micro_batches=size.micro_batches,
        run_micro_batches=size.run_micro_batches,
        checkpointing=plan.config.engine.checkpointing,
        log_every_steps=plan.config.metrics.log_every_steps,
    )


def _name(plan: Plan, phase: int, steps: int, world: World) -> str:
    run, ours = plan.config.run.name[:40], plan.config.phases[phase].name[:40]
    return f"{run}, phase {ours}: {steps} steps on {world.size} x {device_name(world)}, rank 0"


if __name__ == "__main__":
    main()
