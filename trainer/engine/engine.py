"""The engine: one optimizer step over any number of micro-batches, on top of DeepSpeed ZeRO.

This is the only file that imports DeepSpeed, and it does so only when it builds an engine: the import takes
seconds and picks the accelerator. DeepSpeed's configuration is derived here from Lambert's, with every default
that matters written out; nobody writes one by hand.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from kernels import apex
from kernels.dropout import token_keys
from trainer.bounds import MOST_STEPS, outside
from trainer.console import Tell, say, silent
from trainer.engine.exact_sums import require_exact_sums
from trainer.engine.gradients import Gradients
from trainer.engine.loss_scale import POWERS_OF_TWO, LossScale, next_scale
from trainer.engine.optimizer import OptimizerConfig, make_optimizer, require_implementation
from trainer.engine.partition import fill_masters, read_partition, read_weights, round_masters
from trainer.engine.private_names import HOOKS, NORM, OPS, REDUCE, TESTED, find, need
from trainer.engine.stopwatch import Stopwatch
from trainer.errors import NotFiniteError, TrainerError
from trainer.model.batch import Rows
from trainer.model.bert import Encoder
from trainer.model.checkpointing import Checkpointing
from trainer.ranks.world import World

M = TypeVar("M", bound=Encoder)
ALIGNED = 64  # elements


@dataclass(frozen=True)
class EngineConfig:
    """How weights and optimizer are sharded over the ranks, and in which precision they compute."""

    zero_stage: Literal[0, 1, 2, 3] = 1  # what is sharded: 1 the optimizer state, 2 also gradients, 3 also weights
    precision: Literal["auto", "fp16", "bf16", "fp32"] = "auto"  # auto: fp16 on GPUs, fp32 on CPUs and at stage 0
    offload_optimizer: bool = False  # keep fp32 weights and moments in host memory, and update them there
    # what backward computes again to save memory, with the same bits: cheap: in each layer GELU and a LayerNorm, which
    # saves memory with the Triton kernels only; full: whole layers
    checkpointing: Checkpointing = "none"
    kernels: Literal["auto", "triton", "torch"] = "auto"  # auto: Triton on GPUs, PyTorch on CPUs
    initial_loss_scale: float = 2.0**16  # fp16 only: the loss scale of the first step, a power of two
    loss_scale_growth_interval: int = 1000  # steps in a row without overflow before the loss scale doubles

    def problems(self) -> list[str]:
        """Every invalid setting, with what to change."""
        found = []
        if self.precision in ("fp16", "bf16") and self.zero_stage == 0:
            found.append(
                f"precision {self.precision} does not work with zero_stage 0, because DeepSpeed would accumulate "
                f"gradients in {self.precision}: set zero_stage to 1, 2 or 3, which accumulate them in fp32"
            )
        if self.offload_optimizer and self.zero_stage == 0:
            found.append("offload_optimizer does not work with zero_stage 0: set zero_stage to 1, 2 or 3, or remove it")
        if self.offload_optimizer and self.kernels == "triton":
            found.append(
                "offload_optimizer runs the optimizer on the CPU, where Triton does not run: set kernels to auto or "
                "torch"
            )
        if self.initial_loss_scale not in POWERS_OF_TWO:  # any other scale would round the values it scales
            found.append(f"initial_loss_scale is {self.initial_loss_scale}: must be a power of two from 1 to 2^24")
        return found + outside(self, loss_scale_growth_interval=(1, MOST_STEPS))


@dataclass(frozen=True)
class StepResult:
    """The outcome of one step. Tensors stay on the device, so nothing waits for them."""

    sums: Tensor  # (K,) fp64, the model's output as one row, summed over this rank's micro-batches
    gradient_norm: Tensor  # () fp32, global, unscaled, before clipping; infinite when the gradients overflowed
    trust: Tensor | None  # (K,) fp32, LAMB's ratios; None for Adam and for a step that overflowed
    applied: bool  # False when the gradients overflowed
    loss_scale: float


def resolve_precision(config: EngineConfig, device: torch.device) -> str:
    """The precision to use on this device. Raises TrainerError if the device does not support it."""
    if config.precision == "auto":
        return "fp16" if device.type == "cuda" and config.zero_stage > 0 else "fp32"
    if config.precision == "fp16" and device.type == "cpu":
        raise TrainerError("engine.precision is fp16, but this run is on CPUs: set it to auto, fp32 or bf16")
    return config.precision


def sums_apart(config: EngineConfig, precision: str) -> bool:
    """Whether DeepSpeed uses a separate optimizer, which keeps and reduces all gradients in fp32. Pure."""
    return config.zero_stage == 1 and precision == "bf16" and not config.offload_optimizer


def deepspeed_config(config: EngineConfig, precision: str, ranks: int, parameters: int) -> dict[str, Any]:
    """DeepSpeed's configuration, with every default that matters written out. Pure.

    ``parameters`` is the number of elements in the whole model. The reduction bucket holds them all, up to
    DeepSpeed's own limit, so one collective is enough. Stage 3 exists to save memory and gets a smaller bucket.
    """
    stage, offloads = config.zero_stage, config.offload_optimizer
    bucket = min(50_000_000 if stage == 3 else 500_000_000, parameters + parameters % 2)
    own = precision == "fp32" and stage in (1, 2) and not offloads  # our optimizer computes the norm
    return {
        # Lambert splits batches itself; DeepSpeed only checks that these three agree
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": ranks,
        # the loss is already divided by the counts of the global batch; stage 3 does not accept "sum", so
        # Partition.divisor undoes its division
        "gradient_allreduce_op": "mean" if stage == 3 else "sum",
        "gradient_clipping": 0.0,  # 1.0 by default; our optimizer clips by the unscaled norm
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "fp16": {"enabled": precision == "fp16", "loss_scale": 1.0},  # static; trainer/engine/loss_scale.py scales
        # do not skip the step as for an overflow: bf16 has no loss scale to lower, so a NaN must end the run
        "bf16": {"enabled": precision == "bf16", "check_grad_overflow": False},
        # fp32 for sums over all micro-batches
        "communication_data_type": "fp32" if sums_apart(config, precision) else precision,
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,  # trainer/engine/optimizer.py is exact under partitions, and tested
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "contiguous_gradients": True,
            "overlap_comm": False,
            "reduce_scatter": True,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "round_robin_gradients": False,
            "ignore_unused_parameters": True,
            "offload_optimizer": {"device": "cpu" if offloads else "none", "pin_memory": True},
            **({NORM.name: False} if own else {}),
            # stage 3 calls the optimizer once per sub-group: one group means one all-reduce of norms
            "sub_group_size": 10**12,
            "stage3_prefetch_bucket_size": 50_000_000,
            # parameters up to this size stay gathered between steps: biases, but not matrices
            "stage3_param_persistence_threshold": min(100_000, parameters // 64),
            "stage3_max_live_parameters": 10**9,
            "stage3_max_reuse_distance": 10**9,
        },
    }


def _load_deepspeed(tell: Tell) -> Any:
    """Import DeepSpeed without its shared-memory op for CPUs, and without a package apex that is not NVIDIA's.

    DeepSpeed would compile that op and never free the 64 MiB per rank that it takes; only inference needs it.
    """
    apex.keep_foreign_out()
    import deepspeed

    if (ops := find(deepspeed.ops, OPS, tell)) is not None:
        ops["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def _initialize(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any], tell: Tell
) -> tuple[Any, Any]:
    """DeepSpeed's engine for ``module``, and its ZeRO optimizer around ``optimizer``.

    Raises TrainerError if this release of DeepSpeed does not accept the settings.
    """
    deepspeed, zero = _load_deepspeed(tell), settings["zero_optimization"]
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    if NORM.name in zero and find(DeepSpeedZeroConfig(), NORM, tell) is None:
        del zero[NORM.name]
    try:
        engine, wrapped, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=settings, dist_init_required=False
        )
    except ValueError as error:
        raise TrainerError(
            f"DeepSpeed {deepspeed.__version__} refuses Lambert's settings for it: install deepspeed=={TESTED[-1]} "
            f"({error})"
        ) from error
    return engine, wrapped


class Engine(Generic[M]):
    """A model, its optimizer and its loss scale on this rank's device.

    The model's ``forward(rows, keys)`` returns a named tuple of tensors, summed over the micro-batch. Its
    ``mean(counts)`` is this micro-batch's share of the global batch's loss.

    A checkpoint stores ``partition``, ``optimizer`` (moments, steps) and ``loss_scale``. If ``gathers`` is True, a
    forward pass of ``model`` is a collective: every rank must make the same number of them, in the same order.
    """

    def __init__(
        self,
        config: EngineConfig,
        module: M,
        optimizer: OptimizerConfig,
        world: World,
        seed: int,
        watch: Stopwatch | None = None,
    ) -> None:
        # DeepSpeed's own calls trigger one on every rank
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        self.world, self.seed, self.stage = world, seed, config.zero_stage
        self.watch = watch or Stopwatch(world.device)
        self.gathers = config.zero_stage == 3
        self.precision = resolve_precision(config, world.device)
        require_implementation(optimizer, self.stage, world.size, world.device)
        shapes = {name: p.shape for name, p in module.named_parameters()}
        self.parameters = sum(shape.numel() for shape in shapes.values())
        drawn = {n: p.detach().clone() for n, p in module.named_parameters()} if self.precision != "fp32" else {}
        # DeepSpeed lays the parameters out in this order. A matrix that is not aligned to 16 bytes gets kernels of
        # half the speed, so a two-element bias must not come before one.
        ordered = sorted(module.parameters(), key=lambda p: p.numel() % ALIGNED != 0)
        self.optimizer = make_optimizer(iter(ordered), optimizer)
        tell = say if world.is_main else silent
        settings = deepspeed_config(config, self.precision, world.size, self.parameters)
        self._deepspeed, zero = _initialize(module, self.optimizer, settings, tell)
        self.model: M = self._deepspeed.module
        self.model.checkpointing = config.checkpointing
        self.partition = read_partition(self.model, self.optimizer, zero, self.stage, shapes)
        fill_masters(self.partition, drawn)  # DeepSpeed made the masters from rounded weights
        self._weights = read_weights(self.model) if self.stage in (1, 2) else None
        self._gradients = self._take_over(config, zero, tell)
        self.optimizer.bind(self.partition)
        if self._gradients is None and (reduce := find(self._deepspeed, REDUCE, tell)) is not None:
            setattr(self._deepspeed, REDUCE.name, self._timed(reduce))
        scaled = self.precision == "fp16"
        self.loss_scale = LossScale(
            config.initial_loss_scale if scaled else 1.0, growth_interval=config.loss_scale_growth_interval
        )

    @property
    def versions(self) -> dict[str, str]:
        """The library versions and the precision actually in use, by name."""
        from deepspeed import __version__

        return {"deepspeed": __version__, "torch": torch.__version__, "precision": self.precision}

    def step(self, batches: Sequence[Rows], counts: Any, step: int, rate: float) -> StepResult:
        """One optimizer step over this rank's micro-batches of a global batch.

        The loss is the sum of ``output.mean(counts)`` over all micro-batches and ranks, so it does not depend on how
        the global batch is split. Every rank must pass the same number of micro-batches. ``step`` seeds the dropout;
        ``rate`` is the learning rate. Raises NotFiniteError if gradients overflow and no lower loss
        scale can help.
        """
        self.model.train()
        self.optimizer.rate, self.optimizer.gradient_scale = rate, self.loss_scale.scale
        sums = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for index, batch in enumerate(batches):
            sums = sums + self._micro_step(batch, counts, step, index == 0, index == len(batches) - 1)
        self.watch.begin("optimizer")
        applied = self._move()
        self.watch.begin("")
        used = self.loss_scale.scale
        if self.precision == "fp16":
            self.loss_scale = next_scale(self.loss_scale, not applied)
        elif not applied:
            raise NotFiniteError(
                "the gradients are not finite: training diverged; lower the learning rate or lengthen the warm-up, and "
                "resume from the last checkpoint"
            )
        if not applied:
            return StepResult(sums, torch.full_like(self.optimizer.gradient_norm, torch.inf), None, False, used)
        return StepResult(sums, self.optimizer.gradient_norm, self.optimizer.trust, True, used)

    def gradient_norms(self) -> tuple[str, dict[str, float]]:
        """Return a name for what was measured, and its norm for each parameter.

        It is the last step's gradient if that is still there, otherwise the gradient's moving average. Both are
        unscaled, over all ranks. A collective.
        """
        if self._gradients is not None and self._gradients.own is not None:
            norms = self.optimizer.tensor_norms([self._gradients.own], self.optimizer.unscale)
            return "gradient in the last step", norms
        if self.optimizer.refused:
            return "gradient in the last step", self.optimizer.refused
        averages = [self.optimizer.moments(buffer)["exp_avg"] for buffer in self.partition.buffers]
        return "moving average of the gradient", self.optimizer.tensor_norms(averages)

    def close(self) -> None:
        """Release what DeepSpeed's hooks hold, for a process that builds several engines."""
        self._deepspeed.destroy()

    def refresh_weights(self) -> None:
        """Round the masters into the model's weights on every rank, after a checkpoint filled the masters."""
        if self.gathers:  # weights that are gathered now would keep their old values
            self._deepspeed.empty_partition_cache()
        round_masters(self.partition)
        if self._weights is not None:
            self._weights.gather()

    def _take_over(self, config: EngineConfig, zero: Any, tell: Tell) -> Gradients | None:
        """Remove DeepSpeed's hooks on gradients in half precision under stages 1 and 2; None if it keeps them."""
        if self._weights is None or self.precision == "fp32" or sums_apart(config, self.precision):
            return None
        count = len(self._weights.placed)
        if config.offload_optimizer:  # DeepSpeed's own path keeps what an overflow, or an earlier step, left behind
            hooks = need(zero, HOOKS, "offload_optimizer", "set it to false", count)
        else:
            hooks = find(zero, HOOKS, tell, count)
        if hooks is None:
            require_exact_sums(self._deepspeed, self.model, self.optimizer, self.partition)
            return None
        for hook in hooks:
            hook.remove()
        return Gradients(self._weights, self.stage, self.optimizer, config.offload_optimizer)

    def _timed(self, reduce: Callable[..., None]) -> Callable[..., None]:
        """Time DeepSpeed's gradient reduction, which it calls at the end of each backward pass."""

        def timed(*arguments: Any, **options: Any) -> None:
            self.watch.begin("reduce")
            reduce(*arguments, **options)

        return timed

    def _micro_step(self, batch: Rows, counts: Any, step: int, first: bool, last: bool) -> Tensor:
        self.watch.begin("forward")
        batch = batch.to(self.world.device)
        keys = token_keys(self.seed, step, batch.samples, batch.positions, batch.cu_seqlens)
        output = (self._deepspeed if self._gradients is None else self.model)(batch, keys)
        loss = output.mean(counts) * self.loss_scale.scale
        self.watch.begin("backward")
        if self._gradients is None:
            self._deepspeed.set_gradient_accumulation_boundary(last)
            self._deepspeed.backward(loss, scale_wrt_gas=False)
        else:
            torch.autograd.backward(loss)
            self.watch.begin("reduce")
            self._gradients.add(first, last)
        return torch.cat([value.detach().double().view(-1) for value in output])

    def _move(self) -> bool:
        """Apply the gradients. Returns False if they overflowed."""
        if self._gradients is not None:
            return self._gradients.step()
        taken = self.optimizer.steps
        self._deepspeed.step()  # DeepSpeed does not call the optimizer if it sees an overflow
        return self.optimizer.steps > taken
