"""The panels of a run's report. Each knows whether it has data to show, and draws them into its axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, PercentFormatter

from trainer.monitor.curves import (
    POINTS,
    Numbers,
    median_rate,
    paced,
    present,
    skew,
    slowest_ranks,
    smooth,
    smooth_logarithm,
    strided,
    thinned,
    throughput,
)
from trainer.monitor.history import History
from trainer.monitor.quantities import brief

INK, FAINT = "#20262e", "#6b7480"
BLUE, SKY, GREEN, ORANGE = "#0072b2", "#56b4e9", "#009e73", "#e69f00"
VIOLET, ROSE, RED = "#7b3fa0", "#cc6677", "#d1242f"
PART_COLORS = {"forward": BLUE, "backward": SKY, "optimizer": GREEN, "reduce": ROSE, "data": ORANGE}
STYLE = {  # for all figures about a run
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.6,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "legend.framealpha": 0.75,
    "legend.edgecolor": "none",
    "legend.fontsize": 9,
    "lines.solid_capstyle": "round",
}
_MANY = 60  # with more marks than this, they are drawn smaller
_WINDOWS = 120  # number of windows in the panel of a step's time
_STRAGGLER = 1.2  # the alert's threshold


@dataclass(frozen=True)
class RunPanel:
    """One plot over the steps of a run."""

    name: str
    unit: str
    known: Callable[[History], bool]  # whether there is anything to draw
    draw: Callable[[Axes, History], str]  # returns the text to the right of the panel's name
    aside: float = 0.0  # inches for a legend to the right of the axes


def number(value: float) -> str:
    """A number with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _line(axes: Axes, x: Numbers, y: Numbers, bold: Numbers, label: str | None = None, color: str = BLUE) -> None:
    """Draw the values as a thin line, with the ``bold`` mean on top."""
    axes.plot(*thinned(x, y), color=color, alpha=0.25, linewidth=0.8)
    axes.plot(*thinned(x, bold), color=color, linewidth=1.8, label=label)


# ---- learning ------------------------------------------------------------------------------------------------


def _learning(key: str, color: str) -> Callable[[Axes, History], str]:
    show = "{:.1%}" if key.endswith("accuracy") else "{:.3f}"

    def draw(axes: Axes, history: History) -> str:
        said = []
        x, y = present(history.steps, key)
        if len(x):
            _line(axes, x, y, bold := smooth(y), "training", color)
            said.append(f"training {show.format(bold[-1])}")
        x, y = present(history.steps, "unigram_loss")
        if len(x) and key == "mlm_loss":
            axes.plot(*thinned(x, y), color=FAINT, linestyle="--", linewidth=1.2, label="word frequencies")
        x, y = present(history.heldout, key)
        if len(x):
            size = 6.5 if len(x) <= _MANY else 3.5
            [dots] = axes.plot(x, y, "o", color=color, markeredgecolor=INK, markersize=size, label="held out")
            dots.set(zorder=3, clip_on=False)
            said.append(f"held out {show.format(y[-1])}")
        if key.endswith("accuracy"):
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.legend(loc="lower right" if key.endswith("accuracy") else "upper right", ncols=2)
        return "   ".join(said)

    return draw


# ---- optimizer -----------------------------------------------------------------------------------------------


def _rate(axes: Axes, history: History) -> str:
    x, y = present(history.steps, "learning_rate")
    axes.plot(*thinned(x, y), color=BLUE, linewidth=1.8)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    return f"peak {y.max():.3g}   now {y[-1]:.3g}"


def _norm(axes: Axes, history: History) -> str:
    x, y = present(history.steps, "gradient_norm")
    _line(axes, x, y, bold := smooth_logarithm(y))
    _logarithmic(axes, y)
    clipped = x[history.steps["clipped"][np.isfinite(history.steps["gradient_norm"])] == 1]
    _rug(axes, clipped, ORANGE, 0.02, f"clipped: {len(clipped):,} steps ({len(clipped) / len(x):.0%})")
    _skipped(axes, history)
    return f"now {number(bold[-1])}"


