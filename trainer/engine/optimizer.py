"""LAMB and Adam as PyTorch optimizers that DeepSpeed drives, exact under every ZeRO partition.

DeepSpeed hands an optimizer flat buffers that cut through tensors and calls ``step`` on them. These optimizers step
over the :class:`~trainer.engine.partition.Partition` instead, so they know which tensor an element belongs to. Weight
decay, trust ratios and norms are computed for whole tensors, and the padding of the buffers never enters a norm.

NVIDIA Apex's optimizers can take the steps instead. Its FusedAdam has no norms, so it is exact under every partition.
Its FusedLAMB computes norms of the tensors it is given and updates them in the same call (csrc/multi_tensor_lamb.cu).
Under ZeRO 1 to 3 that would be the trust ratio of one rank's share, with no point at which to complete it over the
ranks. So on several ranks it works with ZeRO 0 only, where each rank holds whole tensors and the summed gradients. The
state and its names in checkpoints are the same, so a run may resume with the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import apex, apex_optimizers
from kernels.adam import Moments, adam_update
from kernels.flat import Flat, Layout, Piece, gradient_square_sum, make_layout
from kernels.lamb import lamb_begin, lamb_finish, trust_ratios
from trainer.bounds import outside
from trainer.engine.clipping import clipping_factor
from trainer.engine.partition import Buffer, Partition
from trainer.errors import TrainerError

MOMENTS = ("exp_avg", "exp_avg_sq")  # PyTorch's own names of the two moving averages


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its constants. The learning rate belongs to the phases.

    LAMB's defaults are those of the paper (You et al. 2020, Algorithm 2, φ the identity) and of its authors' code.
    Other implementations differ. NVIDIA's NVLAMB normalizes the gradients first, by max(1, ‖g‖) over all tensors, which
    is ``gradient_clipping: 1.0``; Apex with ``use_nvlamb`` also adapts all tensors. DeepSpeed's FusedLamb adapts all
    tensors, within ``min_coeff`` and ``max_coeff``. The paper's alternative φ bounds ‖x‖, at values it does not give.
    Norms are L2, as in all of these: one all-reduce completes their sums of squares over the ranks.
    """

    name: Literal["lamb", "adam"] = "lamb"  # lamb for large batches, adam for small ones
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.999  # decay of the second moment
    epsilon: float = 1e-6  # added to the root of the second moment
    weight_decay: float = 0.01  # decoupled weight decay; not applied to biases and LayerNorm
    bias_correction: bool = True  # false: as in the original BERT's Adam and DeepSpeed's recipe for LAMB
    gradient_clipping: float = 0.0  # maximum global norm of the gradients; larger ones are scaled down to it; 0: off
    # LAMB: parameters with a trust ratio; decayed: all but biases and LayerNorm, whose ratio is 1
    adapted: Literal["decayed", "all"] = "decayed"
    min_trust_ratio: float = 0.0  # LAMB: lower bound of the trust ratios; if a norm is zero, the ratio is 1 regardless
    max_trust_ratio: float | None = None  # LAMB: upper bound of the trust ratios; null: none
    # whose kernels take the steps; apex: on GPUs, NVIDIA Apex's FusedAdam, or its FusedLAMB on one rank or at stage 0
    implementation: Literal["lambert", "apex"] = "lambert"

    def problems(self) -> list[str]:
        """Every invalid setting, with what to change."""
        found = []
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                found.append(f"{name} is {getattr(self, name)}: must be in [0, 1)")
        found += outside(
            self,
            epsilon=(1e-30, 1),  # anything smaller is 0 in fp32
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
                found.append(f"{name} is for LAMB, but name is {self.name}: remove it, or set name to lamb")
        fused_lamb = (self.name, self.implementation) == ("lamb", "apex")
        for name in ("min_trust_ratio", "max_trust_ratio"):
            if fused_lamb and getattr(self, name) != getattr(OptimizerConfig, name):
                found.append(
                    f"{name} is set but Apex's FusedLAMB has no bounds: remove it, or set implementation to lambert"
                )
        return found


def require_implementation(config: OptimizerConfig, zero_stage: int, ranks: int, device: torch.device) -> None:
    """Raise TrainerError or UnavailableError if ``config.implementation`` cannot take the steps of this run."""
    if config.implementation == "lambert":
        return
    if device.type != "cuda":
        raise TrainerError(
            f"optimizer.implementation is apex, which runs on GPUs, not on {device.type}: set it to lambert"
        )
    if config.name == "lamb" and ranks > 1 and zero_stage > 0:
        raise TrainerError(
            f"optimizer.implementation is apex with LAMB on {ranks} ranks at zero_stage {zero_stage}: Apex's FusedLAMB "
            "takes the norms of one rank's share, not of whole tensors: set it to lambert, or use zero_stage 0, in fp32"
        )
    apex.extension("amp_C")


def decays(shape: torch.Size) -> bool:
    """Whether weight decay applies to a parameter: yes for matrices, no for biases and LayerNorm.

    The LAMB authors' code also leaves the undecayed tensors out of the layer adaptation.
    """
    return len(shape) > 1


class LambertOptimizer(torch.optim.Optimizer):
    """The part that LAMB and Adam share: binding to a partition, gradient scale, norm, clipping and moments."""

    def __init__(self, parameters: Iterator[Tensor], config: OptimizerConfig) -> None:
        super().__init__(list(parameters), {"lr": 0.0})
        self.config = config
        self.partition: Partition | None = None
        self.rows: dict[str, int] = {}  # adapted parameter: its row in LAMB's sums
        self.layouts: list[Layout] = []  # one per buffer of the partition
        self.steps = 0  # steps taken, for the bias correction
        self.gradient_scale = 1.0  # the factor that the loss was multiplied by
        self.gradient_norm = torch.zeros(())  # of the last step: global, unscaled, before clipping
        self.refused: dict[str, float] = {}  # each tensor's norm, if `step` refused the last gradients as not finite
        self.trust: Tensor | None = None  # (K,) LAMB's trust ratios of the last step
        self.copies: list[Tensor] | None = None  # where to write each buffer's rounded weights; None: DeepSpeed copies

    def bind(self, partition: Partition) -> None:
        """Step over ``partition`` from now on, with zero moments. Before this call, ``step`` does nothing."""
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
        """The two moving averages of a buffer, flat fp32, under PyTorch's names."""
        return {name: self.state[buffer.master][name] for name in MOMENTS}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take one step over the bound partition, from the gradients that DeepSpeed put there.

        Takes none, on any rank, if a gradient is not finite on some rank: releases of DeepSpeed differ in whether they
        check that. Waits for the device, because the ranks' total sum of squares decides. The gradients are read as
        they are; the factor that unscales and clips them stays on the device.
        """
        if self.partition is None:
            return  # DeepSpeed may call the optimizer with zero gradients while it initializes
        gradients = [_gradient(buffer) for buffer in self.partition.buffers]
        squares = self.square_sum(gradients)
        whole = self.complete(squares.clone())
        if bool(whole.isfinite()):
            self.refused = {}
            self.move(gradients, squares, whole)
        else:
            self.refused = self.tensor_norms(gradients, self.unscale)

    def square_sum(self, gradients: list[Tensor]) -> Tensor:
        """The sum of squares of this rank's gradients, unscaled, () fp32; not finite if any gradient is not.

        ``gradients``: one flat tensor of any dtype per buffer.
        """
        both = zip(gradients, self.layouts, strict=True)
        return torch.stack([gradient_square_sum(*pair) for pair in both]).sum() * self.unscale**2

    @torch.no_grad()
    def move(self, gradients: list[Tensor], squares: Tensor, whole: Tensor | None = None) -> None:
        """Take one step. ``squares``: `square_sum` of ``gradients``; ``whole``: its total over the ranks, if known."""
        self.steps += 1
        factor = torch.full_like(squares, self.unscale)
        if self.config.gradient_clipping > 0:  # the moments need clipped gradients, which costs a second all-reduce
            whole = self.complete(squares.clone()) if whole is None else whole
            factor *= clipping_factor(whole, self.config.gradient_clipping)
        self.gradient_norm = self._update(gradients, factor, squares, whole).sqrt()

    @torch.no_grad()
    def tensor_norms(self, flats: list[Tensor], factor: float = 1.0) -> dict[str, float]:
        """The norms of ``factor`` times each tensor in ``flats``, one per buffer, by parameter name. A collective."""
        assert self.partition is not None
        rows = {name: row for row, name in enumerate(self.partition.shapes)}
        sums = torch.zeros(len(rows), dtype=torch.float64, device=flats[0].device)
        for buffer, flat in zip(self.partition.buffers, flats, strict=True):
            for part in buffer.slices:
                piece = flat[part.offset : part.offset + part.length].double() * factor
                sums[rows[part.name]] += piece.square().sum()
        return dict(zip(rows, self.complete(sums).sqrt().tolist(), strict=True))

    @property
    def unscale(self) -> float:
        """The factor that makes the gradients of the last step those of the loss."""
        assert self.partition is not None
        return self.partition.divisor / self.gradient_scale

    def _update(self, gradients: list[Tensor], factor: Tensor, squares: Tensor, whole: Tensor | None) -> Tensor:
        """Update the weights from ``factor`` times the gradients; return the sum of squared gradients over all ranks.

        ``squares`` () is this rank's sum, unscaled and before clipping; ``whole`` is the total, if already known.
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
        """Add up partial sums over the ranks."""
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
        update = adam_update if self.config.implementation == "lambert" else apex_optimizers.adam_update
        for flat, gradient, layout in zip(self._flats(), gradients, self.layouts, strict=True):
            update(flat, gradient, layout, self._moments(), self.steps, self.rate, factor)
        return self.complete(squares) if whole is None else whole


class Lamb(LambertOptimizer):
    """LAMB: Adam's direction, with each tensor's step scaled to that tensor's norm."""

    def _update(self, gradients: list[Tensor], factor: Tensor, squares: Tensor, whole: Tensor | None) -> Tensor:
        flats, moments, rate = self._flats(), self._moments(), self.rate
        sums = squares.new_zeros(len(self.rows) + 1, 2)  # the last row carries the gradients' sum of squares
        sums[-1, 0] = squares
        for flat, gradient, layout in zip(flats, gradients, self.layouts, strict=True):
            lamb_begin(flat, gradient, layout, moments, self.steps, rate, factor, sums[:-1])
        sums = self.complete(sums)
        self.trust = trust_ratios(sums[:-1], moments)
        for flat, layout in zip(flats, self.layouts, strict=True):
            lamb_finish(flat, layout, moments, self.steps, rate, self.trust)
        return sums[-1, 0] if whole is None else whole


class ApexLamb(LambertOptimizer):
    """LAMB as NVIDIA Apex's FusedLAMB takes its steps. All tensors must be whole."""

    def _update(self, gradients: list[Tensor], factor: Tensor, squares: Tensor, whole: Tensor | None) -> Tensor:
        ratios: dict[int, Tensor] = {}
        for flat, gradient, layout in zip(self._flats(), gradients, self.layouts, strict=True):
            step = self._moments(), self.steps, self.rate, factor
            ratios |= apex_optimizers.lamb_update(flat, gradient, layout, *step)
        self.trust = torch.stack([ratios[row] for row in sorted(ratios)])
        return self.complete(squares) if whole is None else whole


def make_optimizer(parameters: Iterator[Tensor], config: OptimizerConfig) -> LambertOptimizer:
    """The optimizer that the configuration names."""
    if config.name == "adam":
        return Adam(parameters, config)
    return (Lamb if config.implementation == "lambert" else ApexLamb)(parameters, config)


def _gradient(buffer: Buffer) -> Tensor:
    assert buffer.master.grad is not None, "DeepSpeed called the optimizer without a gradient"
    return buffer.master.grad.reshape(-1)
