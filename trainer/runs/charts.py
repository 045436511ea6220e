"""The curves that the page of runs draws: for each panel of the report, its line, its mean and its dots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.monitor.curves import Numbers, present, skew, smooth, smooth_logarithm, strided, thinned, throughput
from trainer.monitor.history import History
from trainer.monitor.panels import PANEL_ROWS

Curve = tuple[str, Numbers, Numbers]  # its name, steps, and values
_PANELS = {panel.name: panel for row in PANEL_ROWS for panel in row}
_KNOTS = 500  # steps at which samples, tokens and time are given; the page interpolates between them


@dataclass(frozen=True)
class Chart:
    """One chart over the steps of a run."""

    name: str  # of a panel of the report
    line: Callable[[History], list[Numbers]]  # steps, values, and smoothed values if there are any
    form: str = "number"  # how a value is written: number, loss, share or count
    logarithm: int = 0  # base of a logarithmic axis; 0: linear
    zero: bool = False  # whether the axis begins at 0
    heldout: str = ""  # the key of held-out values, drawn as dots
    baseline: str = ""  # the key of a second line, drawn dashed


def _smoothed(key: str, mean: Callable[[Numbers], Numbers] = smooth) -> Callable[[History], list[Numbers]]:
    def line(history: History) -> list[Numbers]:
        x, y = present(history.steps, key)
        return [x, y, mean(y)] if len(y) else [x, y]

    return line


def _plain(key: str) -> Callable[[History], list[Numbers]]:
    return lambda history: present(history.steps, key)


def _slowest(history: History) -> list[Numbers]:
    x, _, most = skew(history)
    return [x, most, smooth(most)]


def _learning(name: str, form: str) -> Chart:
    key = name.lower().replace(" ", "_")
    return Chart(name, _smoothed(key), form, heldout=key, baseline="unigram_loss" if key == "mlm_loss" else "")


CHARTS = (
    _learning("MLM loss", "loss"),
    _learning("NSP loss", "loss"),
    _learning("MLM accuracy", "share"),
    _learning("NSP accuracy", "share"),
    Chart("throughput", throughput, "count", zero=True),
    Chart("learning rate", _plain("learning_rate"), zero=True),
    Chart("gradient norm", _smoothed("gradient_norm", smooth_logarithm), logarithm=10),
    Chart("loss scale", _plain("loss_scale"), "count", logarithm=2),
    Chart("rank skew", _slowest, "loss"),
    Chart("trust ratio of LAMB", _smoothed("trust_mean", smooth_logarithm), logarithm=10),
    Chart("variance over tokens", _smoothed("token_variance"), "share", zero=True),
)


def describe(chart: Chart) -> dict[str, Any]:
    """The facts that the page needs to draw a chart."""
    own = {key: getattr(chart, key) for key in ("name", "form", "logarithm", "zero")}
    return {**own, "unit": _PANELS[chart.name].unit}


def curves(history: History, points: int, within: tuple[float, float], alone: bool) -> dict[str, dict[str, Any]]:
    """The curves of all charts that have data, each as steps and values.

    A mean has ``points`` of them at most, and any other curve twice as many. Only the steps ``within`` a range are in
    them, smoothed as in the whole. A run that is not shown ``alone`` has only one line in each chart.
    """
    found = {}
    for chart in CHARTS:
        if _PANELS[chart.name].known(history):
            lines = _lines(chart, history) if alone else _lines(chart, history)[-1:]
            own = {name: _reduced(name, x, y, points, within) for name, x, y in [*lines, *_dots(chart, history)]}
            found[chart.name] = {name: pair for name, pair in own.items() if pair[0]}
    return found


def _lines(chart: Chart, history: History) -> list[Curve]:
    """Faint lines first."""
    x, y, *mean = chart.line(history)
    found: list[Curve] = []
    if chart.baseline:
        at, values = present(history.steps, chart.baseline)
        found.append(("baseline", at, values))
    return [*found, ("line", x, y), *(("mean", x, values) for values in mean)]


def _dots(chart: Chart, history: History) -> list[Curve]:
    if not chart.heldout:
        return []
    x, y = present(history.heldout, chart.heldout)
    return [("dots", x, y)]


def places(history: History, price: float | None) -> dict[str, list[float]]:
    """Some steps, and the run's samples, tokens, hours, GPU-hours and cost until then. What is unknown is left out."""
    steps, clock = history.steps, history.clock
    rows = np.unique(np.linspace(0, len(steps["step"]) - 1, _KNOTS).astype(int))
    at = steps["step"][rows]
    found = {"step": at, "samples": steps["samples"][rows], "tokens": np.nancumsum(steps["tokens"])[rows]}
    if len(clock["step"]):
        first = at[0] - 1
        hours, ranks = (
            np.interp(at, [first, *clock["step"]], [0.0, *clock[key]]) / 3600 for key in ("seconds", "rank_seconds")
        )
        found["hours"] = hours
        if history.facts.get("device") == "cuda":
            found["GPU-hours"] = ranks
            found |= {} if price is None else {"cost": price * ranks}
    return {name: _numbers(values) for name, values in found.items() if np.isfinite(values).all()}


def _reduced(name: str, x: Numbers, y: Numbers, points: int, within: tuple[float, float]) -> list[list[float]]:
    """A smooth curve needs no extremes: its neighborhood of 2 % of the steps has at least five of its points."""
    kept = np.isfinite(y) & (x >= within[0]) & (x <= within[1])
    x, y = x[kept], y[kept]
    return [_numbers(values) for values in (strided(x, y, points=points) if name == "mean" else thinned(x, y, points))]


def _numbers(values: Numbers) -> list[float]:
    """The values with seven digits: more than a screen shows, and short as text."""
    tens = np.floor(np.log10(np.maximum(np.abs(values), 1e-290)))
    scale = 10.0 ** (6 - tens)
    rounded: list[float] = (np.round(values * scale) / scale).tolist()
    return rounded
