"""Draw the memory of a rank by kind, one bar per ZeRO stage, next to what the GPU has."""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from data_prep.atomic import replacing
from trainer.monitor.panels import BLUE, FAINT, GREEN, INK, ORANGE, RED, ROSE, SKY, STYLE, VIOLET
from trainer.plan.estimate import STAGES, Plan
from trainer.plan.memory import GIB, KINDS

COLORS = (BLUE, SKY, VIOLET, GREEN, "#a6d96a", ORANGE, "#f0c75e", ROSE, FAINT, "#c9ced6")


def draw(plan: Plan, path: Path) -> None:
    """Write the picture to ``path`` as PNG, whole or not at all."""
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        axes = figure.subplots()
        names = [f"ZeRO {stage}" + (" *" if stage == plan.setting.stage else "") for stage in STAGES]
        starts = [0.0] * len(STAGES)
        for kind, color in zip(KINDS, COLORS, strict=True):
            sizes = [plan.memory[stage][kind] / GIB for stage in STAGES]
            axes.barh(STAGES, sizes, left=starts, color=color, label=kind, height=0.62)
            starts = [start + size for start, size in zip(starts, sizes, strict=True)]
        for place, total in enumerate(starts):
            axes.text(total, place, f" {total:.1f}", va="center", color=INK, fontsize=9)
        card = plan.hardware.card
        axes.axvline(card.memory_gib, color=RED, linestyle="--", linewidth=1.2, label=f"{card.memory_gib:g} GiB")
        axes.set_xlim(0, 1.08 * max(card.memory_gib, *starts))
        axes.set_yticks(STAGES, names)
        axes.invert_yaxis()
        axes.set_xlabel("GiB")
        title = f"Memory of a rank, {plan.largest_phase.phase.name[:40]}: {plan.hardware.ranks:,} × {card.name}"
        axes.set_title(title, loc="left", fontsize=10)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        with replacing(path) as file:
            figure.savefig(file, dpi=100, format="png")
