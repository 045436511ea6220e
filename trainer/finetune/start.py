"""What a fine-tuning starts from: a pre-trained encoder, from wherever it is, and its tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data_prep.tokenizer import Tokenizer
from trainer.checkpoint.reading import file_sha256, find
from trainer.checkpoint.vocabulary import RESTORE, load_trained, require_rows
from trainer.convert.weights import read
from trainer.errors import TrainerError
from trainer.finetune.task import Task, TaskModel
from trainer.model.bert import ModelConfig

_POOLER = "pooler_"


@dataclass(frozen=True)
class Pretrained:
    """An encoder's weights by Lambert's names, whole, with its shape, its tokenizer, and what tells it from others."""

    weights: dict[str, Tensor]
    model: ModelConfig
    tokenizer: Tokenizer
    sha256: str


def read_pretrained(path: Path, tokenizer: Path | None, tell: Callable[[str], None]) -> Pretrained:
    """The model of a Hugging Face folder, a run's folder, a checkpoint or a file of plain weights.

    Its tokenizer lies in the same folder, or beside a run's checkpoints, unless it is given. ``tell`` is told what is
    not used, and of a tokenizer that is smaller than the model. Raises TrainerError where anything of it is missing.
    """
    told: list[str] = []
    given = read(path, told.append)
    for line in told:
        if "not used" in line or line.startswith("warning:"):  # heads that it lacks are none of the task's
            tell(line)
    if given.model is None:
        raise TrainerError(f"{path} does not say which model its weights are of: name the folder that they come from")
    folder = tokenizer or given.tokenizer
    if folder is None:
        raise TrainerError(f"{path} has no tokenizer beside it: name its folder by --tokenizer")
    known = given.sha256
    if known is None and given.tokenizer not in (None, folder):
        known = load_trained(given.tokenizer, None, path).sha256()
    loaded = load_trained(folder, known, path, f"{RESTORE}, or name it by --tokenizer")
    require_rows(loaded.vocab_size, folder, given.model.vocab_size, path, tell)
    return Pretrained(given.tensors, given.model, loaded, _sha256(path, loaded))


def choose(given: Pretrained, task: Task, tell: Callable[[str], None]) -> dict[str, Tensor]:
    """The weights that the task's model takes: the whole encoder, and the pooler where the head reads through it.

    The head, and a pooler that is not there, stay as the seed draws them. Raises TrainerError where the encoder is
    not whole.
    """
    with torch.device("meta"):
        model = TaskModel(given.model, task, 0)
    own = {name: tensor.shape for name, tensor in model.named_parameters() if not name.startswith("head_")}
    lacking = [name for name in own if name not in given.weights]
    if lacking and not all(name.startswith(_POOLER) for name in lacking):
        raise TrainerError(f"--model lacks {len(lacking)} tensors of the encoder, {lacking[0]} first: it is not whole")
    for name, shape in own.items():
        if name in given.weights and given.weights[name].shape != shape:
            seen = tuple(given.weights[name].shape)
            raise TrainerError(f"--model has {name} of {seen}, its configuration says {tuple(shape)}: is it damaged?")
    if lacking:
        tell("the model has no pooler: it is drawn from the seed, as the head is")
    if unused := sorted({_head(name) for name in given.weights if name not in own}):
        tell(f"of the model, not used: {', '.join(unused)}")
    return {name: given.weights[name] for name in own if name in given.weights}


def _head(name: str) -> str:
    heads = {"mlm": "MLM head", "decoder": "MLM head", "nsp": "NSP head", "pooler": "pooler", "head": "another head"}
    return heads.get(name.split("_")[0], name)


def _sha256(path: Path, tokenizer: Tokenizer) -> str:
    """Of what decides a run's numbers: the weights' own file, or a checkpoint's list of parts, and the vocabulary."""
    names = ("model.safetensors", "pytorch_model.bin", "config.json", "weights.safetensors")
    files = [path / name for name in names if (path / name).is_file()]
    if path.is_file():
        files = [path]
    elif not files:
        files = [find(path).folder / "checkpoint.json"]
    parts = [*(file_sha256(file) for file in files), tokenizer.sha256()]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()
