"""Draws the main dashboard panels of a run into one PNG, from Prometheus and without Grafana.

python -m deploy.monitoring.pictures http://localhost:9090 RUN OUT.png
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import matplotlib

matplotlib.use("Agg")  # draws to files and needs no display
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, PercentFormatter

from data_prep.streams import say_error
from deploy.monitoring.dashboards import ANNOTATIONS, DASHBOARDS, substitute
from deploy.monitoring.panels import Panel
from trainer.monitor.panels import BLUE, FAINT, GREEN, INK, ORANGE, RED, ROSE, SKY, STYLE, VIOLET

PICTURED_PANELS = {  # dashboard: panel titles, in this order
    "overview": [
        "Loss of masked tokens",
        "Tokens",
        "A step's time by part",
        "Where the time goes",
        "Steps since a checkpoint",
        "Alerts that fire",
    ],
    "nodes": ["Forward and backward", "Wait in the reduction"],
}
COLUMNS, SIZE, DPI = 2, (6.2, 2.5), 75  # inches per panel
POINTS = 300  # maximum points per curve
SCRAPES = 4  # scrapes per rate window, as in Grafana
COLOURS = (BLUE, ORANGE, GREEN, ROSE, SKY, VIOLET, RED)
UNITS = {"percentunit": "share", "none": "", "locale": "", "s": "seconds", "cps": "per second", "flops": "FLOP/s"}
LOOK = STYLE | {"font.size": 9, "legend.frameon": False, "legend.fontsize": 8}


class Curve(NamedTuple):
    """One curve of a picture."""

    label: str  # for the legend
    values: list[float]  # one per point of the span; NaN if missing


class Span(NamedTuple):
    """The time range to query."""

    start: float  # Unix time
    step: float  # seconds between points
    points: int
    window: int  # seconds of each rate window

    @property
    def asked(self) -> dict[str, float]:
        """Prometheus' query parameters for this range."""
        return {"start": self.start, "end": self.start + self.step * (self.points - 1), "step": self.step}

    @property
    def minutes(self) -> list[float]:
        """The points in minutes after the first."""
        return [number * self.step / 60 for number in range(self.points)]


class PictureError(Exception):
    """An error that the user can fix, in one line."""


def ask(url: str, path: str, **parameters: object) -> Any:
    """Query Prometheus' API and return the data. Raises PictureError with the reason it or the network gave."""
    address = f"{url.rstrip('/')}/api/v1/{path}?{urlencode(parameters)}"
    try:
        with urllib.request.urlopen(address, timeout=30) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise PictureError(f"{url}: {' '.join(error.read().decode(errors='replace').split())}") from None
    except (OSError, ValueError) as error:
        raise PictureError(f"no Prometheus answers at {url} ({error}): give the address of its web page") from None


def life(url: str, run: str, scrape: float, hours: float) -> Span:
    """Return the span of a run's scrapes within the last ``hours``. Raises PictureError if there are none."""
    step = max(scrape, hours * 3600 / 10_000)  # Prometheus returns at most 11,000 points
    asked = Span(time.time() - hours * 3600, step, int(hours * 3600 / step) + 1, 0).asked
    found = ask(url, "query_range", query=f'max by (run) (lambert_step{{run="{run}"}})', **asked)["result"]
    if not found:
        raise PictureError(f"{url} has no run {run!r} in the last {hours:g} hours: lambert_step lists the runs")
    times = [float(at) for at, _ in found[0]["values"]]
    start, length = times[0] - step, times[-1] - times[0] + 2 * step
    step = max(scrape, length / POINTS)
    return Span(start, step, int(length / step) + 1, round(max(SCRAPES * scrape, step + scrape)))


def chosen() -> list[Panel]:
    """List the panels of PICTURED_PANELS."""
    panels = {
        name: {each.title: each for row in DASHBOARDS[name].rows.values() for each in row} for name in PICTURED_PANELS
    }
    return [panels[name][title] for name, titles in PICTURED_PANELS.items() for title in titles]


def curves(url: str, panel: Panel, run: str, span: Span) -> list[Curve]:
    """Fetch all series of a panel's queries."""
    found = []
    for legend, expr in panel.queries.items():
        query = substitute(expr, run, f"{span.window}s")
        for series in ask(url, "query_range", query=query, **span.asked)["result"]:
            values = [math.nan] * span.points
            for at, value in series["values"]:
                values[round((float(at) - span.start) / span.step)] = float(value)
            found.append(Curve(named(legend, series["metric"]), values))
    return found


