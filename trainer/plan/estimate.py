"""A plan: what a run takes in memory, steps, time and money on given GPUs, or why it is impossible there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from trainer.engine.engine import resolve_precision
from trainer.engine.schedule import Phase, batch_of, resolve, samples_in
from trainer.errors import TrainerError
from trainer.model.bert import ModelConfig
from trainer.model.checkpointing import Checkpointing
from trainer.plan import goodput
from trainer.plan.cards import Card, doubts
from trainer.plan.lengths import Lengths
from trainer.plan.memory import GIB, LAYER_BYTES, Bytes, Load, Setting, Sizes, host_bytes, peak, sizes
from trainer.plan.speed import Network, StepTime, step_time
from trainer.run.config import Config

STAGES = (0, 1, 2, 3)
MOST_RANKS = 4096  # tried when nothing fits
LEAST_GOODPUT = 0.05  # with less, a plan is refused


@dataclass(frozen=True)
class Hardware:
    """What a run would use, and what it costs."""

    gpus: int  # per node
    nodes: int
    card: Card
    network: Network
    price: float | None  # per GPU and hour
    failures: float | None  # per GPU and day
    restart_seconds: float  # from a failure to the next step
    disk_bytes_per_second: float  # of all ranks together

    @property
    def ranks(self) -> int:
        """GPUs of all nodes."""
        return self.gpus * self.nodes


@dataclass(frozen=True)
class PhasePlan:
    """One phase as it would run."""

    phase: Phase  # resolved
    lengths: Lengths
    global_batch: int
    accumulation: int
    load: Load  # the fullest micro-batch
    largest: dict[int, int]  # by ZeRO stage: most sequences of a micro-batch that fits; 0: none
    step: StepTime
    steps: int
    samples: int

    @property
    def tokens(self) -> int:
        """Tokens of all steps."""
        return round(self.samples * self.lengths.mean)

    @property
    def epochs(self) -> float:
        """Passes over the data set."""
        return self.samples / self.lengths.samples

    @property
    def seconds(self) -> float:
        """Time of all steps; batch warm-up makes some of them shorter."""
        return self.step.total * self.samples / self.global_batch


@dataclass(frozen=True)
class Checkpoints:
    """What checkpoints cost."""

    size: int  # bytes
    write_seconds: float
    stall_seconds: float
    every_seconds: float  # of training, as configured
    best_seconds: float | None  # Daly's interval; None without a rate of failures
    goodput: float  # at the configured interval, in 0–1
    best_goodput: float | None


@dataclass(frozen=True)
class Plan:
    """The whole run."""

    config: Config
    hardware: Hardware
    setting: Setting
    sizes: Sizes
    phases: tuple[PhasePlan, ...]
    doubts: tuple[str, ...]

    @cached_property
    def memory(self) -> dict[int, Bytes]:
        """Bytes of a rank by ZeRO stage and kind, in the phase that takes the most."""
        return {stage: max(self.peaks(stage), key=lambda found: sum(found.values())) for stage in STAGES}

    @property
    def largest_phase(self) -> PhasePlan:
        """The phase that takes the most memory."""
        peaks = [sum(found.values()) for found in self.peaks(self.setting.stage)]
        return self.phases[peaks.index(max(peaks))]

    @property
    def seconds(self) -> float:
        """Training time without checkpoints and failures."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def steps(self) -> int:
        """Steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    @property
    def host_bytes(self) -> int:
        """Host memory that the offloaded optimizers of one node take."""
        return self.hardware.gpus * host_bytes(self.sizes, self.setting)

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """Their size, stall and interval, and what is left for training."""
        hardware, config = self.hardware, self.config.checkpoint
        size = goodput.checkpoint_bytes(self.sizes.parameters)
        write = size / hardware.disk_bytes_per_second
        share = self.sizes.share(self.setting.stage, self.setting.ranks)
        stall = goodput.stall(share, write, config.asynchronous)
        every = config.every_steps * self.seconds / self.steps
        between = goodput.mean_time_between(hardware.failures or 0.0, hardware.ranks)
        # until an asynchronous save is on disk, a failure costs the work since the one before it
        restart = hardware.restart_seconds + (write if config.asynchronous else 0.0)
        best = None if not hardware.failures else goodput.best_interval(stall, between)
        kept = None if best is None else goodput.goodput(best, stall, restart, between)
        return Checkpoints(size, write, stall, every, best, goodput.goodput(every, stall, restart, between), kept)

    @property
    def wall_seconds(self) -> float:
        """The time from start to end, with checkpoints and failures."""
        share = self.checkpoints.goodput
        return self.seconds / share if share else float("inf")

    @property
    def gpu_hours(self) -> float:
        """What is paid for."""
        return self.wall_seconds * self.hardware.ranks / 3600

    def peaks(self, stage: int) -> list[Bytes]:
        """Bytes of a rank by kind, of each phase."""
        setting = at_stage(self.setting, stage)
        model = self.config.model
        return [peak(model, self.sizes, setting, each.load, each.accumulation > 1) for each in self.phases]


def setting_of(config: Config, ranks: int) -> Setting:
    """How the run uses its GPUs. Raises TrainerError if it does not fit them or uses none."""
    engine = config.engine
    if config.run.device == "cpu":
        raise TrainerError("run.device is cpu, but a plan is for GPUs: set it to auto")
    if engine.kernels == "torch":
        raise TrainerError("engine.kernels is torch, but a plan knows only the memory of Triton's: set it to auto")
    if config.run.ranks not in (None, ranks):
        raise TrainerError(f"run.ranks is {config.run.ranks}, but --gpus and --nodes make {ranks:,}: change either")
    precision = resolve_precision(engine, torch.device("cuda"))
    apex = config.optimizer.implementation == "apex"
    offloads, again = engine.offload_optimizer, engine.checkpointing
    return Setting(engine.zero_stage, precision, ranks, offloads, apex, again)  # type: ignore[arg-type]


def at_stage(setting: Setting, stage: int) -> Setting:
    """The same use of the GPUs under another ZeRO stage; stage 0 computes in fp32."""
    if stage == 0:
        return replace(setting, stage=0, precision="fp32", offloads=False)
    precision = "fp16" if setting.stage == 0 else setting.precision
    return replace(setting, stage=stage, precision=precision)


def make_plan(config: Config, setting: Setting, data: Sequence[Lengths], hardware: Hardware) -> Plan:
    """Plan a run over data sets of these lengths, one per phase. Raises TrainerError if the run cannot work."""
    counted = sizes(config.model)
    phases = [
        _plan_phase(config, phase, setting, counted, lengths, hardware)
        for phase, lengths in zip(config.phases, data, strict=True)
    ]
    found: list[str] = []
    for each in phases:
        length = each.lengths.squares / each.lengths.tokens
        found += doubts(hardware.card, config.model.hidden, length, each.load.tokens)
    if setting.checkpointing != "none":
        found.append(f"engine.checkpointing {setting.checkpointing}: its time is not measured")
    plan = Plan(config, hardware, setting, counted, tuple(phases), tuple(dict.fromkeys(found)))
    require_room(plan)
    require_progress(plan)
    return plan


def _plan_phase(
    config: Config, phase: Phase, setting: Setting, counted: Sizes, lengths: Lengths, hardware: Hardware
) -> PhasePlan:
    global_batch, _ = batch_of(phase, setting.ranks)
    share = -(-global_batch // setting.ranks)
    stages = {stage: at_stage(setting, stage) for stage in STAGES}
    most = {
        stage: largest(config.model, each, counted, lengths, share, hardware.card) for stage, each in stages.items()
    }
    if phase.micro_batch == "auto":
        phase = replace(phase, micro_batch=max(1, most[setting.stage]))
    _, accumulation = batch_of(phase, setting.ranks)
    runs = resolve(phase, global_batch, lengths.samples)
    batch = global_batch, accumulation
    where = hardware.card, hardware.network
    step = step_time(config.model, counted, setting, config.optimizer.name, lengths, batch, where)
    steps = runs.steps if phase.minutes is None else max(1, round(60 * phase.minutes / step.total))
    return PhasePlan(
        phase=runs,
        lengths=lengths,
        global_batch=global_batch,
        accumulation=accumulation,
        load=lengths.fullest(-(-share // accumulation)),
        largest=most,
        step=step,
        steps=steps,
        samples=samples_in(runs, steps, global_batch),
    )


def largest(model: ModelConfig, setting: Setting, counted: Sizes, lengths: Lengths, share: int, card: Card) -> int:
    """The most sequences of a rank's ``share`` that fit into one micro-batch; 0 if not even one fits."""

    def fits(sequences: int) -> bool:
        load = lengths.fullest(sequences)
        return sum(peak(model, counted, setting, load, sequences < share).values()) <= card.memory_gib * GIB

    if fits(share):
        return share
    low, high = 0, share  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def require_room(plan: Plan) -> None:
    """Raise TrainerError, with what would be possible, if a phase does not fit into a GPU's memory."""
    card, stage = plan.hardware.card, plan.setting.stage
    for number, each in enumerate(plan.phases):
        needs = sum(plan.peaks(stage)[number].values())
        if needs <= card.memory_gib * GIB:
            continue
        said = f"phases.{number}: a micro-batch of {each.load.sequences:,} sequences needs {needs / GIB:,.2f} GiB under"
        said += f" ZeRO {stage}, and a GPU has {card.memory_gib:,.2f} GiB"
        most = each.largest[stage]
        if most == 0:
            raise TrainerError(f"{said}: {_alternatives(plan, each)}")
        share = -(-each.global_batch // plan.hardware.ranks)
        given = plan.config.phases[number]
        change = f"set accumulation to {-(-share // most):,}"
        if given.micro_batch is not None:
            more = " and change accumulation to keep the global batch" if given.global_batch is None else ""
            change = f"set micro_batch to {most:,}{more}"
        kinds = [kind for kind in LAYER_BYTES if _has_room(plan, each, kind)]
        if kinds:
            change += f", or set engine.checkpointing to {kinds[0]}"
        raise TrainerError(f"{said}: {change}")


def _has_room(plan: Plan, each: PhasePlan, checkpointing: Checkpointing) -> bool:
    """Whether a phase's micro-batches would fit with another kind of checkpointing."""
    setting = replace(plan.setting, checkpointing=checkpointing)
    needs = peak(plan.config.model, plan.sizes, setting, each.load, each.accumulation > 1)
    return sum(needs.values()) <= plan.hardware.card.memory_gib * GIB


def require_progress(plan: Plan) -> None:
    """Raise TrainerError if failures leave less than LEAST_GOODPUT of the time for training."""
    found = plan.checkpoints
    if plan.hardware.failures is None or found.goodput >= LEAST_GOODPUT:
        return
    between = goodput.mean_time_between(plan.hardware.failures, plan.hardware.ranks)
    said = f"a failure every {between:,.0f} s of {plan.hardware.ranks:,} GPUs leaves {found.goodput:.1%} for training"
    if found.best_seconds is None or found.best_goodput is None or found.best_goodput < LEAST_GOODPUT:
        raise TrainerError(f"{said} at any interval of checkpoints: lower --restart, or use fewer GPUs")
    steps = max(1, round(found.best_seconds / plan.seconds * plan.steps))
    raise TrainerError(
        f"{said} with a checkpoint every {plan.config.checkpoint.every_steps:,} steps: set checkpoint.every_steps to "
        f"{steps:,}, which leaves {found.best_goodput:.0%}"
    )


def _alternatives(plan: Plan, each: PhasePlan) -> str:
    """What would fit if not even one sequence does."""
    found, card = [], plan.hardware.card
    for stage in STAGES[1:]:
        for offloads in (False, True):
            setting = replace(at_stage(plan.setting, stage), offloads=offloads)
            share = -(-each.global_batch // setting.ranks)
            if most := largest(plan.config.model, setting, plan.sizes, each.lengths, share, card):
                more = " and engine.offload_optimizer" if offloads else ""
                found.append(f"engine.zero_stage {stage}{more} (micro_batch up to {most:,})")
    if found:
        return f"not even one fits; these would: {', '.join(found)}"
    ranks = 2 * plan.setting.ranks
    while ranks <= MOST_RANKS:
        setting = replace(at_stage(plan.setting, 3), ranks=ranks)
        if largest(plan.config.model, setting, plan.sizes, each.lengths, 1, card):
            return f"not even one fits; engine.zero_stage 3 on {ranks:,} GPUs would"
        ranks *= 2
    one = each.lengths.fullest(1)
    setting = replace(at_stage(plan.setting, 2), offloads=True)
    needs = sum(peak(plan.config.model, plan.sizes, setting, one, True).values())
    return f"not even one fits on any number of these GPUs; engine.offload_optimizer needs {needs / GIB:,.1f} GiB each"
