"""Plain weights: ``python -m trainer.weights RUN_OR_CHECKPOINT OUT.safetensors``, and what a run may start from.

One safetensors file with every parameter whole, fp32, under Lambert's own names, and the model's configuration
and its tokenizer's sha256 in its metadata: no moments and no step. Writing one needs no engine and no launcher.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data_prep.errors import DataError
from data_prep.manifest import TOKENIZER_FOLDER
from data_prep.tokenizer import load_tokenizer
from trainer.checkpoint import find, load_weights, require_shapes, sync
from trainer.errors import TrainerError
from trainer.export import read_folder
from trainer.hugging_face import missing_heads
from trainer.model import Bert, ModelConfig
from trainer.optimizer import LambertOptimizer
from trainer.partition import fill_masters

_FREE = ("dropout", "attention_dropout", "initializer_range")  # no weight means another thing under another one


@dataclass(frozen=True)
class PlainWeights:
    """Parameters by Lambert's names, whole."""

    tensors: dict[str, Tensor]
    model: ModelConfig | None  # None: its source does not say
    heads_may_lack: bool = False
    tokenizer: Path | str | None = None  # a folder, or a sha256 alone; None: its source does not say


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
    given = read(path, tell)
    if tokenizer is not None:
        _require_vocabulary(path, given.tokenizer, tokenizer, tell)
    if given.model is not None:
        theirs, ours = asdict(given.model), asdict(model)
        if different := [
            f"{k} is {theirs[k]} there, {ours[k]} here" for k in ours if theirs[k] != ours[k] and k not in _FREE
        ]:
            raise TrainerError(
                f"run.weights: {path} is of another model ({'; '.join(different)}): correct the one or the other"
            )
    shapes = {name: tensor.shape for name, tensor in given.tensors.items()}
    kept = {n: s for n, s in partition.shapes.items() if n not in shapes} if given.heads_may_lack else {}
    require_shapes(f"run.weights: {path}", shapes | kept, partition.shapes)
    fill_masters(partition, given.tensors)


def read(path: Path, tell: Callable[[str], None]) -> PlainWeights:
    """The weights of a file that :func:`write` wrote, of a run's or a checkpoint's folder, or of a Hugging Face one.

    ``tell`` is told what a Hugging Face folder lacks. Raises TrainerError for anything else, and for damage.
    """
    if (path / "config.json").is_file():
        named = any((path / name).is_file() for name in ("tokenizer.json", "vocab.txt"))
        return PlainWeights(*read_folder(path, tell), heads_may_lack=True, tokenizer=path if named else None)
    if path.is_dir():
        found = find(path)
        beside = found.folder.parent / TOKENIZER_FOLDER
        own = ModelConfig(**found.record["config"]["model"])
        return PlainWeights(load_weights(found), own, tokenizer=beside if beside.is_dir() else None)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            metadata = file.metadata() or {}
            said = metadata.get("model")
            model = None if said is None else ModelConfig(**json.loads(said))
            return PlainWeights(tensors, model, tokenizer=metadata.get("tokenizer"))
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise TrainerError(
            f"{path} cannot be read as weights ({' '.join(str(error).split())}): name a file of trainer.weights, a "
            "run's folder, or a Hugging Face BERT's"
        ) from None


def _require_vocabulary(path: Path, theirs: Path | str | None, ours: Path, tell: Callable[[str], None]) -> None:
    """Raises TrainerError where the tokens of ``path`` are not, one by one, those of the shards' tokenizer ``ours``."""
    remedy = "name weights of the shards' vocabulary, or build the shards with that one"
    if theirs is None:
        tell(f"{path} names no vocabulary: that of the shards is taken to be its own")
        return
    try:
        shards, sha256 = load_tokenizer(ours), load_tokenizer(theirs).sha256() if isinstance(theirs, Path) else theirs
        if shards.sha256() == sha256:
            return
        if isinstance(theirs, str):
            raise TrainerError(
                f"run.weights: {path} is of another tokenizer than the shards (sha256 differs): {remedy}"
            )
        pairs = zip_longest(load_tokenizer(theirs).pieces, shards.pieces)
    except DataError as error:
        raise TrainerError(f"run.weights: the vocabulary of {path} cannot be read ({error}): {remedy}") from None
    for number, (there, here) in enumerate(pairs):
        if there != here:
            seen = ["absent" if piece is None else repr(piece) for piece in (there, here)]
            raise TrainerError(
                f"run.weights: {path} has another vocabulary than the shards: token {number} is {seen[0]} there, "
                f"{seen[1]} in the shards: {remedy}"
            )
    tell(f"warning: {path} has the shards' vocabulary, but cleans its text in another way (case, accents)")


def load_bert(path: Path) -> tuple[Bert, Path, list[str]]:
    """A model to use, fp32, on the CPU; the folder of its tokenizer; the names of heads that it lacks, left random.

    ``path``: a run's folder, a checkpoint or a Hugging Face BERT. Raises TrainerError for anything else, and
    DataError for a tokenizer that cannot be read.
    """
    given = read(path, lambda text: None)
    if given.model is None or not isinstance(given.tokenizer, Path):
        raise TrainerError(f"{path} has no tokenizer: name the folder of a run, a checkpoint or a Hugging Face BERT")
    pieces, rows = load_tokenizer(given.tokenizer).vocab_size, given.model.vocab_size
    if pieces > rows:  # the table's padding has rows for some of them, which were never trained
        raise TrainerError(
            f"{given.tokenizer} has {pieces:,} pieces, the model only {rows:,}: restore its own vocabulary"
        )
    model = Bert(given.model)
    if not given.heads_may_lack:
        shapes = [{name: tensor.shape for name, tensor in each.items()} for each in (given.tensors, model.state_dict())]
        require_shapes(str(path), *shapes)
    model.load_state_dict(given.tensors, strict=False)
    return model, given.tokenizer, missing_heads(given.tensors, given.model)


def write(weights: dict[str, Tensor], model: ModelConfig, out: Path, tokenizer: str | None = None) -> None:
    """Write whole fp32 parameters as one file, whole or not at all; ``tokenizer``: its sha256, where it is known.

    Raises TrainerError if ``out`` is there.
    """
    if out.exists():
        raise TrainerError(f"{out} is already there: name a file that is not")
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        known = {} if tokenizer is None else {"tokenizer": tokenizer}
        save_file(weights, temporary, metadata={"model": json.dumps(asdict(model)), **known})
        temporary.chmod(0o644)  # safetensors leaves it to its owner alone
        sync(temporary)
        temporary.replace(out)
    except (OSError, SafetensorError):
        temporary.unlink(missing_ok=True)
        raise
    sync(out.parent)


def main(arguments: list[str] | None = None) -> int:
    """The command line; 0, or 2 after one line."""
    parser = argparse.ArgumentParser(prog="python -m trainer.weights", description="Write a checkpoint's weights.")
    parser.add_argument("checkpoint", type=Path, help="a run's folder, or one step-… folder in it")
    parser.add_argument("out", type=Path, help="the safetensors file to write; must not exist")
    options = parser.parse_args(arguments)
    try:
        found = find(options.checkpoint)
        beside = found.folder.parent / TOKENIZER_FOLDER
        tokenizer = load_tokenizer(beside).sha256() if beside.is_dir() else None
        write(load_weights(found), ModelConfig(**found.record["config"]["model"]), options.out, tokenizer)
    except (TrainerError, DataError, OSError, SafetensorError) as error:
        print(f"trainer.weights: error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {found.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