def named(legend: str, labels: dict[str, str]) -> str:
    """Fill in a legend's labels."""
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), legend)


def marks(url: str, run: str, span: Span) -> list[float]:
    """Return the minutes of the run's restarts: the first point of each restart annotation."""
    there = [False] * span.points
    for series in ask(url, "query_range", query=substitute(ANNOTATIONS["Restarts"][0], run), **span.asked)["result"]:
        for at, _ in series["values"]:
            there[round((float(at) - span.start) / span.step)] = True
    return [span.minutes[number] for number in range(1, span.points) if there[number] and not there[number - 1]]


def draw(axes: Axes, panel: Panel, found: list[Curve], span: Span) -> None:
    """Draw a panel as Grafana would: stacked areas, lines, or bars for states."""
    unit = UNITS.get(panel.unit, panel.unit.removeprefix("count:"))
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
    axes.set_title(unit, loc="right", color=FAINT, fontsize=9)
    axes.set_xlim(0, span.minutes[-1])
    if panel.kind == "state-timeline":
        draw_states(axes, found, span)
        return
    if panel.stacked:
        filled = [[0.0 if math.isnan(value) else value for value in curve.values] for curve in found]
        axes.stackplot(span.minutes, filled, labels=[curve.label for curve in found], colors=COLOURS, linewidth=0)
    else:
        for number, curve in enumerate(found):
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(span.minutes, curve.values, label=curve.label, color=colour, linewidth=1.3)
    low, high = axes.get_ylim()
    low = low if panel.unit in ("none", "sci") else 0
    axes.set_ylim(low, low + (high - low) * 1.25)  # room for the legend
    axes.yaxis.set_major_formatter(PercentFormatter(1.0) if panel.unit == "percentunit" else EngFormatter())
    axes.legend(loc="upper left", ncols=4, handlelength=1.2, columnspacing=1.2)


def draw_states(axes: Axes, found: list[Curve], span: Span) -> None:
    """Draw a bar for each period in which a state was above 0."""
    found = [curve for curve in found if any(value > 0 for value in curve.values)]
    for height, curve in enumerate(found):
        there = [minute for minute, value in zip(span.minutes, curve.values, strict=True) if value > 0]
        bars = [(minute, span.step / 60) for minute in there]
        axes.broken_barh(bars, (height - 0.25, 0.5), color=COLOURS[-1], linewidth=0)
    axes.set_yticks(range(len(found)), [curve.label for curve in found])
    axes.set_ylim(len(found) - 0.5, -0.5)


def picture(url: str, run: str, out: Path, scrape: float = 15.0, hours: float = 24.0) -> None:
    """Draw the panels in PICTURED_PANELS of a run into a PNG. Raises PictureError if there is nothing to draw."""
    span, panels = life(url, run, scrape, hours), chosen()
    restarts = marks(url, run, span)
    with pyplot.rc_context(LOOK):
        rows = -(-len(panels) // COLUMNS)
        size = (SIZE[0] * COLUMNS, SIZE[1] * rows)
        figure, grid = pyplot.subplots(rows, COLUMNS, figsize=size, dpi=DPI, layout="constrained", squeeze=False)
        for axes, panel in zip(grid.flat, panels, strict=False):
            draw(axes, panel, curves(url, panel, run, span), span)
            for minute in restarts:
                axes.axvline(minute, color=INK, linestyle=":", linewidth=1)
        for axes in grid[-1]:
            axes.set_xlabel("minutes (dotted: a restart)" if restarts else "minutes")
        figure.savefig(out)
        pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Exit codes: 0 drawn; 2 an error that the user can fix."""
    parser = argparse.ArgumentParser(prog="pictures", description="Draw a run's main dashboard panels from Prometheus.")
    parser.add_argument("url", help="address of Prometheus, such as http://localhost:9090")
    parser.add_argument("run", help="name of the run")
    parser.add_argument("out", type=Path, help="PNG file to write")
    parser.add_argument(
        "--scrape", type=float, default=15.0, metavar="SECONDS", help="scrape interval (default: %(default)s)"
    )
    parser.add_argument("--hours", type=float, default=24.0, help="how far to look back (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        picture(options.url, options.run, options.out, options.scrape, options.hours)
    except (PictureError, OSError) as error:
        say_error(f"pictures: error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
