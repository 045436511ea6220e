"""Reading checkpoints in Lambert's own layout: tensors in safetensors, the rest in one JSON file, no pickle.

    step-00001200/
        part-00000-of-00002.safetensors   what rank 0 owned: weight/<name>, exp_avg/<name>, exp_avg_sq/<name>
        part-00001-of-00002.safetensors   what rank 1 owned
        checkpoint.json                   shapes, parts with their sha256, the run's record, and its own sha256
    latest                                name of the newest checkpoint, for people and tools; Lambert reads the folders

A part contains whole parameters or flat pieces of them. Its metadata say where each piece begins, so any number of
ranks under any ZeRO stage can reassemble whole tensors. The weights are the fp32 masters. A folder gets its name only
when all its parts are on disk; see trainer/checkpoint/saving.py, which writes them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from data_prep.json_text import parse_json, read_json, shown
from data_prep.manifest import file_sha256
from trainer.bounds import MOST_STEPS, outside
from trainer.console import Tell, silent, warn
from trainer.engine.optimizer import LambertOptimizer
from trainer.engine.partition import Buffer
from trainer.errors import TrainerError, exit_code, explain, shortage
from trainer.exits import FAILED
from trainer.model.bert import Bert, ModelConfig
from trainer.ranks.world import World

FORMAT, VERSION = "lambert-checkpoint", 2
_NAME = re.compile(r"step-\d{8,}", re.ASCII)
LISTING = "checkpoint.json"
_LONGEST_NAME = 64  # how many bytes of ``latest`` are read
LARGEST_LISTING = 1 << 27  # bytes of checkpoint.json; a parameter takes about a hundred


@dataclass(frozen=True)
class CheckpointConfig:
    """When and how to save, and which checkpoints to keep."""

    every_steps: int = 1000  # steps between checkpoints
    asynchronous: bool = True  # training waits only for a copy to CPU memory; a thread writes it to disk
    keep: int = 3  # number of newest checkpoints to keep; older ones are removed after a save
    keep_every_steps: int | None = None  # checkpoints at multiples of this step are kept forever

    def problems(self) -> list[str]:
        """Every invalid setting, with what to change."""
        found = outside(
            self, every_steps=(1, MOST_STEPS), keep=(1, MOST_STEPS), keep_every_steps=(-math.inf, MOST_STEPS)
        )
        often = self.keep_every_steps
        if often is not None and (often < 1 or (self.every_steps > 0 and often % self.every_steps)):
            found.append(
                f"keep_every_steps is {often}: must be a multiple of every_steps ({self.every_steps}), the "
                "interval between checkpoints, or null"
            )
        return found


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    shapes: dict[str, torch.Size]
    parts: dict[str, str]  # file name: sha256
    record: dict[str, Any]  # everything that the run saved other than tensors


Check = Callable[[Checkpoint], object]  # raises TrainerError for a record that no run can resume from


def newest(
    root: Path, damaged: Mapping[str, str] | None = None, check: Check | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint under ``root``, or None, and why each newer one was skipped.

    Complete means that every file has its full size, and that ``check`` accepts the record. ``damaged`` maps the names
    of checkpoints that failed :func:`verify` to the reasons.
    """
    damaged = damaged or {}
    passed: list[str] = []
    pointer = root / "latest"
    if pointer.is_file():
        name = _pointed(pointer)
        if not _NAME.fullmatch(name) or not (root / name).is_dir():
            passed.append(f"{pointer} names {name}, which does not exist")
    names = [folder.name for folder in sorted(named(root), key=step_of, reverse=True)]
    found, more = first_whole(names, lambda name: read(root / name), damaged, check)
    return found, passed + more


