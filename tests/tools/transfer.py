"""Fine-tunes several encoders on several tasks and seeds, many runs side by side on each GPU, and compares the scores.

    python -m tests.tools.transfer OUT --encoders DIR --tasks tasks.tar.xz --gpus 2 --beside 6 --seconds 520

Each folder of DIR is a Hugging Face BERT with its tokenizer, and gives an encoder its name. One more, ``random``, has
the shape and tokenizer of the first one, and weights drawn from the seed. Each worker process imports everything once
and then runs job after job. A job takes the steps of ``trainer.finetune``, but writes no checkpoint and is evaluated
only once, at its end. All encoders get the same recipes.

Each job leaves a line in ``OUT/results.jsonl``; the same command continues with those that are missing. After
``--seconds`` no job starts. ``OUT/table.md`` has the scores: mean over seeds ± standard error, and the differences to
``random``, paired by seed.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from data_prep.manifest import file_sha256
from data_prep.options import CommandParser
from deploy.reference.scores import aligned, score
from kernels import backend
from tests.tools.task_files import unpack
from trainer.console import silent
from trainer.data.order import Order
from trainer.engine.engine import Engine, EngineConfig
from trainer.engine.optimizer import OptimizerConfig
from trainer.engine.partition import fill_masters
from trainer.engine.schedule import Phase, learning_rate
from trainer.errors import NotFiniteError, TrainerError
from trainer.exits import DONE
from trainer.finetune.data import EvaluationFile, UnitTable, cut_of, read_evaluation_file, read_training, take
from trainer.finetune.evaluation import answer, judge
from trainer.finetune.pretrained import Pretrained, needed_weights, read_pretrained
from trainer.finetune.task import Task, TaskModel
from trainer.finetune.tasks import Recipe, Wish, known
from trainer.monitor.metrics_log import read_lines
from trainer.ranks.world import World, from_launcher, join, leave

RECIPES = {  # in the order in which jobs start: the longest first
    "conll2003": Recipe(epochs=3, rate=5e-5, clipping=1.0),
    "sst2": Recipe(epochs=3, rate=5e-5, clipping=1.0),
    "squad": Recipe(epochs=6, rate=5e-5, clipping=1.0),
    "cola": Recipe(epochs=3, rate=5e-5, clipping=1.0),
    "stsb": Recipe(epochs=4, rate=5e-5, clipping=1.0),
    "sick-entailment": Recipe(epochs=4, rate=5e-5, clipping=1.0),
    "mrpc": Recipe(epochs=5, rate=5e-5, clipping=1.0),
    "rte": Recipe(epochs=5, rate=5e-5, clipping=1.0),
}
RANDOM = "random"
DROPOUT = 0.1


@dataclass(frozen=True)
class Job:
    """One run: an encoder, a task and a seed."""

    encoder: str
    task: str
    seed: int
    model: Path  # the encoder's folder; for ``random``, the one that gives it its shape and its tokenizer
    data: Path  # a folder with train and dev
    recipe: Recipe
    inputs: str  # hash of the encoder, the data and the recipe

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.encoder, self.task, self.seed, self.inputs


# ---- a worker --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskData:
    """A task and its tokenised files."""

    task: Task
    training: UnitTable
    dev: EvaluationFile


@dataclass
class Bench:
    """One worker's device, and what its jobs share: each encoder and each task is read once."""

    world: World
    encoders: dict[Path, Pretrained] = field(default_factory=dict)
    tasks: dict[tuple[Path, str], TaskData] = field(default_factory=dict)

    def encoder(self, folder: Path) -> Pretrained:
        if folder not in self.encoders:
            self.encoders[folder] = read_pretrained(folder, None, silent)
        return self.encoders[folder]

    def data(self, job: Job, given: Pretrained) -> TaskData:
        key = job.data, given.tokenizer.sha256()
        if key not in self.tasks:
            train, dev = (next(iter(job.data.glob(f"{part}.*"))) for part in ("train", "dev"))
            task = known(job.task).make(Wish(train), silent)
            encoder, length = given.tokenizer.encoder, job.recipe.length
            self.tasks[key] = TaskData(
                task, read_training(train, task, encoder, length), read_evaluation_file(dev, task, encoder, length)
            )
        return self.tasks[key]

    def run(self, job: Job) -> dict[str, Any]:
        """Train, evaluate once, and free the memory. Returns the job's line in results.jsonl."""
        begun = time.perf_counter()
        given = self.encoder(job.model)
        data = self.data(job, given)
        start = {} if job.encoder == RANDOM else needed_weights(given, data.task, silent)
        module = TaskModel(job.recipe.of(given.model), data.task, job.seed)
        adam = OptimizerConfig("adam", weight_decay=job.recipe.weight_decay, gradient_clipping=job.recipe.clipping)
        engine = Engine(EngineConfig(), module, adam, self.world, job.seed)
        fill_masters(engine.partition, start)
        engine.refresh_weights()
        ready = time.perf_counter()
        how, steps = train(engine, data.training, job.recipe, job.seed, self.world)
        trained = time.perf_counter()
        metrics: dict[str, float] = {}
        if how == "done":
            judged = judge(answer(engine.model, data.dev.table, self.world), data.dev, data.task, self.world)
            metrics, how = judged.metrics, "degenerate" if judged.constant else "done"
        engine.close()
        del engine, module
        gc.collect()  # the engine's hooks form reference cycles
        seconds = {"start": ready - begun, "train": trained - ready, "end": time.perf_counter() - trained}
        return {
            **{"encoder": job.encoder, "task": job.task, "seed": job.seed, "inputs": job.inputs},
            **{"how": how, "measure": data.task.measure, "score": metrics.get(data.task.measure), "metrics": metrics},
            **{"units": len(data.training), "steps": steps},
            "seconds": {name: round(value, 2) for name, value in seconds.items()},
        }


