"""A sweep as a table and a picture: the results of each setting over its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.atomic import replacing
from trainer.finetune.label_counts import LabelCounts
from trainer.finetune.result import SettingSummary

CLASSES_SHOWN = 30  # classes on a line
_HEADINGS = ("rate", "batch", "epochs", "median", "spread", "best", "n", "diverged", "constant")


def table(rows: Sequence[SettingSummary], measure: str) -> str:
    """The settings' dev metrics as a text table, best median first."""
    cells: list[tuple[str, ...]] = [_HEADINGS]
    for row in sorted(rows, key=lambda row: -1e9 if row.median is None else row.median, reverse=True):
        setting = row.setting
        values = (_number(value) for value in (row.median, row.spread, row.best))
        counts = str(len(row.values)), str(row.diverged), str(row.constant)
        cells.append((f"{setting.rate:g}", str(setting.batch), f"{setting.epochs:g}", *values, *counts))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    legend = "spread: standard deviation; constant: runs with the same answer for every input"
    return "\n".join([f"{measure} on dev, over seeds ({legend})", *lines])


def counted(path: Path, counts: LabelCounts) -> str:
    """A file's classes and their counts, in one line."""
    parts = [f"{label} ({number:,.10g})" for label, number in counts.items()]
    more = f" and {len(parts) - CLASSES_SHOWN} more" if len(parts) > CLASSES_SHOWN else ""
    return f"{path}: {', '.join(parts[:CLASSES_SHOWN])}{more}"


def closing(tree: dict[str, Any]) -> str:
    """The last lines of the output: the chosen run and its metrics."""
    chosen = tree["chosen"]
    setting = f"rate {chosen['rate']:g}, batch {chosen['batch']}, {chosen['epochs']:g} epochs, seed {chosen['seed']}"
    odd = ", which gives the same answer for every input: no run has learned" if chosen["how"] == "degenerate" else ""
    lines = [f"chosen: {setting}{odd}", f"  dev: {_metrics(chosen['dev'])}"]
    lines += [f"  {path}: {_metrics(metrics)}" for path, metrics in tree.get("also", {}).items()]
    return "\n".join(lines + ([f"  test: {_metrics(tree['test'])}"] if "test" in tree else []))


def draw(rows: Sequence[SettingSummary], title: str, measure: str, path: Path) -> None:
    """Draw a column per setting, with a dot per seed and a line at the median. Writes the file atomically."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from trainer.monitor.panels import BLUE, ORANGE, RED, STYLE

    with rc_context(STYLE):
        figure = Figure(figsize=(max(4.5, 1.8 + 0.62 * len(rows)), 4.2), layout="constrained")
        axes = figure.subplots()
        for place, row in enumerate(rows):
            known = [value for value in row.values if value is not None]
            axes.plot([place] * len(known), known, "o", color=BLUE, alpha=0.65, markersize=6, markeredgewidth=0)
            if row.median is not None:
                axes.plot([place - 0.28, place + 0.28], [row.median] * 2, color=ORANGE, linewidth=2.2)
            if gone := len(row.values) - len(known):
                axes.annotate(f"× {gone}", (place, 0.02), xycoords=("data", "axes fraction"), ha="center", color=RED)
        axes.margins(y=0.12)
        names = [f"{row.setting.rate:g}\n{row.setting.batch}\n{row.setting.epochs:g}" for row in rows]
        axes.set_xticks(range(len(rows)), names)
        axes.set_xlim(-0.6, len(rows) - 0.4)
        axes.grid(axis="x", visible=False)
        axes.set_xlabel("rate, batch, epochs")
        axes.set_ylabel(f"{measure} on dev")
        odd = "; ×: diverged" if any(None in row.values for row in rows) else ""
        axes.set_title(f"{title}\ndots: seeds; lines: medians{odd}", loc="left", fontsize=10)
        with replacing(path) as file:
            figure.savefig(file, dpi=120, format="png")


def _metrics(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
