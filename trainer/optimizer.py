"""LAMB and Adam as PyTorch optimizers that DeepSpeed drives, exact under every partition of ZeRO.

DeepSpeed hands an optimizer flat buffers that cut through tensors and calls ``step`` on them. These
optimizers step over the :class:`~trainer.partition.Partition` instead, so they know which tensor an
element belongs to: the decay, the trust ratio and every norm are those of whole tensors, and the
padding of the buffers is never read into one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.adam import Moments, adam_direction, adam_step
from kernels.lamb import lamb_step, square_sums, trust_ratios
from trainer.partition import Buffer, Partition, Slice

MOMENTS = ("exp_avg", "exp_avg_sq")  # PyTorch's own names of the two moving averages


@dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer, and its constants. The learning rate belongs to the phases."""

    name: Literal["lamb", "adam"] = "lamb"
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6
    weight_decay: float = 0.01  # decoupled; not for biases and LayerNorm
    bias_correction: bool = True  # False is the original BERT's Adam
    gradient_clipping: float = 0.0  # bound of the global gradient norm; 0 is off

    def problems(self) -> list[str]:
        """What cannot be, each with its remedy."""
        found = []
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                found.append(f"{name} is {getattr(self, name)}: must lie in [0, 1)")
        if not self.epsilon > 0:
            found.append(f"epsilon is {self.epsilon}: must be above 0")
        for name in ("weight_decay", "gradient_clipping"):
            if getattr(self, name) < 0:
                found.append(f"{name} is {getattr(self, name)}: must be 0 (off) or more")
        return found


def decays(shape: torch.Size) -> bool:
    """Whether a parameter is decayed, and adapted by LAMB: matrices are, biases and LayerNorm are not.

    The authors' LAMB leaves the tensors that it does not decay out of the layer adaptation, too.
    """
    return len(shape) > 1


class LambertOptimizer(torch.optim.Optimizer):
    """The common part: binding to a partition, gradient scale, norm and clipping, and the moments."""

    def __init__(self, parameters: Iterator[Tensor], config: OptimizerConfig) -> None:
        super().__init__(list(parameters), {"lr": 0.0})
        self.config = config
        self.partition: Partition | None = None
        self.steps = 0  # taken; bias correction counts them
        self.gradient_scale = 1.0  # what the loss was multiplied by
        self.gradient_norm = torch.zeros(())  # of the last step: global, unscaled, before clipping
        self.trust: Tensor | None = None  # (K,) LAMB's ratios of the last step

    def bind(self, partition: Partition) -> None:
        """Step over ``partition`` from now on, with zero moments. Until then ``step`` does nothing."""
        self.partition = partition
        self.gradient_norm = partition.buffers[0].master.new_zeros(())  # on the device from the start
        for buffer in partition.buffers:
            flat = buffer.master.view(-1)
            self.state[buffer.master] = {name: torch.zeros_like(flat) for name in MOMENTS}

    def moments(self, buffer: Buffer) -> dict[str, Tensor]:
        """The two moving averages of a buffer, flat fp32, by PyTorch's names."""
        return {name: self.state[buffer.master][name] for name in MOMENTS}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step over the bound partition, from the gradients that DeepSpeed put there."""
        if self.partition is None:
            return  # DeepSpeed's initialisation may try the optimizer on zero gradients
        self.steps += 1
        gradients = [_gradient(buffer) for buffer in self.partition.buffers]
        for gradient in gradients:
            gradient.mul_(1.0 / self.gradient_scale)
        squares = self._squares(gradients)
        if self.config.gradient_clipping > 0:  # the moments must see clipped gradients: a second all-reduce
            norm = self._complete(squares.clone()).sqrt()
            factor = (self.config.gradient_clipping / (norm + 1e-6)).clamp(max=1.0)
            for gradient in gradients:
                gradient.mul_(factor)
        directions = [self._direction(b, g) for b, g in zip(self.partition.buffers, gradients, strict=True)]
        self.gradient_norm = self._update(directions, squares).sqrt()

    def _update(self, directions: list[Tensor], squares: Tensor) -> Tensor:
        """Move the weights. ``squares`` () is this rank's sum of squared gradients; returns that of all ranks."""
        raise NotImplementedError

    def _squares(self, gradients: list[Tensor]) -> Tensor:
        assert self.partition is not None
        squares = gradients[0].new_zeros(())
        for buffer, gradient in zip(self.partition.buffers, gradients, strict=True):
            for part in buffer.slices:
                own = _cut(gradient, part)
                squares += own.dot(own)
        return squares

    def _complete(self, sums: Tensor) -> Tensor:
        """Partial sums over the ranks' shares, made whole."""
        assert self.partition is not None
        if self.partition.shared:
            dist.all_reduce(sums)
        return sums

    def _direction(self, buffer: Buffer, gradient: Tensor) -> Tensor:
        config, state = self.config, self.state[buffer.master]
        moments = Moments(config.beta1, config.beta2, config.epsilon, config.bias_correction)
        return adam_direction(gradient, state["exp_avg"], state["exp_avg_sq"], moments, self.steps)

    def _parts(self, directions: list[Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, weight, direction) of each tensor's part in this rank's share."""
        assert self.partition is not None
        for buffer, direction in zip(self.partition.buffers, directions, strict=True):
            for part in buffer.slices:
                yield part.name, _cut(buffer.master, part), _cut(direction, part)

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

    def _update(self, directions: list[Tensor], squares: Tensor) -> Tensor:
        assert self.partition is not None
        for name, weight, direction in self._parts(directions):
            decay = self.config.weight_decay if decays(self.partition.shapes[name]) else 0.0
            adam_step(weight, direction, self.rate, decay)
        return self._complete(squares)


class Lamb(LambertOptimizer):
    """LAMB: Adam's direction, with each tensor's step scaled to its own norm."""

    def _update(self, directions: list[Tensor], squares: Tensor) -> Tensor:
        assert self.partition is not None
        adapted = [name for name, shape in self.partition.shapes.items() if decays(shape)]
        row = {name: k for k, name in enumerate(adapted)}
        sums = directions[0].new_zeros(len(adapted) + 1, 2)  # the last row takes the gradients' squares along
        sums[-1, 0] = squares
        for name, weight, direction in self._parts(directions):
            if name in row:
                direction.add_(weight, alpha=self.config.weight_decay)
                sums[row[name]] += square_sums(weight, direction)
        sums = self._complete(sums)
        self.trust = trust_ratios(sums[:-1])
        for name, weight, direction in self._parts(directions):
            if name in row:
                lamb_step(weight, direction, self.trust[row[name]], self.rate)
            else:
                adam_step(weight, direction, self.rate, 0.0)
        return sums[-1, 0]


def make_optimizer(parameters: Iterator[Tensor], config: OptimizerConfig) -> LambertOptimizer:
    """The optimizer that the configuration names."""
    return {"lamb": Lamb, "adam": Adam}[config.name](parameters, config)


def _cut(flat: Tensor, part: Slice) -> Tensor:
    return flat.view(-1)[part.offset : part.offset + part.length]


def _gradient(buffer: Buffer) -> Tensor:
    assert buffer.master.grad is not None, "DeepSpeed called the optimizer without a gradient"
    return buffer.master.grad.reshape(-1)
