"""Draw a network check: the collectives' bandwidth by size, and each link's rate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator

from data_prep.atomic import replacing
from trainer.links.measure import COLLECTIVES, SIZES
from trainer.links.report import BETWEEN, INSIDE, Results, expected, size_text
from trainer.links.wires import GIGA
from trainer.monitor.panels import BLUE, FAINT, GREEN, ORANGE, STYLE

FEW = 12  # up to this many ranks, each rate is written into its cell
COLORS = dict(zip(COLLECTIVES, (BLUE, GREEN, ORANGE), strict=True))
DASHES = {INSIDE: "--", BETWEEN: ":"}


def draw(results: Results, path: Path) -> None:
    """Write the picture to ``path`` as PNG, whole or not at all."""
    with rc_context(STYLE):
        figure = Figure(figsize=(10.5, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_collectives(left, results)
        _draw_links(right, results)
        with replacing(path) as file:
            figure.savefig(file, dpi=100, format="png")


def _draw_collectives(axes: Axes, results: Results) -> None:
    ranks = len(results.places)
    timings = [each for each in results.timings if each.bytes >= SIZES[1]]  # the first shows the latency
    sizes = [size for size in SIZES[1:] if size <= max(each.bytes for each in timings)]
    for name in COLLECTIVES:
        found = [each for each in timings if each.collective == name]
        rates = [each.bus_rate(ranks) for each in found]
        axes.plot([each.bytes for each in found], rates, "o-", color=COLORS[name], markersize=4, label=name)
    for kind in results.kinds():
        if (wire := expected(results, kind)) is not None:
            axes.axhline(wire.rate, color=FAINT, linestyle=DASHES[kind], linewidth=1, label=f"{kind}: {wire.name}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [size_text(size) for size in sizes], fontsize=8)
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(EngFormatter("B/s"))
    axes.set_title(f"Bus bandwidth by size: {ranks} ranks, {results.backend}", loc="left", fontsize=10)
    axes.legend(loc="lower right")


def _draw_links(axes: Axes, results: Results) -> None:
    """Draw a matrix with a row per sender and a column per receiver; links that were not measured stay empty."""
    ranks = len(results.places)
    rates = np.full((ranks, ranks), np.nan)
    for link, (rate, _) in results.links.items():
        rates[link] = rate / GIGA
    axes.grid(visible=False)
    drawn = axes.imshow(rates, cmap="viridis", vmin=0)
    if ranks <= FEW:
        middle = np.nanmax(rates) / 2
        for sender, receiver in np.argwhere(~np.isnan(rates)):
            value = rates[sender, receiver]
            color = "white" if value < middle else "black"
            axes.text(receiver, sender, f"{value:.3g}", ha="center", va="center", color=color, fontsize=8)
        names = [f"{rank} {host[:16]}" for rank, host in enumerate(results.hosts)]
        axes.set_yticks(range(ranks), names)
        axes.set_xticks(range(ranks))
    axes.set_xlabel("receiver")
    axes.set_ylabel("sender")
    axes.figure.colorbar(drawn, ax=axes, label="GB/s", shrink=0.8)
    axes.set_title(f"Links, {size_text(results.message)} at a time", loc="left", fontsize=10)
