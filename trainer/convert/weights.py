"""Loads model weights from any source: a run, a checkpoint, a plain weights file, or a Hugging Face folder.

It also starts a run from such weights, and writes the plain file: one safetensors file under Lambert's names, whose
metadata record the model and the tokenizer's sha256.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data_prep.atomic import sync
from data_prep.errors import DataError
from data_prep.json_text import parse_json
from data_prep.tokenizer import Tokenizer, load_tokenizer
from trainer.checkpoint.leftovers import temporary
from trainer.checkpoint.reading import find, load_weights, model_of, named, require_finite, require_shapes
from trainer.checkpoint.trained_tokenizer import load_trained, own_folder, recorded, require_rows, unproven
from trainer.console import Tell, silent, warn
from trainer.convert.folder import read_folder
from trainer.convert.hugging_face import missing_heads
from trainer.engine.optimizer import LambertOptimizer
from trainer.engine.partition import fill_masters
from trainer.errors import TrainerError, shortage
from trainer.model.bert import Bert, Encoder, ModelConfig

PLAIN = "weights.safetensors"  # in a fine-tuned model's folder if transformers has no class with its head
# settings that may differ, because they do not change what the weights mean
_FREE = ("dropout", "attention_dropout", "initializer_range", "decoder_prior")


@dataclass(frozen=True)
class PlainWeights:
    """Whole parameters under Lambert's names."""

    tensors: dict[str, Tensor]
    model: ModelConfig | None  # None: the source does not say
    unused: Sequence[str] = ()  # tensors of the source that Bert has no parameters for
    heads_may_lack: bool = False
    tokenizer: Path | None = None  # the folder of the tokenizer that came with the weights
    sha256: str | None = None  # of the tokenizer that they were trained with; None: the source does not say

    def load_tokenizer(self, path: Path) -> Tokenizer:
        """Load and verify the tokenizer. ``path``: where the weights are. Raises TrainerError."""
        assert self.tokenizer is not None
        return load_trained(self.tokenizer, self.sha256, path)


def start_from(
    path: Path,
    model: ModelConfig,
    optimizer: LambertOptimizer,
    tell: Tell,
    tokenizer: Path | None = None,
) -> None:
    """Fill this rank's masters in place with the weights at ``path``, any source that :func:`read` accepts.

    Heads that a Hugging Face folder lacks stay as they are, and so do the moments. Raises TrainerError if the weights
    do not fit ``model``, or if their vocabulary is not that of the shards' ``tokenizer`` folder.
    """
    partition = optimizer.partition
    assert partition is not None
    fill_masters(partition, fitting(path, model, partition.shapes, tell, tokenizer))


def fitting(
    path: Path,
    model: ModelConfig,
    wanted: dict[str, torch.Size],
    tell: Tell,
    tokenizer: Path | None = None,
) -> dict[str, Tensor]:
    """The whole weights at ``path`` by name; heads may be missing. ``wanted``: the parameters of ``model``.

    Raises TrainerError if the weights do not fit the model or the tokenizer, as :func:`start_from` does.
    """
    given = read(path, tell)
    if given.heads_may_lack and given.model and (heads := missing_heads(given.tensors, given.model)):
        tell(f"{path} has no {', no '.join(heads)}; training would start it from random values")
    if given.unused:
        tell(f"{path}: not used: {', '.join(given.unused)}")
    if tokenizer is not None:
        _require_vocabulary(path, given, tokenizer, tell)
        if "decoder_bias" in given.tensors:  # an export's bias of fillers would dominate a LAMB norm
            given.tensors["decoder_bias"][model.vocab_size - load_tokenizer(tokenizer).fillers :] = 0
    if given.model is not None:
        theirs, ours = asdict(given.model), asdict(model)
        if different := [
            f"{k} is {theirs[k]} there, {ours[k]} here" for k in ours if theirs[k] != ours[k] and k not in _FREE
        ]:
            raise TrainerError(
                f"run.weights: {path} comes from another model ({'; '.join(different)}): change the model section, or "
                "name other weights"
            )
    shapes = {name: tensor.shape for name, tensor in given.tensors.items()}
    kept = {n: s for n, s in wanted.items() if n not in shapes} if given.heads_may_lack else {}
    require_shapes(f"run.weights: {path}", shapes | kept, wanted)
    return given.tensors


