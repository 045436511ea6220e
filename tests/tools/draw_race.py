"""Draws the race of docs/reference.md: MLM losses of Lambert's runs and of the peer over seconds of training.

    python -m tests.tools.draw_race OUT.png --peer NAME PEER.json --run NAME METRICS.jsonl [--run …]

A run's thin line is its training loss, smoothed; its point is its held-out loss. The peer's points are held-out losses.
"""

from __future__ import annotations

import argparse
import json
from itertools import accumulate
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from trainer.monitor.metrics_log import read_lines
from trainer.monitor.panels import FAINT, STYLE

RUNS, PEER = ("#08306b", "#56b4e9", "#009e73", "#cc79a7"), "#d95f0e"
SMOOTH = 0.9  # share of the past in the moving average of the training loss


def draw_run(axes: Axes, name: str, path: Path, color: str) -> None:
    """Draw a run's training loss over the seconds of its steps, and its last held-out loss."""
    records = list(read_lines(path))
    steps = [each for each in records if each["event"] == "step" and each["applied"]]
    seconds = list(accumulate(each["seconds"] for each in steps))
    smooth = list(
        accumulate((each["mlm_loss"] for each in steps), lambda past, new: SMOOTH * past + (1 - SMOOTH) * new)
    )
    axes.plot(seconds, smooth, color=color, lw=0.9, alpha=0.7)
    found = [each["mlm_loss"] for each in records if each["event"] == "heldout"][-1]
    axes.plot(seconds[-1:], [found], "o", color=color, label=f"{name}: {found:.3f} after {seconds[-1]:.0f} s")


def draw_peer(axes: Axes, name: str, path: Path) -> None:
    """Draw the peer's held-out losses, and its last one as a level."""
    curve = json.loads(path.read_text())["curve"]
    seconds, losses = [[each[key] for each in curve] for key in ("seconds", "mlm_loss")]
    axes.plot(seconds, losses, "o-", color=PEER, lw=1.4, label=f"{name}: {losses[-1]:.3f} after {seconds[-1]:.0f} s")
    axes.axhline(losses[-1], color=PEER, lw=0.9, ls=":")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("out", type=Path)
    parser.add_argument("--peer", nargs=2, metavar=("NAME", "PEER.json"), required=True)
    parser.add_argument("--run", nargs=2, action="append", metavar=("NAME", "METRICS.jsonl"), required=True)
    given = parser.parse_args()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.6, 4.4))
        draw_peer(axes, given.peer[0], Path(given.peer[1]))
        for (name, path), color in zip(given.run, RUNS, strict=False):
            draw_run(axes, name, Path(path), color)
        axes.set_xlabel("seconds of training on one H200, without compilation and evaluation")
        axes.set_ylabel("MLM loss, nats")
        axes.set_ylim(2.9, 7.3)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.2, color=FAINT)
        axes.legend(title="held out at length 128 (points)", alignment="left", fontsize=8, title_fontsize=8)
        figure.tight_layout()
        figure.savefig(given.out, dpi=110)


if __name__ == "__main__":
    main()
