"""Draws the training losses of rows that `tests.tools.ablations` trained, one panel for each batch.

    python -m tests.tools.draw_ablations OUT.png --panel TITLE CURVES.json [CURVES.json …] [--panel …]

LAMB's rows are blue, Adam's orange; a dashed line is a second seed. The legend is in the order of the held-out losses.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from trainer.monitor.panels import FAINT, STYLE

SHADES = {"lamb": ("#08306b", "#0072b2", "#56b4e9", "#a6cee3"), "adam": ("#7f3b08", "#d95f0e", "#e69f00", "#f5cf8a")}
SEED = "run.seed"
TOP = 7.5  # nats; without the prior, a loss starts above 10


def read_rows(files: list[str]) -> list[dict[str, Any]]:
    """The rows of all files that have a held-out result, the best first."""
    rows = [row for file in files for row in json.loads(Path(file).read_text()) if row["heldout"]]
    return sorted(rows, key=lambda row: float(row["heldout"][-1]["mlm_loss"]))


def draw(axes: Axes, title: str, rows: list[dict[str, Any]]) -> None:
    """Draw the rows' training MLM losses (nats) over steps; rows that differ only in their seed share a shade."""
    shades: dict[str, str] = {}
    for row in rows:
        optimizer = row["changes"].get("optimizer.name", "lamb")
        kind = json.dumps({k: v for k, v in row["changes"].items() if k != SEED}, sort_keys=True)
        taken = sum(each in SHADES[optimizer] for each in shades.values())
        color = shades.setdefault(kind, SHADES[optimizer][min(taken, len(SHADES[optimizer]) - 1)])
        steps = [each for each in row["steps"] if "mlm_loss" in each]
        label = f"{row['name']}: {row['heldout'][-1]['mlm_loss']:.3f}"
        style = "--" if SEED in row["changes"] else "-"
        axes.plot([s["step"] for s in steps], [s["mlm_loss"] for s in steps], style, color=color, lw=1.6, label=label)
    axes.set_title(title, loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel("training MLM loss, nats")
    axes.grid(alpha=0.2, color=FAINT)
    axes.set_ylim(top=TOP)
    below = {"loc": "upper left", "bbox_to_anchor": (0, -0.16), "ncols": 2, "borderaxespad": 0.0}
    axes.legend(title="run, peak rate: held out", alignment="left", fontsize=8, title_fontsize=8, **below)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("out", type=Path)
    parser.add_argument("--panel", nargs="+", action="append", required=True, metavar=("TITLE", "CURVES.json"))
    given = parser.parse_args()
    with plt.rc_context(STYLE):
        figure, places = plt.subplots(1, len(given.panel), figsize=(5.5 * len(given.panel), 5.4), squeeze=False)
        for axes, (title, *files) in zip(places[0], given.panel, strict=True):
            draw(axes, title, read_rows(files))
        figure.tight_layout()
        figure.savefig(given.out, dpi=110)


if __name__ == "__main__":
    main()
