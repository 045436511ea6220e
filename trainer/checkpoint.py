"""Checkpoints in Lambert's own layout: tensors in safetensors, everything else in one JSON, no pickle.

    step-00001200/
        part-00000-of-00002.safetensors   what rank 0 owned: weight/<name>, exp_avg/<name>, exp_avg_sq/<name>
        part-00001-of-00002.safetensors   what rank 1 owned
        checkpoint.json                   shapes, parts with their sha256, and the run's record
    latest                                the newest one's name, for people and tools; Lambert reads the folders

A part may hold a whole parameter or a flat piece of one; its metadata say where the piece begins, so any
number of ranks under any ZeRO stage puts whole tensors together again. The weights are the fp32 masters.
A folder gets its name only when all its parts are on disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.errors import TrainerError
from trainer.model import Bert, ModelConfig
from trainer.optimizer import LambertOptimizer
from trainer.partition import Buffer, Partition, Slice
from trainer.world import World, together

FORMAT, VERSION = "lambert-checkpoint", 1
_NAME = re.compile(r"step-\d{8,}")


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and how many to keep."""

    every_steps: int = 1000
    keep: int = 3  # newest ones; older ones are removed after a save

    def problems(self) -> list[str]:
        """What cannot be, each with its remedy."""
        return [
            f"{name} is {getattr(self, name)}: must be 1 or more"
            for name in ("every_steps", "keep")
            if getattr(self, name) < 1
        ]


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    folder: Path
    shapes: dict[str, torch.Size]
    parts: tuple[str, ...]
    record: dict[str, Any]  # what the run saved beside the tensors


def save(root: Path, step: int, optimizer: LambertOptimizer, record: dict[str, Any], keep: int, world: World) -> Path:
    """Write the checkpoint of ``step`` under ``root``; every rank calls it and writes its own part.

    Returns the final folder, and leaves the ``keep`` newest. Raises TrainerError on every rank when any rank
    could not write; nothing then has a final name.
    """
    assert optimizer.partition is not None
    final = root / f"step-{step:08d}"
    temporary = root / f".{final.name}.tmp"

    def start() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def finish() -> None:
        _publish(temporary, final, optimizer, record, world.size)
        prune(root, keep, step)

    together(start if world.is_main else _nothing, world)
    together(lambda: _write_part(temporary, optimizer, world), world)
    together(finish if world.is_main else _nothing, world)
    return final


