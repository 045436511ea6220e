"""The panel type, and helpers that build its PromQL.

Run-level series are aggregated by run, since a restarted run may come back on another instance. A panel reads a
recording rule if one exists for its value.
"""

from __future__ import annotations

from typing import NamedTuple

Limits = tuple[tuple[float | None, str], ...]  # each value and the colour from there up


class Panel(NamedTuple):
    """One or more queries in one plot. ``good`` and ``alerts`` become the text behind the panel's (i)."""

    title: str
    unit: str  # Grafana's id; "count:NOUN" prints a number with K, Mil, Bil and a noun
    alerts: str  # space-separated names of the alerts to look up if the panel looks wrong
    good: str
    queries: dict[str, str]  # legend ({{label}} is a label's value): PromQL
    kind: str = "timeseries"  # a Grafana panel type: bargauge, stat, state-timeline, table, timeseries
    width: int = 8  # of 24 columns
    limits: Limits = ()
    stacked: bool = False


PanelRows = dict[str, list[Panel]]  # row title: its panels, left to right


def worse_above(*limits: float) -> Limits:
    """Return limits: green, then orange from the first limit up, red from the last."""
    return tuple(zip((None, *limits), ("green", "orange", "red") if limits[1:] else ("green", "red"), strict=True))


def worse_below(*limits: float) -> Limits:
    """Return limits: red, then orange from the first limit up, green from the last."""
    return tuple(zip((None, *limits), ("red", "orange", "green") if limits[1:] else ("red", "green"), strict=True))


def gauge(name: str, by: str = "run", where: str = "") -> str:
    """Return PromQL for a run's gauge, from any instance that exports it."""
    return f'max by ({by}) (lambert_{name}{{run="$run"{where}}})'


def rate(name: str, by: str = "run", where: str = "", function: str = "rate") -> str:
    """Return PromQL for the rate of a run's counter; it takes the rate before the sum, so a restart causes no drop."""
    return f'sum by ({by}) ({function}(lambert_{name}{{run="$run"{where}}}[$__rate_interval]))'


def rule(name: str) -> str:
    """Return PromQL that reads a recording rule of rules.yml."""
    return f'run:lambert_{name}{{run="$run"}}'


def prep(name: str, by: str = "dataset, instance") -> str:
    """Return PromQL for a data build's value. The last build's value, read from a file, is another instance."""
    return f'max by ({by}) (lambert_prep_{name}{{dataset="$dataset"}})'


def prep_rate(name: str) -> str:
    """Return PromQL for the rate of a data build's counter."""
    return f'sum by (dataset) (rate(lambert_prep_{name}{{dataset="$dataset"}}[$__rate_interval]))'


def firing(names: str, where: str = "") -> str:
    """Return PromQL for the firing alerts, or a line "none" at 0: an empty panel then means a broken query."""
    alerts = f'count by (alertname) (ALERTS{{alertname=~"{names}", alertstate="firing"{where}}})'
    return f'{alerts} or label_replace(vector(0), "alertname", "none", "", "")'
