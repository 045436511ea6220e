"""One step of a recording as a picture: what the host does, its calls, and the work of the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from data_prep.atomic import replacing
from trainer.monitor.panels import BLUE, FAINT, GREEN, INK, ORANGE, PART_COLORS, ROSE, SKY, STYLE, VIOLET
from trainer.profile import parts
from trainer.profile.breakdown import COLUMNS, column_of, typical_step
from trainer.profile.events import HOST, Recording
from trainer.profile.marks import FORWARD

GRAY = "#c9ced6"
COLORS = {  # of the device's work; what the report also shows has the same color there
    parts.PRODUCTS: BLUE,
    parts.ATTENTION: VIOLET,
    parts.LAYER_NORM: SKY,
    parts.GELU: "#f0c75e",
    parts.EMBEDDING: "#a6d96a",
    parts.SUMS: "#8c6bb1",
    parts.HEADS: "#b15928",
    parts.OTHER: FAINT,
    parts.ACCUMULATION: "#9ed9c5",
    parts.REDUCTION: ROSE,
    parts.OPTIMIZER: GREEN,
    parts.COPIES: ORANGE,
    parts.BETWEEN: GRAY,
}
HOST_COLORS = {column: PART_COLORS.get(column, GRAY) for column in COLUMNS}
WAITS = "#e4e7eb"
ENLARGED = 1 / 12  # the share of a micro-batch's time that is enlarged
PIXELS = 1600  # pieces of a row that are closer than a pixel, and of one color, are drawn as one
Bar = tuple[float, float, str]  # begin and end in ms, and a color


def draw(recording: Recording, title: str, path: Path) -> None:
    """Write the step of median length, and its beginning again enlarged, to ``path`` as PNG, whole or not at all."""
    step = typical_step(recording.steps)
    whole = f"{title}: the step of median length, with the profiler"
    panels = {whole: step, "the beginning of its first forward pass": beginning(recording, step)}
    rows = len(bars(recording, step))
    with rc_context(STYLE):
        figure = Figure(figsize=(16, 2.2 + 1.1 * rows), layout="constrained")
        for axes, (name, span) in zip(figure.subplots(2), panels.items(), strict=True):
            _fill(axes, bars(recording, span), span)
            axes.set_title(name, loc="left", fontsize=11.5)
        axes.set_xlabel("ms")
        host, work = _legends(recording, step)
        figure.legend(handles=host, loc="outside upper right", ncols=len(host), frameon=False)
        figure.legend(handles=work, loc="outside lower left", ncols=9, frameon=False)
        with replacing(path) as file:
            figure.savefig(file, dpi=100, format="png")


def beginning(recording: Recording, step: tuple[float, float]) -> tuple[float, float]:
    """Begin and end of the part of a step that is enlarged: a share of a micro-batch's time, from its forward on."""
    begins = [mark.at for mark in recording.marks if mark.name == FORWARD and step[0] <= mark.at < step[1]]
    return begins[0], min(step[1], begins[0] + ENLARGED * (step[1] - step[0]) / len(begins))


def bars(recording: Recording, span: tuple[float, float]) -> dict[str, list[Bar]]:
    """The rows of a panel from top to bottom, with times since the begin of ``span``."""
    following = [mark.at for mark in recording.marks[1:]]
    host = [
        (mark.at, end, HOST_COLORS[column_of(mark.name)]) for mark, end in zip(recording.marks, following, strict=False)
    ]
    rows = {"host": host}
    if recording.calls:
        rows["launches"] = [(c.begin, c.end, WAITS if c.waits else COLORS.get(c.part, GRAY)) for c in recording.calls]
    for name in sorted({work.row for work in recording.work}, key=lambda name: (len(name), name)):
        own = [(work.begin, work.end, COLORS[work.part]) for work in recording.work if work.row == name]
        label = "operations" if name == HOST else f"GPU, {name}"
        rows[label] = own
    begin, end = span
    inside = {name: clipped(row, begin, end) for name, row in rows.items()}
    return {name: merged(row, (end - begin) / PIXELS) for name, row in inside.items()}


def clipped(row: Iterable[Bar], begin: float, end: float) -> list[Bar]:
    """The bars between ``begin`` and ``end``, with times since ``begin``."""
    return [(max(a, begin) - begin, min(b, end) - begin, color) for a, b, color in row if a < end and b > begin]


def merged(row: Sequence[Bar], gap: float) -> list[Bar]:
    """Neighbors of one color with less than ``gap`` between them, as one bar."""
    found: list[Bar] = []
    for begin, end, color in row:
        if found and found[-1][2] == color and begin - found[-1][1] < gap:
            found[-1] = found[-1][0], max(end, found[-1][1]), color
        else:
            found.append((begin, end, color))
    return found


def _fill(axes: Axes, rows: dict[str, list[Bar]], span: tuple[float, float]) -> None:
    for place, row in enumerate(rows.values()):
        lengths = [(begin, end - begin) for begin, end, _ in row]
        axes.broken_barh(lengths, (place - 0.38, 0.76), facecolors=[color for *_, color in row], linewidth=0)
    axes.set_yticks(range(len(rows)), list(rows), color=INK)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, span[1] - span[0])
    axes.grid(axis="y", visible=False)


def _legends(recording: Recording, step: tuple[float, float]) -> tuple[list[Patch], list[Patch]]:
    """The colors of the host's row, and those of all others."""
    begin, end = step
    host = {column_of(mark.name) for mark in recording.marks if begin <= mark.at < end}
    work = {each.part for each in recording.work if each.end > begin and each.begin < end}
    shown = [Patch(color=COLORS[part], label=part) for part in parts.PARTS if part in work]
    if any(call.waits for call in recording.calls):
        shown.append(Patch(color=WAITS, label="may wait for the GPU"))
    return [Patch(color=HOST_COLORS[column], label=f"host: {column}") for column in COLUMNS if column in host], shown
