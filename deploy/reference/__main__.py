"""Runs a recipe from text to fine-tuned scores, in one command.

    python -m deploy.reference --text TEXT --tokenizer TOKENIZER --tasks TASKS --out OUT

Text → shards of each length → pre-training under the ``deepspeed`` launcher → held-out evaluation → Hugging Face export
→ fine-tuning on every task, over several seeds → scores. Each folder of TASKS has the name of a task of
``trainer.finetune`` and holds its files. Every stage is a command that a user could type, and is printed as one. After
a kill, the same command continues; a stage that is done, with the same inputs, is skipped.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data_prep.errors import DataError
from data_prep.manifest import MANIFEST, file_sha256, load_manifest
from data_prep.options import CommandParser, check_range
from deploy import commands
from deploy.commands import section
from deploy.reference.done import Done, tree_hashes
from deploy.reference.scores import Score, aligned, draw, score
from kernels.backend import UnavailableError
from trainer.bounds import MOST_SAMPLES
from trainer.checkpoint.reading import named, step_of
from trainer.console import say, silent
from trainer.engine.schedule import batch_problems
from trainer.errors import TrainerError, exit_code, explain
from trainer.finetune import options as finetuning
from trainer.finetune.tasks import known
from trainer.ranks.network import free_port
from trainer.ranks.world import read_world
from trainer.run.config import Config, load
from trainer.run.folder import ENDED
from trainer.run.lock import hold
from trainer.run.start import require_fitting

CONFIG = Path("deploy/configs/reference-base.yaml")
DUPLICATES = {32: 3, 128: 8}  # sequence length: passes over the text, each with its own masks; 5 for others
RATE = "5e-5"  # of fine-tuning; the rest of a task's recipe is trainer.finetune's
DROPOUT = "--dropout", "0.1"  # as in BERT's own fine-tuning: the reference recipe pre-trains without
command = partial(commands.command, script="reference")


def main(arguments: list[str] | None = None) -> int:
    """Check everything and run; returns the exit code."""
    given = parse(arguments)
    commands.stop_on_signals("reference", "; the same command continues")
    try:
        require(given)
        config = load(given.config)
        require_ranks(config, given.ranks)
        done = Done.open(given.out)
        lock = hold(given.out, 0, say)
    except (TrainerError, DataError, UnavailableError, OSError) as error:
        print(f"reference: error: {explain(error)}", file=sys.stderr)
        return exit_code(error)
    with lock or nullcontext():  # None: the file system has no locks
        run(given, config, done)
    return 0


def run(given: argparse.Namespace, config: Config, done: Done) -> None:
    """Run all stages in order."""
    shards = prepare(given, config)
    pretrain(given, config, shards, done)
    evaluate(given.out, config, shards, done)
    export(given.out, done)
    results = {task.name: finetune(task, given, config.model.max_positions, done) for task in tasks_of(given.tasks)}
    report(results, given.out)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(prog="python -m deploy.reference", description="Run a recipe from text to scores.")
    add = parser.add_argument
    add("--text", type=Path, required=True, help="text files, or a folder of them; see docs/prepare.md")
    add("--heldout", type=Path, help="other text to evaluate on; by default, a share of the documents is held out")
    add("--held-out-share", type=float, default=0.01, metavar="X", help="that share (%(default)s)")
    add("--tokenizer", type=Path, required=True, help="folder of a BERT's tokenizer")
    add("--tasks", type=Path, required=True, help="folder with a folder for each task of trainer.finetune")
    add("--out", type=Path, required=True, help="output folder; the same command continues in it")
    add("--config", type=Path, default=CONFIG, help="the recipe (%(default)s); its data and folder are replaced")
    add("--seeds", default="1,2,3,4,5", metavar="N,…", help="of fine-tuning (%(default)s)")
    add("--ranks", type=int, default=1, help="GPUs of this machine, or processes on CPUs (%(default)s)")
    return parser.parse_args(arguments)


def require(given: argparse.Namespace) -> None:
    """Find now what would otherwise fail after hours, such as a task's file. Raises TrainerError or DataError."""
    if shutil.which("deepspeed") is None:
        raise TrainerError("no deepspeed launcher on the PATH: activate the environment, `. .venv/bin/activate`")
    for name in ("text", "heldout", "tokenizer", "tasks"):
        path = getattr(given, name)
        if path is not None and not path.exists():
            raise TrainerError(f"--{name} {path} does not exist: name a folder")
        if name in ("tokenizer", "tasks") and not path.is_dir():
            raise TrainerError(f"--{name} {path} is a file: name a folder")
    check_range("--ranks", given.ranks, 1)
    if not tasks_of(given.tasks):
        raise TrainerError(f"--tasks {given.tasks} has no folder in it: make one for each task, with the task's name")
    for folder in tasks_of(given.tasks):
        try:
            require_data(folder, given)
        except TrainerError as error:
            raise TrainerError(f"--tasks, {folder.name}: {error}") from None


