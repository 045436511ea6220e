"""The part of a checkpoint that one rank owns, copied to CPU memory so that training can go on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from data_prep.atomic import sync
from data_prep.manifest import file_sha256
from trainer.checkpoint import reading as checkpoint
from trainer.engine.optimizer import LambertOptimizer
from trainer.ranks.world import World


@dataclass(frozen=True)
class Part:
    """A copy of what one rank owns."""

    tensors: dict[str, Tensor]  # "kind/name": fp32, whole with its shape or a flat piece
    starts: dict[str, int]  # name: first element of the piece
    shapes: dict[str, torch.Size]  # of all parameters
    rank: int
    ranks: int

    @property
    def name(self) -> str:
        """The name of its file."""
        return checkpoint.part_name(self.rank, self.ranks)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the part to disk. Returns what the checkpoint lists of it: name, bytes and sha256."""
        path = folder / self.name
        save_file(self.tensors, path, metadata={"starts": json.dumps(self.starts)})
        path.chmod(0o644)  # safetensors makes it readable by its owner only
        sync(path)
        return {"name": path.name, "bytes": path.stat().st_size, "sha256": file_sha256(path)}


def copy_part(optimizer: LambertOptimizer, world: World) -> Part:
    """This rank's tensors in CPU memory, their starts, and the shapes of all parameters."""
    partition = optimizer.partition
    assert partition is not None
    tensors: dict[str, Tensor] = {}
    starts: dict[str, int] = {}
    for buffer in partition.buffers:
        for kind, flat in checkpoint.flat_tensors(optimizer, buffer).items():
            for part in buffer.slices:
                if partition.shared or world.is_main:  # if every rank has everything, rank 0's copy is enough
                    shape = partition.shapes[part.name]
                    piece = torch.empty(shape if part.length == shape.numel() else (part.length,), device="cpu")
                    piece.view(-1).copy_(flat[part.offset : part.offset + part.length])
                    tensors[f"{kind}/{part.name}"] = piece
                    starts[part.name] = part.start
    return Part(tensors, starts, partition.shapes, world.rank, world.size)
