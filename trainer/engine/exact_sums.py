"""A test of DeepSpeed's own path at a run's start: are its gradients the exact sums?

Lambert leaves gradients in half precision to DeepSpeed only if it must (:mod:`trainer.engine.private_names`), and not
every release can be trusted with them: those of 0.19.7 are wrong under ZeRO 1, and rounded to half precision under 2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.engine.partition import Partition
from trainer.engine.private_names import HOOKS, refusal

# What the gradients of three micro-batches are multiples of. Added up in half precision, the small one would be lost.
PARTS = (256.0, 1 / 16, -256.0)


def require_exact_sums(engine: Any, module: nn.Module, optimizer: torch.optim.Optimizer, partition: Partition) -> None:
    """Give DeepSpeed gradients that are known, and compare what it hands to the optimizer. A collective.

    ``optimizer`` must not be bound yet: then its step changes no weight. Raises TrainerError on all ranks if any
    gradient is not the sum over micro-batches and ranks.
    """
    values = {name: (number % 16 + 1) / 16 for number, name in enumerate(partition.shapes)}
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    share = (rank == 0) + 2 * (rank == last)  # the other ranks give zeros, so that no sum overflows
    [buffer], given = partition.buffers, list[Tensor | None]()
    handle = optimizer.register_step_pre_hook(lambda *_: given.append(buffer.master.grad))
    for part in PARTS:
        losses = [p.float().sum() * (values[name] * part * share) for name, p in module.named_parameters()]
        engine.set_gradient_accumulation_boundary(part == PARTS[-1])
        engine.backward(torch.stack(losses).sum(), scale_wrt_gas=False)
    engine.step()
    handle.remove()
    gradient = given[0] if len(given) == 1 else None
    exact = gradient is not None
    if gradient is not None:
        for own in buffer.slices:
            found = gradient.view(-1)[own.offset : own.offset + own.length]
            exact &= bool((found == values[own.name] * sum(PARTS) * 3).all())
    agreed = torch.tensor(exact, dtype=torch.int32, device=partition.device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    if not agreed:
        raise refusal(HOOKS, "and its own sums of gradients are not exact", "set zero_stage to 3")
