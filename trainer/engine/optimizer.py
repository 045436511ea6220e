"""LAMB and Adam as PyTorch optimizers that DeepSpeed drives, exact under every partition of ZeRO.

DeepSpeed hands an optimizer flat buffers that cut through tensors and calls ``step`` on them. These
optimizers step over the :class:`~trainer.engine.partition.Partition` instead, so they know which tensor an
element belongs to: the decay, the trust ratio and every norm are those of whole tensors, and the
padding of the buffers is never read into one.

NVIDIA Apex's optimizers are not among the choices. Its FusedLAMB takes the norms of the tensors that it is
given and moves these in the same call (csrc/multi_tensor_lamb.cu): under ZeRO that is the trust ratio of one
rank's share, and no place is left to complete it over the ranks. Its FusedAdam has no norms and would be exact,
but does nothing that the step here does not do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.adam import Moments, adam_update
from kernels.flat import Flat, Layout, Piece, gradient_square_sum, make_layout
from kernels.lamb import lamb_begin, lamb_finish, trust_ratios
from trainer.bounds import outside
from trainer.engine.partition import Buffer, Partition

MOMENTS = ("exp_avg", "exp_avg_sq")  # PyTorch's own names of the two moving averages


@dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer, and its constants. The learning rate belongs to the phases.

    LAMB's defaults are the paper's (You et al. 2020, Algorithm 2, φ the identity) and its authors' code's. Others:
    NVIDIA's NVLAMB pre-normalises the gradients, g / max(1, ‖g‖) of all tensors together, which is
    ``gradient_clipping: 1.0``, and in Apex with ``use_nvlamb`` adapts all tensors. DeepSpeed's FusedLamb adapts
    all, within ``min_coeff`` and ``max_coeff``. The paper's other φ bounds ‖x‖ instead, at values that it does not
    give. Norms are L2, as everybody's: one all-reduce completes their sums of squares over the ranks.
    """

    name: Literal["lamb", "adam"] = "lamb"  # lamb for large batches, adam for small ones
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.999  # decay of the second moment
    epsilon: float = 1e-6  # added to the root of the second moment
    weight_decay: float = 0.01  # decoupled; not for biases and LayerNorm
    bias_correction: bool = True  # False: the original BERT's Adam, DeepSpeed's recipe for LAMB
    gradient_clipping: float = 0.0  # gradients are divided by max(1, their global norm / this); 0 is off
    # LAMB only:
    adapted: Literal["decayed", "all"] = "decayed"  # decayed: biases and LayerNorm have a trust ratio of 1
    min_trust_ratio: float = 0.0  # bounds of the trust ratios; where a norm is zero the ratio is 1 all the same
    max_trust_ratio: float | None = None  # null: none

    def problems(self) -> list[str]:
        """What cannot be, each with its remedy."""
        found = []
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                found.append(f"{name} is {getattr(self, name)}: must lie in [0, 1)")
        found += outside(
            self,
            epsilon=(1e-30, 1),  # in fp32, less is 0
            weight_decay=(-math.inf, 10),
            gradient_clipping=(-math.inf, 10**9),
            min_trust_ratio=(-math.inf, 10**9),
            max_trust_ratio=(-math.inf, 10**9),
        )
        for name in ("weight_decay", "gradient_clipping", "min_trust_ratio"):
            if getattr(self, name) < 0:
                found.append(f"{name} is {getattr(self, name)}: must be 0 (off) or more")
        most = self.max_trust_ratio
        if most is not None and (most <= 0 or most < self.min_trust_ratio):
            least = self.min_trust_ratio
            found.append(f"max_trust_ratio is {most}: must be above 0 and not below min_trust_ratio ({least}), or null")
        for name in ("adapted", "min_trust_ratio", "max_trust_ratio"):
            if self.name != "lamb" and getattr(self, name) != getattr(OptimizerConfig, name):
                found.append(f"{name} is LAMB's, and name is {self.name}: leave it out, or set name to lamb")
        return found


def decays(shape: torch.Size) -> bool:
    """Whether a parameter is decayed: matrices are, biases and LayerNorm are not.

    The authors' LAMB leaves the tensors that it does not decay out of the layer adaptation, too.
    """
    return len(shape) > 1


