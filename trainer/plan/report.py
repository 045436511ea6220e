"""A plan as lines to read, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import wrap

from matplotlib import rc_context
from matplotlib.figure import Figure

from data_prep.atomic import replacing
from trainer.monitor.panels import BLUE, FAINT, GREEN, INK, ORANGE, RED, ROSE, SKY, STYLE, VIOLET
from trainer.monitor.quantities import short
from trainer.plan.cards import SPARE
from trainer.plan.estimate import STAGES, Hardware, Plan
from trainer.plan.memory import GIB, KINDS, MIB
from trainer.run.config import Config

COLORS = (BLUE, SKY, VIOLET, GREEN, "#a6d96a", ORANGE, "#f0c75e", ROSE, FAINT, "#c9ced6")


def lines(plan: Plan, config: Config, hardware: Hardware) -> list[str]:
    """The whole plan, each line within 100 columns."""
    notes = [line for note in plan.notes for line in wrap(f"note: {note}", 100, subsequent_indent="  ")]
    tables = _memory(plan), _phases(plan), _step(plan)
    parts = _head(plan, config, hardware), *tables, _run(plan, config, hardware), notes
    return [line for part in parts for line in ("", *part)][1:]


def _head(plan: Plan, config: Config, hardware: Hardware) -> list[str]:
    card, network = hardware.card, plan.network
    nodes = f"{plan.nodes} nodes of {hardware.gpus}" if plan.nodes > 1 else "one node"
    dates = sorted(row.date for row in card.rates)
    rates = "as given" if card.tflops else f"measured, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}"
    offload = ", optimizer in host memory" if config.engine.offload_optimizer else ""
    links = f"{network.bandwidth / 1e9:,.0f} GB/s, {1e6 * network.latency:.0f} µs ({network.source[:60]})"
    return [
        f"{plan.name[:60]}: {plan.parameters:,} parameters, ZeRO {plan.zero_stage}, {plan.precision}{offload}",
        f"{plan.gpus:,} GPU{'s'[: plan.gpus > 1]} ({nodes}): {plan.card[:30]}, {card.memory_gib:.4g} GiB",
        f"rates: {rates}",
        f"network: {links if plan.gpus > 1 else 'none, one rank'}",
    ]


def _memory(plan: Plan) -> list[str]:
    [each] = (phase for phase in plan.phases if phase.name == plan.memory_phase)
    by_stage = plan.memory_bytes.values()
    rows = [("", [f"ZeRO {stage}" + ("*" if stage == plan.zero_stage else "") for stage in STAGES])]
    rows += [(kind, [_gib(found[kind]) for found in by_stage]) for kind in KINDS]
    rows.append(("total", [_gib(sum(found.values())) for found in by_stage]))
    rows.append(("in PyTorch", [_gib(size) for size in plan.reserved_bytes.values()]))
    rows.append(
        ("largest micro-batch", [f"{most:,}" if most else "none" for most in each.largest_micro_batch.values()])
    )
    host = plan.host_bytes_per_node
    return [
        f"GiB of a rank in {each.name[:20]}: a micro-batch of {each.micro_batch.sequences:,} sequences, up to "
        f"{each.micro_batch.tokens:,} tokens",
        *_table(rows, [12] * len(STAGES)),
        "* as configured. ZeRO 0 computes in fp32. DeepSpeed's buffers of ZeRO 0 and 3 are estimates.",
        f"A micro-batch fits if {SPARE:.0%} of the GPU's memory stays free.",
        *([f"host memory of a node for the optimizer: {_gib(host)} GiB"] if host else []),
    ]


def _phases(plan: Plan) -> list[str]:
    rows = [("phase", ["batch", "micro", "largest", "accum.", "steps", "samples", "tokens", "epochs", "time"])]
    for each in plan.phases:
        counts = each.global_batch, each.micro_batch.sequences, each.largest_micro_batch[plan.zero_stage]
        cells = [f"{count:,}" for count in (*counts, each.accumulation, each.steps)]
        cells += [short(each.samples), short(each.tokens), short(each.epochs), duration(each.seconds)]
        rows.append((each.name, cells))
    return _table(rows, [8, 7, 8, 7, 11, 9, 9, 8, 9])


def _step(plan: Plan) -> list[str]:
    rows = [("a step, ms", [*plan.phases[0].step_seconds, "tokens/s"])]
    for each in plan.phases:
        parts = [f"{1000 * seconds:,.1f}" for seconds in each.step_seconds.values()]
        rows.append((each.name, [*parts, short(each.tokens_per_second)]))
    return _table(rows, [11] * 7)


def _run(plan: Plan, config: Config, hardware: Hardware) -> list[str]:
    found = plan.checkpoints
    failures = ", without failures (see --failures)"
    if hardware.failures is not None:
        between, restart = duration(hardware.seconds_between_failures), duration(hardware.restart_seconds)
        failures = f": a failure every {between}, {restart} to restart"
    said = [
        f"training    {duration(plan.training_seconds)} in {plan.steps:,} steps",
        f"checkpoints {_size(found.size)}, every {config.checkpoint.every_steps:,} steps or "
        f"{duration(found.every_seconds)}",
        f"a save      stalls training for {duration(found.stall_seconds)}; {duration(found.write_seconds)} to write",
        f"goodput     {found.goodput:.2%}{failures}",
    ]
    if found.best_seconds is not None and found.best_goodput is not None:
        steps = max(1, round(found.best_seconds / plan.training_seconds * plan.steps))
        said.append(f"best        a checkpoint every {steps:,} steps, for {found.best_goodput:.2%} (Daly 2006)")
    cost = "" if plan.cost is None else f", {plan.cost:,.2f} at {hardware.price:g} an hour"
    return [*said, f"cost        {duration(plan.wall_seconds)}, {plan.gpu_hours:,.1f} GPU-hours{cost}"]


def draw(plan: Plan, path: Path) -> None:
    """Write a picture of the memory of a rank to ``path`` as PNG, whole or not at all: a bar for each ZeRO stage."""
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        axes = figure.subplots()
        starts = [0.0] * len(STAGES)
        for kind, color in zip(KINDS, COLORS, strict=True):
            sizes = [found[kind] / GIB for found in plan.memory_bytes.values()]
            axes.barh(STAGES, sizes, left=starts, color=color, label=kind, height=0.62)
            starts = [start + size for start, size in zip(starts, sizes, strict=True)]
        for place, total in enumerate(starts):
            axes.text(total, place, f" {total:.1f}", va="center", color=INK, fontsize=9)
        room = plan.card_bytes / GIB
        axes.axvline(room, color=RED, linestyle="--", linewidth=1.2, label=f"{room:g} GiB")
        axes.set_xlim(0, 1.08 * max(room, *starts))
        axes.set_yticks(STAGES, [f"ZeRO {stage}" + (" *" if stage == plan.zero_stage else "") for stage in STAGES])
        axes.invert_yaxis()
        axes.set_xlabel("GiB")
        title = f"Memory of a rank, {plan.memory_phase[:40]}: {plan.gpus:,} × {plan.card}"
        axes.set_title(title, loc="left", fontsize=10)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        with replacing(path) as file:
            figure.savefig(file, dpi=100, format="png")


def _table(rows: Iterable[tuple[str, Sequence[str]]], widths: Sequence[int]) -> list[str]:
    """Rows of a name and some cells, in columns of these widths."""
    return [
        f"{name[:19]:20}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, cells in rows
    ]


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}"


def _size(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / MIB:,.2f} MiB"


def duration(seconds: float) -> str:
    """Format a time: ``1.2 s``, ``3.4 h``."""
    if math.isinf(seconds):
        return "forever"
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{1000 * seconds:,.1f} ms"
