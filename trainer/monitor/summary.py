"""The summary of a run, drawn from its history: lines of text, one large figure, and comparisons with published runs.

``trainer.report`` prints and saves it; a model card uses its learning curves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from trainer.monitor.curves import median_rate, present
from trainer.monitor.history import History, StepColumns
from trainer.monitor.metrics_log import LOSS_TASKS
from trainer.monitor.panels import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    PANEL_ROWS,
    PART_COLORS,
    RED,
    SKY,
    RunPanel,
    number,
)
from trainer.monitor.quantities import duration, short
from trainer.monitor.references import Reference

TIME_COLORS = {
    "productive": GREEN,
    "rework": "#c46210",
    "skipped": RED,
    "data": PART_COLORS["data"],
    "evaluation": BLUE,
    "checkpoint": SKY,
    "start": "#7a8494",
    "down": "#d5d9df",
}
_FACTS = ("parameters", "ranks", "device", "precision", "optimizer", "zero_stage", "kernels")
_MARKS: dict[str, Callable[[History], bool]] = {
    "dotted: a restart": lambda history: bool(history.restarts),
    "shaded: a later phase": lambda history: history.steps["phase"][-1] != history.steps["phase"][0],
}
_WIDTH, _LEFT, _RIGHT = 20.0, 0.8, 0.35  # inches: the figure's width, the margin left of axes, and its right margin
_HEAD, _ROW, _BAR = 1.65, 3.45, 1.15


def summary(history: History) -> dict[str, str]:
    """The summary as text: a name and a line for everything that the metrics log contains."""
    steps, last = history.steps, {key: column[-1] for key, column in history.steps.items()}
    out = {
        "steps": f"{last['step']:,.0f}, {len(history.skipped):,} skipped, {_restarts(history)}",
        "samples": f"{last['samples']:,.0f}",
        "tokens": f"{np.nansum(steps['tokens']):,.0f}",
    }
    if history.wall is not None:
        out["wall time"] = duration(history.wall)
        if history.goodput is not None:
            out["goodput"] = f"{history.goodput:.1%} of the wall time went into steps that count"
    out["speed"] = f"{median_rate(history, 'tokens'):,.0f} tokens/s (median)"
    if np.isfinite(flops := median_rate(history, "flops")):
        ranks = int(history.facts.get("ranks", 1))
        out["speed"] += f", {number(flops / ranks / 1e12)} TFLOP/s on each of {ranks:,} ranks"
    _, memory = present(history.ranks, "memory_peak_bytes")
    if len(memory):
        out["memory"] = f"{memory.max() / 1e9:,.1f} GB, the highest of any rank"
    out |= _heldout(history) | _plateau(history) | _guard(history) | _checkpoints(history)
    return out | ({"ended": history.end} if history.end else {})


def _restarts(history: History) -> str:
    return f"{len(history.restarts):,} restart{'' if len(history.restarts) == 1 else 's'}"


def _heldout(history: History) -> dict[str, str]:
    if not len(history.heldout["step"]):
        return {}
    [*_, last] = records(history.heldout)
    return {"held out": f"{evaluated(last)} (step {last['step']:,.0f})"}


def records(columns: StepColumns) -> Iterator[dict[str, float]]:
    """The rows of a table, in order, each by key."""
    return (dict(zip(columns, row, strict=True)) for row in zip(*(c.tolist() for c in columns.values()), strict=True))


def evaluated(row: Mapping[str, float]) -> str:
    """The held-out losses and accuracies of an evaluation."""
    tasks = [
        f"{task.upper()} loss {row[f'{task}_loss']:.3f}, accuracy {row[f'{task}_accuracy']:.1%}"
        for task in LOSS_TASKS
        if np.isfinite(row[f"{task}_loss"])
    ]
    return "; ".join(tasks)


def saved(row: Mapping[str, float]) -> str:
    """The size of a checkpoint, and the time that it took."""
    size, seconds, stall = (row[key] for key in ("bytes", "seconds", "stall_seconds"))
    return f"{size / 1e6:,.1f} MB in {seconds:.2f} s, training stalled for {stall:.2f} s"


def _plateau(history: History) -> dict[str, str]:
    """Whether the run is on the unigram plateau, or was; empty if it never was."""
    if not len(history.plateaus["step"]):
        return {}
    [*_, last] = records(history.plateaus)
    return {"plateau": judged(last)}


def judged(row: Mapping[str, float]) -> str:
    """What was found about the unigram plateau, and from which numbers."""
    losses = f"MLM loss {row['mlm_loss']:.2f}, word frequencies alone {row['unigram_loss']:.2f}"
    what = "found on the unigram plateau at" if row["on"] else "left the unigram plateau before"
    measured = f"{losses}, variance over tokens {row['token_variance']:.1%}"
    return f"{what} step {row['step']:,.0f} ({measured})"


def _guard(history: History) -> dict[str, str]:
    """Lines about the guard's actions and the skipped samples; none if there were none."""
    done = Counter((sign.replace("_", " "), action) for _, sign, action in history.guard)
    told = [f"{sign}: {action}{f' ({times} times)' if times > 1 else ''}" for (sign, action), times in done.items()]
    if told:
        told[-1] += f", the last at step {history.guard[-1][0]:,}"
    if left_out := int(np.nansum(history.steps["left_out"])):
        told.append(f"{left_out:,} samples skipped")
    return {"guard": "; ".join(told)} if told else {}


