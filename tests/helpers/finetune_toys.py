"""Tiny vocabularies and models for the tasks of fine-tuning, and a plain loop that trains them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from data_prep.tokenizer import load_tokenizer
from tests.helpers.corpora import write_tokenizer
from trainer.finetune.task import Task, TaskModel, Unit, collate
from trainer.model.bert import ModelConfig

CLS, SEP, UNK = 2, 3, 1
FIRST = 5  # the id of the first piece after the special ones


def vocabulary(folder: Path, pieces: str, cased: bool = False) -> Tokenizer:
    """Write BERT's tokenizer with a vocabulary of the space-separated pieces."""
    write_tokenizer(folder, pieces.split())
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": not cased}))
    return load_tokenizer(folder).encoder


def tiny(task: Task, pieces: int, seed: int = 0) -> TaskModel:
    """A model of one layer, without dropout."""
    shape = ModelConfig(layers=1, hidden=32, heads=2, intermediate=64, max_positions=64, vocab_size=pieces)
    sure = ModelConfig(**{**vars(shape), "dropout": 0.0, "attention_dropout": 0.0, "initializer_range": 0.1})
    return TaskModel(sure, task, seed)


def answers(model: TaskModel, units: Sequence[Unit]) -> list[NDArray[np.float32]]:
    """The head's answers to each unit."""
    with torch.no_grad():
        return [model.answers(collate([unit], [0], model.task.dtype)).numpy() for unit in units]


def learn(model: TaskModel, units: Sequence[Unit], steps: int) -> None:
    """Take ``steps`` steps of Adam, each on all units at once."""
    batch = collate(units, range(len(units)), model.task.dtype)
    targets = sum(map(model.task.count, units))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(batch).loss / targets).backward()
        optimizer.step()


def without_gradient(model: TaskModel, units: Sequence[Unit]) -> list[str]:
    """The parameters that the loss of the units does not reach."""
    model.zero_grad()
    model(collate(units, range(len(units)), model.task.dtype)).loss.backward()
    return [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
