"""Differences between runs: settings, what they ran on, results, and their losses in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from data_prep.atomic import replacing
from trainer.checkpoint.changed_settings import differing, setting
from trainer.errors import TrainerError
from trainer.monitor.curves import median_rate, present, smooth, thinned
from trainer.monitor.history import History, read_history
from trainer.monitor.panels import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    ROSE,
    SKY,
    STYLE,
    VIOLET,
)
from trainer.monitor.quantities import duration, short
from trainer.runs.status import RunStatus, read_config, read_status
from trainer.runs.table import LONGEST_NAME, NOTHING, aligned, clipped, printable

COLORS = (BLUE, ORANGE, GREEN, VIOLET, ROSE, SKY)
LINES = ("-", "--", ":")  # for more runs than there are colors
OWN = ("run.name", "run.folder", "run", "config")  # settings and facts that always differ


@dataclass(frozen=True)
class Compared:
    """A run, and the label that tells it from the others."""

    label: str
    config: dict[str, Any]
    history: History
    status: RunStatus


def compared(folders: Sequence[Path], now: float) -> list[Compared]:
    """The runs in these folders at the Unix time ``now``.

    Raises TrainerError if a journal has no step or cannot be read.
    """
    return labeled([(folder, read_history(folder), read_status(folder, now)) for folder in folders])


def compare(runs: Sequence[Compared]) -> list[str]:
    """The lines that say what differs."""
    blocks = [[f"no readable config.yaml in {run.status.folder}" for run in runs if not run.config]]
    for name, rows in differences(runs).items():
        columns = {name: list(rows)} | {run.label: [row[at] for row in rows.values()] for at, run in enumerate(runs)}
        blocks.append(aligned(columns, [name]) if rows else [f"{name}: no difference"])
    return [line.rstrip() for block in filter(None, blocks) for line in ("", *block)][1:]


def labeled(runs: Sequence[tuple[Path, History, RunStatus]]) -> list[Compared]:
    """The runs with their configurations; if two have one name, each is labeled with its folder."""
    names = [clipped(status.name, LONGEST_NAME) for _, _, status in runs]
    labels = names if len(set(names)) == len(names) else [status.folder for _, _, status in runs]
    return [
        Compared(printable(label), read_config(folder), history, status)
        for label, (folder, history, status) in zip(labels, runs, strict=True)
    ]


def differences(runs: Sequence[Compared]) -> dict[str, dict[str, list[str]]]:
    """Tables of what differs between the runs: by its name, a row of each run's value as text."""
    return {
        "settings": _different([run.config for run in runs]),
        "ran with": _different([run.history.facts for run in runs]),
        "results": _results(runs),
    }


def _different(trees: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """The keys in which any two of the trees differ, section by section, and each tree's value as text."""
    keys = {key: None for one, other in combinations(trees, 2) for key in differing(one, other) if key not in OWN}
    sections = list(trees[0])
    ordered = sorted(keys, key=lambda key: sections.index(key.split(".")[0]) if key.split(".")[0] in sections else -1)
    return {printable(key): [printable(_at(tree, key)) for tree in trees] for key in ordered}


def _at(tree: Any, key: str) -> str:
    """The text of the value at a key such as phases.0.steps."""
    for part in key.split("."):
        try:
            tree = tree[int(part)] if isinstance(tree, list) else tree[part]
        except (IndexError, KeyError, TypeError, ValueError):
            return NOTHING
    return setting(tree)


def _results(runs: Sequence[Compared]) -> dict[str, list[str]]:
    rows = [_result(run) for run in runs]
    return {
        name: [row.get(name, NOTHING) for row in rows] for name in dict.fromkeys(key for row in rows for key in row)
    }


def _result(run: Compared) -> dict[str, str]:
    """A run's results, by name; those that are unknown are missing."""
    history, status = run.history, run.status
    found = {"state": status.state, "step": f"{history.steps['step'][-1]:,.0f}"}
    if (samples := float(history.steps["samples"][-1])) >= 0:  # not NaN
        found["samples"] = short(samples)
    found["tokens"] = short(float(np.nansum(history.steps["tokens"])))
    if history.wall is not None:
        found["wall time"] = duration(history.wall)
    if history.goodput is not None:
        found["goodput"] = f"{history.goodput:.1%}"
    if (rate := median_rate(history, "tokens")) >= 0:  # not NaN
        found["tokens/s"] = short(rate)
    if status.gpu_hours is not None:
        found["GPU-hours"] = f"{status.gpu_hours:,.1f}"
    for what, columns in (("training", history.steps), ("held-out", history.heldout)):
        for key, name in (("mlm_loss", "MLM loss"), ("nsp_loss", "NSP loss"), ("mlm_accuracy", "MLM accuracy")):
            _, values = present(columns, key)
            if len(values):
                last = smooth(values)[-1] if what == "training" else values[-1]
                found[f"{what} {name}"] = f"{last:.1%}" if key.endswith("accuracy") else f"{last:.3f}"
    return found


def draw(runs: Sequence[Compared], path: Path) -> None:
    """Write a picture of the losses over steps and over samples, as PNG, whole or not at all.

    Raises TrainerError if there is no loss to draw, or the picture cannot be written.
    """
    losses = {"MLM loss": "mlm_loss", "NSP loss": "nsp_loss"}
    known = {name: key for name, key in losses.items() if any(len(present(run.history.steps, key)[0]) for run in runs)}
    if not known:
        raise TrainerError("none of these runs has a loss to draw: leave out --picture")
    try:
        with rc_context(STYLE), replacing(path) as file:
            figure = Figure(figsize=(15, 0.8 + 3.9 * len(known)), layout="constrained")
            grid = figure.subplots(len(known), 2, squeeze=False)
            for row, (name, key) in zip(grid, known.items(), strict=True):
                for axes, over in zip(row, ("step", "samples"), strict=True):
                    _panel(axes, runs, key, over)
                    axes.set_title(name, loc="left", fontweight="bold", fontsize=11.5)
            figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper left", ncols=4, fontsize=11)
            figure.savefig(file, dpi=100, format="png")
    except OSError as error:
        raise TrainerError(f"{path} cannot be written: {error.strerror}") from None


def _panel(axes: Axes, runs: Sequence[Compared], key: str, over: str) -> None:
    """Draw each run's training loss as a line, and its held-out loss as dots."""
    for number, run in enumerate(runs):
        steps, color = run.history.steps, COLORS[number % len(COLORS)]
        x, y, place = present(steps, key, over)
        label = " " + run.label.replace(
            "$", r"\$"
        )  # Matplotlib hides a label that begins with _, and $ begins a formula
        style = LINES[number // len(COLORS) % len(LINES)]
        if len(x):
            axes.plot(*thinned(place, y), color=color, alpha=0.18, linewidth=0.8)
            axes.plot(*thinned(place, smooth(y)), color=color, linestyle=style, linewidth=1.8, label=label)
        x, y = present(run.history.heldout, key)
        if len(x):
            x = np.interp(x, steps["step"], steps[over])
            axes.plot(x, y, "o", color=color, markeredgecolor=INK, markersize=6, zorder=3, clip_on=False)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel(f"{over}   (line: training, dots: held out)")
    axes.set_ylabel("nats")