def require_ranks(config: Config, ranks: int) -> None:
    """Raise TrainerError or UnavailableError if the recipe cannot run on so many ranks of this machine."""
    device = read_world({}, config.run.device).device
    if device.type == "cuda" and ranks > torch.cuda.device_count():
        raise TrainerError(f"--ranks {ranks}, but PyTorch sees {torch.cuda.device_count()} GPU(s): lower it")
    require_fitting(config, ranks, device)
    checked = enumerate(batch_problems(phase, ranks, MOST_SAMPLES) for phase in config.phases)
    if problems := [f"phases.{number}.{problem}" for number, found in checked for problem in found]:
        raise TrainerError(f"{'; '.join(problems)}: change --ranks, or the recipe")


def require_data(folder: Path, given: argparse.Namespace) -> None:
    """Read a task's files. Raises TrainerError for what ``trainer.finetune`` would refuse."""
    own = {"task": folder.name, "data": folder, "seeds": given.seeds}
    own |= {"model": given.out / "bert", "out": given.out / "finetune" / folder.name}
    options = finetuning.parse([f"--{name}={value}" for name, value in own.items()])
    task = known(folder.name).make(options.wish, silent)
    for path in (options.wish.train, options.dev):
        task.read(path)


def tasks_of(folder: Path) -> list[Path]:
    """The folder of each task."""
    return sorted(path for path in folder.iterdir() if path.is_dir())


# ---- the stages ------------------------------------------------------------------------------------------------


def prepare(given: argparse.Namespace, config: Config) -> dict[str, Path]:
    """Build training and held-out shards of each length; ``data_prep`` skips what it has made. Returns the folders."""
    section("Shards")
    lengths = sorted({phase.sequence_length for phase in config.phases})
    evaluated = {phase.sequence_length for phase in config.phases if phase.heldout} or {lengths[-1]}
    made = [("train", length) for length in lengths] + [("heldout", length) for length in sorted(evaluated)]
    return {f"{part}-{length}": build(given, part, length) for part, length in made}


def build(given: argparse.Namespace, part: str, length: int) -> Path:
    """Build one set of shards: ``part`` is train or heldout. Returns its folder."""
    out, train = given.out / "shards" / f"{part}-{length}", part == "train"
    text = given.text if train or given.heldout is None else given.heldout
    words = ["--input", text, "--tokenizer", given.tokenizer, "--out", out, "--sequence-length", length]
    if train:
        words += ["--duplicates", DUPLICATES.get(length, 5)]
    if given.heldout is None:
        words += ["--held-out-share", given.held_out_share, "--part", "train" if train else "held-out"]
    if text == given.text:
        words += ["--store", given.out / "store"]  # all builds from this text tokenize it once
    command("python", "-m", "data_prep", "build", *words)
    return Path(out)


def pretrain(given: argparse.Namespace, config: Config, shards: dict[str, Path], done: Done) -> None:
    """Pre-train, or continue the run; the trainer itself decides whether changed inputs fit its checkpoints."""
    section("Pre-training")
    changes = {"run.folder": given.out / "run", "model.vocab_size": vocabulary(shards)}
    for number, phase in enumerate(config.phases):
        changes[f"phases.{number}.train"] = shards[f"train-{phase.sequence_length}"]
        if phase.heldout:
            changes[f"phases.{number}.heldout"] = shards[f"heldout-{phase.sequence_length}"]
    sets = [f"{key}={value}" for key, value in changes.items()]
    inputs = {"config": file_sha256(given.config)} | {n: file_sha256(path / MANIFEST) for n, path in shards.items()}
    run = given.out / "run"
    if done.is_done("pretrain", run / ENDED, inputs | {"settings": " ".join(sets)}):
        return
    words = [word for each in sets for word in ("--set", each)]
    log = given.out / "launcher.log"
    code = commands.launch(given.ranks, log, "--config", given.config, *words, port=free_port("127.0.0.1")).finish()
    if code != 0 or not finished(run):  # the launcher's code may be 0 although its ranks were killed or stopped
        commands.fail("reference", f"pre-training ended early, with code {code}; see the lines above, and {log}", code)
    done.finish("pretrain")


