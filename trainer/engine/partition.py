"""A map of DeepSpeed's partitions: which part of which parameter each rank holds, and where.

An optimizer under ZeRO steps over flat fp32 buffers that cut through tensors. LAMB needs whole-tensor norms and a
checkpoint needs whole tensors, so both use this description of the buffers. No other file looks into the partitions.
It follows DeepSpeed 0.19.8 (``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py`` and
``runtime/bf16_optimizer.py``), and every assumption about them is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
    """One fp32 tensor that the optimizer steps over, and the slices in it; the rest of it is padding."""

    master: Tensor  # any shape, fp32; offsets of slices refer to its flattened form
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class Partition:
    """This rank's share of all parameters.

    ``shapes``: every parameter of the model by name, in the model's order, the same on all ranks.
    ``shared``: True if a parameter may be split over ranks, so that norms need an all-reduce.
    ``device``: the device of the weights and of collectives; the buffers may be in host memory instead.
    ``divisor``: what DeepSpeed divided the gradients by; multiplied by it, they are the sums over the ranks.
    """

    buffers: tuple[Buffer, ...]
    shapes: dict[str, torch.Size]
    shared: bool
    device: torch.device
    divisor: int = 1


def read_partition(engine: Any, zero_stage: int) -> Partition:
    """The partition of a freshly initialized DeepSpeed engine.

    Raises TrainerError if DeepSpeed's layout is not the one this file knows.
    """
    named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    shapes = {name: getattr(p, "ds_shape", p.shape) for name, p in named}  # a partitioned parameter is empty
    device = named[0][1].device
    if zero_stage == 0:
        return Partition(tuple(Buffer(p, (Slice(n, 0, 0, p.numel()),)) for n, p in named), shapes, False, device)
    zero, names = engine.optimizer, {id(p): name for name, p in named}
    rank, ranks = dist.get_rank(zero.dp_process_group), dist.get_world_size(zero.dp_process_group)
    read = {
        "DeepSpeedZeroOptimizer": _stages_1_and_2,
        "BF16_Optimizer": _stage_1_in_bf16,
        "DeepSpeedZeroOptimizer_Stage3": _stage_3,
    }.get(type(zero).__name__)
    if read is None:
        raise _differs(f"optimizer {type(zero).__name__}")
    buffers = read(zero, names, rank, ranks)
    _require(all(b.master.dtype == torch.float32 and b.master.is_contiguous() for b in buffers), "fp32 partitions")
    _require_whole(buffers, shapes, zero.dp_process_group, device)
    return Partition(buffers, shapes, True, device, ranks if zero_stage == 3 else 1)


class Halves(NamedTuple):
    """The model's half-precision weights under stages 1 and 2: one flat row, with an equal share for each rank."""

    flat: Tensor  # (size,) fp16 or bf16
    share: Tensor  # (size / ranks,), this rank's part of the row
    placed: tuple[tuple[nn.Parameter, int], ...]  # the parameters, as views of the row, and where each begins
    offloaded: bool = False  # their masters are in the host's memory