def first_whole(
    names: Iterable[str], open_one: Callable[[str], Checkpoint], damaged: Mapping[str, str], check: Check | None
) -> tuple[Checkpoint | None, list[str]]:
    """The first of the checkpoints ``names`` that can be opened and is not ``damaged``, and why others were skipped."""
    passed = []
    for name in names:
        if name in damaged:
            passed.append(damaged[name])
            continue
        try:
            found = open_one(name)
            if check is not None:
                check(found)
            return found, passed
        except TrainerError as error:
            if exit_code(error) == FAILED:
                raise  # a server that does not answer: the checkpoint may be complete
            passed.append(str(error))
    return None, passed


def _pointed(pointer: Path) -> str:
    """The name in the file ``latest``, truncated if it is longer than a checkpoint's name can be."""
    try:
        with pointer.open("rb") as file:
            return " ".join(file.read(_LONGEST_NAME).decode(errors="replace").split())
    except OSError as error:
        return f"nothing ({error.strerror})"


def read(folder: Path) -> Checkpoint:
    """Open one checkpoint and check that it has exactly its own parts, each of its full size.

    Raises TrainerError naming the part that is missing, truncated or does not belong, and OSError if the machine is
    short of memory or file handles.
    """
    files = folder.glob("part-*")
    return opened(folder, {path.name: path.stat().st_size if path.is_file() else None for path in files})


