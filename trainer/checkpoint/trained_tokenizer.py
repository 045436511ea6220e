"""Finds the tokenizer that a checkpoint was trained with, and checks it against the checkpoint's record.

A run keeps a copy of its tokenizer next to its checkpoints. Token ids mean nothing without it, so the copy's sha256 is
compared with the record before it is used. Data used with the weights must have the same tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.errors import DataError
from data_prep.manifest import MANIFEST, TOKENIZER_FOLDER, Manifest, load_manifest, manifest_hash, read_histogram
from data_prep.tokenizer import Tokenizer, load_proven, load_tokenizer
from trainer.checkpoint.reading import Checkpoint, named
from trainer.console import Tell, warn
from trainer.errors import TrainerError

RESTORE_TOKENIZER = "restore it from the tokenizer folder of the training shards"


def recorded(record: dict[str, Any]) -> str | None:
    """The tokenizer's sha256 in a checkpoint's record; None if the record is too old and its shards are gone."""
    known: str | None = record.get("identity", {}).get("tokenizer")
    if known is None:
        known = next((found.tokenizer.sha256 for _, found in manifests_of(record) if found is not None), None)
    return known


def manifests_of(record: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Manifest | None]]:
    """Yield each phase that has begun, with the manifest of its training shards if it is available and unchanged."""
    config = record["config"]
    cache = [Path(os.path.expanduser(config["cache"]["folder"]))] if "cache" in config else []
    begun = record.get("identity", {}).get("phases", [])  # fine-tuning has none
    begun = begun[: record.get("state", {}).get("phase", 0) + 1]
    for phase, known in zip(config.get("phases", []), begun, strict=False):
        places = (Path(phase["train"]), *(folder / known["shards"] for folder in cache))  # in the cache: from a URL
        found = (_manifest(place, known["shards"]) for place in places)
        yield phase | known, next((manifest for manifest in found if manifest is not None), None)


def _manifest(folder: Path, sha256: str) -> Manifest | None:
    try:
        same = (folder / MANIFEST).is_file() and manifest_hash(folder) == sha256
        return load_manifest(folder) if same else None
    except (OSError, DataError):
        return None


def load_trained(folder: Path, sha256: str | None, path: Path, remedy: str = RESTORE_TOKENIZER) -> Tokenizer:
    """Load the tokenizer in ``folder``, and verify that the weights at ``path`` were trained with it.

    ``sha256`` is the hash recorded with the weights. If it is None, nothing is verified. Raises TrainerError.
    """
    try:
        if sha256 is None:
            return load_tokenizer(folder)
        return load_proven(folder, sha256, f"the tokenizer that {path} was trained with", remedy)
    except DataError as error:
        raise TrainerError(str(error) if sha256 is not None else f"{error}; restore it, or name another one") from None


def unproven(found: Checkpoint) -> str:
    """A warning that a checkpoint's tokenizer cannot be verified."""
    return (
        f"{found.folder} is from an older Lambert that did not record the tokenizer, and its shards are not "
        f"available: cannot verify that {own_folder(found)} is the right one"
    )


def token_counts(folder: Path, manifest: Manifest) -> Tensor:
    """How often each token occurs in the unmasked samples of a data set: (V,) int64.

    Raises TrainerError if the file is missing, or not the one that the manifest names.
    """
    try:
        return torch.from_numpy(read_histogram(folder, manifest.token_counts))
    except DataError as error:
        raise TrainerError(str(error)) from None


def require_rows(pieces: int, folder: Path, rows: int, model: Path, tell: Tell) -> None:
    """Raise TrainerError if the tokenizer in ``folder`` has more ``pieces`` than the model; warn if fewer."""
    if pieces > rows:  # some of them would fall on padding rows of the table, which were never trained
        raise TrainerError(
            f"{folder} has {pieces:,} pieces, but the model in {model} only {rows:,}: name the tokenizer that it was "
            "trained with"
        )
    if pieces < rows:
        warn(
            f"{folder} has {pieces:,} pieces, but the model in {model} has {rows:,}: ids from {pieces} on "
            "never occur; if tokens were added to the model, save its tokenizer with it",
            tell,
        )


def own_folder(found: Checkpoint) -> Path:
    """The folder of the tokenizer copy that a run keeps next to its checkpoints."""
    step = found.folder
    return (step.parent if step in named(step.parent) else step) / TOKENIZER_FOLDER


def tokenizer_of(found: Checkpoint, tell: Tell, given: Path | None = None) -> tuple[Path, Tokenizer]:
    """The folder and the tokenizer that belong to a checkpoint: ``given``, or the run's own copy, verified.

    ``tell`` receives a warning if it cannot be verified. Raises TrainerError if it is another tokenizer.
    """
    known, own = recorded(found.record), own_folder(found)
    if known is None:
        warn(unproven(found), tell)
        if given is not None and own.is_dir():
            known = load_trained(own, None, found.folder).sha256()
    folder = own if given is None else given
    return folder, load_trained(folder, known, found.folder, f"{RESTORE_TOKENIZER}, or name it by --tokenizer")


def require_vocabulary(found: Checkpoint, sha256: str, what: object, tell: Tell) -> None:
    """Raise TrainerError unless ``what`` was made with the checkpoint's tokenizer; ``sha256``: that of its tokenizer.

    The run's own copy, if there is one, must also be the recorded tokenizer.
    """
    known, own = recorded(found.record), own_folder(found)
    if own.is_dir():
        if known is None:
            warn(unproven(found), tell)
        known = load_trained(own, known, found.folder).sha256()
    if known not in (None, sha256):
        raise TrainerError(
            f"{what} has a different vocabulary from the run of {found.folder} (sha256 differs): use data made with "
            "that run's tokenizer"
        )