def read(path: Path, tell: Tell) -> PlainWeights:
    """Read weights from a run, a checkpoint, a Hugging Face folder, or a file that :func:`write` wrote.

    A fine-tuned model's folder with its file weights.safetensors works too: it gives the encoder and the pre-training
    heads that it has. ``tell`` receives a warning about skipped damaged checkpoints, and about a tokenizer that cannot
    be verified. Raises TrainerError for any other path, for damage, and for NaN or infinity.
    """
    if path.is_dir():
        path = source(path, tell)
    given = _read_folder(path, tell) if path.is_dir() else _read_file(path)
    require_finite(str(path), given.tensors)
    return given


def source(path: Path, tell: Tell) -> Path:
    """The folder to read weights from: ``path``, or the newest complete checkpoint in it. Raises TrainerError."""
    if (path / "config.json").is_file():
        return path
    if named(path) or (path / "checkpoint.json").is_file():
        return find(path, tell).folder
    if not (path / PLAIN).is_file():
        raise TrainerError(
            f"{path} contains neither the config.json of a Hugging Face BERT nor a checkpoint: name a folder with one "
            "of them, such as a run's"
        )
    return path


def _read_folder(path: Path, tell: Tell) -> PlainWeights:
    own = path if any((path / name).is_file() for name in ("tokenizer.json", "vocab.txt")) else None
    if (path / "config.json").is_file():
        return PlainWeights(*read_folder(path), heads_may_lack=True, tokenizer=own, sha256=_recorded_in(path))
    if not (path / "checkpoint.json").is_file():
        given = _read_file(path / PLAIN)
        return PlainWeights(*_of_bert(path, given), heads_may_lack=True, tokenizer=own, sha256=given.sha256)
    found = find(path)
    known, beside = recorded(found.record), own_folder(found)
    kept = beside if beside.is_dir() else None
    if known is None and kept is not None:
        warn(unproven(found), tell)
    model = model_of(found)
    return PlainWeights(load_weights(found), model, tokenizer=kept, sha256=known)


def _recorded_in(path: Path) -> str | None:
    """The tokenizer's sha256 stored in an export's weights; None for any other Hugging Face folder."""
    safe = path / "model.safetensors"  # already read successfully
    if not safe.is_file():
        return None
    with safe_open(safe, framework="pt") as file:
        return (file.metadata() or {}).get("tokenizer")


def _of_bert(path: Path, given: PlainWeights) -> tuple[dict[str, Tensor], ModelConfig, list[str]]:
    """The weights that Bert has parameters for, the model, and unused names; the encoder must be complete."""
    if given.model is None:
        raise TrainerError(f"{path / PLAIN} does not describe the model of its weights: write it again")
    with torch.device("meta"):
        bert, encoder = (
            {name: tensor.shape for name, tensor in kind(given.model).state_dict().items()} for kind in (Bert, Encoder)
        )
    kept = {name: tensor for name, tensor in given.tensors.items() if name in bert}
    shapes = {name: tensor.shape for name, tensor in kept.items()}
    require_shapes(str(path), {n: s for n, s in bert.items() if n not in encoder} | shapes, bert)
    return kept, given.model, sorted(given.tensors.keys() - kept.keys())


def _read_file(path: Path) -> PlainWeights:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            metadata = file.metadata() or {}
            said = metadata.get("model")
            model = None if said is None else ModelConfig(**parse_json(said))
            if model is not None and (problems := model.problems()):
                raise ValueError("; ".join(problems))
            return PlainWeights(tensors, model, sha256=metadata.get("tokenizer"))
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        if shortage(error):
            raise
        raise TrainerError(
            f"{path} cannot be read as weights ({' '.join(str(error).split())}): name a file written by "
            "trainer.weights, or the folder of a run or of a Hugging Face BERT"
        ) from None


