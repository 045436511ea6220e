"""``python -m trainer.finetune --task mrpc --data FOLDER --model BERT --out FOLDER``; also under any launcher."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import trainer.ranks.first_process  # noqa: F401  before the others, which take seconds
from data_prep.manifest import file_sha256
from data_prep.streams import write_whole_lines
from kernels import backend
from trainer.checkpoint.fetched import fetched
from trainer.console import Tell, print_result, say, silent, warn
from trainer.engine.engine import EngineConfig, resolve_precision
from trainer.errors import TrainerError, exit_code, explain, one_line
from trainer.exits import DONE, STOPPED
from trainer.finetune.data import EvaluationFile, UnitTable, read_evaluation_file, read_training
from trainer.finetune.formats import split_name
from trainer.finetune.label_counts import only_class
from trainer.finetune.options import Options, parse
from trainer.finetune.predict import default_name
from trainer.finetune.pretrained import needed_weights, read_pretrained
from trainer.finetune.result import RunResult, summarise
from trainer.finetune.run import FineTuningJob
from trainer.finetune.sweep import SWEEP_PICTURE, conclude, require_same, sweep
from trainer.finetune.sweep_report import closing, counted, draw, table
from trainer.finetune.task import Task
from trainer.finetune.tasks import known
from trainer.ranks.ending import fail, guard
from trainer.ranks.stop import Stop
from trainer.ranks.world import World, from_launcher, join, leave, speaks_first, together
from trainer.run.lock import LOCK_PATIENCE_SECONDS, hold

STOP_STEPS = 10  # steps between checks for a requested stop


def main(arguments: Sequence[str] | None = None) -> None:
    """Read all inputs, join the other ranks and run. The exit codes are in :mod:`trainer.exits`."""
    write_whole_lines()
    faulthandler.enable()
    world, job, test = prepare(arguments)
    whole = guard(world, partial(run, world, job, test))
    if not whole:
        fail("lambert: stopped and saved: run the same command to continue" if world.is_main else "", STOPPED)
    leave(DONE)


def prepare(arguments: Sequence[str] | None) -> tuple[World, FineTuningJob, EvaluationFile | None]:
    """Work out everything a rank can alone. Ends the process with a one-line error if anything is wrong."""
    try:
        options = parse(arguments)
        world = from_launcher(options.machine.device)
        engine = EngineConfig(options.machine.zero_stage, options.machine.precision)
        precision = resolve_precision(engine, world.device)
        if problems := engine.problems():
            raise TrainerError("; ".join(problems))
        machine = replace(options.machine, precision=precision)  # type: ignore[arg-type]
        options = replace(options, machine=machine)  # nothing after this sees "auto"
        tell = say if world.is_main else silent
        with backend.using(options.machine.kernels):
            kernels = backend.resolve(world.device.type)
        tell(f"{world.size} rank(s) on {world.device.type}, {precision}, kernels: {kernels.name} ({kernels.reason})")
        return world, *make_job(options, tell)
    except (TrainerError, backend.UnavailableError, OSError, MemoryError) as error:
        if not speaks_first():
            time.sleep(3)  # usually all ranks hit the same error: the first reports it, and the launcher ends us
        fail(f"trainer.finetune: error: {by_option(one_line(explain(error)))}", exit_code(error))


def by_option(text: str) -> str:
    """Replace the configuration keys in an error by this command's options."""
    for key, option in {"run.device": "--device", "engine.precision": "--precision"}.items():
        text = text.replace(key, option)
    return text


