"""A plan as lines to read and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from trainer.plan.estimate import STAGES, PhasePlan, Plan
from trainer.plan.goodput import mean_time_between
from trainer.plan.memory import GIB, KINDS, MIB, reserved

DAY, HOUR, MINUTE = 86_400, 3600, 60
NOTES = (
    "not counted: evaluation, waiting for data, start-up",
    "not calibrated on a GPU: workspace, NCCL, context; latency; the copy of a checkpoint",
)


def lines(plan: Plan) -> list[str]:
    """The whole plan, each line within 100 columns."""
    return [
        *_head(plan),
        "",
        *_memory(plan),
        "",
        *_phases(plan),
        "",
        *_step(plan),
        "",
        *_run(plan),
        "",
        *(line for note in (*plan.doubts, *NOTES) for line in wrap(f"note: {note}", 100, subsequent_indent="  ")),
    ]


def _head(plan: Plan) -> list[str]:
    hardware, setting = plan.hardware, plan.setting
    card = hardware.card
    nodes = f"{hardware.nodes} nodes of {hardware.gpus}" if hardware.nodes > 1 else "one node"
    dates = [row.date for row in card.rates]
    rates = f"measured, {' to '.join(sorted({min(dates), max(dates)}))}" if card.tflops is None else "as given"
    offload = ", optimizer in host memory" if setting.offloads else ""
    network = hardware.network
    links = f"{network.bandwidth / 1e9:,.0f} GB/s, {1e6 * network.latency:.0f} µs ({network.source[:60]})"
    return [
        f"{plan.config.run.name[:60]}: {plan.sizes.parameters:,} parameters, ZeRO {setting.stage}, "
        f"{setting.precision}{offload}",
        f"{hardware.ranks:,} GPU{'s'[: hardware.ranks > 1]} ({nodes}): {card.name[:30]}, {card.memory_gib:.4g} GiB",
        f"rates: {rates}",
        f"network: {links if hardware.ranks > 1 else 'none, one rank'}",
    ]


def _memory(plan: Plan) -> list[str]:
    each = plan.largest_phase
    found = [
        f"GiB of a rank in {each.phase.name[:20]}: a micro-batch of {each.load.sequences:,} sequences, "
        f"up to {each.load.tokens:,} tokens",
        _row("", *(f"ZeRO {stage}" + ("*" if stage == plan.setting.stage else "") for stage in STAGES)),
    ]
    for kind in KINDS:
        found.append(_row(kind, *(_gib(plan.memory[stage][kind]) for stage in STAGES)))
    found.append(_row("total", *(_gib(sum(plan.memory[stage].values())) for stage in STAGES)))
    found.append(_row("in PyTorch", *(_gib(reserved(plan.memory[stage])) for stage in STAGES)))
    most = (each.largest[stage] for stage in STAGES)
    found.append(_row("largest micro-batch", *(f"{sequences:,}" if sequences else "none" for sequences in most)))
    found.append("* as configured. ZeRO 0 computes in fp32. DeepSpeed's buffers of ZeRO 0 and 3 are estimates.")
    if plan.host_bytes:
        found.append(f"host memory of a node for the optimizer: {_gib(plan.host_bytes)} GiB")
    return found


def _row(name: str, *cells: str) -> str:
    return f"{name:20}" + "".join(f"{cell:>12}" for cell in cells)


def _phases(plan: Plan) -> list[str]:
    heads = ("batch", "micro", "largest", "accum.", "steps", "samples", "tokens", "epochs", "time")
    widths = (8, 7, 8, 7, 11, 9, 9, 8, 9)
    found = [f"{'phase':20}" + "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))]
    for each in plan.phases:
        cells = (
            f"{each.global_batch:,}",
            f"{each.load.sequences:,}",
            f"{each.largest[plan.setting.stage]:,}",
            f"{each.accumulation:,}",
            f"{each.steps:,}",
            _short(each.samples),
            _short(each.tokens),
            _short(each.epochs),
            duration(each.seconds),
        )
        row = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        found.append(f"{each.phase.name[:19]:20}{row}")
    return found


def _step(plan: Plan) -> list[str]:
    heads = ("compute", "accumulate", "reduce", "optimizer", "gather", "total", "tokens/s")
    found = [f"{'a step, ms':20}" + "".join(f"{head:>11}" for head in heads)]
    for each in plan.phases:
        parts = (*asdict(each.step).values(), each.step.total)
        cells = [f"{1000 * part:,.1f}" for part in parts] + [_short(_tokens_per_second(each))]
        found.append(f"{each.phase.name[:19]:20}" + "".join(f"{cell:>11}" for cell in cells))
    return found


def _run(plan: Plan) -> list[str]:
    found, hardware = plan.checkpoints, plan.hardware
    said = [
        f"training    {duration(plan.seconds)} in {plan.steps:,} steps",
        f"checkpoints {_size(found.size)}, every {plan.config.checkpoint.every_steps:,} steps or "
        f"{duration(found.every_seconds)}",
        f"a save      stalls training for {duration(found.stall_seconds)}; {duration(found.write_seconds)} to write",
        f"goodput     {found.goodput:.2%}" + ("" if hardware.failures else ", without failures (see --failures)"),
    ]
    if found.best_seconds is not None and found.best_goodput is not None:
        between = mean_time_between(hardware.failures or 0.0, hardware.ranks)
        steps = max(1, round(found.best_seconds / plan.seconds * plan.steps))
        said[-1] += f": a failure every {duration(between)}, {duration(hardware.restart_seconds)} to restart"
        said.append(f"best        a checkpoint every {steps:,} steps, for {found.best_goodput:.2%} (Daly 2006)")
    cost = "" if hardware.price is None else f", {plan.gpu_hours * hardware.price:,.2f} at {hardware.price:g} an hour"
    said.append(f"cost        {duration(plan.wall_seconds)}, {plan.gpu_hours:,.1f} GPU-hours{cost}")
    return said


def tree(plan: Plan) -> dict[str, Any]:
    """The plan as JSON's types, in bytes and seconds."""
    hardware, found = plan.hardware, plan.checkpoints
    return {
        "name": plan.config.run.name,
        "parameters": plan.sizes.parameters,
        "gpus": hardware.ranks,
        "nodes": hardware.nodes,
        "card": hardware.card.name,
        "card_bytes": round(hardware.card.memory_gib * GIB),
        "network": asdict(hardware.network),
        "zero_stage": plan.setting.stage,
        "precision": plan.setting.precision,
        "memory_phase": plan.largest_phase.phase.name,
        "reserved_bytes": {str(stage): reserved(kinds) for stage, kinds in plan.memory.items()},
        "memory_bytes": {str(stage): kinds for stage, kinds in plan.memory.items()},
        "host_bytes_per_node": plan.host_bytes,
        "phases": [_phase_tree(each) for each in plan.phases],
        "steps": plan.steps,
        "training_seconds": plan.seconds,
        "checkpoints": asdict(found),
        "wall_seconds": plan.wall_seconds,
        "gpu_hours": plan.gpu_hours,
        "cost": None if hardware.price is None else plan.gpu_hours * hardware.price,
        "notes": [*plan.doubts, *NOTES],
    }


def _phase_tree(each: PhasePlan) -> dict[str, Any]:
    return {
        "name": each.phase.name,
        "global_batch": each.global_batch,
        "accumulation": each.accumulation,
        "micro_batch": each.load._asdict(),
        "largest_micro_batch": {str(stage): most for stage, most in each.largest.items()},
        "steps": each.steps,
        "samples": each.samples,
        "tokens": each.tokens,
        "epochs": each.epochs,
        "step_seconds": asdict(each.step) | {"total": each.step.total},
        "tokens_per_second": _tokens_per_second(each),
        "seconds": each.seconds,
    }


def _tokens_per_second(each: PhasePlan) -> float:
    return each.lengths.mean * each.global_batch / each.step.total


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}"


def _size(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / MIB:,.2f} MiB"


def _short(value: float) -> str:
    for power, unit in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:,.3g} {unit}"
    return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Format a time: ``1.2 s``, ``3.4 h``."""
    if math.isinf(seconds):
        return "forever"
    for size, unit in ((DAY, "d"), (HOUR, "h"), (MINUTE, "min")):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{1000 * seconds:,.1f} ms"