def _require_vocabulary(path: Path, given: PlainWeights, ours: Path, tell: Tell) -> None:
    """Raise TrainerError unless the tokens of ``path`` are exactly those of the shards' tokenizer ``ours``."""
    remedy = "use weights with the shards' vocabulary, or build the shards with that of the weights"
    if given.tokenizer is None and given.sha256 is None:
        tell(f"{path} does not record its vocabulary: assuming that of the shards")
        return
    try:
        theirs = None if given.tokenizer is None else given.load_tokenizer(path)
        shards = load_tokenizer(ours)
    except (DataError, TrainerError) as error:
        raise TrainerError(f"run.weights: {error}") from None
    if shards.sha256() == (given.sha256 if theirs is None else theirs.sha256()):
        return
    if theirs is None:
        raise TrainerError(
            f"run.weights: {path} was trained with a different tokenizer from the shards' (sha256 differs): {remedy}"
        )
    pairs = zip_longest(theirs.pieces, shards.pieces)
    for number, (there, here) in enumerate(pairs):
        if there != here:
            seen = ["absent" if piece is None else repr(piece) for piece in (there, here)]
            raise TrainerError(
                f"run.weights: {path} has a different vocabulary from the shards: token {number} is {seen[0]} there, "
                f"{seen[1]} in the shards: {remedy}"
            )
    warn(f"{path} has the shards' vocabulary, but cleans text differently (case, accents, emoji, added tokens)", tell)


def load_bert(path: Path, tell: Tell = silent) -> tuple[Bert, Path, list[str]]:
    """Load a model, fp32, on the CPU. Returns it, its tokenizer's folder, and the names of missing heads, left random.

    ``path``: a folder that :func:`read` accepts. ``tell`` receives warnings about skipped damaged checkpoints, and if
    the tokenizer cannot be verified or is smaller than the model. Raises TrainerError for any other path, and if the
    tokenizer is not the recorded one.
    """
    given = read(path, tell)
    if given.model is None or given.tokenizer is None:
        raise TrainerError(f"{path} has no tokenizer: name the folder of a run, a checkpoint or a Hugging Face BERT")
    tokenizer, rows = given.load_tokenizer(path), given.model.vocab_size
    require_rows(tokenizer.vocab_size, given.tokenizer, rows, path, tell)
    model = Bert(given.model, fillers=tokenizer.fillers + rows - tokenizer.vocab_size)
    if not given.heads_may_lack:
        shapes = [{name: tensor.shape for name, tensor in each.items()} for each in (given.tensors, model.state_dict())]
        require_shapes(str(path), *shapes)
    model.load_state_dict(given.tensors, strict=False)
    return model, given.tokenizer, missing_heads(given.tensors, given.model)


def write(weights: dict[str, Tensor], model: ModelConfig, out: Path, tokenizer: str | None = None) -> None:
    """Write whole fp32 parameters atomically to one file. ``tokenizer``: the tokenizer's sha256, if known.

    Raises TrainerError if ``out`` already exists, or its folder does not.
    """
    require_new(out)
    draft = temporary(out)
    try:
        known = {} if tokenizer is None else {"tokenizer": tokenizer}
        save_file(weights, draft, metadata={"model": json.dumps(asdict(model)), **known})
        draft.chmod(0o644)  # safetensors makes it readable by its owner only
        sync(draft)
        draft.replace(out)
    except (OSError, SafetensorError):
        draft.unlink(missing_ok=True)
        raise
    sync(out.parent)


def require_new(out: Path) -> None:
    """Raise TrainerError if an output file already exists, or its folder does not."""
    if out.exists():
        raise TrainerError(f"{out} already exists: choose another file name")
    if not out.parent.is_dir():
        raise TrainerError(f"{out.parent}, the folder of {out.name}, does not exist: create it, or name another")
