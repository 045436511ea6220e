"""Reads the pre-trained encoder and the tokenizer that fine-tuning starts from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data_prep.manifest import file_sha256
from data_prep.tokenizer import Tokenizer
from trainer.checkpoint.reading import find
from trainer.checkpoint.trained_tokenizer import RESTORE_TOKENIZER, load_trained, require_rows
from trainer.console import Tell
from trainer.convert.weights import read
from trainer.errors import TrainerError
from trainer.finetune.task import Task, TaskModel
from trainer.model.bert import ModelConfig

_POOLER = "pooler_"


@dataclass(frozen=True)
class Pretrained:
    """An encoder's complete weights under Lambert's names, with its configuration, tokenizer and hash."""

    weights: dict[str, Tensor]
    model: ModelConfig
    tokenizer: Tokenizer
    sha256: str


def read_pretrained(path: Path, tokenizer: Path | None, tell: Tell) -> Pretrained:
    """Read the model of a Hugging Face folder, a run's folder, a checkpoint or a file of plain weights.

    Unless it is given, its tokenizer is in the same folder, or next to a run's checkpoints. ``tell`` receives what is
    not used, and warnings about damaged checkpoints and the tokenizer. Raises TrainerError if anything is missing.
    """
    given = read(path, tell)
    if given.unused:
        tell(f"{path}: not used: {', '.join(given.unused)}")
    if given.model is None:
        raise TrainerError(
            f"{path} does not say which model its weights belong to: name the folder that they come from"
        )
    folder = tokenizer or given.tokenizer
    if folder is None:
        raise TrainerError(f"{path} has no tokenizer next to it: name its folder with --tokenizer")
    known = given.sha256
    if known is None and given.tokenizer not in (None, folder):
        known = load_trained(given.tokenizer, None, path).sha256()
    loaded = load_trained(folder, known, path, f"{RESTORE_TOKENIZER}, or name it by --tokenizer")
    require_rows(loaded.vocab_size, folder, given.model.vocab_size, path, tell)
    return Pretrained(given.tensors, given.model, loaded, _sha256(path, loaded))


def needed_weights(given: Pretrained, task: Task, tell: Tell) -> dict[str, Tensor]:
    """The weights that the task's model needs: the whole encoder, and the pooler if the head reads through it.

    The head, and a missing pooler, keep the values drawn from the seed. Raises TrainerError if the encoder is
    incomplete.
    """
    with torch.device("meta"):
        model = TaskModel(given.model, task, 0)
    own = {name: tensor.shape for name, tensor in model.named_parameters() if not name.startswith("head_")}
    lacking = [name for name in own if name not in given.weights]
    if lacking and not all(name.startswith(_POOLER) for name in lacking):
        raise TrainerError(
            f"--model lacks {len(lacking)} tensors of the encoder, {lacking[0]} first: the model is incomplete"
        )
    for name, shape in own.items():
        if name in given.weights and given.weights[name].shape != shape:
            seen = tuple(given.weights[name].shape)
            raise TrainerError(f"--model has {name} of {seen}, its configuration says {tuple(shape)}: is it damaged?")
    if lacking:
        tell("the model has no pooler: it is drawn from the seed, like the head")
    if unused := sorted({_head(name) for name in given.weights if name not in own}):
        tell(f"not used from the model: {', '.join(unused)}")
    return {name: given.weights[name] for name in own if name in given.weights}


def _head(name: str) -> str:
    heads = {"mlm": "MLM head", "decoder": "MLM head", "nsp": "NSP head", "pooler": "pooler", "head": "another head"}
    return heads.get(name.split("_")[0], name)


def _sha256(path: Path, tokenizer: Tokenizer) -> str:
    """Hash what decides a run's numbers: the weights' file, or a checkpoint's list of parts, and the vocabulary."""
    names = ("model.safetensors", "pytorch_model.bin", "config.json", "weights.safetensors")
    files = [path / name for name in names if (path / name).is_file()]
    if path.is_file():
        files = [path]
    elif not files:
        files = [find(path).folder / "checkpoint.json"]
    parts = [*(file_sha256(file) for file in files), tokenizer.sha256()]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()