def train(engine: Engine[TaskModel], table: UnitTable, recipe: Recipe, seed: int, world: World) -> tuple[str, int]:
    """Train a whole recipe, in ``trainer.finetune``'s order and at its rates; returns how it ended and the steps."""
    total = round(recipe.epochs * len(table))
    steps = math.ceil(total / recipe.batch)
    warmup = round(recipe.warmup * steps)
    phase = Phase("", "", recipe.length, steps, recipe.rate, global_batch=recipe.batch, warmup_steps=warmup)
    order, cut = Order((len(table),), seed, 1), cut_of(recipe.batch, None, world.rank, world.size)
    finite, taken = torch.ones((), dtype=torch.bool, device=world.device), 0
    for step in range(steps):
        position = step * recipe.batch
        batches, counts = take(table, order, position, min(recipe.batch, total - position), cut)
        try:
            result = engine.step(
                [batch.pin(world.device) for batch in batches], counts, step, learning_rate(phase, taken + 1)
            )
        except NotFiniteError:
            return "diverged", taken
        if result.applied:
            taken += 1
            finite &= result.gradient_norm.isfinite()
        elif engine.loss_scale.scale <= engine.loss_scale.floor:
            return "diverged", taken
    return ("done" if finite else "diverged"), taken


def work(jobs: Connection, on_gpu: bool) -> None:
    """Run the jobs that come in, until None comes. Any error ends the process."""
    try:
        world = from_launcher("cuda" if on_gpu else "cpu")
        join(world, timeout_seconds=600)
        bench = Bench(world)
        with backend.using("auto"):
            for job in iter(jobs.recv, None):
                jobs.send(bench.run(job))
    except TrainerError as error:
        raise SystemExit(f"transfer: error: {error}") from None
    leave(DONE)


# ---- all jobs --------------------------------------------------------------------------------------------------


@dataclass
class Worker:
    """A worker process, its GPU, and the job that it has."""

    gpu: int | None
    process: BaseProcess
    connection: Connection
    job: Job | None = None
    proven: bool = False  # whether it has finished a job

    @classmethod
    def start(cls, gpu: int | None) -> Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        os.environ["CUDA_VISIBLE_DEVICES"] = "" if gpu is None else str(gpu)  # the new process inherits it
        process = context.Process(target=work, args=(theirs, gpu is not None), daemon=True)
        process.start()
        theirs.close()  # so that receiving fails once the process has ended
        return cls(gpu, process, ours)

    def take(self, job: Job | None) -> None:
        """Start a job; None ends the worker."""
        self.job = job
        self.connection.send(job)

    def result(self) -> dict[str, Any] | None:
        """The finished job's line in results.jsonl; None if the process has ended instead."""
        try:
            found: dict[str, Any] = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return None
        self.proven = True
        return found


