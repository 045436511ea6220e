"""Weights from wherever they are: a checkpoint, a run, a plain file, or a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data_prep.errors import DataError
from data_prep.json_text import parse_json
from data_prep.tokenizer import Tokenizer, load_tokenizer
from trainer.checkpoint.leftovers import temporary
from trainer.checkpoint.reading import find, load_weights, model_of, named, require_finite, require_shapes, sync
from trainer.checkpoint.vocabulary import load_trained, own_folder, recorded, require_rows, unproven
from trainer.convert.folder import read_folder
from trainer.convert.hugging_face import missing_heads
from trainer.engine.optimizer import LambertOptimizer
from trainer.engine.partition import fill_masters
from trainer.errors import TrainerError, shortage
from trainer.model.bert import Bert, Encoder, ModelConfig

PLAIN = "weights.safetensors"  # in a folder of fine-tuning, where no class of transformers' has its head
# no weight means another thing under another one
_FREE = ("dropout", "attention_dropout", "initializer_range", "decoder_prior")


@dataclass(frozen=True)
class PlainWeights:
    """Parameters by Lambert's names, whole."""

    tensors: dict[str, Tensor]
    model: ModelConfig | None  # None: its source does not say
    heads_may_lack: bool = False
    tokenizer: Path | None = None  # the folder of the tokenizer that lies with them
    sha256: str | None = None  # of the tokenizer that they were trained with, which proves that folder; None: not said

    def load_tokenizer(self, path: Path) -> Tokenizer:
        """The tokenizer in the folder ``tokenizer``, proven; ``path``: of the weights. Raises TrainerError."""
        assert self.tokenizer is not None
        return load_trained(self.tokenizer, self.sha256, path)


def start_from(
    path: Path,
    model: ModelConfig,
    optimizer: LambertOptimizer,
    tell: Callable[[str], None],
    tokenizer: Path | None = None,
) -> None:
    """Fill this rank's masters, in place, with the weights at ``path``, as :func:`read` takes it.

    Heads that a Hugging Face folder lacks stay as they are, and so do the moments. Raises TrainerError if the
    weights are of another model than ``model``, or of another vocabulary than the shards' ``tokenizer`` folder.
    """
    partition = optimizer.partition
    assert partition is not None
    fill_masters(partition, fitting(path, model, partition.shapes, tell, tokenizer))


def fitting(
    path: Path,
    model: ModelConfig,
    wanted: dict[str, torch.Size],
    tell: Callable[[str], None],
    tokenizer: Path | None = None,
) -> dict[str, Tensor]:
    """The weights at ``path`` by name, whole; heads may be missing. ``wanted``: the parameters of ``model``.

    Raises TrainerError as :func:`start_from`.
    """
    given = read(path, tell)
    if tokenizer is not None:
        _require_vocabulary(path, given, tokenizer, tell)
        if "decoder_bias" in given.tensors:  # an export's, of fillers, would be all of a LAMB norm
            given.tensors["decoder_bias"][model.vocab_size - load_tokenizer(tokenizer).fillers :] = 0
    if given.model is not None:
        theirs, ours = asdict(given.model), asdict(model)
        if different := [
            f"{k} is {theirs[k]} there, {ours[k]} here" for k in ours if theirs[k] != ours[k] and k not in _FREE
        ]:
            raise TrainerError(
                f"run.weights: {path} comes from another model ({'; '.join(different)}): correct the one or the other"
            )
    shapes = {name: tensor.shape for name, tensor in given.tensors.items()}
    kept = {n: s for n, s in wanted.items() if n not in shapes} if given.heads_may_lack else {}
    require_shapes(f"run.weights: {path}", shapes | kept, wanted)
    return given.tensors


def read(path: Path, tell: Callable[[str], None]) -> PlainWeights:
    """The weights of a file that :func:`write` wrote, of a run's or a checkpoint's folder, or of a Hugging Face one.

    Also of a folder with such a file named weights.safetensors, as fine-tuning leaves one: the encoder in it, and what
    heads of pre-training there are. ``tell`` is told what a folder lacks, what of it is not used, and which damaged
    checkpoints are passed over, and what of it nothing proves. Raises TrainerError for anything else, for damage, and
    for NaN or infinity.
    """
    if path.is_dir():
        path = source(path, tell)
    given = _read_folder(path, tell) if path.is_dir() else _read_file(path)
    require_finite(str(path), given.tensors)
    return given


def source(path: Path, tell: Callable[[str], None]) -> Path:
    """The folder that is read of a folder: itself, or the newest whole checkpoint in it. Raises TrainerError."""
    if (path / "config.json").is_file():
        return path
    if named(path) or (path / "checkpoint.json").is_file():
        return find(path, tell).folder
    if not (path / PLAIN).is_file():
        raise TrainerError(
            f"{path} holds neither the config.json of a Hugging Face BERT nor a checkpoint: name the folder of the "
            "one, or a run's"
        )
    return path