def _checkpoints(history: History) -> dict[str, str]:
    done, failed = history.checkpoints, len(history.failed["step"])
    if not len(done["step"]) + failed:
        return {}
    text = f"{len(done['step']):,}" + (f" and {failed:,} failed" if failed else "")
    if len(done["step"]):
        [*_, last] = records(done)
        text += f", the last of step {last['step']:,.0f}: {saved(last)}"
    return {"checkpoints": text}


def published(reference: Reference, history: History) -> str:
    """One line that compares a published result with the run's last value of the same metric."""
    columns = history.heldout if reference.held_out else history.steps
    parts = [f"{task}_loss" for task in LOSS_TASKS] if reference.figure == "loss" else [reference.figure]
    own = np.sum(present(columns, *parts)[1:], axis=0)
    show = "{:.1%}" if reference.figure.endswith("accuracy") else "{:.3f}"
    here = f"; here {show.format(own[-1])}" if len(own) else ""
    name = " + ".join(part.replace("_", " ").replace("mlm", "MLM").replace("nsp", "NSP") for part in parts)
    source = "; ".join([reference.where, reference.setting, reference.source])
    return f"{reference.name}: {name} {reference.value}{here} ({source})"


def draw(
    history: History,
    title: str,
    references: Sequence[Reference] = (),
    rows_wanted: Sequence[Sequence[RunPanel]] = PANEL_ROWS,
) -> Figure:
    """Draw everything known about the run in one figure; or only ``rows_wanted``, without the bar of time spent."""
    rows = [shown for row in rows_wanted if (shown := [panel for panel in row if panel.known(history)])]
    timed = bool(history.spent) and history.wall is not None and rows_wanted is PANEL_ROWS
    height = _HEAD + _ROW * len(rows) + (_BAR if timed else 0.0)
    figure = Figure(figsize=(_WIDTH, height))
    _head(_axes(figure, _LEFT, 0.15, _WIDTH - _LEFT - _RIGHT, 0.9), history, title)
    for row, shown in enumerate(rows):
        width = (_WIDTH - _RIGHT) / len(shown)
        for place, panel in enumerate(shown):
            left, top = place * width + _LEFT, _HEAD + row * _ROW
            axes = _axes(figure, left, top, width - _LEFT - panel.aside, _ROW - 0.95)
            _panel(axes, panel, history)
            _references(axes, [each for each in references if each.figure.replace("_", " ") == panel.name.lower()])
    if timed:
        _time(_axes(figure, _LEFT, height - _BAR, _WIDTH - _LEFT - _RIGHT, 0.45), history)
    return figure