def _scale(axes: Axes, history: History) -> str:
    x, y = present(history.steps, "loss_scale")
    axes.step(*thinned(x, y), where="pre", color=BLUE, linewidth=1.8)
    axes.set_yscale("log", base=2)
    axes.set_ylim(y.min() / 4, y.max() * 4)
    _skipped(axes, history)
    return f"now $2^{{{np.log2(y[-1]):.0f}}}$" if y[-1] >= 1024 else f"now {number(y[-1])}"


def _trust(axes: Axes, history: History) -> str:
    x, least, mean, most = present(history.steps, "trust_min", "trust_mean", "trust_max")
    x, least, mean, most = strided(x, *(smooth_logarithm(values) for values in (least, mean, most)))
    axes.fill_between(x, least, most, color=SKY, alpha=0.3, linewidth=0, label="range over tensors")
    axes.plot(x, mean, color=BLUE, linewidth=1.8, label="mean")
    _logarithmic(axes, np.concatenate([least, 3 * most]))
    axes.set_ylim(top=3 * most.max())
    axes.legend(loc="upper right", ncols=2)
    return f"mean now {number(mean[-1])}"


def _variance(axes: Axes, history: History) -> str:
    x, y = present(history.steps, "token_variance")
    _line(axes, x, y, bold := smooth(y))
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return f"now {bold[-1]:.0%}"


def _logarithmic(axes: Axes, y: Numbers) -> None:
    """Make the y axis logarithmic if all values are positive; over few decades, label ticks within a decade too."""
    if not len(y) or y.min() <= 0:
        return
    axes.set_yscale("log")
    decades = np.log10(y.max() / y.min())
    axes.yaxis.set_major_locator(
        LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7) if decades < 1 else (1, 2, 5) if decades < 3 else (1,))
    )
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _skipped(axes: Axes, history: History) -> None:
    _rug(axes, np.array(history.skipped, dtype=float), RED, 0.06, f"skipped: {len(history.skipped):,}")


def _rug(axes: Axes, x: Numbers, color: str, height: float, label: str) -> None:
    """Draw a tick at each of these steps, near the bottom."""
    if len(x):
        x = np.unique(np.round(x / (x.max() or 1), 3)) * x.max() if len(x) > POINTS else x
        height_of_axes = axes.get_xaxis_transform()
        axes.plot(x, np.full(len(x), height), "|", color=color, transform=height_of_axes, label=label, markersize=9)
        axes.legend(loc="upper right", ncols=2)


# ---- speed ---------------------------------------------------------------------------------------------------


def _throughput(axes: Axes, history: History) -> str:
    x, rate, bold = throughput(history)
    _line(axes, x, rate, bold)
    axes.set_ylim(0, 1.15 * float(np.percentile(rate, 99)))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    return f"median {median_rate(history, 'tokens'):,.0f}"


def _split(axes: Axes, history: History) -> str:
    x, *parts = present(history.ranks, *PART_COLORS)
    rows = np.array_split(np.arange(len(x)), min(len(x), _WINDOWS))
    ends = [x[row[-1]] for row in rows]
    seconds = np.array([[part[row].sum() for row in rows] for part in parts])  # (parts, windows)
    shares = seconds / np.maximum(seconds.sum(0), 1e-12)
    edges = [max(0.0, x[0] - (x[1] - x[0] if len(x) > 1 else x[0])), *ends]
    stacked = np.concatenate([shares[:, :1], shares], axis=1)  # a window ends at its step
    axes.stackplot(edges, stacked, step="pre", colors=PART_COLORS.values(), linewidth=0)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _name_layers(axes, (seconds.sum(1) / seconds.sum()).tolist())
    return f"{brief(sum(float(part[-1]) for part in parts))} per step"


def _name_layers(axes: Axes, shares: Sequence[float]) -> None:
    """Add a legend to the right of the axes, in the order of the layers from the top."""
    labels = [f"{name} {share:.0%}" for name, share in zip(PART_COLORS, shares, strict=True)]
    handles = [axes.collections[number] for number in range(len(labels))]
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))


