"""The time of a profiled step by part: every moment of it belongs to one part, or is idle.

If several pieces of work run at once, the moment belongs to computation before copies, and to copies before the
reduction over ranks. So a reduction counts only while nothing else runs; the rest of it is hidden.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.profile import marks, parts
from trainer.profile.events import Recording, Work

Times = NDArray[np.float64]
# what the host does, as the table's columns name it, and the marks that begin it
DATA, FORWARD, BACKWARD, REDUCE, OPTIMIZER, REST = COLUMNS = (
    "data",
    "forward",
    "backward",
    "reduce",
    "optimizer",
    "rest",
)
_COLUMN_OF = {
    **{marks.DATA: DATA, marks.FORWARD: FORWARD, marks.HEADS: FORWARD, marks.BACKWARD: BACKWARD},
    **{marks.LAYERS: BACKWARD, marks.REDUCE: REDUCE, marks.OPTIMIZER: OPTIMIZER, marks.AFTER: REST, marks.END: REST},
}
LONGEST = 8  # kernels that are listed by name


@dataclass(frozen=True)
class Breakdown:
    """Means per step of one rank, in ms. ``spent`` and ``idle`` add up to ``step``."""

    step: float
    spent: dict[str, dict[str, float]]  # by part and column: the device's time
    idle: dict[str, float]  # by column: time without work on the device while the host was there
    hidden: float  # reduction while other work ran
    pieces: float  # pieces of work: kernels, copies and fills
    longest: list[tuple[str, float]]  # the kernels that took longest, over all their calls

    def part(self, name: str) -> float:
        """A part's time, in ms."""
        return sum(self.spent.get(name, {}).values())

    @property
    def busy(self) -> float:
        """The time with work on the device, in ms."""
        return sum(map(self.part, self.spent))

    @property
    def own(self) -> float:
        """The time for data, forward and backward, without waiting for other ranks, in ms."""
        columns = DATA, FORWARD, BACKWARD
        rows = [row for part, row in self.spent.items() if part != parts.REDUCTION]
        return sum(row.get(column, 0.0) for row in (*rows, self.idle) for column in columns)


def column_of(mark: str) -> str:
    """The column of what the host does after a mark."""
    return _COLUMN_OF.get(mark, REST)


def break_down(recording: Recording) -> Breakdown:
    """The means over the recording's steps."""
    steps = recording.steps
    first, last = steps[0][0], steps[-1][1]
    inside = [each for each in recording.work if each.end > first and each.begin < last]
    nothing: Times = np.empty(0)
    cover, spent = (nothing, nothing), dict[str, defaultdict[str, float]]()
    total_reduction = 0.0
    for kind in range(3):
        some = [each for each in inside if _priority(each) == kind]
        begins = np.clip([each.begin for each in some], first, last)
        ends = np.clip([each.end for each in some], first, last)
        exposed, cover = uncovered(cover, begins, ends)
        for each, length in zip(some, exposed.tolist(), strict=True):
            spent.setdefault(each.part, defaultdict(float))[column_of(each.doing)] += length / len(steps)
        if kind == 2:
            total_reduction = float((ends - begins).sum()) / len(steps)
    idle = defaultdict[str, float](float)
    times = np.clip([mark.at for mark in recording.marks], first, last)
    without = np.diff(times) - covered(cover, times[:-1], times[1:])
    for mark, length in zip(recording.marks, without.tolist(), strict=False):  # the last mark is the end
        idle[column_of(mark.name)] += length / len(steps)
    names = defaultdict[str, float](float)
    for each in inside:
        names[each.name] += (min(each.end, last) - max(each.begin, first)) / len(steps)
    return Breakdown(
        step=(last - first) / len(steps),
        spent={part: dict(spent[part]) for part in parts.PARTS if part in spent},
        idle=dict(idle),
        hidden=total_reduction - sum(spent.get(parts.REDUCTION, {}).values()),
        pieces=len(inside) / len(steps),
        longest=sorted(names.items(), key=lambda item: -item[1])[:LONGEST],
    )


def uncovered(cover: tuple[Times, Times], begins: Times, ends: Times) -> tuple[Times, tuple[Times, Times]]:
    """The uncovered length of each stretch, outside ``cover`` and earlier stretches; and the cover with all of them.

    ``begins``, ``ends`` (n,): stretches in the order of ``begins``. A cover is the begins and ends of disjoint
    stretches in order.
    """
    reached = np.maximum.accumulate(np.concatenate([[-np.inf], ends]))[:-1]
    starts = np.maximum(begins, reached)
    stops = np.maximum(ends, starts)
    exposed = stops - starts - covered(cover, starts, stops)
    return exposed, union(np.concatenate([cover[0], begins]), np.concatenate([cover[1], ends]))


def union(begins: Times, ends: Times) -> tuple[Times, Times]:
    """The stretches, any of which may overlap, as disjoint ones in order."""
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    fresh = np.concatenate([[True], begins[1:] > ends[:-1]])[: len(begins)]
    closing = np.concatenate([fresh[1:], [True]])[: len(begins)]
    return begins[fresh], ends[closing]


def covered(cover: tuple[Times, Times], begins: Times, ends: Times) -> Times:
    """The length of each stretch that ``cover`` covers."""
    if not len(cover[0]):
        return np.zeros_like(begins)
    edges = np.stack(cover, axis=1).ravel()
    lengths = np.stack([np.zeros(len(cover[0])), cover[1] - cover[0]], axis=1).ravel().cumsum()
    return np.asarray(np.interp(ends, edges, lengths) - np.interp(begins, edges, lengths))


def _priority(work: Work) -> int:
    return {parts.COPIES: 1, parts.REDUCTION: 2}.get(work.part, 0)


def typical_step(steps: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The step of median length."""
    return sorted(steps, key=lambda step: step[1] - step[0])[len(steps) // 2]
