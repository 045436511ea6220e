"""Half-precision gradients under ZeRO 1 and 2: accumulated in fp32, reduced and applied in few kernel launches.

DeepSpeed lays out and partitions the weights. Left to itself, it then works parameter by parameter in Python between
a backward pass and the next forward pass, and BERT-Large has 390 parameters. Here one launch collects the gradients of
a backward pass, one collective reduces them, and one collective gathers the new weights.

    stage 1: each rank accumulates its own micro-batches, for all parameters, and reduces once per step
    stage 2: each rank reduces every micro-batch, on GPUs while the next one is computed, and accumulates its share only

Memory kept from step to step, in bytes per parameter: 2 for the row that is reduced; on several GPUs, 2 / ranks for
the result; and, after a step of several micro-batches, 4 (stage 1) or 4 / ranks (stage 2) for the sums, until a step
has only one micro-batch. A step that has begun either finishes or ends the process.
While a row is being filled, the gradients from autograd are still in memory as well.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.accumulate import accumulate, make_places
from trainer.engine.optimizer import LambertOptimizer
from trainer.engine.partition import Weights


class Gradients:
    """One rank's gradients of ``weights``, from backward pass to new weights. Every rank must make every call.

    ``offloads``: the masters are in host memory.
    """

    def __init__(self, weights: Weights, zero_stage: int, optimizer: LambertOptimizer, offloads: bool = False) -> None:
        flat, share = weights.flat, weights.share
        self.weights, self.optimizer, self.whole, self.offloads = weights, optimizer, zero_stage == 1, offloads
        self.ranks = flat.numel() // share.numel()  # DeepSpeed pads the row, so shares are equal and never empty
        self.places = make_places([at for _, at in weights.placed], [p.numel() for p, _ in weights.placed], flat.device)
        self.own_places = make_places([0], [share.numel()], flat.device)
        self.row = torch.zeros_like(flat)  # (size,), what is reduced over the ranks
        self.scatters = flat.is_cuda and self.ranks > 1  # gloo sums the whole row, in place
        own = torch.empty_like(share) if self.scatters else self.row.chunk(self.ranks)[dist.get_rank()]
        self.reduced = own  # (size / ranks,), this rank's share of the ranks' sum
        self.reduction: dist.Work | None = None  # in progress
        self.sums: Tensor | None = None  # fp32, (size,) at stage 1, else (size / ranks,); None for one micro-batch
        self.summed: Tensor | None = None  # ``sums`` once they include a micro-batch of this step
        self.own: Tensor | None = None  # (size / ranks,), what the step applies: ``reduced``, or stage 2's ``sums``
        self.copy = torch.empty_like(share, device="cpu", pin_memory=share.is_cuda) if offloads else share
        optimizer.copies = [self.copy]  # the new weights, in half precision

    @torch.no_grad()
    def add(self, first: bool, last: bool) -> None:
        """Collect the gradients of a backward pass. A micro-batch may be the step's ``first``, ``last``, or both."""
        given = [parameter.grad for parameter, _ in self.weights.placed]
        for parameter, _ in self.weights.placed:
            parameter.grad = None  # ``given`` keeps them until the launch; later work on the stream waits for it
        if first:
            self.sums, self.summed = None if last else self._new_sums(), None
        if self.whole and not last:
            assert self.sums is not None
            accumulate(self.sums, given, self.places, self.summed)
            self.summed = self.sums
            return
        if not (self.whole or first):
            self._collect()  # the previous micro-batch; the row is then free again
        accumulate(self.row, given, self.places, self.summed if self.whole else None)
        self._reduce()
        if last:
            self.own = self._collect()

    def step(self) -> bool:
        """Update the weights on all ranks, or on none if a gradient overflowed on any rank; returns which.

        If the masters are in host memory, the update runs there too, on a copy of this rank's gradients.

        Waits for the device, because the ranks' total sum of squares decides whether to step.
        """
        assert self.own is not None
        own, share = self.own.cpu() if self.offloads else self.own, self.weights.share
        squares = self.optimizer.square_sum([own])
        whole = self.optimizer.complete(squares.clone())
        if not bool(whole.isfinite()):
            return False
        self.optimizer.move([own], squares, whole)
        if self.offloads:
            share.copy_(self.copy)
        self.weights.gather()
        return True

    def _new_sums(self) -> Tensor:
        """The buffer for this step's sums: the last step's if there is one, to be overwritten; padding stays zero."""
        size = self.row.numel() if self.whole else self.weights.share.numel()
        return torch.zeros(size, dtype=torch.float32, device=self.row.device) if self.sums is None else self.sums

    def _reduce(self) -> None:
        """Start summing the row over the ranks."""
        if self.scatters:
            self.reduction = dist.reduce_scatter_tensor(self.reduced, self.row, async_op=True)
        elif self.ranks > 1:
            dist.all_reduce(self.row)

    def _collect(self) -> Tensor:
        """This step's reduced gradients so far, including the reduction in progress."""
        if self.reduction is not None:
            self.reduction.wait()  # the stream waits, not this thread
            self.reduction = None
        if self.whole or self.sums is None:
            return self.reduced
        accumulate(self.sums, [self.reduced], self.own_places, self.summed)
        self.summed = self.sums
        return self.sums