def make_job(options: Options, tell: Tell) -> tuple[FineTuningJob, EvaluationFile | None]:
    """Build the task, its tokenised data and the starting weights; also return the test file, if any."""
    task = known(options.task).make(options.wish, tell)
    given = read_pretrained(fetched(options.model, tell), options.tokenizer, tell)
    longest = options.recipe.length
    if longest > given.model.max_positions:
        most = given.model.max_positions
        raise TrainerError(f"--max-length is {longest}, but {options.model} has {most} positions: use at most {most}")
    encoder = given.tokenizer.encoder
    training = read_training(options.wish.train, task, encoder, longest)
    dev, *also = (read_evaluation_file(path, task, encoder, longest) for path in (options.dev, *options.also))
    for part in (dev, *also):
        if not part.known:
            raise TrainerError(f"{part.path} has no labels to evaluate against: name their column (--label-column)")
    test = None if options.test is None else read_evaluation_file(options.test, task, encoder, longest)
    _tell_classes(task, options.wish.train, training, list(filter(None, (dev, *also, test))), tell)
    if test is not None and not test.known:
        options = replace(options, predict=options.predict or options.out / default_name(test.path))
        tell(f"{test.path} has no labels: predictions go to {options.predict}, and it is not scored")
    identity = {
        "task": options.task,
        "model": given.sha256,
        "train": _which(options.wish.train),
        "dev": _which(options.dev),
        "wish": {name: str(value) for name, value in asdict(options.wish).items() if _decides(name, value)},
        "labels": list(task.labels),
        "recipe": {
            k: v for k, v in asdict(options.recipe).items() if k not in ("batch", "rate", "epochs") and v is not None
        },
        "evaluation": [options.eval_every, options.patience],
    }
    start = needed_weights(given, task, tell)
    tell(f"{options.task}: {len(training):,} training examples, {len(dev.table):,} dev examples")
    model = options.recipe.of(given.model)
    return FineTuningJob(options, task, model, start, given.tokenizer, training, dev, tuple(also), identity), test


def _tell_classes(task: Task, train: Path, training: UnitTable, parts: list[EvaluationFile], tell: Tell) -> None:
    """Report the classes of each file, and warn if an evaluation file has only one."""
    tell("classes in " + counted(train, training.classes))
    for part in parts:
        tell("classes in " + counted(part.path, part.table.classes))
        if task.labels and (label := only_class(part.table.classes)):
            warn(f"every label in {part.path} is {label}: if it means no label, pass --no-label {label}", tell)


def _decides(name: str, value: Any) -> bool:
    """Whether a wish is part of a run's identity. An empty ``no_label`` is not: older runs do not record it."""
    return name != "train" and (name != "no_label" or bool(value))


def _which(path: Path) -> list[str]:
    """Identify the rows of a file: its sha256, and the column and value that select them."""
    file, *chosen = split_name(path)
    return [file_sha256(file), *chosen]


def run(world: World, job: FineTuningJob, test: EvaluationFile | None) -> bool:
    """Do all runs and combine their results. False if asked to stop; everything is then saved."""
    options = job.options
    facts: dict[str, Any] = {"task": options.task, "settings": str(options.settings), "seeds": str(options.seeds)}
    digest = hashlib.sha256(json.dumps(job.identity, sort_keys=True).encode()).hexdigest()
    for difference in join(world, options.machine.timeout, facts | {"data, model and recipe": digest}):
        warn(f"not the same on all ranks: {difference}")
    together(partial(require_same, job) if world.is_main else _nothing, world)
    patience = min(LOCK_PATIENCE_SECONDS, options.machine.timeout / 2)  # meanwhile the other ranks wait in a collective
    held = together(lambda: hold(options.out, patience, say) if world.is_main else None, world)
    with backend.using(options.machine.kernels), held or nullcontext():
        results = sweep(job, world, Stop(world, STOP_STEPS))
        if results is None:
            return False
        together(partial(show, job, results) if world.is_main else _nothing, world)
        tree = conclude(job, results, test, world)
    if world.is_main:
        print_result(closing(tree))
    return True


def show(job: FineTuningJob, results: list[RunResult]) -> None:
    """Draw the picture and print the table."""
    rows, measure = summarise(results, job.task.measure), job.task.measure
    draw(rows, job.options.task, measure, job.options.out / SWEEP_PICTURE)
    print_result(table(rows, measure))


def _nothing() -> None:
    return None


if __name__ == "__main__":
    main()
