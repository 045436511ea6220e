"""The table of runs that ``python -m trainer.runs`` prints."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence

from trainer.monitor.quantities import duration, short
from trainer.runs.status import RunStatus

NOTHING = "-"
LONGEST_NAME = 40  # columns of the terminal
# The columns, in order. If the terminal is too narrow for all, those named first in _FIRST_TO_GO are left out.
_COLUMNS: dict[str, Callable[[RunStatus, float], str]] = {
    "run": lambda run, now: clipped(run.name, LONGEST_NAME),
    "state": lambda run, now: run.state,
    "phase": lambda run, now: clipped(run.phase or "", LONGEST_NAME),
    "step": lambda run, now: _steps(run),
    "time left": lambda run, now: _show(run.seconds_left, duration),
    "held-out MLM": lambda run, now: _show(run.heldout_mlm_loss, "{:.3f}".format),
    "tokens/s": lambda run, now: _show(run.tokens_per_second, short),
    "goodput": lambda run, now: _show(run.goodput, "{:.1%}".format),
    "GPU-hours": lambda run, now: _show(run.gpu_hours, "{:,.1f}".format),
    "cost": lambda run, now: _show(run.cost, "{:,.2f}".format),
    "checkpoint": lambda run, now: _checkpoint(run, now),
    "slowest rank": lambda run, now: _slowest(run),
    "folder": lambda run, now: run.folder,
}
_FIRST_TO_GO = ("folder", "slowest rank", "GPU-hours", "phase", "goodput", "cost", "checkpoint", "tokens/s")
_LEFT_ALIGNED = ("run", "state", "phase", "folder")


def table(runs: Sequence[RunStatus], now: float, width: int | None = None) -> list[str]:
    """A heading, a line for each run, and a note for each run with a reason; no line is wider than ``width``.

    A column without a value is left out. ``now``: Unix time in seconds.
    """
    rows = [cells(run, now) for run in runs]
    columns = {name: [row[name] for row in rows] for name in _COLUMNS}
    columns = {name: cells for name, cells in columns.items() if name in ("run", "state", "step") or any(cells)}
    for name in _FIRST_TO_GO:
        if width is not None and max(text_width(line.rstrip()) for line in aligned(columns, _LEFT_ALIGNED)) > width:
            columns.pop(name, None)
    names = Counter(columns["run"])
    labels = [run.folder if names[name] > 1 else name for run, name in zip(runs, columns["run"], strict=True)]
    notes = [f"{label}: {run.state}: {run.reason}" for run, label in zip(runs, labels, strict=True) if run.reason]
    lines = [*aligned(columns, _LEFT_ALIGNED), *map(printable, notes)]
    return [(line if width is None else clipped(line, width)).rstrip() for line in lines]


def cells(run: RunStatus, now: float) -> dict[str, str]:
    """The run's cell in each column; empty if the value is unknown."""
    return {name: printable(cell(run, now)) for name, cell in _COLUMNS.items()}


def aligned(columns: dict[str, list[str]], left: Sequence[str]) -> list[str]:
    """Columns of texts as lines, below a line of their names; those named in ``left`` are aligned to the left."""
    found = [""] * (1 + max(map(len, columns.values())))
    for name, cells in columns.items():
        texts = [name, *(cell or NOTHING for cell in cells)]
        wide = max(map(text_width, texts))
        for row, text in enumerate(texts):
            space = " " * (wide - text_width(text))
            found[row] += f"{text}{space}  " if name in left else f"{space}{text}  "
    return found


def _steps(run: RunStatus) -> str:
    if run.step is None:
        return ""
    return f"{run.step:,}" + ("" if run.target_steps is None else f"/{run.target_steps:,}")


def _checkpoint(run: RunStatus, now: float) -> str:
    if run.checkpoint_step is None:
        return ""
    age = _show(run.checkpoint_time, lambda time: f", {duration(max(0.0, now - time))} ago")
    return f"{run.checkpoint_step:,}{age}"


def _slowest(run: RunStatus) -> str:
    return "" if run.slowest_rank is None else f"{run.slowest_rank:,}{_show(run.slowest_ratio, ' ({:.2f}x)'.format)}"


def _show(value: float | None, text: Callable[[float], str]) -> str:
    return "" if value is None else text(value)


def text_width(text: str) -> int:
    """The columns that a text takes on a terminal: two for a wide character, such as a Chinese one."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(each) else 1 + (unicodedata.east_asian_width(each) in "WF") for each in text)


def clipped(text: str, width: int) -> str:
    """The beginning of a text that takes at most ``width`` columns."""
    text = text[: 2 * width]
    while text_width(text) > width:
        text = text[:-1]
    return text


def printable(text: str) -> str:
    """The text without control characters: what a file contains may not move the cursor."""
    return "".join(character if character.isprintable() else "?" for character in text)
