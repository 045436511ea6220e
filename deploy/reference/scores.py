"""Scores over seeds: their mean, its standard error, and a table and a picture of several tasks."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.atomic import replacing
from trainer.convert.model_card import markdown_table


@dataclass(frozen=True)
class Score:
    """The mean over ``count`` seeds, and its standard error: None for fewer than two."""

    mean: float
    error: float | None
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + ("" if self.error is None else f" ± {self.error:.4f}")


def score(values: Sequence[float]) -> Score | None:
    """The score of some seeds' values; None if there are none."""
    if not values:
        return None
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return Score(statistics.fmean(values), error, len(values))


def aligned(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table whose columns are aligned."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    first, *rest = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    return markdown_table(first, rest)


def draw(rows: dict[str, tuple[str, Score]], path: Path) -> None:
    """Draw a bar for each task, with its standard error. Writes a PNG, unless matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from trainer.monitor.panels import BLUE, STYLE

    with rc_context(STYLE):
        figure = Figure(figsize=(max(4.5, 1.2 + 0.9 * len(rows)), 3.6), layout="constrained")
        axes = figure.subplots()
        heights = [found.mean for _, found in rows.values()]
        errors = [found.error or 0.0 for _, found in rows.values()]
        axes.bar(range(len(rows)), heights, yerr=errors, color=BLUE, width=0.6, capsize=3)
        axes.set_xticks(range(len(rows)), [f"{task}\n{measure}" for task, (measure, _) in rows.items()])
        axes.grid(axis="x", visible=False)
        axes.set_title("scores on dev: mean over seeds, and standard error", loc="left", fontsize=10)
        with replacing(path) as file:
            figure.savefig(file, dpi=120, format="png")