def _read_folder(path: Path, tell: Callable[[str], None]) -> PlainWeights:
    own = path if any((path / name).is_file() for name in ("tokenizer.json", "vocab.txt")) else None
    if (path / "config.json").is_file():
        return PlainWeights(*read_folder(path, tell), heads_may_lack=True, tokenizer=own, sha256=_recorded_in(path))
    if not (path / "checkpoint.json").is_file():
        given = _read_file(path / PLAIN)
        return PlainWeights(*_of_bert(path, given, tell), heads_may_lack=True, tokenizer=own, sha256=given.sha256)
    found = find(path)
    known, beside = recorded(found.record), own_folder(found)
    kept = beside if beside.is_dir() else None
    if known is None and kept is not None:
        tell(unproven(found))
    model = model_of(found)
    return PlainWeights(load_weights(found), model, tokenizer=kept, sha256=known)


def _recorded_in(path: Path) -> str | None:
    """The tokenizer's sha256 by an export's weights; None for another Hugging Face folder's."""
    safe = path / "model.safetensors"  # read before
    if not safe.is_file():
        return None
    with safe_open(safe, framework="pt") as file:
        return (file.metadata() or {}).get("tokenizer")


def _of_bert(path: Path, given: PlainWeights, tell: Callable[[str], None]) -> tuple[dict[str, Tensor], ModelConfig]:
    """What Bert has a place for; the encoder must be whole."""
    if given.model is None:
        raise TrainerError(f"{path / PLAIN} does not say which model its weights are of: write it again")
    with torch.device("meta"):
        bert, encoder = (
            {name: tensor.shape for name, tensor in kind(given.model).state_dict().items()} for kind in (Bert, Encoder)
        )
    kept = {name: tensor for name, tensor in given.tensors.items() if name in bert}
    shapes = {name: tensor.shape for name, tensor in kept.items()}
    require_shapes(str(path), {n: s for n, s in bert.items() if n not in encoder} | shapes, bert)
    if heads := missing_heads(kept, given.model):
        tell(f"{path} has no {', no '.join(heads)}; training would start it from random values")
    if unused := sorted(given.tensors.keys() - kept.keys()):
        tell(f"{path}: not used: {', '.join(unused)}")
    return kept, given.model


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
            f"{path} cannot be read as weights ({' '.join(str(error).split())}): name a file of trainer.weights, a "
            "run's folder, or a Hugging Face BERT's"
        ) from None


def _require_vocabulary(path: Path, given: PlainWeights, ours: Path, tell: Callable[[str], None]) -> None:
    """Raises TrainerError where the tokens of ``path`` are not, one by one, those of the shards' tokenizer ``ours``."""
    remedy = "name weights of the shards' vocabulary, or build the shards with that one"
    if given.tokenizer is None and given.sha256 is None:
        tell(f"{path} names no vocabulary: that of the shards is taken to be its own")
        return
    try:
        theirs = None if given.tokenizer is None else given.load_tokenizer(path)
        shards = load_tokenizer(ours)
    except (DataError, TrainerError) as error:
        raise TrainerError(f"run.weights: {error}") from None
    if shards.sha256() == (given.sha256 if theirs is None else theirs.sha256()):
        return
    if theirs is None:
        raise TrainerError(f"run.weights: {path} is of another tokenizer than the shards (sha256 differs): {remedy}")
    pairs = zip_longest(theirs.pieces, shards.pieces)
    for number, (there, here) in enumerate(pairs):
        if there != here:
            seen = ["absent" if piece is None else repr(piece) for piece in (there, here)]
            raise TrainerError(
                f"run.weights: {path} has another vocabulary than the shards: token {number} is {seen[0]} there, "
                f"{seen[1]} in the shards: {remedy}"
            )
    tell(
        f"warning: {path} has the shards' vocabulary, but cleans its text in another way (case, accents, emoji, added "
        "tokens)"
    )


def load_bert(path: Path, tell: Callable[[str], None] = lambda text: None) -> tuple[Bert, Path, list[str]]:
    """A model to use, fp32, on the CPU; the folder of its tokenizer; the names of heads that it lacks, left random.

    ``path``: a folder that :func:`read` takes; ``tell`` is told of damaged checkpoints that are passed over, and of a
    tokenizer that nothing proves, or that is smaller than the model. Raises TrainerError for anything else, and for
    another tokenizer than the recorded one.
    """
    told: list[str] = []
    given = read(source(path, tell) if path.is_dir() else path, told.append)
    for line in told:
        if line.startswith("warning:"):  # what heads are missing is told by who needs them
            tell(line)
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
    """Write whole fp32 parameters as one file, whole or not at all; ``tokenizer``: its sha256, where it is known.

    Raises TrainerError if ``out`` is there, or its folder is not.
    """
    require_new(out)
    draft = temporary(out)
    try:
        known = {} if tokenizer is None else {"tokenizer": tokenizer}
        save_file(weights, draft, metadata={"model": json.dumps(asdict(model)), **known})
        draft.chmod(0o644)  # safetensors leaves it to its owner alone
        sync(draft)
        draft.replace(out)
    except (OSError, SafetensorError):
        draft.unlink(missing_ok=True)
        raise
    sync(out.parent)


def require_new(out: Path) -> None:
    """Raises TrainerError if a file to write is there, or its folder is not."""
    if out.exists():
        raise TrainerError(f"{out} is already there: name a file that is not")
    if not out.parent.is_dir():
        raise TrainerError(f"{out.parent}, the folder of {out.name}, is not there: make it, or name another")