class LambertOptimizer(torch.optim.Optimizer):
    """The common part: binding to a partition, gradient scale, norm and clipping, and the moments."""

    def __init__(self, parameters: Iterator[Tensor], config: OptimizerConfig) -> None:
        super().__init__(list(parameters), {"lr": 0.0})
        self.config = config
        self.partition: Partition | None = None
        self.rows: dict[str, int] = {}  # of LAMB's sums, by the names of the adapted parameters
        self.layouts: list[Layout] = []  # of the partition's buffers
        self.steps = 0  # taken; bias correction counts them
        self.gradient_scale = 1.0  # what the loss was multiplied by
        self.gradient_norm = torch.zeros(())  # of the last step: global, unscaled, before clipping
        self.trust: Tensor | None = None  # (K,) LAMB's ratios of the last step
        self.copies: list[Tensor] | None = None  # where each buffer's weights go, rounded; None: DeepSpeed copies

    def bind(self, partition: Partition) -> None:
        """Step over ``partition`` from now on, with zero moments. Until then ``step`` does nothing."""
        self.partition = partition
        self.gradient_norm = partition.buffers[0].master.new_zeros(())  # on the device from the start
        every = self.config.adapted == "all"
        adapted = [name for name, shape in partition.shapes.items() if every or decays(shape)]
        self.rows = {name: row for row, name in enumerate(adapted)}
        self.layouts = [self._layout(buffer) for buffer in partition.buffers]
        for buffer in partition.buffers:
            flat = buffer.master.view(-1)
            self.state[buffer.master] = {name: torch.zeros_like(flat) for name in MOMENTS}

    def moments(self, buffer: Buffer) -> dict[str, Tensor]:
        """The two moving averages of a buffer, flat fp32, by PyTorch's names."""
        return {name: self.state[buffer.master][name] for name in MOMENTS}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step over the bound partition, from the gradients that DeepSpeed put there.

        These are read as they are: what unscales and clips them is a factor on the device, so that no
        step waits for the GPU.
        """
        if self.partition is None:
            return  # DeepSpeed's initialisation may try the optimizer on zero gradients
        gradients = [_gradient(buffer) for buffer in self.partition.buffers]
        self.move(gradients, self.square_sum(gradients))

    def square_sum(self, gradients: list[Tensor]) -> Tensor:
        """() fp32: of this rank's gradients, by buffer, flat, of any dtype; unscaled. Not finite where one is not."""
        both = zip(gradients, self.layouts, strict=True)
        return torch.stack([gradient_square_sum(*pair) for pair in both]).sum() * self._unscale**2

    @torch.no_grad()
    def move(self, gradients: list[Tensor], squares: Tensor, whole: Tensor | None = None) -> None:
        """One step by gradients of this ``square_sum``; ``whole``: that of all ranks, where it is known already."""
        self.steps += 1
        factor = torch.full_like(squares, self._unscale)
        if self.config.gradient_clipping > 0:  # the moments must see clipped gradients: a second all-reduce
            whole = self.complete(squares.clone()) if whole is None else whole
            factor *= (self.config.gradient_clipping / whole.sqrt()).clamp(max=1.0)
        self.gradient_norm = self._update(gradients, factor, squares, whole).sqrt()

    @property
    def _unscale(self) -> float:
        assert self.partition is not None
        return self.partition.divisor / self.gradient_scale

    def _update(self, gradients: list[Tensor], factor: Tensor, squares: Tensor, whole: Tensor | None) -> Tensor:
        """Move the weights by ``factor`` times the gradients. ``squares`` () is this rank's sum of squared
        gradients, unscaled and before clipping; returns that of all ranks, ``whole`` where it is known.
        """
        raise NotImplementedError

    def _layout(self, buffer: Buffer) -> Layout:
        assert self.partition is not None
        pieces = []
        for part in buffer.slices:
            shape = self.partition.shapes[part.name]
            decay = self.config.weight_decay if decays(shape) else 0.0
            row, whole = self.rows.get(part.name, -1), part.length == shape.numel()
            pieces.append(Piece(part.offset, part.length, decay, row, whole))
        return make_layout(pieces, buffer.master.numel(), buffer.master.device)

    def _flats(self) -> list[Flat]:
        assert self.partition is not None
        flats = [Flat(b.master.view(-1), *self.moments(b).values()) for b in self.partition.buffers]
        if self.copies is None:
            return flats
        return [flat._replace(copy=copy) for flat, copy in zip(flats, self.copies, strict=True)]

    def complete(self, sums: Tensor) -> Tensor:
        """Partial sums over the ranks' shares, made whole."""
        assert self.partition is not None
        if not self.partition.shared:
            return sums
        moved = sums.to(self.partition.device)
        dist.all_reduce(moved)
        return moved.to(sums.device)

    def _moments(self) -> Moments:
        config = self.config
        bounds = config.min_trust_ratio, math.inf if config.max_trust_ratio is None else config.max_trust_ratio
        return Moments(config.beta1, config.beta2, config.epsilon, config.bias_correction, *bounds)

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return float(self.param_groups[0]["lr"])

    @rate.setter
    def rate(self, value: float) -> None:
        for group in self.param_groups:
            group["lr"] = value


class Adam(LambertOptimizer):
    """AdamW, or the original BERT's Adam with ``bias_correction: false``."""

    def _update(self, gradients: list[Tensor], factor: Tensor, squares: Tensor, whole: Tensor | None) -> Tensor:
        for flat, gradient, layout in zip(self._flats(), gradients, self.layouts, strict=True):
            adam_update(flat, gradient, layout, self._moments(), self.steps, self.rate, factor)
        return self.complete(squares) if whole is None else whole


class Lamb(LambertOptimizer):
    """LAMB: Adam's direction, with each tensor's step scaled to its own norm."""

    def _update(self, gradients: list[Tensor], factor: Tensor, squares: Tensor, whole: Tensor | None) -> Tensor:
        flats, moments, rate = self._flats(), self._moments(), self.rate
        sums = squares.new_zeros(len(self.rows) + 1, 2)  # the last row takes the gradients' squares along
        sums[-1, 0] = squares
        for flat, gradient, layout in zip(flats, gradients, self.layouts, strict=True):
            lamb_begin(flat, gradient, layout, moments, self.steps, rate, factor, sums[:-1])
        sums = self.complete(sums)
        self.trust = trust_ratios(sums[:-1], moments)
        for flat, layout in zip(flats, self.layouts, strict=True):
            lamb_finish(flat, layout, moments, self.steps, rate, self.trust)
        return sums[-1, 0] if whole is None else whole


def make_optimizer(parameters: Iterator[Tensor], config: OptimizerConfig) -> LambertOptimizer:
    """The optimizer that the configuration names."""
    return {"lamb": Lamb, "adam": Adam}[config.name](parameters, config)


def _gradient(buffer: Buffer) -> Tensor:
    assert buffer.master.grad is not None, "DeepSpeed called the optimizer without a gradient"
    return buffer.master.grad.reshape(-1)