def take_halves(engine: Any) -> Halves | None:
    """Take over the row of a freshly initialized engine and remove its gradient hooks; None if it has no such row.

    Raises TrainerError if DeepSpeed's layout is not the one this file knows.
    """
    zero = engine.optimizer
    if type(zero).__name__ != "DeepSpeedZeroOptimizer" or zero.dtype == torch.float32:
        return None
    _require(len(zero.bit16_groups_flat) == 1, "several groups")
    ranks, rank = dist.get_world_size(), dist.get_rank()  # trainer/engine/gradients.py reduces over all of them
    _require(dist.get_world_size(zero.dp_process_group) == ranks, "a group of some ranks")
    [flat], [parameters] = zero.bit16_groups_flat, zero.round_robin_bit16_groups
    placed = tuple(zip(parameters, zero.round_robin_bit16_offsets[0], strict=True))
    begin = flat.data_ptr()
    _require(all(p.data_ptr() == begin + at * flat.element_size() for p, at in placed), "weights in one row")
    for hook in zero._grad_acc_hooks:
        hook.remove()
    [shares] = zero.parallel_partitioned_bit16_groups
    _require({len(share) for share in shares} == {len(flat) // ranks}, "unequal shares")
    return Halves(flat, shares[rank], placed, zero.cpu_offload)


def _stages_1_and_2(zero: Any, names: Mapping[int, str], rank: int, ranks: int) -> tuple[Buffer, ...]:
    """One buffer per group: its parameters are laid end to end and split into equal parts."""
    _require(not zero.round_robin_gradients and not zero.parameter_alignment, "reordered partitions")
    buffers = []
    for group, master in enumerate(zero.single_partition_of_fp32_groups):
        _require(master.numel() == zero.partition_size[group], "partition sizes")
        placed = zip(zero.round_robin_bit16_groups[group], zero.round_robin_bit16_offsets[group], strict=True)
        buffers.append(_cut(master, ((names[id(p)], p.numel(), at) for p, at in placed), rank))
    return tuple(buffers)


def _stage_1_in_bf16(zero: Any, names: Mapping[int, str], rank: int, ranks: int) -> tuple[Buffer, ...]:
    """Read stage 1's partition in bf16, where DeepSpeed keeps no offsets: they follow from the addresses."""
    buffers = []
    for parameters, flat, master in zip(
        zero.bf16_groups, zero.bf16_groups_flat, zero.fp32_groups_flat_partition, strict=True
    ):
        _require(master.numel() * ranks == flat.numel(), "partition sizes")
        begin = flat.data_ptr()
        placed = [(names[id(p)], p.numel(), (p.data_ptr() - begin) // p.element_size()) for p in parameters]
        buffers.append(_cut(master, placed, rank))
    return tuple(buffers)


def _cut(master: Tensor, placed: Iterable[tuple[str, int, int]], rank: int) -> Buffer:
    """A rank's part of a buffer that spans all ranks. ``placed``: name, elements and offset of each parameter."""
    begin, slices = rank * master.numel(), []
    for name, length, at in placed:
        low, high = max(at, begin), min(at + length, begin + master.numel())
        if low < high:
            slices.append(Slice(name, low - at, low - begin, high - low))
    return Buffer(master, tuple(slices))


def _stage_3(zero: Any, names: Mapping[int, str], rank: int, ranks: int) -> tuple[Buffer, ...]:
    """Each parameter is split into equal parts separately; the last ones may be padding, which is never written."""
    _require(len(zero.fp16_groups) == 1, "several sub-groups")  # the optimizer would be called once per sub-group
    _require(not zero.offload_param, "weights in the host's memory")
    [parameters], [master] = zero.fp16_groups, zero.fp32_partitioned_groups_flat
    offset, slices = 0, []
    for parameter in parameters:
        share, whole = parameter.partition_numel(), parameter.ds_numel
        _require(share == -(-whole // ranks) == parameter.ds_tensor.numel(), "partition sizes")
        start = min(rank * share, whole)
        if length := min(share, whole - start):
            slices.append(Slice(names[id(parameter)], start, offset, length))
        offset += share
    _require(offset == master.numel(), "partition sizes")
    return (Buffer(master, tuple(slices)),)


def _require(fact: bool, what: str) -> None:
    if not fact:
        raise _differs(what)


def _differs(what: str) -> TrainerError:
    return TrainerError(
        f"DeepSpeed's ZeRO partitions are not laid out as Lambert expects ({what}): use the DeepSpeed "
        "version of requirements.lock"
    )


def _require_whole(buffers: Iterable[Buffer], shapes: dict[str, torch.Size], group: Any, device: torch.device) -> None:
    """Check that every element of every parameter is owned exactly once over all ranks."""
    owned = dict.fromkeys(shapes, 0)
    for buffer in buffers:
        for part in buffer.slices:
            owned[part.name] += part.length
    counts = torch.tensor(list(owned.values()), dtype=torch.int64, device=device)
    dist.all_reduce(counts, group=group)
    _require(counts.tolist() == [shape.numel() for shape in shapes.values()], "parameters not covered once")


@torch.no_grad()
def fill_masters(partition: Partition, weights: Mapping[str, Tensor]) -> None:
    """Copy ``weights``, whole tensors, into this rank's masters; parameters not among them stay as they are."""
    for buffer in partition.buffers:
        flat = buffer.master.view(-1)
        for part in buffer.slices:
            if part.name in weights:
                whole = weights[part.name].reshape(-1)
                flat[part.offset : part.offset + part.length] = whole[part.start : part.start + part.length]


@torch.no_grad()
def refresh_weights(engine: Any, zero_stage: int) -> None:
    """Round the masters into the model's weights again, on every rank."""
    zero = engine.optimizer
    if zero_stage == 3:  # parameters that are gathered now would keep their old values
        zero._partition_all_parameters()
        zero._reassign_or_swap_out_partitioned_parameters(0)
    elif zero_stage > 0:
        zero.update_lp_params()