def _skew(axes: Axes, history: History) -> str:
    x, least, most = skew(history)
    at, low, high = strided(x, smooth(least), smooth(most))
    axes.fill_between(at, low, high, color=SKY, alpha=0.3, linewidth=0, label="fastest to slowest")
    _line(axes, x, most, bold := smooth(most), "slowest")
    axes.axhline(_STRAGGLER, color=ORANGE, linestyle="--", linewidth=1.2, label=f"straggler: {_STRAGGLER}")
    axes.set_ylim(min(0.9, float(np.percentile(least, 2))), max(1.35, 1.1 * float(np.percentile(most, 99))))
    axes.legend(loc="upper center", ncols=3)
    often = [f"   rank {rank} most often ({share:.0%})" for rank, share in slowest_ranks(history).items()]
    return f"now {bold[-1]:.2f}{''.join(often[:1])}"


def _saving(axes: Axes, history: History) -> str:
    x, seconds, stall = present(history.checkpoints, "seconds", "stall_seconds")
    if len(x):
        if len(x) <= _MANY:
            axes.vlines(x, 0, np.maximum(seconds, stall), color=FAINT, linewidth=1, alpha=0.5, clip_on=False)
        axes.plot(x, seconds, "o", color=SKY, label="until complete", clip_on=False)
        axes.plot(x, stall, "o", color=BLUE, markersize=5, label="training stalled", clip_on=False)
    at, lost = present(history.failed, "stall_seconds")
    if len(at):
        axes.plot(at, lost, "X", color=RED, markersize=9, label="failed", zorder=4, clip_on=False)
    axes.set_ylim(0, 1.25 * float(np.concatenate([[1e-3], seconds, stall, lost]).max()))
    axes.legend(loc="upper center", ncols=3)
    return f"{len(x)} whole" + (f"   {len(at)} failed" if len(at) else "")


def _has(*keys: str) -> Callable[[History], bool]:
    def known(history: History) -> bool:
        return any(
            len(present(columns, *keys)[0])
            for columns in (history.steps, history.heldout, history.ranks)
            if all(key in columns for key in keys)
        )

    return known


def _scaled(history: History) -> bool:
    return bool(np.any(present(history.steps, "loss_scale")[1] != 1))


def _many_ranks(history: History) -> bool:
    return bool(np.any(history.ranks["compute_max"] > history.ranks["compute_min"]))


def _saved(history: History) -> bool:
    return len(history.checkpoints["step"]) + len(history.failed["step"]) > 0


PANEL_ROWS = (
    (
        RunPanel("MLM loss", "nats", _has("mlm_loss"), _learning("mlm_loss", BLUE)),
        RunPanel("NSP loss", "nats", _has("nsp_loss"), _learning("nsp_loss", VIOLET)),
        RunPanel("MLM accuracy", "correct predictions", _has("mlm_accuracy"), _learning("mlm_accuracy", BLUE)),
        RunPanel("NSP accuracy", "correct predictions", _has("nsp_accuracy"), _learning("nsp_accuracy", VIOLET)),
    ),
    (
        RunPanel("learning rate", "", _has("learning_rate"), _rate),
        RunPanel("gradient norm", "before clipping", _has("gradient_norm"), _norm),
        RunPanel("loss scale", "", _scaled, _scale),
        RunPanel("trust ratio of LAMB", "", _has("trust_min", "trust_mean", "trust_max"), _trust),
        RunPanel("variance over tokens", "share, last layer", _has("token_variance"), _variance),
    ),
    (
        RunPanel("throughput", "valid tokens per second", lambda history: len(paced(history)[0]) > 0, _throughput),
        RunPanel("a step's time", "share of the ranks' time", _has(*PART_COLORS), _split, aside=1.25),
        RunPanel("rank skew", "compute over its mean", _many_ranks, _skew),
        RunPanel("checkpoints", "seconds", _saved, _saving),
    ),
)
