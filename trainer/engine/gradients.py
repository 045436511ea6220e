"""Gradients in half precision under ZeRO 1 and 2: added up in fp32, reduced and stepped by, in few launches.

DeepSpeed lays the weights out and cuts them; between a backward and the next forward it then works parameter by
parameter, in Python, and BERT-Large has 390. Here a backward's gradients move in one launch, one collective reduces
them, and one brings the weights back.

    stage 1: each rank adds up its own micro-batches, all parameters, and reduces once a step
    stage 2: each rank reduces every micro-batch, on GPUs while the next one is computed, and adds up its share alone

Kept from step to step, in bytes a parameter: 2 for the row that is reduced; on several GPUs 2 / ranks for what comes
of it; and, after a step of several micro-batches until one of a single one, 4 (stage 1) or 4 / ranks (stage 2) for the
sums. A step that was begun is finished, or the process ends.
While a row is filled, the gradients that autograd left are there, too.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.accumulate import accumulate, make_places
from trainer.engine.optimizer import LambertOptimizer
from trainer.engine.partition import Halves


class Gradients:
    """One rank's gradients of ``halves``, from backward to the new weights. Every rank makes every call."""

    def __init__(self, halves: Halves, zero_stage: int, optimizer: LambertOptimizer) -> None:
        flat, share = halves.flat, halves.share
        self.halves, self.optimizer, self.whole = halves, optimizer, zero_stage == 1
        self.ranks = flat.numel() // share.numel()  # DeepSpeed pads the row, so shares are equal and not empty
        self.places = make_places([at for _, at in halves.placed], [p.numel() for p, _ in halves.placed], flat.device)
        self.own_places = make_places([0], [share.numel()], flat.device)
        self.row = torch.zeros_like(flat)  # (size,), what goes over the ranks
        self.scatters = flat.is_cuda and self.ranks > 1  # gloo sums the whole row, in place
        own = torch.empty_like(share) if self.scatters else self.row.chunk(self.ranks)[dist.get_rank()]
        self.reduced = own  # (size / ranks,), this rank's share of the ranks' sum
        self.reduction: dist.Work | None = None  # under way
        self.sums: Tensor | None = None  # fp32, (size,) at stage 1, else (size / ranks,); None for one micro-batch
        self.summed: Tensor | None = None  # ``sums`` once they hold a micro-batch of this step
        self.own: Tensor | None = None  # (size / ranks,), what the step goes by: ``reduced``, or stage 2's ``sums``
        self.copy = torch.empty_like(share, device="cpu", pin_memory=share.is_cuda) if halves.offloaded else share
        optimizer.copies = [self.copy]  # the new weights, beside their masters

    @torch.no_grad()
    def add(self, first: bool, last: bool) -> None:
        """Take the gradients that a backward left, of the step's ``first`` or ``last`` micro-batch, or both."""
        given = [parameter.grad for parameter, _ in self.halves.placed]
        for parameter, _ in self.halves.placed:
            parameter.grad = None  # ``given`` holds them until the launch; later work waits for it, on the same stream
        if first:
            self.sums, self.summed = None if last else self._new_sums(), None
        if self.whole and not last:
            assert self.sums is not None
            accumulate(self.sums, given, self.places, self.summed)
            self.summed = self.sums
            return
        if not (self.whole or first):
            self._collect()  # the micro-batch before this one; the row is free again
        accumulate(self.row, given, self.places, self.summed if self.whole else None)
        self._reduce()
        if last:
            self.own = self._collect()

    def step(self) -> bool:
        """Move the weights on all ranks; or nothing on any, and False, where a gradient overflowed on one of them.

        Where the masters are in the host's memory, so is the step: this rank's share of the gradient goes there.

        Waits for the device: whether to step is decided here, from the ranks' common sum of squares.
        """
        assert self.own is not None
        own, share = self.own.cpu() if self.halves.offloaded else self.own, self.halves.share
        squares = self.optimizer.square_sum([own])
        whole = self.optimizer.complete(squares.clone())
        if not bool(whole.isfinite()):
            return False
        self.optimizer.move([own], squares, whole)
        if self.halves.offloaded:
            share.copy_(self.copy)
        if self.ranks > 1:  # NCCL gathers in place
            dist.all_gather_into_tensor(self.halves.flat, share if share.is_cuda else share.clone())
        return True

    def _new_sums(self) -> Tensor:
        """The sums of the last step, to be written over, if there are any. Padding is never written: it stays zero."""
        size = self.row.numel() if self.whole else self.halves.share.numel()
        return torch.zeros(size, dtype=torch.float32, device=self.row.device) if self.sums is None else self.sums

    def _reduce(self) -> None:
        """Begin to sum the row over the ranks."""
        if self.scatters:
            self.reduction = dist.reduce_scatter_tensor(self.reduced, self.row, async_op=True)
        elif self.ranks > 1:
            dist.all_reduce(self.row)

    def _collect(self) -> Tensor:
        """What this step's reductions came to so far, the one under way included."""
        if self.reduction is not None:
            self.reduction.wait()  # the stream waits, not this thread
            self.reduction = None
        if self.whole or self.sums is None:
            return self.reduced
        accumulate(self.sums, [self.reduced], self.own_places, self.summed)
        self.summed = self.sums
        return self.sums
