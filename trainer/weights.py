"""Plain weights: ``python -m trainer.weights RUN_OR_CHECKPOINT OUT.safetensors``, and what a run may start from.

One safetensors file with every parameter whole, fp32, under Lambert's own names, and the model's configuration
in its metadata: no moments and no step. Writing one needs no engine and no launcher.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.checkpoint import find, load_weights, require_shapes, sync
from trainer.errors import TrainerError
from trainer.export import read_folder
from trainer.model import ModelConfig
from trainer.optimizer import LambertOptimizer
from trainer.partition import fill_masters

_FREE = ("dropout", "attention_dropout", "initializer_range")  # no weight means another thing under another one


@dataclass(frozen=True)
class PlainWeights:
    """Parameters by Lambert's names, whole."""

    tensors: dict[str, Tensor]
    model: ModelConfig | None  # None: its source does not say
    heads_may_lack: bool = False


def start_from(path: Path, model: ModelConfig, optimizer: LambertOptimizer, tell: Callable[[str], None]) -> None:
    """Fill this rank's masters, in place, with the weights at ``path``, as :func:`read` takes it.

    Heads that a Hugging Face folder lacks stay as they are, and so do the moments. Raises TrainerError if the
    weights are of another model than ``model``.
    """
    partition = optimizer.partition
    assert partition is not None
    given = read(path, tell)
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
        return PlainWeights(*read_folder(path, tell), heads_may_lack=True)
    if path.is_dir():
        found = find(path)
        return PlainWeights(load_weights(found), ModelConfig(**found.record["config"]["model"]))
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            said = (file.metadata() or {}).get("model")
            return PlainWeights(tensors, None if said is None else ModelConfig(**json.loads(said)))
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise TrainerError(
            f"{path} cannot be read as weights ({' '.join(str(error).split())}): name a file of trainer.weights, a "
            "run's folder, or a Hugging Face BERT's"
        ) from None


def write(weights: dict[str, Tensor], model: ModelConfig, out: Path) -> None:
    """Write whole fp32 parameters as one file, whole or not at all. Raises TrainerError if ``out`` is there."""
    if out.exists():
        raise TrainerError(f"{out} is already there: name a file that is not")
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        save_file(weights, temporary, metadata={"model": json.dumps(asdict(model))})
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
        write(load_weights(found), ModelConfig(**found.record["config"]["model"]), options.out)
    except (TrainerError, OSError, SafetensorError) as error:
        print(f"trainer.weights: error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {found.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