def finished(run: Path) -> bool:
    """Whether the run ended by itself, as its ``ended.json`` says."""
    try:
        return json.loads((run / ENDED).read_text(encoding="utf-8"))["how"] in ("done", "reached")
    except (FileNotFoundError, ValueError):  # it was killed, maybe while it wrote the file
        return False


def vocabulary(shards: dict[str, Path]) -> int:
    """Entries of the tokenizer's vocabulary."""
    return load_manifest(next(iter(shards.values()))).tokenizer.vocab_size


def checkpoint(out: Path) -> dict[str, str]:
    """The hash of the run's newest checkpoint."""
    newest = max(named(out / "run"), key=step_of)
    return {"checkpoint": file_sha256(newest / "checkpoint.json")}


def evaluate(out: Path, config: Config, shards: dict[str, Path], done: Done) -> None:
    """Write the held-out metrics to evaluation.json, at the longest length that has held-out shards."""
    section("Held-out evaluation")
    length = max(int(name.removeprefix("heldout-")) for name in shards if name.startswith("heldout-"))
    heldout, train = shards[f"heldout-{length}"], shards[f"train-{length}"]
    inputs = checkpoint(out) | {path.name: file_sha256(path / MANIFEST) for path in (heldout, train)}
    path = out / "evaluation.json"
    if not done.is_done("evaluate", path, inputs):
        words = ("--checkpoint", out / "run", "--heldout", heldout, "--train", train)
        path.write_text(command("python", "-m", "trainer.evaluate", *words, quiet=True), encoding="utf-8")
        done.finish("evaluate")
    metrics = json.loads(path.read_text(encoding="utf-8"))
    print(f"  MLM {metrics['mlm_loss']:.3f} nats, [MASK] only {metrics['mask_loss']:.3f} nats")
    if "nsp_accuracy" in metrics:
        print(f"  next sentence {metrics['nsp_accuracy']:.1%}")


def export(out: Path, done: Done) -> None:
    """Write the Hugging Face folder ``OUT/bert``."""
    section("Hugging Face export")
    if not done.is_done("export", out / "bert", checkpoint(out)):
        shutil.rmtree(out / "bert", ignore_errors=True)  # of an older checkpoint
        command("python", "-m", "trainer.export", "--checkpoint", out / "run", "--out", out / "bert")
        done.finish("export")


def finetune(task: Path, given: argparse.Namespace, positions: int, done: Done) -> dict[str, Any]:
    """Fine-tune on one task over the seeds; finished runs are kept. Returns the results."""
    section(f"Fine-tuning: {task.name}")
    folder, name = given.out / "finetune" / task.name, f"finetune-{task.name}"
    inputs = {"model": file_sha256(given.out / "bert/model.safetensors")} | tree_hashes(task)
    if done.changed(name, inputs):
        shutil.rmtree(folder, ignore_errors=True)  # its runs are of another model, or of other data
    if not done.is_done(name, folder / "results.json", inputs, given.seeds):
        words = ("--task", task.name, "--data", task, "--model", given.out / "bert", "--out", folder)
        longest = ("--max-length", positions) if known(task.name).recipe.length > positions else ()
        command("python", "-m", "trainer.finetune", *words, "--seeds", given.seeds, "--rates", RATE, *DROPOUT, *longest)
        done.finish(name)
    results: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return results


# ---- the end ---------------------------------------------------------------------------------------------------


def report(results: dict[str, dict[str, Any]], out: Path) -> None:
    """Print the table of scores on dev, and write it to scores.json and scores.png."""
    section("Scores on dev, at each run's best evaluation: mean over seeds ± standard error")
    rows: list[list[object]] = []
    tree: dict[str, dict[str, Any]] = {}
    found: dict[str, tuple[str, Score]] = {}
    for task, result in results.items():
        measure = result["measure"]
        values = {str(run["seed"]): run["figures"].get(measure) for run in result["runs"]}
        mean = score([value for value in values.values() if value is not None])
        rows.append([task, measure, mean or "none: no run has one", f"{mean.count if mean else 0} of {len(values)}"])
        tree[task] = {"metric": measure, "mean": None, "standard_error": None, "by_seed": values}
        if mean is not None:
            found[task] = measure, mean
            tree[task] |= {"mean": mean.mean, "standard_error": mean.error}
    print(aligned(["task", "metric", "score", "seeds"], rows))
    (out / "scores.json").write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    draw(found, out / "scores.png")


if __name__ == "__main__":
    sys.exit(main())