def run_all(jobs: list[Job], gpus: list[int | None], seconds: float, out: Path) -> int:
    """Run the jobs, on a worker for each of ``gpus``, and add their results to ``out``. Returns how many failed."""
    begun, waiting, failed, done = time.monotonic(), list(jobs), 0, 0
    workers = [Worker.start(gpu) for gpu in gpus[: len(jobs)]]
    for worker in workers:
        worker.take(waiting.pop(0))
    while workers:
        ready = wait([worker.connection for worker in workers])
        for worker in [each for each in workers if each.connection in ready]:
            job, result, spent = worker.job, worker.result(), time.monotonic() - begun
            assert job is not None
            name = f"[{spent:4.0f} s] {job.encoder}, {job.task}, seed {job.seed}"
            following = waiting.pop(0) if waiting and spent < seconds and worker.proven else None
            if result is None:
                failed += 1
                print(f"{name}: failed: its worker ended with code {worker.process.exitcode}", flush=True)
                workers.remove(worker)
                if following is not None:
                    workers.append(Worker.start(worker.gpu))
                    workers[-1].take(following)
                continue
            done += 1
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            shown = "" if result["score"] is None else f" {result['score']:.4f}"
            print(f"{name}: {result['how']}{shown}, {result['seconds']}, {done} of {len(jobs)}", flush=True)
            worker.take(following)
            if following is None:
                workers.remove(worker)
    if waiting:
        print(f"transfer: {len(waiting)} jobs were not started: run the same command to continue")
    return failed


def key_of(result: dict[str, Any]) -> tuple[str, str, int, str]:
    """The key of the job that left this line."""
    return result["encoder"], result["task"], result["seed"], result["inputs"]


def results_of(jobs: list[Job], path: Path) -> list[dict[str, Any]]:
    """The lines that these jobs left in results.jsonl."""
    wanted = {job.key for job in jobs}
    return [line for line in read_lines(path) if key_of(line) in wanted] if path.exists() else []


def table(results: list[dict[str, Any]], encoders: list[str]) -> str:
    """Scores by task and encoder, and their differences to random weights, paired by seed. A diverged run has none.

    The mean is over the seeds for which every encoder has a score in every task.
    """
    found = {(r["encoder"], r["task"], r["seed"]): r for r in results if r["score"] is not None}
    tasks = [task for task in RECIPES if any(key[1] == task for key in found)]
    seeds = sorted({key[2] for key in found})
    others = [name for name in encoders if name != RANDOM]
    rows = []
    for task in tasks:
        one = next(result for key, result in found.items() if key[1] == task)
        by_name = {n: {s: found[n, task, s]["score"] for s in seeds if (n, task, s) in found} for n in encoders}
        rows.append([task, one["measure"], one["units"], *cells(by_name, others, len(seeds))])
    means: dict[str, dict[int, float]] = {name: {} for name in encoders}
    for seed in seeds:
        if all((name, task, seed) in found for name in encoders for task in tasks):
            for name in encoders:
                means[name][seed] = sum(found[name, task, seed]["score"] for task in tasks) / len(tasks)
    rows.append(["mean", "", "", *cells(means, others, len(seeds))])
    differences = [f"{name} − {RANDOM}" for name in others]
    return aligned(["task", "measure", "training units", *encoders, *differences], rows)


def cells(by_name: dict[str, dict[int, float]], others: list[str], seeds: int) -> list[str]:
    """A row's scores, and its differences to random weights, each with the number of its standard errors.

    A cell says how many of the ``seeds`` it counts, if not all of them have a score.
    """

    def shown(values: list[float], difference: bool = False) -> str:
        found = score(values)
        if found is None:
            return ""
        times = f" ({found.mean / found.error:+.1f})" if difference and found.error else ""
        return f"{found}{times}" + (f", {found.count} of {seeds} seeds" if found.count < seeds else "")

    base = by_name[RANDOM]
    pairs = [[value - base[seed] for seed, value in by_name[name].items() if seed in base] for name in others]
    return [shown(list(values.values())) for values in by_name.values()] + [shown(each, True) for each in pairs]


