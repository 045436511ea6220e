"""The command line of ``python -m trainer.finetune``, parsed and checked."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Literal, TypeVar

from data_prep.json_text import shown
from data_prep.options import CommandParser
from trainer.bounds import LARGEST_BATCH, MOST_STEPS, outside
from trainer.errors import TrainerError
from trainer.finetune.classification import Columns
from trainer.finetune.formats import split_name
from trainer.finetune.tasks import TASKS, Known, Recipe, Wish, known
from trainer.options import path_or_address
from trainer.ranks.world import LONGEST_TIMEOUT_SECONDS

T = TypeVar("T", int, float)
_STEPS = ("eval_every", "save_every", "patience")


@dataclass(frozen=True)
class Setting:
    """One point of a sweep, apart from the seed."""

    rate: float
    batch: int
    epochs: float

    def folder(self, seed: int) -> str:
        """The folder name of one run."""
        return f"rate-{self.rate:g}-batch-{self.batch}-epochs-{self.epochs:g}-seed-{seed}"


@dataclass(frozen=True)
class Machine:
    """Settings of the machine. None of them changes what is learned, apart from rounding."""

    device: str
    precision: Literal["auto", "fp16", "bf16", "fp32"]
    kernels: Literal["auto", "triton", "torch"]
    zero_stage: Literal[0, 1]
    micro_batch: int | None  # at most so many records in one forward on one rank; None: all of them
    timeout: int  # seconds that ranks wait for each other


@dataclass(frozen=True)
class Options:
    """Everything the user chose, with the task's defaults filled in."""

    task: str
    model: Path | str
    tokenizer: Path | None
    out: Path
    wish: Wish
    dev: Path
    test: Path | None
    also: tuple[Path, ...]
    recipe: Recipe  # its batch, rate and epochs are in ``settings``
    settings: tuple[Setting, ...]
    seeds: tuple[int, ...]
    eval_every: int | None  # steps; besides the end of each epoch
    save_every: int | None  # steps; besides each evaluation
    patience: int | None  # stop after so many evaluations without improvement
    predict: Path | None
    machine: Machine


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Parse and check the options. Raises a TrainerError that lists everything wrong with them."""
    given = _parser().parse_args(arguments)
    task = known(given.task)
    recipe = _recipe(given, task.recipe)
    train, dev, test, also = _files(given, task)
    columns = None
    if given.text_columns:
        columns = Columns(tuple(given.text_columns.split(",")), given.label_column or "label")
    elif given.label_column:
        raise TrainerError("--label-column is given alone: also name the columns of the texts with --text-columns")
    rates, batches, epochs = (
        given.rates or [recipe.rate],
        given.batches or [recipe.batch],
        given.epochs or [recipe.epochs],
    )
    options = Options(
        task=given.task,
        model=given.model,
        tokenizer=given.tokenizer,
        out=given.out,
        wish=Wish(train, columns, given.regression, given.measure, given.head == "mlp", tuple(given.no_label)),
        dev=dev,
        test=test,
        also=also,
        recipe=recipe,
        settings=tuple(Setting(r, b, e) for r in rates for b in batches for e in epochs),
        seeds=tuple(given.seeds),
        eval_every=given.eval_every,
        save_every=given.save_every,
        patience=given.patience,
        predict=given.predict,
        machine=Machine(
            given.device, given.precision, given.kernels, given.zero_stage, given.micro_batch, given.timeout
        ),
    )
    if found := problems(options):
        raise TrainerError("; ".join(found))
    return options


def problems(options: Options) -> list[str]:
    """Everything wrong with the options, each with its fix."""
    found, recipe = [], options.recipe
    if recipe.length < 4:
        found.append(f"--max-length is {recipe.length}: must be 4 or more, for a pair of one token each")
    for name, values, most in (
        ("--rates", [s.rate for s in options.settings], 100),
        ("--batches", [s.batch for s in options.settings], LARGEST_BATCH),
        ("--epochs", [s.epochs for s in options.settings], 10**6),
    ):
        for value in dict.fromkeys(values):
            if not 0 < value < inf:
                found.append(f"{name}: {value} must be above 0, and finite")
            elif value > most:
                found.append(f"{name}: {shown(value)} must be {most:,} or less")
    found += _alike(options.settings)
    found += [f"--seeds: {seed} must be from 0 to 2^63 - 1" for seed in options.seeds if not 0 <= seed < 2**63]
    if not 0 <= recipe.warmup <= 1:
        found.append(f"--warmup is {recipe.warmup}: it is a share of the steps, from 0 to 1")
    found += [
        f"{n} is {v}: must be 0 (off) or more, and finite" for n, v in _from_zero(recipe).items() if not 0 <= v < inf
    ]
    found += [
        *(f"--{line}".replace("_", "-") for line in outside(options, **dict.fromkeys(_STEPS, (1, MOST_STEPS)))),
        *(f"--{line}".replace("_", "-") for line in outside(options.machine, micro_batch=(1, LARGEST_BATCH))),
        *(f"--{line}" for line in outside(options.machine, timeout=(1, inf))),
        *(f"--max-{line}" for line in outside(recipe, length=(-inf, 2**16))),
        *(f"--{line}".replace("_", "-") for line in outside(recipe, weight_decay=(-inf, 10), dropout=(0, 0.99))),
        *(f"--clip{line.removeprefix('clipping')}" for line in outside(recipe, clipping=(-inf, 10**9))),
    ]
    if options.machine.timeout > LONGEST_TIMEOUT_SECONDS:
        said = shown(options.machine.timeout)
        found.append(f"--timeout is {said}: must be {LONGEST_TIMEOUT_SECONDS} (thirty days) or less")
    if options.out.exists() and not options.out.is_dir():
        found.append(f"--out {options.out} is a file: name a folder")
    if options.predict is not None and options.predict.suffix not in (".tsv", ".jsonl"):
        found.append(f"--predict {options.predict}: its name must end with .tsv or .jsonl")
    return found


def _alike(settings: Sequence[Setting]) -> Iterator[str]:
    """Settings that would share a folder, so that the second would be taken for the first."""
    first: dict[str, Setting] = {}
    for setting in settings:
        other = first.setdefault(setting.folder(seed=1), setting)
        if other is not setting:
            yield f"--rates, --epochs: {other} and {setting} agree to 6 digits and would share a folder: drop one"


def _from_zero(recipe: Recipe) -> dict[str, float]:
    return {"--weight-decay": recipe.weight_decay, "--clip": recipe.clipping}


def _recipe(given: argparse.Namespace, recipe: Recipe) -> Recipe:
    """The task's recipe with the user's changes."""
    said = {
        "length": given.max_length,
        "warmup": given.warmup,
        "weight_decay": given.weight_decay,
        "clipping": given.clip,
        "dropout": given.dropout,
    }
    changed: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    return replace(recipe, **changed)


def _files(given: argparse.Namespace, task: Known) -> tuple[Path, Path, Path | None, tuple[Path, ...]]:
    """Training, dev and test file, and others to score at the end: as given, or found in the data folder."""
    folder, names = given.data, task.files
    train, dev = (_required(given, f"--{part}", getattr(names, part)) for part in ("train", "dev"))
    also = given.also or [folder / name for name in names.also if folder and (folder / name).is_file()]
    return train, dev, given.test or _first(folder, names.test), tuple(also)


def _required(given: argparse.Namespace, option: str, names: Sequence[str]) -> Path:
    path: Path | None = getattr(given, option.removeprefix("--")) or _first(given.data, names)
    if path is None:
        place = f"{given.data} contains none of {', '.join(names)}" if given.data else "there is no --data folder"
        if given.data and not given.data.is_dir():
            place = f"--data {given.data} is not a folder"
        raise TrainerError(f"{option} is not given, and {place}")
    return path


def _first(folder: Path | None, names: Sequence[str]) -> Path | None:
    if folder is None:
        return None
    return next((folder / name for name in names if split_name(folder / name)[0].is_file()), None)


def _several(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Make a parser of comma-separated values, as ``1,2,3``; it drops repetitions."""

    def read(text: str) -> list[T]:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))

    read.__name__ = f"list of {kind.__name__}"  # argparse shows this name in its errors
    return read


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m trainer.finetune",
        description="Fine-tune a BERT on a task, and evaluate it as the task's authors do.",
    )
    add = parser.add_argument
    add("--task", required=True, help=f"one of {', '.join(sorted(TASKS))}")
    add("--model", required=True, type=path_or_address, help="a Hugging Face BERT, run or checkpoint, or its address")
    add("--tokenizer", type=Path, help="folder of its tokenizer, if that is not next to the model")
    add("--out", required=True, type=Path, help="output folder; running the same command again resumes in it")
    data = parser.add_argument_group("data")
    data.add_argument("--data", type=Path, help="a folder with the task's files under their published names")
    for name in ("train", "dev", "test"):
        data.add_argument(f"--{name}", type=Path, help=f"the {name} file: TSV, CSV or JSON lines")
    data.add_argument("--also", type=Path, action="append", help="another file to score at the end; repeatable")
    data.add_argument(
        "--text-columns", metavar="A[,B]", help="columns of the text, of the pair, or of the context and the choices"
    )
    data.add_argument("--label-column", metavar="C", help="column of the label, or of the number")
    data.add_argument(
        "--no-label", action="append", default=[], metavar="VALUE", help="a label value that means no label, as -1"
    )
    data.add_argument("--regression", action="store_true", help="labels are numbers (task sentence)")
    data.add_argument(
        "--predict", type=Path, metavar="FILE", help="write predictions for test, else dev: .tsv or .jsonl"
    )
    recipe = parser.add_argument_group("recipe; several values, separated by commas, make a sweep")
    several = recipe.add_argument
    several("--seeds", "--seed", type=_several(int), default=[1], metavar="N,…", help="one run for each (1)")
    several(
        "--rates", "--rate", type=_several(float), metavar="R,…", help="peak learning rate (2e-5; ner, squad: 5e-5)"
    )
    several("--batches", "--batch", type=_several(int), metavar="N,…", help="records per step, over all ranks (32)")
    several("--epochs", type=_several(float), metavar="E,…", help="may be fractions (3)")
    recipe.add_argument("--max-length", type=int, metavar="TOKENS", help="longer texts are truncated (128; squad: 384)")
    recipe.add_argument("--warmup", type=float, metavar="SHARE", help="share of the steps (0.1)")
    recipe.add_argument("--weight-decay", type=float, help="0.01 by default")
    recipe.add_argument("--clip", type=float, metavar="NORM", help="gradient norm to clip to; 0, the default, is off")
    recipe.add_argument("--dropout", type=float, metavar="SHARE", help="instead of the model's own")
    recipe.add_argument(
        "--head",
        choices=("linear", "mlp"),
        default="linear",
        help="mlp: adds a hidden layer, for which transformers has no class",
    )
    recipe.add_argument("--measure", help="the metric that decides, instead of the task's own")
    run = parser.add_argument_group("the run")
    run.add_argument("--eval-every", type=int, metavar="STEPS", help="evaluate on dev, besides each epoch's end")
    run.add_argument("--save-every", type=int, metavar="STEPS", help="save a checkpoint, besides each evaluation")
    run.add_argument("--patience", type=int, metavar="N", help="stop after N evaluations without improvement")
    run.add_argument("--micro-batch", type=int, metavar="N", help="at most N records in one forward on one rank")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    run.add_argument("--precision", choices=("auto", "fp16", "bf16", "fp32"), default="auto", help="auto: fp16 on GPUs")
    run.add_argument("--kernels", choices=("auto", "triton", "torch"), default="auto", help="auto: Triton on GPUs")
    run.add_argument("--zero-stage", type=int, choices=(0, 1), default=1, help="1: the optimizer is sharded")
    run.add_argument("--timeout", type=int, default=1800, metavar="SECONDS", help="how long ranks wait for each other")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed's launcher adds it
    return parser
