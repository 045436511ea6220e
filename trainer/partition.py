"""Where DeepSpeed keeps which part of which parameter: the only file that looks into its partitions.

An optimizer under ZeRO steps over flat fp32 buffers that cut through tensors. LAMB needs whole-tensor
norms and a checkpoint needs whole tensors, so both work on this description of the buffers instead.
Read from DeepSpeed 0.19.8 (``runtime/zero/stage_1_and_2.py``); what it relies on is asserted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.errors import TrainerError


@dataclass(frozen=True)
class Slice:
    """Elements ``start … start + length`` of a flattened parameter, at ``offset`` of a flat buffer."""

    name: str
    start: int
    offset: int
    length: int


@dataclass(frozen=True)
class Buffer:
    """One fp32 tensor that the optimizer steps over, and what it holds; the rest of it is padding."""

    master: Tensor  # any shape, fp32; slices count in its flattened form
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class Partition:
    """This rank's share of all parameters.

    ``shapes``: every parameter of the model by name, in the model's order, the same on all ranks.
    ``shared``: True where a parameter may be cut over ranks, so that norms need an all-reduce.
    """

    buffers: tuple[Buffer, ...]
    shapes: dict[str, torch.Size]
    shared: bool


def read_partition(engine: Any, zero_stage: int) -> Partition:
    """The partition of a freshly initialised DeepSpeed engine.

    Raises TrainerError where DeepSpeed is laid out in another way than this file knows.
    """
    named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    shapes = {name: p.shape for name, p in named}
    if zero_stage == 0:
        return Partition(tuple(Buffer(p, (Slice(n, 0, 0, p.numel()),)) for n, p in named), shapes, False)
    zero = engine.optimizer
    _require(type(zero).__name__ == "DeepSpeedZeroOptimizer", f"optimizer {type(zero).__name__}")
    _require(not zero.round_robin_gradients and not zero.parameter_alignment, "reordered partitions")
    _require(not zero.cpu_offload, "optimizer offload")
    names = {id(p): name for name, p in named}
    buffers = []
    rank = torch.distributed.get_rank(zero.dp_process_group)
    for group, master in enumerate(zero.single_partition_of_fp32_groups):
        size = zero.partition_size[group]
        _require(master.numel() == size and master.dtype == torch.float32, "fp32 partitions")
        begin, slices = rank * size, []
        parameters = zero.round_robin_bit16_groups[group]
        for parameter, at in zip(parameters, zero.round_robin_bit16_offsets[group], strict=True):
            low, high = max(at, begin), min(at + parameter.numel(), begin + size)
            if low < high:
                slices.append(Slice(names[id(parameter)], low - at, low - begin, high - low))
        buffers.append(Buffer(master, tuple(slices)))
    _require_whole(buffers, shapes, zero.dp_process_group)
    return Partition(tuple(buffers), shapes, True)


def _require(fact: bool, what: str) -> None:
    if not fact:
        raise TrainerError(
            f"DeepSpeed's ZeRO partitions are not as Lambert reads them ({what}): use the DeepSpeed "
            "version of requirements.lock"
        )


def _require_whole(buffers: list[Buffer], shapes: dict[str, torch.Size], group: Any) -> None:
    """Every element of every parameter is owned exactly once, over all ranks."""
    owned = dict.fromkeys(shapes, 0)
    for buffer in buffers:
        for part in buffer.slices:
            owned[part.name] += part.length
    counts = torch.tensor(list(owned.values()), dtype=torch.int64, device=buffers[0].master.device)
    torch.distributed.all_reduce(counts, group=group)
    _require(counts.tolist() == [shape.numel() for shape in shapes.values()], "parameters not covered once")


@torch.no_grad()
def refresh_weights(engine: Any, zero_stage: int) -> None:
    """Make the model's weights the rounding of the masters again, on every rank."""
    if zero_stage > 0:
        engine.optimizer.update_lp_params()
