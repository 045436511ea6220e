"""The data of the page of runs, as plain trees: the list, and everything about some runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import inf, isfinite
from typing import Any

import numpy as np

from trainer.checkpoint.changed_settings import setting
from trainer.monitor.curves import POINTS, present, slowest_ranks
from trainer.monitor.history import History
from trainer.monitor.panels import PART_COLORS
from trainer.monitor.quantities import brief, duration
from trainer.monitor.summary import key_metrics, summary, time_spent
from trainer.runs.charts import CHARTS, curves, describe, places
from trainer.runs.comparison import Compared, differences
from trainer.runs.events import events
from trainer.runs.status import LIVE, RunStatus
from trainer.runs.table import cells, printable

FEWEST_POINTS = 250  # of a curve, if many runs are shown
MOST_EVENTS = 500  # the newest ones
MOST_SLOW_RANKS = 8
_DAMAGED = np.errstate(all="ignore")  # a damaged journal may contain any number; what is not finite is left out


def list_tree(runs: Sequence[tuple[str, RunStatus]], now: float) -> dict[str, Any]:
    """The list: every run's identifier, and its status and its cells as ``python -m trainer.runs`` prints them."""
    return {"time": now, "runs": [_listed(identifier, status, now) for identifier, status in runs]}


def _listed(identifier: str, status: RunStatus, now: float) -> dict[str, Any]:
    texts = {key: printable(getattr(status, key)) for key in ("name", "folder", "reason")}
    return {"id": identifier, **asdict(status), **texts, "live": status.state in LIVE, "cells": cells(status, now)}


@_DAMAGED
def runs_tree(runs: Sequence[tuple[str, Compared]], now: float, price: float | None) -> dict[str, Any]:
    """Everything about the runs, each of which has at least one step, and what differs between several."""
    drawn = curves_tree([run.history for _, run in runs])
    found = [
        {**_listed(identifier, run.status, now), "label": run.label, "curves": own, **_run(run, price)}
        for (identifier, run), own in zip(runs, drawn, strict=True)
    ]
    tables = differences([run for _, run in runs]) if len(runs) > 1 else {}
    return {"time": now, "charts": [describe(chart) for chart in CHARTS], "runs": found, "tables": tables}


def file_tree(runs: Sequence[Compared], now: float) -> dict[str, Any]:
    """`runs_tree` for a page that is a file: without a server, any identifiers will do."""
    return runs_tree([(f"run-{number}", run) for number, run in enumerate(runs)], now, None)


@_DAMAGED
def curves_tree(histories: Sequence[History], within: tuple[float, float] = (0.0, inf)) -> list[dict[str, Any]]:
    """Each run's curves within a range of steps, with fewer points if there are many runs."""
    points = max(FEWEST_POINTS, POINTS // max(1, len(histories)))
    return [curves(history, points, within, len(histories) == 1) for history in histories]


def _run(run: Compared, price: float | None) -> dict[str, Any]:
    history = run.history
    happened = events(history, [printable(name) for name in _phases(run.config)])
    return {
        "places": places(history, price),
        "restarts": history.restarts[-MOST_EVENTS:],
        "phases": [event.step for event in happened if event.kind == "phase"][1:][-MOST_EVENTS:],
        "numbers": {name: printable(text) for name, text in key_metrics(history).items()},
        "summary": {name: printable(text) for name, text in summary(history).items()},
        "facts": {printable(name): printable(text) for name, text in history.facts.items()},
        "wall": None if history.wall is None else duration(history.wall),
        "time": _shares(time_spent(history), duration) if history.spent else [],
        "step_time": _shares(_parts(history), brief),
        "slowest": [[str(rank), share] for rank, share in slowest_ranks(history).items()][:MOST_SLOW_RANKS],
        "events": [[event.step, event.kind, printable(event.text)] for event in happened[-MOST_EVENTS:]],
        "events_left_out": max(0, len(happened) - MOST_EVENTS),
        "settings": _leaves(run.config),
    }


def _phases(config: dict[str, Any]) -> list[str]:
    phases = config.get("phases")
    named = [phase.get("name") for phase in phases if isinstance(phase, dict)] if isinstance(phases, list) else []
    return [str(name) for name in named]


def _parts(history: History) -> dict[str, float]:
    """Seconds of a mean step, by part."""
    _, *parts = present(history.ranks, *PART_COLORS)
    return {name: float(np.mean(part)) for name, part in zip(PART_COLORS, parts, strict=True) if len(part)}


def _shares(seconds: dict[str, float], text: Callable[[float], str]) -> list[list[Any]]:
    """The name, share and duration as text of each part that took any time."""
    whole = sum(seconds.values())
    return [[name, value / whole, text(value)] for name, value in seconds.items() if value > 0 and isfinite(whole)]


def _leaves(tree: Any, where: str = "") -> list[list[str]]:
    """Every setting of a configuration, by key ("phases.0.steps"), as text."""
    if isinstance(tree, dict | list) and tree:
        inner = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return [leaf for key, value in inner for leaf in _leaves(value, f"{where}.{key}" if where else str(key))]
    return [[printable(where), printable(setting(tree))]]
