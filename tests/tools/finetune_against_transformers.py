"""Compares fine-tuning with transformers' Trainer on the same files, settings and seeds: metrics and times of both.

    python -m tests.tools.finetune_against_transformers --model MINILM --tasks DATA --only rte mrpc --seeds 1 2 3

DATA holds a folder for each task. Both use length 128 (384 for questions), batches of 32, three epochs, a rate of 5e-5,
AdamW with epsilon 1e-6 and a decay of 0.01, warm-up over a tenth, no clipping and fp16 on a GPU. The same code
evaluates both on dev after each epoch. Theirs pads each batch to its longest sequence; its rate decays from the end of
the warm-up, ours from the start. Seconds cover training and evaluation, not reading and tokenizing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.helpers import ranks
from trainer.finetune.data import EvaluationFile, flat_units, read_evaluation_file
from trainer.finetune.pretrained import read_pretrained
from trainer.finetune.task import Task, Unit
from trainer.finetune.tasks import Wish, known

EPOCHS, BATCH, RATE, IGNORED = 3, 32, 5e-5, -100
FOLDERS = {"conll2003": "conll2003", "squad": "xquad_en", "sick-entailment": "sick"}
ENDINGS = ("tsv", "jsonl")


def file_of(folder: Path, part: str) -> Path:
    return next(path for ending in ENDINGS if (path := folder / f"{part}.{ending}").is_file())


def ours(name: str, folder: Path, model: Path, seeds: list[int], tell: Any) -> tuple[list[float], list[float]]:
    """Metrics and seconds of ``python -m trainer.finetune``, by seed."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "trainer.finetune", "--task", name, "--model", str(model), "--out", out]
        command += ["--train", str(file_of(folder, "train")), "--dev", str(file_of(folder, "dev"))]
        command += ["--seeds", ",".join(map(str, seeds)), "--rates", str(RATE), "--batches", str(BATCH)]
        done = subprocess.run([*command, "--epochs", str(EPOCHS)], cwd=ranks.ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
        results = [json.loads(path.read_text()) for path in sorted(Path(out).glob("rate-*/result.json"))]
    measure = known(name).make(Wish(file_of(folder, "train")), tell).measure
    return [r["evaluations"][-1]["figures"][measure] for r in results], [r["seconds"] for r in results]


class Features(torch.utils.data.Dataset[dict[str, Any]]):
    """A data set of one-example units in the form that transformers' collators take."""

    def __init__(self, units: list[Unit], task: Task) -> None:
        self.rows = [self._row(unit[0], task) for unit in units]

    def _row(self, example: Any, task: Task) -> dict[str, Any]:
        row: dict[str, Any] = {"input_ids": list(example.tokens), "token_type_ids": list(example.segments)}
        row["attention_mask"] = [1] * len(example.tokens)
        targets = (
            [float(t) for t in example.targets] if task.dtype.is_floating_point else list(map(int, example.targets))
        )
        if task.export_class == "BertForTokenClassification":
            labels = [IGNORED] * len(example.tokens)
            for place, target in zip(example.places, targets, strict=True):
                labels[place] = int(target)
            return row | {"labels": labels}
        if task.export_class == "BertForQuestionAnswering":
            at = [example.places[target] for target in targets]  # targets count places, theirs count tokens
            return row | dict(zip(("start_positions", "end_positions"), at, strict=True))
        return row | {"labels": targets[0]}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def answers(predicted: Any, units: list[Unit], task: Task) -> list[NDArray[np.float32]]:
    """transformers' logits in the form that ``Task.score`` takes."""
    if task.pooled:
        return [row[None] for row in np.asarray(predicted, np.float32)]
    rows = np.stack(predicted, -1) if isinstance(predicted, tuple) else predicted  # (E, S, outputs)
    return [np.asarray(row[list(unit[0].places)], np.float32) for row, unit in zip(rows, units, strict=True)]


def theirs(name: str, folder: Path, model: Path, seeds: list[int], tell: Any) -> tuple[list[float], list[float]]:
    """Metrics and seconds of transformers' Trainer, by seed."""
    import transformers

    task = known(name).make(Wish(file_of(folder, "train")), tell)
    length, tokenizer = known(name).recipe.length, read_pretrained(model, None, tell).tokenizer.encoder
    learnt = flat_units(task, task.read(file_of(folder, "train")), tokenizer, length, training=True)
    dev: EvaluationFile = read_evaluation_file(file_of(folder, "dev"), task, tokenizer, length)
    train, judged = Features([unit for unit in learnt if task.count(unit)], task), Features(dev.units, task)
    fast = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    transformers.logging.set_verbosity_error()
    tags = task.export_class == "BertForTokenClassification"
    collate = (transformers.DataCollatorForTokenClassification if tags else transformers.DataCollatorWithPadding)(fast)
    scores, seconds = [], []
    for seed in seeds:
        transformers.set_seed(seed)
        labels = {} if task.export_class == "BertForQuestionAnswering" else {"num_labels": task.outputs}
        bert = getattr(transformers, task.export_class).from_pretrained(model, local_files_only=True, **labels)
        with tempfile.TemporaryDirectory() as out:
            arguments = transformers.TrainingArguments(
                **{"output_dir": out, "num_train_epochs": EPOCHS, "per_device_train_batch_size": BATCH, "seed": seed},
                **{
                    "per_device_eval_batch_size": BATCH,
                    "learning_rate": RATE,
                    "weight_decay": 0.01,
                    "max_grad_norm": 0.0,
                },
                **{
                    "adam_epsilon": 1e-6,
                    "warmup_steps": EPOCHS * len(train) // BATCH // 10,
                    "fp16": torch.cuda.is_available(),
                    "save_strategy": "no",
                },
                **{"eval_strategy": "epoch", "report_to": [], "logging_strategy": "no", "disable_tqdm": True},
            )
            trainer = transformers.Trainer(
                bert,
                arguments,
                train_dataset=train,
                eval_dataset=judged,
                data_collator=collate,
                compute_metrics=lambda logged: task.score(
                    dev.records, dev.units, answers(logged.predictions, dev.units, task)
                ),
            )
            begun = time.perf_counter()
            trainer.train()
            seconds.append(time.perf_counter() - begun)
            logged = [line for line in trainer.state.log_history if f"eval_{task.measure}" in line]
            scores.append(logged[-1][f"eval_{task.measure}"])
    return scores, seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=["rte", "mrpc", "stsb"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--who", nargs="+", choices=("ours", "theirs"), default=["ours", "theirs"])
    given = parser.parse_args()
    for name in given.only:
        folder = given.tasks / FOLDERS.get(name, name)
        for who in given.who:
            run = ours if who == "ours" else theirs
            scores, seconds = run(name, folder, given.model, given.seeds, lambda line: None)
            spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
            each = " ".join(f"{score:.4f}" for score in scores)
            middle = f"{statistics.median(scores):.4f} ± {spread:.4f}"
            print(f"| {name} | {who} | {middle} ({each}) | {statistics.median(seconds):.1f} s |", flush=True)


if __name__ == "__main__":
    main()
