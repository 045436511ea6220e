"""Runs the fine-tuning command on real ranks, and reads the files that it leaves."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.helpers import ranks
from tests.helpers.finetune_inputs import bert_folder, write_data
from trainer.finetune.options import Setting
from trainer.monitor.metrics_log import read_lines

MINUS_KILL = -signal.SIGKILL
ON_RANKS = "tests/helpers/finetune_on_ranks.py"


@dataclass(frozen=True)
class Inputs:
    model: Path
    data: Path


def make_inputs(folder: Path) -> Inputs:
    """Write a random BERT, and a task with 96 training texts and 60 dev texts."""
    return Inputs(bert_folder(folder), write_data(folder / "data"))


def finetune(
    inputs: Inputs, out: Path, *arguments: str, size: int = 1, aim: str = "-", script: str = ON_RANKS
) -> list[tuple[int, str]]:
    """Run the command on ``size`` ranks: 30 steps of 16, an evaluation every 6. Returns (exit code, output) of each."""
    recipe = ["--rates", "1e-2", "--batches", "16", "--epochs", "5", "--max-length", "24"]
    said = ["--task", "sst2", "--data", str(inputs.data), "--model", str(inputs.model), "--out", str(out), *recipe]
    return ranks.finish(ranks.fork(size, script, aim, *said, "--device", "cpu", *arguments))


def run_folder(out: Path, seed: int = 1, rate: float = 0.01, epochs: float = 5.0) -> Path:
    return out / Setting(rate, 16, epochs).folder(seed)


def result(out: Path, seed: int = 1, **setting: float) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((run_folder(out, seed, **setting) / "result.json").read_text())
    return tree


def logged(out: Path, what: str, seed: int = 1, **setting: float) -> dict[int, float]:
    """The run's loss or rate by step; for a repeated step, the later one."""
    log = read_lines(run_folder(out, seed, **setting) / "metrics.jsonl")
    return {line["step"]: line[what] for line in log if line["event"] == "step"}


def losses(out: Path) -> dict[int, float]:
    return logged(out, "loss")


def weights(out: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(run_folder(out) / "weights.safetensors")
    return found
