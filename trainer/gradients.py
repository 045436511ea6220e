"""Gradients in half precision under ZeRO 1 and 2: added up in fp32, reduced and stepped by, in few launches.

DeepSpeed lays the weights out and cuts them; between a backward and the next forward it then works parameter by
parameter, in Python, and BERT-Large has 390: on two H200s that cost 51 % of a step (docs/lab.md). Here a backward's
gradients move in one launch, and one collective each reduces them and brings the weights back.

    stage 1: sums over the micro-batches on each rank, whole; one reduction a step
    stage 2: sums of this rank's share alone; a reduction a micro-batch
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.accumulate import accumulate, make_places
from trainer.optimizer import LambertOptimizer
from trainer.partition import Halves


class Gradients:
    """One rank's gradients of ``halves``, from backward to the new weights. Every rank makes every call."""

    def __init__(self, halves: Halves, zero_stage: int, optimizer: LambertOptimizer) -> None:
        flat, self.halves, self.optimizer = halves.flat, halves, optimizer
        self.whole = zero_stage == 1  # whether sums are
        self.places = make_places([at for _, at in halves.placed], [p.numel() for p, _ in halves.placed], flat.device)
        self.own_places = make_places([0], [halves.share.numel()], flat.device)
        self.reduced = torch.zeros_like(flat)  # what goes over the ranks; its padding stays zero
        self.sums: Tensor | None = None  # (size,) or (size / ranks,) fp32, once there are several micro-batches
        self.own = self.reduced  # what this rank steps by: its share, fp16, bf16 or fp32
        optimizer.copies = [halves.share]

    def add(self, first: bool, last: bool) -> None:
        """Take the gradients that a backward left; ``last``: of this step, which then has what it steps by."""
        given = [parameter.grad for parameter, _ in self.halves.placed]
        for parameter, _ in self.halves.placed:
            parameter.grad = None
        if self.sums is None and not last:
            size = self.reduced.numel() if self.whole else self.halves.share.numel()
            self.sums = torch.zeros(size, dtype=torch.float32, device=self.reduced.device)
        before = None if first else self.sums
        if self.whole and not last:
            assert self.sums is not None
            accumulate(self.sums, given, self.places, before)
            return
        accumulate(self.reduced, given, self.places, before if self.whole else None)
        self.own = self._reduce()
        if not self.whole and not (first and last):
            assert self.sums is not None
            accumulate(self.sums, [self.own], self.own_places, before)
            self.own = self.sums

    def step(self) -> bool:
        """Move the weights on all ranks; or on none, and False, where any gradient overflowed. Waits for the device."""
        squares = self.optimizer.square_sum([self.own])
        whole = self.optimizer.complete(squares.clone())
        if not bool(whole.isfinite()):
            return False
        self.optimizer.move([self.own], squares, whole)
        if self._ranks > 1:
            own = self.halves.share if self.reduced.is_cuda else self.halves.share.clone()  # gloo takes no overlap
            dist.all_gather_into_tensor(self.halves.flat, own)
        return True

    @property
    def _ranks(self) -> int:
        return self.halves.flat.numel() // self.halves.share.numel()

    def _reduce(self) -> Tensor:
        """This rank's share of the sum over the ranks."""
        if self._ranks == 1:
            return self.reduced
        if self.reduced.is_cuda:
            own = torch.empty_like(self.halves.share)
            dist.reduce_scatter_tensor(own, self.reduced)
            return own
        dist.all_reduce(self.reduced)
        return self.reduced.chunk(self._ranks)[dist.get_rank()]
