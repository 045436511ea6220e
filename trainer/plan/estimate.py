"""The plan of a run: what it needs, how long it takes and what it costs, or why it is impossible there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch

from trainer.engine.engine import resolve_precision
from trainer.engine.schedule import Phase, batch_of, resolve, samples_in
from trainer.errors import TrainerError
from trainer.model.bert import ModelConfig
from trainer.model.checkpointing import Checkpointing
from trainer.plan import goodput
from trainer.plan.cards import SPARE, Card, doubts
from trainer.plan.lengths import Lengths
from trainer.plan.memory import GIB, Bytes, Load, Setting, host_bytes, peak, reserved, sizes
from trainer.plan.speed import Network, launch_bound, step_time
from trainer.run.config import Config

STAGES = (0, 1, 2, 3)
MOST_RANKS = 4096  # tried when nothing fits
DAY = 86_400.0  # seconds
LEAST_GOODPUT = 0.05  # with less, a plan is refused
NOTES = (
    "not counted: evaluation, waiting for data, start-up",
    "not calibrated on a GPU: NCCL, context; latency; the copy of a checkpoint",
)


@dataclass(frozen=True)
class Hardware:
    """The resources of a planned run, and their cost."""

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

    @property
    def seconds_between_failures(self) -> float:
        """The mean time from one failure of any GPU to the next; infinite without a rate of failures."""
        return math.inf if self.failures is None else 1 / (self.failures * self.ranks / DAY)


@dataclass(frozen=True)
class PhasePlan:
    """One phase as it would run."""

    name: str
    global_batch: int
    accumulation: int
    micro_batch: Load  # the fullest one
    largest_micro_batch: dict[int, int]  # by ZeRO stage: the most sequences that fit; 0: none
    steps: int
    samples: int
    tokens: int
    epochs: float
    step_seconds: dict[str, float]  # by part, and in total
    tokens_per_second: float
    seconds: float  # of all steps; batch warm-up makes some of them shorter


@dataclass(frozen=True)
class Run:
    """The run to plan."""

    config: Config
    hardware: Hardware
    setting: Setting

    def needs(self, each: PhasePlan, setting: Setting | None = None) -> Bytes:
        """Bytes of a rank by kind in a phase, at their peak."""
        load, accumulates = each.micro_batch, each.accumulation > 1
        return peak(self.config.model, setting or self.setting, load, accumulates)


@dataclass(frozen=True)
class Checkpoints:
    """The cost of checkpoints."""

    size: int  # bytes
    write_seconds: float
    stall_seconds: float
    every_seconds: float  # of training, as configured
    best_seconds: float | None  # Daly's interval; None without a rate of failures
    goodput: float  # at the configured interval, in 0–1
    best_goodput: float | None


@dataclass(frozen=True)
class Plan:
    """The whole run; ``--json`` writes these fields. Memory is of a rank, in the phase that takes the most."""

    name: str
    parameters: int
    gpus: int  # of all nodes
    nodes: int
    card: str
    card_bytes: int
    network: Network
    zero_stage: int
    precision: str
    memory_phase: str  # the phase that takes the most memory as configured
    reserved_bytes: dict[int, int]  # by ZeRO stage: PyTorch's part of the memory
    memory_bytes: dict[int, Bytes]  # by ZeRO stage and kind
    host_bytes_per_node: int  # that offloaded optimizers take
    phases: tuple[PhasePlan, ...]
    steps: int
    training_seconds: float  # without checkpoints and failures
    checkpoints: Checkpoints
    wall_seconds: float  # with them
    gpu_hours: float  # of the wall-clock time
    cost: float | None
    notes: tuple[str, ...]


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
    run = Run(config, hardware, setting)
    phases = tuple(_plan_phase(run, phase, lengths) for phase, lengths in zip(config.phases, data, strict=True))
    for number, each in enumerate(phases):
        _require_room(run, number, each, data[number])
    peaks = {stage: [run.needs(each, at_stage(setting, stage)) for each in phases] for stage in STAGES}
    memory = {stage: max(found, key=lambda kinds: sum(kinds.values())) for stage, found in peaks.items()}
    steps, seconds = sum(each.steps for each in phases), sum(each.seconds for each in phases)
    checkpoints = _checkpoints(run, seconds, steps)
    _require_progress(run, checkpoints, seconds / steps)
    wall = seconds / checkpoints.goodput if checkpoints.goodput else math.inf
    hours = wall * hardware.ranks / 3600
    return Plan(
        name=config.run.name,
        parameters=sizes(config.model).parameters,
        gpus=hardware.ranks,
        nodes=hardware.nodes,
        card=hardware.card.name,
        card_bytes=round(hardware.card.memory_gib * GIB),
        network=hardware.network,
        zero_stage=setting.stage,
        precision=setting.precision,
        memory_phase=phases[peaks[setting.stage].index(memory[setting.stage])].name,
        reserved_bytes={stage: reserved(kinds) for stage, kinds in memory.items()},
        memory_bytes=memory,
        host_bytes_per_node=hardware.gpus * host_bytes(config.model, setting),
        phases=phases,
        steps=steps,
        training_seconds=seconds,
        checkpoints=checkpoints,
        wall_seconds=wall,
        gpu_hours=hours,
        cost=None if hardware.price is None else hours * hardware.price,
        notes=_notes(run, phases, data),
    )


def _plan_phase(run: Run, phase: Phase, lengths: Lengths) -> PhasePlan:
    model, setting, hardware = run.config.model, run.setting, run.hardware
    global_batch, _ = batch_of(phase, setting.ranks)
    share = -(-global_batch // setting.ranks)
    most = {stage: largest(model, at_stage(setting, stage), lengths, share, hardware.card) for stage in STAGES}
    if phase.micro_batch == "auto":
        phase = replace(phase, micro_batch=max(1, most[setting.stage]))
    _, accumulation = batch_of(phase, setting.ranks)
    work = lengths, global_batch, accumulation, hardware.card, hardware.network
    parts = step_time(model, setting, run.config.optimizer.name, *work)
    step = sum(parts.values())
    runs = resolve(phase, global_batch, lengths.samples)
    steps = runs.steps if phase.minutes is None else max(1, round(60 * phase.minutes / step))
    samples = samples_in(runs, steps, global_batch)
    return PhasePlan(
        name=phase.name,
        global_batch=global_batch,
        accumulation=accumulation,
        micro_batch=lengths.fullest(-(-share // accumulation)),
        largest_micro_batch=most,
        steps=steps,
        samples=samples,
        tokens=round(samples * lengths.mean),
        epochs=samples / lengths.samples,
        step_seconds=parts | {"total": step},
        tokens_per_second=lengths.mean * global_batch / step,
        seconds=step * samples / global_batch,
    )


def _notes(run: Run, phases: Sequence[PhasePlan], data: Sequence[Lengths]) -> tuple[str, ...]:
    found: list[str] = []
    for each, lengths in zip(phases, data, strict=True):
        length = lengths.squares / lengths.tokens
        model, card, tokens = run.config.model, run.hardware.card, each.micro_batch.tokens
        found += doubts(card, model.hidden, length, tokens)
        if launch_bound(model, run.setting, card, each.step_seconds["compute"] / each.accumulation):
            found.append(
                f"micro-batches of {tokens:,} tokens: the host takes about as long to launch their kernels as the GPU "
                "takes to run them, so steps may take twice as long as planned; larger micro-batches avoid this"
            )
    return (*dict.fromkeys(found), *NOTES)


def _checkpoints(run: Run, seconds: float, steps: int) -> Checkpoints:
    """The size, stall and interval of checkpoints. ``seconds``: of training, for all steps."""
    hardware, config = run.hardware, run.config.checkpoint
    counted = sizes(run.config.model)
    size = goodput.SAVED_BYTES * counted.parameters
    write = size / hardware.disk_bytes_per_second
    stall = goodput.stall(counted.share(run.setting.stage, run.setting.ranks), write, config.asynchronous)
    every = config.every_steps * seconds / steps
    between = hardware.seconds_between_failures
    # until an asynchronous save is on disk, a failure costs the work since the one before it
    restart = hardware.restart_seconds + (write if config.asynchronous else 0.0)
    best = None if hardware.failures is None else goodput.best_interval(stall, between)
    kept = None if best is None else goodput.goodput(best, stall, restart, between)
    return Checkpoints(size, write, stall, every, best, goodput.goodput(every, stall, restart, between), kept)


def largest(model: ModelConfig, setting: Setting, lengths: Lengths, share: int, card: Card) -> int:
    """The most sequences of a rank's ``share`` that fit into one micro-batch; 0 if not even one fits.

    They fit if SPARE of the card's memory stays free.
    """

    def fits(sequences: int) -> bool:
        load = lengths.fullest(sequences)
        return sum(peak(model, setting, load, sequences < share).values()) <= card.room

    if fits(share):
        return share
    low, high = 0, share  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _require_room(run: Run, number: int, each: PhasePlan, lengths: Lengths) -> None:
    """Raise TrainerError, with what would be possible, if a phase does not fit into a GPU's memory."""
    needs, room = sum(run.needs(each).values()), run.hardware.card.room
    if needs <= room:
        return
    said = f"phases.{number}: a micro-batch of {each.micro_batch.sequences:,} sequences needs {needs / GIB:,.2f} GiB"
    said += f" under ZeRO {run.setting.stage}, and {1 - SPARE:.0%} of a GPU's memory is {room / GIB:,.2f} GiB"
    most, share = each.largest_micro_batch[run.setting.stage], -(-each.global_batch // run.setting.ranks)
    if most == 0:
        raise TrainerError(f"{said}: {_alternatives(run, each, lengths)}")
    given = run.config.phases[number]
    change = f"set accumulation to {-(-share // most):,}"
    if given.micro_batch is not None:
        more = " and change accumulation to keep the global batch" if given.global_batch is None else ""
        change = f"set micro_batch to {most:,}{more}"
    for kind in get_args(Checkpointing):
        if sum(run.needs(each, replace(run.setting, checkpointing=kind)).values()) <= room:
            raise TrainerError(f"{said}: {change}, or set engine.checkpointing to {kind}")
    raise TrainerError(f"{said}: {change}")


def _alternatives(run: Run, each: PhasePlan, lengths: Lengths) -> str:
    """Say what would fit if not even one sequence does."""
    model, card = run.config.model, run.hardware.card
    found, share = [], -(-each.global_batch // run.setting.ranks)
    for stage in STAGES[1:]:
        for offloads in (False, True):
            setting = replace(at_stage(run.setting, stage), offloads=offloads)
            if most := largest(model, setting, lengths, share, card):
                more = " and engine.offload_optimizer" if offloads else ""
                found.append(f"engine.zero_stage {stage}{more} (micro_batch up to {most:,})")
    if found:
        return f"not even one fits; these would: {', '.join(found)}"
    ranks = 2 * run.setting.ranks
    while ranks <= MOST_RANKS:
        if largest(model, replace(at_stage(run.setting, 3), ranks=ranks), lengths, 1, card):
            return f"not even one fits; engine.zero_stage 3 on {ranks:,} GPUs would"
        ranks *= 2
    one = replace(each, micro_batch=lengths.fullest(1), accumulation=2)
    least = sum(run.needs(one, replace(at_stage(run.setting, 2), offloads=True)).values())
    return f"not even one fits on any number of these GPUs; engine.offload_optimizer needs {least / GIB:,.1f} GiB each"


def _require_progress(run: Run, found: Checkpoints, step: float) -> None:
    """Raise TrainerError if failures leave less than LEAST_GOODPUT of the time for training."""
    hardware = run.hardware
    if hardware.failures is None or found.goodput >= LEAST_GOODPUT:
        return
    said = f"a failure every {hardware.seconds_between_failures:,.0f} s of {hardware.ranks:,} GPUs "
    said += f"leaves {found.goodput:.1%} for training"
    if found.best_seconds is None or found.best_goodput is None or found.best_goodput < LEAST_GOODPUT:
        raise TrainerError(f"{said} at any interval of checkpoints: lower --restart, or use fewer GPUs")
    raise TrainerError(
        f"{said} with a checkpoint every {run.config.checkpoint.every_steps:,} steps: set checkpoint.every_steps to "
        f"{max(1, round(found.best_seconds / step)):,}, which leaves {found.best_goodput:.0%}"
    )
