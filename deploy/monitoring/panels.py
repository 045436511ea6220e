"""What a panel is, and the PromQL that panels are made of.

Run-level series are aggregated by run, since a run that restarts may come back at another instance. Where a
recording rule holds what a panel wants, the panel reads the rule.
"""

from __future__ import annotations

from typing import NamedTuple

Limits = tuple[tuple[float | None, str], ...]  # from this value on, this colour


class Panel(NamedTuple):
    """One query or more in one picture. ``good`` and ``alerts`` become the text behind the panel's (i)."""

    title: str
    unit: str  # of Grafana; "count:NOUN" is a number with K, Mil, Bil and a noun
    alerts: str  # those to look up when the panel looks wrong; names, separated by blanks
    good: str
    queries: dict[str, str]  # legend, where {{label}} is a label's value: PromQL
    kind: str = "timeseries"  # Grafana's: bargauge, stat, state-timeline, table, timeseries
    width: int = 8  # of 24 columns
    limits: Limits = ()
    stacked: bool = False


Rows = dict[str, list[Panel]]  # title of a row of the page: its panels, laid from left to right


def worse_above(*limits: float) -> Limits:
    """Green, from the first limit on orange, from the last on red."""
    return tuple(zip((None, *limits), ("green", "orange", "red") if limits[1:] else ("green", "red"), strict=True))


def worse_below(*limits: float) -> Limits:
    """Red, from the first limit on orange, from the last on green."""
    return tuple(zip((None, *limits), ("red", "orange", "green") if limits[1:] else ("red", "green"), strict=True))


def gauge(name: str, by: str = "run", where: str = "") -> str:
    """A run's gauge, from whichever instance has it."""
    return f'max by ({by}) (lambert_{name}{{run="$run"{where}}})'


def rate(name: str, by: str = "run", where: str = "", function: str = "rate") -> str:
    """How fast a run's counter grows; the rate is taken before the sum, so that a restart is no drop."""
    return f'sum by ({by}) ({function}(lambert_{name}{{run="$run"{where}}}[$__rate_interval]))'


def rule(name: str) -> str:
    """A recording rule of rules.yml."""
    return f'run:lambert_{name}{{run="$run"}}'


def prep(name: str, by: str = "dataset, instance") -> str:
    """A figure of a build of data as it stands. The last build's, from a file, is that of another instance."""
    return f'max by ({by}) (lambert_prep_{name}{{dataset="$dataset"}})'


def prep_rate(name: str) -> str:
    """How fast a counter of a build grows."""
    return f'sum by (dataset) (rate(lambert_prep_{name}{{dataset="$dataset"}}[$__rate_interval]))'


def firing(names: str, where: str = "") -> str:
    """Alerts that fire, by name; a line "none" at 0 besides, so that an empty picture means a broken query."""
    alerts = f'count by (alertname) (ALERTS{{alertname=~"{names}", alertstate="firing"{where}}})'
    return f'{alerts} or label_replace(vector(0), "alertname", "none", "", "")'
