"""The tokenizer that a checkpoint was trained with, by its sha256: whatever else goes with the weights must have it.

A run keeps a copy of its tokenizer beside its checkpoints. Ids mean nothing without it, so the copy is compared with
the checkpoint's record before it is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.errors import DataError
from data_prep.manifest import MANIFEST, TOKENIZER_FOLDER, Manifest, load_manifest, manifest_hash, read_histogram
from data_prep.tokenizer import Tokenizer, load_proven, load_tokenizer
from trainer.checkpoint.reading import Checkpoint, named
from trainer.errors import TrainerError

RESTORE = "restore it from the tokenizer folder of the training shards"


def recorded(record: dict[str, Any]) -> str | None:
    """The tokenizer's sha256 by a checkpoint's record. None if it is too old to hold it and its shards are gone."""
    known: str | None = record.get("identity", {}).get("tokenizer")
    if known is None:
        known = next((found.tokenizer.sha256 for _, found in manifests_of(record) if found is not None), None)
    return known


def manifests_of(record: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Manifest | None]]:
    """Each phase that has begun, and the manifest of its training shards, if it is at hand and the same."""
    config = record["config"]
    cache = [Path(os.path.expanduser(config["cache"]["folder"]))] if "cache" in config else []
    begun = record.get("identity", {}).get("phases", [])  # of a fine-tuning: none
    begun = begun[: record.get("state", {}).get("phase", 0) + 1]
    for phase, known in zip(config.get("phases", []), begun, strict=False):
        places = (Path(phase["train"]), *(folder / known["shards"] for folder in cache))  # the latter: of an address
        found = (_manifest(place, known["shards"]) for place in places)
        yield phase | known, next((manifest for manifest in found if manifest is not None), None)


def _manifest(folder: Path, sha256: str) -> Manifest | None:
    try:
        same = (folder / MANIFEST).is_file() and manifest_hash(folder) == sha256
        return load_manifest(folder) if same else None
    except (OSError, DataError):
        return None


def load_trained(folder: Path, sha256: str | None, path: Path, remedy: str = RESTORE) -> Tokenizer:
    """The tokenizer in ``folder``, proven to be the one that the weights at ``path`` were trained with.

    ``sha256``: what those record; None if they do not, and then nothing is proven. Raises TrainerError.
    """
    try:
        if sha256 is None:
            return load_tokenizer(folder)
        return load_proven(folder, sha256, f"the tokenizer that {path} was trained with", remedy)
    except DataError as error:
        raise TrainerError(str(error) if sha256 is not None else f"{error}; restore it, or name another") from None


def unproven(found: Checkpoint) -> str:
    """The warning that nothing tells which tokenizer a checkpoint was trained with."""
    return (
        f"warning: {found.folder} is of an older Lambert, does not record its tokenizer, and its shards are not at "
        f"hand: nothing proves that {own_folder(found)} is the right one"
    )


def token_counts(folder: Path, manifest: Manifest) -> Tensor:
    """How often each token stands in the unmasked samples of a data set: (V,) int64.

    Raises TrainerError if the file is missing, or not the one that the manifest names.
    """
    try:
        return torch.from_numpy(read_histogram(folder, manifest.token_counts))
    except DataError as error:
        raise TrainerError(str(error)) from None


def require_rows(pieces: int, folder: Path, rows: int, model: Path, tell: Callable[[str], None]) -> None:
    """Raises TrainerError if the tokenizer in ``folder`` has more ``pieces`` than the model; tells if it has fewer."""
    if pieces > rows:  # the table's padding has rows for some of them, which were never trained
        raise TrainerError(
            f"{folder} has {pieces:,} pieces, the model of {model} only {rows:,}: name the tokenizer that it was "
            "trained with"
        )
    if pieces < rows:
        tell(
            f"warning: {folder} has {pieces:,} pieces, the model of {model} has {rows:,}: no text gives the ids from "
            f"{pieces} on; if tokens were added to the model, save its tokenizer beside it"
        )


def own_folder(found: Checkpoint) -> Path:
    """The folder of the tokenizer that a run keeps beside its checkpoints."""
    step = found.folder
    return (step.parent if step in named(step.parent) else step) / TOKENIZER_FOLDER


def tokenizer_of(found: Checkpoint, tell: Callable[[str], None], given: Path | None = None) -> tuple[Path, Tokenizer]:
    """The tokenizer that goes with a checkpoint: ``given``, or the run's own copy, and its folder; proven.

    ``tell`` is told if nothing proves it. Raises TrainerError for another one.
    """
    known, own = recorded(found.record), own_folder(found)
    if known is None:
        tell(unproven(found))
        if given is not None and own.is_dir():
            known = load_trained(own, None, found.folder).sha256()
    folder = own if given is None else given
    return folder, load_trained(folder, known, found.folder, f"{RESTORE}, or name it by --tokenizer")


def require_vocabulary(found: Checkpoint, sha256: str, what: object, tell: Callable[[str], None]) -> None:
    """Raises TrainerError if ``what``, made with a tokenizer of this sha256, is of another one than the checkpoint.

    The run's own copy, if there is one, must be the recorded one, too.
    """
    known, own = recorded(found.record), own_folder(found)
    if own.is_dir():
        if known is None:
            tell(unproven(found))
        known = load_trained(own, known, found.folder).sha256()
    if known not in (None, sha256):
        raise TrainerError(
            f"{what} has another vocabulary than the run of {found.folder} (sha256 differs): name what was made with "
            "that one"
        )