def plan(
    encoders: dict[str, Path], tasks: Path, names: list[str], seeds: list[int], dropout: float = DROPOUT
) -> list[Job]:
    """All jobs: seed by seed, so that whatever is finished can be compared, and the longest first in each."""
    weights = {name: encoder_sha256(name, folder) for name, folder in encoders.items()}
    jobs = []
    for seed in seeds:
        for task in names:
            recipe = replace(RECIPES[task], dropout=dropout)
            files = [file_sha256(path) for path in sorted((tasks / task).iterdir())]
            for name, folder in encoders.items():
                made_of = json.dumps([weights[name], files, asdict(recipe)])
                inputs = hashlib.sha256(made_of.encode()).hexdigest()[:16]
                jobs.append(Job(name, task, seed, folder, tasks / task, recipe, inputs))
    return jobs


def encoder_sha256(name: str, folder: Path) -> list[str]:
    """Hashes of an encoder's files; for random weights, of those that give its shape and its vocabulary."""
    files = ["config.json", "tokenizer.json", *([] if name == RANDOM else ["model.safetensors"])]
    return [file_sha256(folder / file) for file in files]


def find_encoders(folder: Path) -> dict[str, Path]:
    """The encoders by name, ``random`` last. Raises SystemExit for a folder that has none."""
    found = {path.name: path for path in sorted(folder.glob("*")) if (path / "config.json").is_file()}
    if not found or RANDOM in found:
        fault = f"has a folder named {RANDOM}" if found else "has no folder with a config.json in it"
        raise SystemExit(f"transfer: error: {folder} {fault}: name a folder of Hugging Face BERTs")
    for path in found.values():
        if lacks := [name for name in ("model.safetensors", "tokenizer.json") if not (path / name).is_file()]:
            raise SystemExit(f"transfer: error: {path} has no {lacks[0]}: save the model with its tokenizer there")
    return found | {RANDOM: next(iter(found.values()))}


def main() -> int:
    parser = CommandParser("python -m tests.tools.transfer", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("out", type=Path)
    parser.add_argument("--encoders", type=Path, required=True, help="a folder of Hugging Face BERTs")
    parser.add_argument("--tasks", type=Path, required=True, help="the archive of task files")
    parser.add_argument("--only", nargs="+", choices=list(RECIPES), default=list(RECIPES), metavar="TASK")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--dropout", type=float, default=DROPOUT, help="while fine-tuning (%(default)s)")
    parser.add_argument("--rows", type=int, help="at most so many rows in each file, to try things out")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs to use; 0, the default, is CPUs")
    parser.add_argument("--beside", type=int, default=1, help="workers on each GPU, or on the CPUs (%(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after these no job starts")
    given = parser.parse_args()
    for name, least in {"gpus": 0, "beside": 1}.items():
        if getattr(given, name) < least:
            parser.error(f"--{name} {getattr(given, name)}: wanted {least} or more")
    if not 0 <= given.dropout < 1:
        parser.error(f"--dropout {given.dropout}: wanted 0 or more, below 1")
    encoders = find_encoders(given.encoders)
    names = [task for task in RECIPES if task in given.only]
    unpack(given.tasks, given.out / "tasks", names, given.rows)
    jobs = plan(encoders, given.out / "tasks", names, given.seeds, given.dropout)
    path = given.out / "results.jsonl"
    ended = {key_of(result) for result in results_of(jobs, path)}
    waiting = [job for job in jobs if job.key not in ended]
    print(f"transfer: {len(waiting)} of {len(jobs)} jobs are left", flush=True)
    gpus = list(range(given.gpus)) * given.beside or [None] * given.beside
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // len(gpus))))
    failed = run_all(waiting, gpus, given.seconds, path)
    text = table(results_of(jobs, path), list(encoders))
    (given.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
