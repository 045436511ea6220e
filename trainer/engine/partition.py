"""A map of DeepSpeed's partitions: which part of which parameter each rank holds, and where.

An optimizer under ZeRO steps over flat fp32 buffers that cut through tensors. LAMB needs whole-tensor norms and a
checkpoint needs whole tensors, so both use this description of the buffers. No other file looks into the partitions.

Under stages 1 and 2 the weights are views of one row, and the optimizer's parameter group holds this rank's share of it
in fp32, so no private name of DeepSpeed's is needed. Stage 3 needs three. Every assumption is checked: the masters must
equal the weights, and every element must have one owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.engine.private_names import MASTERS, ORDER, SHARD, PrivateName, need
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
    ``held``: the model's own elements of each slice, flat, in its precision; empty if the buffers are the weights.
    """

    buffers: tuple[Buffer, ...]
    shapes: dict[str, torch.Size]
    shared: bool
    device: torch.device
    divisor: int = 1
    held: dict[str, Tensor] = field(default_factory=dict)


class Weights(NamedTuple):
    """The model's weights under stages 1 and 2: one flat row, with an equal share for each rank."""

    flat: Tensor  # (size,) in the model's precision
    share: Tensor  # (size / ranks,), this rank's part of the row
    placed: tuple[tuple[nn.Parameter, int], ...]  # the parameters, as views of the row, and where each begins

    def gather(self) -> None:
        """Complete the row on every rank from the shares of all. A collective."""
        if self.flat.numel() > self.share.numel():  # NCCL gathers in place
            dist.all_gather_into_tensor(self.flat, self.share if self.share.is_cuda else self.share.clone())


def read_weights(module: nn.Module) -> Weights:
    """The weights of a module that DeepSpeed has just initialized under stage 1 or 2.

    Raises TrainerError if they are not in one row.
    """
    parameters = sorted(module.parameters(), key=lambda parameter: parameter.storage_offset())
    storage, ranks = parameters[0].untyped_storage(), dist.get_world_size()
    _require({p.untyped_storage().data_ptr() for p in parameters} == {storage.data_ptr()}, "weights in one row")
    with torch.no_grad():
        flat = parameters[0].new_empty(0).set_(storage)
    _require(flat.numel() % ranks == 0, "unequal shares")
    return Weights(flat, flat.chunk(ranks)[dist.get_rank()], tuple((p, int(p.storage_offset())) for p in parameters))


def read_partition(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    zero: Any,
    zero_stage: int,
    shapes: dict[str, torch.Size],
) -> Partition:
    """The partition of a module and an optimizer that DeepSpeed has just initialized.

    ``zero`` is the optimizer that DeepSpeed returned; ``shapes`` are those of the parameters before that. Raises
    TrainerError if DeepSpeed's layout is not the one this file knows.
    """
    device, names = next(module.parameters()).device, {id(p): name for name, p in module.named_parameters()}
    if zero_stage == 0:
        whole = tuple(Buffer(p, (Slice(n, 0, 0, p.numel()),)) for n, p in module.named_parameters())
        return Partition(whole, shapes, False, device)
    if zero_stage == 3:
        buffer, held = _stage_3(zero, names, shapes)
    else:
        buffer, held = _stages_1_and_2(read_weights(module), optimizer, names)
    _require(buffer.master.dtype == torch.float32 and buffer.master.is_contiguous(), "fp32 partitions")
    _require_equal(buffer, held)
    _require_whole(buffer, shapes, device)
    return Partition((buffer,), shapes, True, device, dist.get_world_size() if zero_stage == 3 else 1, held)


def _stages_1_and_2(
    weights: Weights, optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> tuple[Buffer, dict[str, Tensor]]:
    """The parameters are laid end to end and split into equal parts."""
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    _require([master.numel() for master in masters] == [weights.share.numel()], "partition sizes")
    begin, end = (place * weights.share.numel() for place in (dist.get_rank(), dist.get_rank() + 1))
    slices, held = [], {}
    for parameter, at in weights.placed:
        low, high, name = max(at, begin), min(at + parameter.numel(), end), names[id(parameter)]
        if low < high:
            slices.append(Slice(name, low - at, low - begin, high - low))
            held[name] = weights.flat[low:high]
    return Buffer(masters[0], tuple(slices)), held


def _stage_3(zero: Any, names: Mapping[int, str], shapes: Mapping[str, torch.Size]) -> tuple[Buffer, dict[str, Tensor]]:
    """Each parameter is split into equal parts separately; the last ones may be padding, which is never written."""
    groups, masters = _needed(zero, ORDER), _needed(zero, MASTERS)
    _require(len(groups) == len(masters) == 1, "several sub-groups")  # the optimizer would be called once for each
    [parameters], [master], rank, ranks = groups, masters, dist.get_rank(), dist.get_world_size()
    offset, slices, held = 0, [], {}
    for parameter in parameters:
        name = names[id(parameter)]
        shard, whole = _needed(parameter, SHARD).view(-1), shapes[name].numel()
        _require(shard.numel() == -(-whole // ranks), "partition sizes")
        start = min(rank * shard.numel(), whole)
        if length := min(shard.numel(), whole - start):
            slices.append(Slice(name, start, offset, length))
            held[name] = shard[:length]
        offset += shard.numel()
    _require(offset == master.numel(), "partition sizes")
    return Buffer(master, tuple(slices)), held


def _needed(owner: Any, private: PrivateName) -> Any:
    return need(owner, private, "zero_stage 3", "set zero_stage to 2")


def _require(fact: bool, what: str) -> None:
    if not fact:
        raise _differs(what)


def _differs(what: str) -> TrainerError:
    return TrainerError(
        f"DeepSpeed's ZeRO partitions are not laid out as Lambert expects ({what}): use the DeepSpeed "
        "version of requirements.lock"
    )


@torch.no_grad()
def _require_equal(buffer: Buffer, held: Mapping[str, Tensor]) -> None:
    """Check that the masters are the weights: DeepSpeed has just made them from each other."""
    flat = buffer.master.view(-1)
    pairs = ((flat[part.offset : part.offset + part.length], held[part.name]) for part in buffer.slices)
    _require(all(torch.equal(master.to(own), own) for master, own in pairs), "masters of other weights")


def _require_whole(buffer: Buffer, shapes: dict[str, torch.Size], device: torch.device) -> None:
    """Check that every element of every parameter is owned exactly once over all ranks."""
    owned = dict.fromkeys(shapes, 0)
    for part in buffer.slices:
        owned[part.name] += part.length
    counts = torch.tensor(list(owned.values()), dtype=torch.int64, device=device)
    dist.all_reduce(counts)
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
def round_masters(partition: Partition) -> None:
    """Round this rank's masters into its part of the model's weights."""
    for buffer in partition.buffers:
        for part in buffer.slices if partition.held else ():
            flat = buffer.master.view(-1)
            partition.held[part.name].copy_(flat[part.offset : part.offset + part.length])
