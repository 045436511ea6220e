"""A run in pictures: ``python -m trainer.report RUN_FOLDER`` draws its metrics.jsonl.

Writes ``report.png`` into the run's folder: losses, accuracies, learning rate, gradient norm, trust
ratios and throughput against the step; held-out figures are dots, restarts dotted lines, later phases shaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws to files: no screen is needed, or looked for
from matplotlib import pyplot
from matplotlib.axes import Axes

from trainer.errors import TrainerError

Record = dict[str, Any]


@dataclass(frozen=True)
class History:
    """The lines of a run: its steps as they count, each once, and what happened beside them."""

    steps: list[Record]  # by step; one that was repeated after a restart as it was repeated
    heldout: list[Record]
    restarts: list[int]  # steps from which the run went on


def read_history(folder: Path) -> History:
    """Read ``metrics.jsonl``. A last line that a kill cut short is left out.

    Raises TrainerError when there is none or it holds no step.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise TrainerError(f"no metrics.jsonl in {folder}: name the folder of a run")
    records = read_lines(path)
    steps: dict[int, Record] = {}
    restarts, seen = [], 0
    for record in (r for r in records if r["event"] == "step" and r["applied"]):
        if record["restarts"] > seen:
            seen = record["restarts"]
            restarts.append(record["step"] - 1)
        steps[record["step"]] = record
    if not steps:
        raise TrainerError(f"{path} holds no step yet: look again after the first ones")
    heldout = {r["step"]: r for r in records if r["event"] == "heldout"}
    return History([steps[s] for s in sorted(steps)], [heldout[s] for s in sorted(heldout)], restarts)


def read_lines(path: Path) -> list[Record]:
    """The JSON lines of a file; a kill may have cut one short, where the next attempt then goes on."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def draw(history: History, title: str, path: Path) -> None:
    """Draw all panels into one picture."""
    figure, panels = pyplot.subplots(2, 4, figsize=(19, 8), constrained_layout=True)
    figure.suptitle(title)
    curves: list[tuple[str, str, list[tuple[str, str]]]] = [
        ("MLM loss", "nats", [("mlm_loss", "training")]),
        ("NSP loss", "nats", [("nsp_loss", "training")]),
        ("MLM accuracy", "share of right predictions", [("mlm_accuracy", "training")]),
        ("NSP accuracy", "share of right predictions", [("nsp_accuracy", "training")]),
        ("learning rate", "", [("learning_rate", "")]),
        ("gradient norm", "before clipping", [("gradient_norm", "")]),
        ("trust ratio of LAMB", "", [("trust_min", "least"), ("trust_mean", "mean"), ("trust_max", "greatest")]),
        ("throughput", "valid tokens a second", [("rate", "")]),
    ]
    for panel, (name, unit, keys) in zip(panels.flat, curves, strict=True):
        _panel(panel, history, name, unit, keys)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _panel(panel: Axes, history: History, name: str, unit: str, keys: list[tuple[str, str]]) -> None:
    for number, (key, label) in enumerate(keys):
        points = [(r["step"], _value(r, key)) for r in history.steps if key == "rate" or r.get(key) is not None]
        if not points:
            continue
        x, y = zip(*points, strict=True)
        color = f"C{number}"
        panel.plot(x, y, color=color, alpha=0.25, linewidth=0.8)
        panel.plot(x, y if key == "learning_rate" else smooth(list(y)), color=color, linewidth=1.6, label=label or None)
        marks = [(r["step"], r[key]) for r in history.heldout if key in r]
        if marks:
            panel.plot(*zip(*marks, strict=True), "o", color=color, markeredgecolor="black", label="held out")
    for step in history.restarts:
        panel.axvline(step, color="black", linestyle=":", linewidth=1)
    for before, after in pairwise(history.steps):
        if before["phase"] != after["phase"]:
            panel.axvspan(after["step"], history.steps[-1]["step"], color="black", alpha=0.06, linewidth=0)
    panel.set_title(name)
    panel.set_xlabel("step")
    panel.set_ylabel(unit)
    panel.grid(alpha=0.3)
    if panel.get_legend_handles_labels()[1]:
        panel.legend()


def _value(record: Record, key: str) -> float:
    return float(record["tokens"] / record["seconds"] if key == "rate" else record[key])


def smooth(values: list[float]) -> list[float]:
    """Exponential moving average over about a fiftieth of the values, without the bias of its start."""
    keep = 1 - 1 / max(1.0, len(values) / 50)
    total, weight, out = 0.0, 0.0, []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        out.append(total / weight)
    return out


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m trainer.report", description="Draw a run's metrics.")
    parser.add_argument("folder", type=Path, help="the run's folder")
    folder = parser.parse_args(arguments).folder
    try:
        history = read_history(folder)
    except TrainerError as error:
        print(f"trainer.report: error: {error}", file=sys.stderr)
        return 2
    last = history.steps[-1]
    restarts = f"{len(history.restarts)} restart{'' if len(history.restarts) == 1 else 's'}"
    title = f"{folder}: {last['step']:,} steps, {last['samples']:,} sequences, {restarts}"
    draw(history, title, folder / "report.png")
    print(f"{folder / 'report.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