def _axes(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Add axes at a position in inches, measured from the left and from the top."""
    whole, high = figure.get_size_inches()
    return figure.add_axes((left / whole, 1 - (top + height) / high, width / whole, height / high))


def _head(axes: Axes, history: History, title: str) -> None:
    """Draw the header: the run's name and facts, and its key metrics in large print."""
    axes.set_axis_off()
    axes.set_xlim(0, _WIDTH - _LEFT - _RIGHT)  # inches
    axes.set_ylim(0, 1)
    axes.text(0, 1, history.facts.get("run", "run"), fontsize=21, fontweight="bold", va="top")
    facts = [f"{key.replace('_', ' ')} {_spaced(history.facts[key])}" for key in _FACTS if key in history.facts]
    marks = [text for text, known in _MARKS.items() if known(history)]
    axes.text(0, 0.42, "   ·   ".join(filter(None, (title, history.end[:100]))), fontsize=10, color=FAINT, va="top")
    axes.text(0, 0.1, "   ·   ".join([*facts, *marks]), fontsize=10, color=FAINT, va="top")
    for place, (name, value) in enumerate(reversed(key_metrics(history).items())):
        x = _WIDTH - _LEFT - _RIGHT - 1.75 * place
        axes.text(x, 1, value, fontsize=19, ha="right", va="top")
        axes.text(x, 0.5, name, fontsize=10, color=FAINT, ha="right", va="top")


def _spaced(value: str) -> str:
    return f"{int(value):,}" if value.isdecimal() else value


def key_metrics(history: History) -> dict[str, str]:
    """The key metrics, by name."""
    steps = history.steps
    out = {"steps": f"{steps['step'][-1]:,.0f}", "restarts": f"{len(history.restarts)}"}
    out["tokens"] = short(float(np.nansum(steps["tokens"])))
    out["tokens/s"] = short(median_rate(history, "tokens"))
    if history.wall is not None:
        out["wall time"] = duration(history.wall)
    if history.goodput is not None:
        out["goodput"] = f"{history.goodput:.1%}"
    _, heldout = present(history.heldout, "mlm_loss")
    if len(heldout):
        out["held-out MLM loss"] = f"{heldout[-1]:.3f}"
    return out


def _panel(axes: Axes, panel: RunPanel, history: History) -> None:
    axes.set_title(panel.name, loc="left", fontweight="bold", fontsize=11.5)
    said = panel.draw(axes, history)
    axes.set_title(said, loc="right", fontsize=9.5, color=FAINT)
    steps, phases = history.steps["step"], history.steps["phase"]
    for step in history.restarts:
        axes.axvline(step, color=INK, linestyle=":", linewidth=1)
    for row in np.flatnonzero(np.diff(phases)) + 1:
        axes.axvspan(steps[row] - 1, steps[-1], color=INK, alpha=0.06, linewidth=0)
    axes.set_xlim(max(0, steps[0] - 1), steps[-1])
    axes.xaxis.set_major_formatter(EngFormatter(sep="") if steps[-1] >= 1e5 else (lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("step")
    axes.set_ylabel(panel.unit)


def _references(axes: Axes, references: Sequence[Reference]) -> None:
    """Draw each published result as a labeled dashed line, or as a band if it is a range."""
    for each in references:
        if each.high > each.low:
            axes.axhspan(each.low, each.high, color=INK, alpha=0.08, linewidth=0)
        axes.axhline(each.low, color=INK, linestyle="--", linewidth=1, alpha=0.7, label="_published")
        at = axes.get_yaxis_transform()  # x as a share of the width, y in data units
        text = f"{each.name}: {each.value} ({each.where})"
        axes.text(0.01, each.high, text, transform=at, va="bottom", fontsize=8.5, color=INK)


def time_spent(history: History) -> dict[str, float]:
    """Seconds of the run's wall time, by what they went into, in the order of TIME_COLORS."""
    return {state: {**history.spent, "down": history.down}.get(state, 0.0) for state in TIME_COLORS}


def _time(axes: Axes, history: History) -> None:
    """Draw one bar that shows where the wall time went."""
    assert history.wall is not None
    spent = time_spent(history)
    whole = sum(spent.values())
    edges = np.cumsum([0.0, *spent.values()]) / whole
    for (state, seconds), (left, right) in zip(spent.items(), pairwise(edges), strict=True):
        if not seconds:
            continue
        label = f"{state} {duration(seconds)} ({seconds / whole:.1%})"
        axes.barh(0, right - left, 1, left=left, color=TIME_COLORS[state], edgecolor="white", label=label)
        color, text = (INK if state == "down" else "white"), f"{state} {seconds / whole:.0%}"
        if right - left > 0.005 * len(text):
            axes.text((left + right) / 2, 0, text, color=color, ha="center", va="center")
    axes.set_title(f"where {duration(history.wall)} went", loc="left", fontweight="bold", fontsize=11.5)
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.5, 0.5)
    axes.set_axis_off()
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.05), ncols=len(TIME_COLORS), borderaxespad=0.2, borderpad=0)
