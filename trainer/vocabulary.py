"""The tokenizer that a run keeps beside its checkpoints: what else goes with these must have its vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data_prep.errors import DataError
from data_prep.manifest import TOKENIZER_FOLDER, Manifest, file_sha256
from data_prep.tokenizer import load_tokenizer
from trainer.checkpoint import named
from trainer.errors import TrainerError, shortage


def tokenizer_of(checkpoint: Path, given: Path | None = None) -> Path:
    """The folder of the tokenizer that goes with a run's folder or a checkpoint in it: ``given``, or the run's own.

    Raises TrainerError where ``given`` cannot be read or has another vocabulary.
    """
    own = _run(checkpoint) / TOKENIZER_FOLDER
    if given is None:
        return own
    try:
        require_vocabulary(checkpoint, load_tokenizer(given).sha256(), given)
    except DataError as error:
        raise TrainerError(str(error)) from None
    return given


def require_vocabulary(checkpoint: Path, sha256: str, what: object) -> None:
    """Raises TrainerError where ``what``, with a tokenizer of this sha256, has another vocabulary than the run."""
    own = _run(checkpoint) / TOKENIZER_FOLDER
    if own.is_dir() and load_tokenizer(own).sha256() != sha256:
        raise TrainerError(f"{what} has another vocabulary than the run, {own}: name what was made with that one")


def token_counts(folder: Path, manifest: Manifest) -> Tensor:
    """How often each token stands in the unmasked samples of a data set: (V,) int64.

    Raises TrainerError if the file is missing, unreadable, or not the one that the manifest names.
    """
    path = folder / manifest.token_counts.file
    try:
        known = file_sha256(path) == manifest.token_counts.sha256
        counts = torch.from_numpy(np.load(path)) if known else torch.empty(0)
    except (OSError, ValueError, EOFError) as error:
        if shortage(error):
            raise
        raise TrainerError(f"{path} cannot be read ({error}): restore it") from None
    if not known:
        raise TrainerError(f"{path} is not the manifest's (its sha256 differs): restore it or build the shards again")
    return counts


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


def _run(checkpoint: Path) -> Path:
    """The run's folder, of that or of a checkpoint in it."""
    return checkpoint.parent if checkpoint in named(checkpoint.parent) else checkpoint
