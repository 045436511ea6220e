"""``micro_batch: auto``: the most sequences that fit into 95 % of the memory of every rank's GPU, by the plan.

The number is found at a run's first start, and stored in its checkpoints and its config.yaml as if the user had stated
it. A run that resumes keeps it if it still fits, so larger GPUs do not change how its batches are split.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple

import torch

from data_prep.errors import DataError
from trainer.checkpoint.train_state import state_of
from trainer.console import say
from trainer.engine.schedule import MOST_TOKENS, batch_problems
from trainer.errors import TrainerError
from trainer.plan.cards import SPARE, Card
from trainer.plan.estimate import largest, setting_of
from trainer.plan.lengths import lengths_of
from trainer.plan.memory import CONTEXT_BYTES, GIB
from trainer.ranks.world import World, broadcast_text, gather_texts, together
from trainer.run.config import Config
from trainer.run.home import store_of
from trainer.run.phases import PhaseData, Plan

AUTO = "auto"


class Room(NamedTuple):
    """Bytes of a GPU; 0 for a CPU."""

    free: int  # that this process can use
    whole: int  # that the GPU has


def settle(plan: Plan, world: World, ranks: int) -> Plan:
    """The plan with a number in place of each ``micro_batch: auto``, the same on all ranks. A collective.

    ``ranks``: how many the run has; more than ``world`` if this process checks alone what will be started later.
    Raises TrainerError with every phase whose number has to be found on CPUs, or of which not even one sequence fits.
    """
    if all(phase.micro_batch != AUTO for phase in plan.config.phases):
        return plan
    rooms = [json.loads(text) for text in gather_texts(json.dumps(_room(world.device)), world)]
    room = Room(*map(min, zip(*rooms, strict=True)))
    found = together(lambda: _numbers(plan, ranks, room) if world.is_main else {}, world)
    numbers: dict[str, int] = json.loads(broadcast_text(json.dumps(found), world))
    phases = tuple(
        replace(data, phase=replace(data.phase, micro_batch=numbers.get(data.phase.name, data.phase.micro_batch)))
        for data in plan.phases
    )
    return replace(plan, config=replace(plan.config, phases=tuple(data.phase for data in phases)), phases=phases)


def _room(device: torch.device) -> Room:
    """The memory of this rank's GPU. Before the first collective, so NCCL has taken none."""
    if device.type != "cuda":
        return Room(0, 0)
    free, total = torch.cuda.mem_get_info(device)
    return Room(min(free + CONTEXT_BYTES, total), total)  # the plan counts CUDA's context, which is there by now


def _numbers(plan: Plan, ranks: int, room: Room) -> dict[str, int]:
    """The number of each phase whose micro-batch is auto, by the phase's name; report where each comes from.

    Raises TrainerError with all phases that have none.
    """
    found, problems, before = dict[str, int](), list[str](), stored(plan.config)
    for index, data in enumerate(plan.phases):
        if data.phase.micro_batch != AUTO:
            continue
        where = f"phases.{index}"
        try:
            number, source = _number(plan, data, ranks, room, before.get(data.phase.name))
        except TrainerError as error:
            problems.append(f"{where}.{error}")
            continue
        found[data.phase.name] = number
        say(f"{where}.micro_batch: auto is {number:,}, {source}")
    if problems:
        raise TrainerError("; ".join(problems))
    return found


def _number(plan: Plan, data: PhaseData, ranks: int, room: Room, before: int | None) -> tuple[int, str]:
    """The number of a phase, and where it comes from. ``before``: the one in the run's checkpoint, if there is one."""
    if before is not None and _still_fits(plan, data, ranks, room.whole, before):
        number, source = before, "as before, from the run's checkpoint"
    else:
        number = largest_of(plan, data, ranks, room.free)
        source = f"the most that fits into {1 - SPARE:.0%} of {room.free / GIB:.1f} GiB by the planner's estimate"
        if before is not None:
            source += f"; the {before:,} of the run's checkpoint do not fit on {ranks} rank(s)"
    if problems := batch_problems(replace(data.phase, micro_batch=number), ranks, sum(data.order.sizes)):
        raise TrainerError(problems[0])
    return number, source


def stored(config: Config) -> dict[str, int | None]:
    """The micro-batches in the run's newest checkpoint, by the phase's name; empty if it has none."""
    found, _ = store_of(config).newest({}, state_of)
    phases = [] if found is None else found.record["config"]["phases"]
    return {own["name"]: own.get("micro_batch") for own in phases}


def _still_fits(plan: Plan, data: PhaseData, ranks: int, whole: int, number: int) -> bool:
    """Whether a run can go on with its number: always on CPUs, and on GPUs if it fits into the ``whole`` GPU.

    What is free at a restart says little: a process that just died may not have released its memory yet. With fewer
    ranks, each holds a larger part of the optimizer's state and may have to accumulate gradients.
    """
    try:
        return not whole or min(number, _share(data, ranks)) <= _most(plan, data, ranks, whole / (1 - SPARE))
    except TrainerError:  # the planner cannot say
        return True


def largest_of(plan: Plan, data: PhaseData, ranks: int, room: int) -> int:
    """The most sequences of a phase that fit into ``room`` bytes. Raises TrainerError if none does."""
    if not room:
        raise TrainerError("micro_batch is auto, which needs a GPU, and this run is on CPUs: set a number")
    most = _most(plan, data, ranks, room)
    if most == 0:
        said = f"micro_batch is auto, but not even one sequence fits into {1 - SPARE:.0%} of {room / GIB:.2f} GiB"
        raise TrainerError(f"{said}: python -m trainer.plan says what would fit")
    return most


def _most(plan: Plan, data: PhaseData, ranks: int, room: float) -> int:
    config, card = plan.config, Card("a rank's GPU", room / GIB, ())
    try:
        setting, lengths = setting_of(config, ranks), lengths_of(data.loader.folder, data.loader.manifest)
    except (DataError, TrainerError) as error:
        raise TrainerError(f"micro_batch is auto, which asks the planner: {error}") from None
    return largest(config.model, setting, lengths, _share(data, ranks), card)


def _share(data: PhaseData, ranks: int) -> int:
    """The most sequences that one micro-batch of a rank can have."""
    return min(-(-data.global_batch // ranks), (MOST_TOKENS - 1) // data.phase.sequence_length)