def newest(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint under ``root`` (None without any), and why newer ones were passed over."""
    passed: list[str] = []
    folders = [path for path in root.glob("step-*") if _NAME.fullmatch(path.name)]
    for folder in sorted(folders, key=_step, reverse=True):
        try:
            return read(folder), passed
        except TrainerError as error:
            passed.append(str(error))
    return None, passed


def read(folder: Path) -> Checkpoint:
    """Open one checkpoint and check that its parts are there, whole in size.

    Raises TrainerError naming what is missing, foreign or short.
    """
    try:
        tree = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise TrainerError(f"{folder} is not a whole checkpoint: it has no readable checkpoint.json") from None
    if not isinstance(tree, dict) or tree.get("format") != FORMAT or tree.get("version") != VERSION:
        raise TrainerError(f"{folder} is not a checkpoint of this version of Lambert ({FORMAT} {VERSION})")
    names = [part["name"] for part in tree["parts"]]
    if names != [_part_name(rank, len(names)) for rank in range(len(names))]:
        raise TrainerError(f"checkpoint {folder} is damaged: its list of parts is not that of one save")
    for part in tree["parts"]:
        path = folder / part["name"]
        size = path.stat().st_size if path.is_file() else None
        if size != part["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes instead of {part['bytes']}"
            raise TrainerError(f"checkpoint {folder} is damaged: {part['name']} {found}")
    shapes = {name: torch.Size(shape) for name, shape in tree["shapes"].items()}
    return Checkpoint(folder, shapes, tuple(names), tree["record"])


def restore(checkpoint: Checkpoint, optimizer: LambertOptimizer, world: World) -> None:
    """Fill this rank's masters and moments from any number of parts, in place.

    The ranks share the proof of the parts, so it belongs inside :func:`~trainer.world.together`. Raises
    TrainerError when a part is damaged or the checkpoint is of another model.
    """
    partition = optimizer.partition
    assert partition is not None
    _require_same_model(checkpoint, partition)
    verify(checkpoint, world.rank, world.size)
    pieces = _Pieces(checkpoint)
    for buffer in partition.buffers:
        for kind, flat in _tensors(optimizer, buffer).items():
            for part in buffer.slices:
                flat[part.offset : part.offset + part.length] = pieces.read(kind, part.name, part.start, part.length)
    optimizer.steps = int(checkpoint.record["optimizer"]["steps"])


def load_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """All parameters, whole, fp32, on the CPU. Raises TrainerError when a part is damaged."""
    verify(checkpoint)
    pieces = _Pieces(checkpoint)
    return {
        name: pieces.read("weight", name, 0, shape.numel()).view(shape) for name, shape in checkpoint.shapes.items()
    }


def load_model(path: Path) -> Bert:
    """The model of one checkpoint, or of the newest one in a run's folder; fp32, on the CPU.

    Raises TrainerError when there is no whole checkpoint.
    """
    checkpoint = find(path)
    model = Bert(ModelConfig(**checkpoint.record["config"]["model"]))
    model.load_state_dict(load_weights(checkpoint))
    return model


def find(path: Path) -> Checkpoint:
    """``path`` as a checkpoint, or the newest whole one in it. Raises TrainerError without any."""
    if (path / "checkpoint.json").is_file():
        return read(path)
    found, passed = newest(path)
    if found is None:
        advice = f"no whole checkpoint in {path}: name a run's folder, or a step-… folder in it"
        raise TrainerError("; ".join([advice, *passed]))
    return found


def verify(checkpoint: Checkpoint, rank: int = 0, ranks: int = 1) -> None:
    """Prove every ``ranks``-th part, from the ``rank``-th on, by its sha256.

    Raises TrainerError with the name of the first damaged one.
    """
    parts = json.loads((checkpoint.folder / "checkpoint.json").read_text(encoding="utf-8"))["parts"]
    for part in parts[rank::ranks]:
        if _sha256(checkpoint.folder / part["name"]) != part["sha256"]:
            raise TrainerError(
                f"checkpoint {checkpoint.folder} is damaged: the sha256 of {part['name']} differs; remove this folder "
                "to go on from an older checkpoint"
            )


def prune(root: Path, keep: int, step: int) -> None:
    """Remove all but the ``keep`` newest checkpoints up to ``step``, and what killed saves left.

    Folders of later steps are none of this run's past: a resume passed them over, and a person may want them.
    """
    named = [path for path in root.glob("step-*") if _NAME.fullmatch(path.name) and _step(path) <= step]
    named.sort(key=_step)
    for folder in [*named[:-keep], *root.glob(".step-*.tmp")]:
        shutil.rmtree(folder)


def _tensors(optimizer: LambertOptimizer, buffer: Buffer) -> dict[str, Tensor]:
    """The flat tensors of one buffer by kind."""
    return {"weight": buffer.master.detach().view(-1), **optimizer.moments(buffer)}


def _write_part(folder: Path, optimizer: LambertOptimizer, world: World) -> None:
    partition = optimizer.partition
    assert partition is not None
    tensors, starts = {}, {}
    for buffer in partition.buffers:
        for kind, flat in _tensors(optimizer, buffer).items():
            for part in buffer.slices:
                if partition.shared or world.is_main:  # whole copies on every rank: one is enough
                    tensors[f"{kind}/{part.name}"] = _piece(flat, part, partition)
                    starts[part.name] = part.start
    path = folder / _part_name(world.rank, world.size)
    save_file(tensors, path, metadata={"starts": json.dumps(starts)})
    path.chmod(0o644)  # safetensors leaves it to its owner alone
    sync(path)
    # beside it, for rank 0, which writes the whole list: ranks share this folder and nothing else
    path.with_suffix(".json").write_text(
        json.dumps({"name": path.name, "bytes": path.stat().st_size, "sha256": _sha256(path)}), encoding="utf-8"
    )


def _piece(flat: Tensor, part: Slice, partition: Partition) -> Tensor:
    piece = flat[part.offset : part.offset + part.length].cpu()
    shape = partition.shapes[part.name]
    return piece.view(shape).clone() if part.length == shape.numel() else piece.clone()


def _publish(temporary: Path, final: Path, optimizer: LambertOptimizer, record: dict[str, Any], ranks: int) -> None:
    assert optimizer.partition is not None
    sidecars = [(temporary / _part_name(rank, ranks)).with_suffix(".json") for rank in range(ranks)]
    tree = {
        "format": FORMAT,
        "version": VERSION,
        "shapes": {name: list(shape) for name, shape in optimizer.partition.shapes.items()},
        "parts": [json.loads(path.read_text(encoding="utf-8")) for path in sidecars],
        "record": record,
    }
    for path in sidecars:
        path.unlink()
    (temporary / "checkpoint.json").write_text(json.dumps(tree, indent=1), encoding="utf-8")
    sync(temporary / "checkpoint.json")
    sync(temporary)
    shutil.rmtree(final, ignore_errors=True)  # the same step, saved by an earlier attempt
    os.replace(temporary, final)
    pointer = final.parent / ".latest.tmp"
    pointer.write_text(final.name + "\n", encoding="utf-8")
    sync(pointer)
    os.replace(pointer, final.parent / "latest")
    sync(final.parent)


def _require_same_model(checkpoint: Checkpoint, partition: Partition) -> None:
    if checkpoint.shapes == partition.shapes:
        return
    names = sorted(checkpoint.shapes.keys() | partition.shapes.keys())
    different = [n for n in names if checkpoint.shapes.get(n) != partition.shapes.get(n)]
    name = different[0]
    theirs, ours = checkpoint.shapes.get(name), partition.shapes.get(name)
    raise TrainerError(
        f"checkpoint {checkpoint.folder} is of another model: {len(different)} parameters differ, first {name} "
        f"({list(theirs) if theirs else 'absent'} there, {list(ours) if ours else 'absent'} in this run); give "
        "run.folder another name or restore the model section"
    )


def _nothing() -> None:
    """What the other ranks do while rank 0 works."""


def _part_name(rank: int, ranks: int) -> str:
    return f"part-{rank:05d}-of-{ranks:05d}.safetensors"


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


class _Pieces:
    """Reads flat ranges of parameters from whichever parts hold them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.folder = checkpoint.folder
        self.files: list[Any] = [safe_open(checkpoint.folder / name, framework="pt") for name in checkpoint.parts]
        self.starts = [json.loads(file.metadata()["starts"]) for file in self.files]

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
        """(first element, flat piece) of the parts that hold any of the elements ``start … end``."""
        key = f"{kind}/{name}"
        for file, starts in zip(self.files, self.starts, strict=True):
            if name in starts:
                low = starts[name]
                if low < end and start < low + math.prod(file.get_slice(key).get_shape()):
                    yield low, file.get_tensor(key).view(-1)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Bring a file, or a folder's list of names, to the disk itself."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