def opened(folder: Path, sizes: Mapping[str, int | None] | None = None) -> Checkpoint:
    """The checkpoint whose checkpoint.json is in ``folder``, without reading its parts.

    ``sizes``: those of the files that it has, wherever they are; without them, the parts are not looked at. Raises the
    same errors as `read`.
    """
    try:
        tree = read_json(folder / LISTING, LARGEST_LISTING)
    except (OSError, ValueError) as error:
        if shortage(error):
            raise  # it may be complete, so an older one must not replace it
        raise TrainerError(f"{folder} is not a whole checkpoint: it has no readable checkpoint.json") from None
    if not isinstance(tree, dict) or tree.get("format") != FORMAT or tree.get("version") != VERSION:
        raise TrainerError(f"{folder} is not a checkpoint of this version of Lambert ({FORMAT} {VERSION})")
    if tree.pop("sha256", None) != tree_sha256(tree):
        raise TrainerError(f"checkpoint {folder} is damaged: the sha256 of checkpoint.json differs")
    whole, parts = _content(folder, tree), tree["parts"]
    if list(whole.parts) != [part_name(rank, len(parts)) for rank in range(len(parts))]:
        raise TrainerError(f"checkpoint {folder} is damaged: its list of parts does not come from one save")
    for part in parts if sizes is not None else ():
        size = (sizes or {}).get(part["name"])
        if size != part["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes instead of {part['bytes']}"
            raise TrainerError(f"checkpoint {folder} is damaged: {part['name']} {found}")
    if extra := sorted(name for name in sizes or () if name.startswith("part-") and name not in whole.parts):
        raise TrainerError(f"checkpoint {folder} is damaged: {extra[0]} belongs to another save")
    return whole


def _content(folder: Path, tree: dict[str, Any]) -> Checkpoint:
    """The checkpoint that ``checkpoint.json`` describes. Raises TrainerError if it is malformed."""
    try:
        shapes = {name: _shape(sizes) for name, sizes in tree["shapes"].items()}
        parts = {str(part["name"]): str(part["sha256"]) for part in tree["parts"]}
        record = dict(tree["record"])
        room = sum(part["bytes"] for part in tree["parts"])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise TrainerError(
            f"checkpoint {folder} is damaged: its checkpoint.json is malformed ({shown(error)})"
        ) from None
    if sum(shape.numel() for shape in shapes.values()) > room:
        raise TrainerError(f"checkpoint {folder} is damaged: its shapes need more bytes than its parts have")
    return Checkpoint(folder, shapes, parts, record)


def restore(checkpoint: Checkpoint, optimizer: LambertOptimizer) -> None:
    """Fill this rank's masters and moments in place, from any number of parts. Call :func:`verify` first.

    Raises TrainerError if the checkpoint is of another model.
    """
    partition = optimizer.partition
    assert partition is not None
    require_shapes(f"checkpoint {checkpoint.folder}", checkpoint.shapes, partition.shapes)
    pieces = Pieces(checkpoint)
    for buffer in partition.buffers:
        for kind, flat in flat_tensors(optimizer, buffer).items():
            for part in buffer.slices:
                flat[part.offset : part.offset + part.length] = pieces.read(kind, part.name, part.start, part.length)
    optimizer.steps = int(checkpoint.record["optimizer"]["steps"])


def load_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """All parameters as whole fp32 tensors on the CPU. Raises TrainerError if a part is damaged."""
    verify(checkpoint)
    pieces = Pieces(checkpoint)
    return {name: pieces.whole(name) for name in checkpoint.shapes}


def load_model(checkpoint: Checkpoint, fillers: int = 0, weights: dict[str, Tensor] | None = None) -> Bert:
    """The checkpoint's model, fp32, on the CPU, with its own weights or with these, such as an average.

    ``fillers``: how many filler pieces its tokenizer has. Raises TrainerError if a part is damaged or a weight is not
    finite.
    """
    weights = load_weights(checkpoint) if weights is None else weights
    require_finite(f"checkpoint {checkpoint.folder}", weights)
    model = Bert(model_of(checkpoint), fillers=fillers)
    model.load_state_dict(weights)
    return model


def model_of(checkpoint: Checkpoint) -> ModelConfig:
    """The model that the run's configuration describes. Raises TrainerError if the description is not valid."""
    try:
        described = {"decoder_prior": "zero"} | checkpoint.record["config"]["model"]  # an old record has no such key
        model = ModelConfig(**described)
        problems = model.problems()
    except (LookupError, TypeError) as error:
        problems = [repr(error)]
    if problems:
        raise TrainerError(f"checkpoint {checkpoint.folder} does not describe a valid model ({'; '.join(problems)})")
    return model


def find(path: Path, tell: Tell = silent) -> Checkpoint:
    """The checkpoint at ``path``, or the newest complete one in that folder. Raises TrainerError if there is none.

    ``tell`` receives a warning for each newer checkpoint that is skipped.
    """
    if (path / LISTING).is_file():
        return read(path)
    found, passed = newest(path)
    if found is None:
        advice = f"no whole checkpoint in {path}: name a run's folder, or a step-… folder in it"
        raise TrainerError("; ".join([advice, *passed]))
    for problem in passed:
        warn(f"not used: {problem}; using {found.folder.name} instead", tell)
    return found


def verify(checkpoint: Checkpoint, rank: int = 0, ranks: int = 1) -> None:
    """Check the sha256 of every ``ranks``-th part, starting at part ``rank``.

    Raises TrainerError naming the first damaged part.
    """
    for name in list(checkpoint.parts)[rank::ranks]:
        if file_sha256(checkpoint.folder / name) != checkpoint.parts[name]:
            raise TrainerError(
                f"checkpoint {checkpoint.folder} is damaged: the sha256 of {name} differs; restore it, or use an older "
                "checkpoint"
            )


def disprove(folder: Path, world: World) -> str:
    """Why ``folder`` is not an intact checkpoint, judged by this rank's share of the parts; empty if they are intact.

    Raises OSError if the machine is short of memory or file handles: that is no reason to use another checkpoint.
    """
    try:
        verify(read(folder), world.rank, world.size)
    except (TrainerError, OSError) as error:
        if exit_code(error) == FAILED:
            raise
        return explain(error)
    return ""


def require_shapes(what: str, theirs: dict[str, torch.Size], ours: dict[str, torch.Size]) -> None:
    """Raise TrainerError, naming the first difference, unless names and shapes of parameters are those of this run."""
    different = [name for name in sorted(theirs.keys() | ours.keys()) if theirs.get(name) != ours.get(name)]
    if not different:
        return
    name = different[0]
    there, here = (f"{list(shapes[name])}" if name in shapes else "absent" for shapes in (theirs, ours))
    raise TrainerError(
        f"{what} comes from another model: {len(different)} parameters differ, first {name} ({there} there, {here} in "
        "this run): restore the model section, or name another folder"
    )


def require_finite(what: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise TrainerError, naming the tensor, if any floating-point tensor contains NaN or infinity."""
    for name, tensor in tensors.items():
        wide = tensor if tensor.itemsize > 1 else tensor.float()  # PyTorch has no isfinite for one-byte types
        if tensor.is_floating_point() and not wide.isfinite().all():
            raise TrainerError(
                f"{what}: {name} contains NaN or infinity, so the weights are unusable: name an older checkpoint, or "
                "download or export the weights again"
            )


# ---- shared by reading and writing ----------------------------------------------------------------------------


def is_name(name: str) -> bool:
    """Whether a folder of this name is a checkpoint's."""
    return _NAME.fullmatch(name) is not None


def named(root: Path) -> list[Path]:
    """The folders under ``root`` that are named like a checkpoint."""
    return [path for path in root.glob("step-*") if is_name(path.name)]


def step_of(folder: Path) -> int:
    """The step number in the name of a checkpoint's folder."""
    return int(folder.name.removeprefix("step-"))


def name_of(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step:08d}"


def part_name(rank: int, ranks: int) -> str:
    """The file name of one rank's part."""
    return f"part-{rank:05d}-of-{ranks:05d}.safetensors"


def flat_tensors(optimizer: LambertOptimizer, buffer: Buffer) -> dict[str, Tensor]:
    """The flat fp32 tensors of one buffer, by kind, on the buffer's device."""
    return {"weight": buffer.master.detach().view(-1), **optimizer.moments(buffer)}


def _shape(sizes: list[int]) -> torch.Size:
    """A shape from its sizes in JSON. Raises ValueError if they are not valid sizes."""
    if not all(type(size) is int and 0 <= size < 2**40 for size in sizes) or math.prod(sizes) >= 2**40:
        raise ValueError(f"shape {sizes}"[:80])
    return torch.Size(sizes)


def tree_sha256(tree: dict[str, Any]) -> str:
    """The sha256 of plain data, after a round trip through JSON."""
    plain = json.loads(json.dumps(tree))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


class Pieces:
    """Reads parameters, or flat ranges of them, from whichever parts contain them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.folder, self.shapes = checkpoint.folder, checkpoint.shapes
        self.files: list[Any] = [safe_open(checkpoint.folder / name, framework="pt") for name in checkpoint.parts]
        self.starts = [parse_json(file.metadata()["starts"]) for file in self.files]

    def whole(self, name: str) -> Tensor:
        """One parameter's weights in their shape, fp32. Raises TrainerError on a gap."""
        shape = self.shapes[name]
        return self.read("weight", name, 0, shape.numel()).view(shape)

    def read(self, kind: str, name: str, start: int, length: int) -> Tensor:
        """Elements ``start … start + length`` of the flattened tensor, fp32. Raises TrainerError on a gap."""
        wanted = torch.empty(length)
        filled = 0
        for low, piece in self._overlapping(kind, name, start, start + length):
            begin, end = max(low, start), min(low + piece.numel(), start + length)
            wanted[begin - start : end - start] = piece[begin - low : end - low]
            filled += end - begin
        if filled != length:
            raise TrainerError(f"checkpoint {self.folder} lacks {length - filled} elements of {kind}/{name}")
        return wanted

    def _overlapping(self, kind: str, name: str, start: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element, flat piece) from each part with any of the elements ``start … end``."""
        key = f"{kind}/{name}"
        for file, starts in zip(self.files, self.starts, strict=True):
            if name in starts:
                low = starts[name]
                if low < end and start < low + math.prod(file.get_slice(key).get_shape()):
                    yield low, file.get_tensor(key).view(-1)
