"""The events of a trace: the marks of the host, the work of the device, and the calls that launched it.

A trace is the JSON that ``torch.profiler`` exports, in the format of Chrome's trace viewer: each event has a category
(``cat``), a name, a start (``ts``) and a duration (``dur``), both in microseconds. On a GPU, the work is its kernels,
copies and fills, and each has the ``correlation`` number of the CUDA call that launched it. On CPUs, the work is
PyTorch's operations on the thread that trains; an operation inside another is a part of it.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import TrainerError
from trainer.profile import marks, parts
from trainer.profile.parts import COPY_CATEGORIES, kernel_part

LAUNCHES = ("cuda_runtime", "cuda_driver")  # categories of the host's calls to CUDA; Triton's are in the second
WAITS = ("synchronize", "cudamemcpy")  # in the lower-case name of a call that may wait for the device
HOST = "host"  # the row of work on CPUs
# the part of all work that is launched after a mark, whatever its name; other work goes by its name
_PART_AFTER = {
    marks.HEADS: parts.HEADS,
    marks.BACKWARD: parts.HEADS,
    marks.REDUCE: parts.ACCUMULATION,
    marks.OPTIMIZER: parts.OPTIMIZER,
    marks.AFTER: parts.BETWEEN,
    marks.DATA: parts.BETWEEN,
}


class Mark(NamedTuple):
    """A part of the step that the host begins at ``at``, in ms."""

    at: float
    name: str


class Work(NamedTuple):
    """A piece of work on the device. Times are in ms."""

    begin: float
    end: float
    part: str  # one of PARTS
    doing: str  # the mark before its launch
    row: str  # a stream of the GPU, or HOST
    name: str


class Call(NamedTuple):
    """A call of the host to CUDA. Times are in ms."""

    begin: float
    end: float
    part: str  # of the work that it launched; empty if it launched none
    waits: bool  # whether it may wait for the device


@dataclass(frozen=True)
class Recording:
    """A trace as the rest of this folder reads it. All lists are in the order of time."""

    marks: list[Mark]
    work: list[Work]
    calls: list[Call]

    @property
    def steps(self) -> list[tuple[float, float]]:
        """Begin and end of each step in ms, without the first, which only warms the profiler up."""
        begins = [mark.at for mark in self.marks if mark.name == marks.DATA] + [self.marks[-1].at]
        return list(zip(begins[1:], begins[2:], strict=False))


def read_trace(path: Path, cuda: bool) -> dict[str, Any]:
    """The JSON of a trace. Raises TrainerError if it is none, holds no steps, or no kernel although ``cuda``."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            tree: dict[str, Any] = json.load(file, strict=False)  # a kernel's name may hold any character
    except json.JSONDecodeError as error:
        raise TrainerError(
            f"PyTorch's profiler wrote no JSON ({error}): use the PyTorch of requirements.lock"
        ) from None
    if [event["name"] for event in _annotations(tree)][-1:] != [marks.PREFIX + marks.END]:
        raise TrainerError("PyTorch's profiler recorded none of the steps: use the PyTorch of requirements.lock")
    if cuda and not any(event.get("cat") == "kernel" for event in tree["traceEvents"]):
        raise TrainerError(
            "PyTorch's profiler recorded no kernel of the GPU: start the command without another profiler, such as "
            "nsys or ncu, and check that NVIDIA's libcupti is installed"
        )
    return tree


def recording_of(tree: dict[str, Any], cuda: bool) -> Recording:
    """The marks, work and calls in a trace, with times in ms since the first mark."""
    spans = [event for event in tree["traceEvents"] if event.get("ph") == "X"]
    annotations = _annotations(tree)
    origin = float(annotations[0]["ts"])
    own = [Mark(_span(event, origin)[0], event["name"].removeprefix(marks.PREFIX)) for event in annotations]
    if cuda:
        work, calls = _on_gpu(spans, own, origin)
    else:
        thread = annotations[0]["tid"]
        work, calls = _on_cpu((event for event in spans if event["tid"] == thread), own, origin), []
    return Recording(own, sorted(work), sorted(calls))


def spans_of_marks(tree: dict[str, Any], recording: Recording) -> list[dict[str, Any]]:
    """The host's parts of the step as events of a trace: a row of its own, in the process that trains."""
    first, *_ = _annotations(tree)
    place = {"pid": first["pid"], "tid": 0}
    row = [{"ph": "M", "name": "thread_name", **place, "args": {"name": "Lambert: the step's parts"}}]
    for mark, following in zip(recording.marks, recording.marks[1:], strict=False):
        times = {"ts": float(first["ts"]) + 1000 * mark.at, "dur": 1000 * (following.at - mark.at)}
        row.append({"ph": "X", "cat": "lambert", "name": mark.name, **place, **times})
    return row


def _annotations(tree: dict[str, Any]) -> list[dict[str, Any]]:
    """The marks as events, in the order of time. The GPU's rows may repeat them, in another category."""
    named = [event for event in tree["traceEvents"] if event.get("cat") == "user_annotation"]
    return sorted((e for e in named if e["name"].startswith(marks.PREFIX)), key=lambda event: float(event["ts"]))


def _on_gpu(spans: list[dict[str, Any]], own: list[Mark], origin: float) -> tuple[list[Work], list[Call]]:
    times = [mark.at for mark in own]
    launches: dict[int, dict[str, Any]] = {}
    for event in spans:
        if event.get("cat") in LAUNCHES and (number := _correlation(event)):
            launches.setdefault(number, event)
    work, launched = [], dict[int, str]()
    for event in spans:
        category = event.get("cat")
        if category != "kernel" and category not in COPY_CATEGORIES:
            continue
        begin, end = _span(event, origin)
        number = _correlation(event)
        asked = _span(launches[number], origin)[0] if number in launches else begin
        doing = _doing(own, times, asked)
        part = parts.COPIES if category in COPY_CATEGORIES else _part(event["name"], doing)
        launched[number] = part
        work.append(
            Work(begin, end, part, doing, f"stream {event.get('args', {}).get('stream', event['tid'])}", event["name"])
        )
    calls = []
    for event in spans:
        if event.get("cat") in LAUNCHES:
            waits = any(word in event["name"].lower() for word in WAITS)
            calls.append(Call(*_span(event, origin), launched.get(_correlation(event), ""), waits))
    return work, calls


def _on_cpu(spans: Iterable[dict[str, Any]], own: list[Mark], origin: float) -> list[Work]:
    """The outermost operations."""
    times, work, ended = [mark.at for mark in own], list[Work](), -float("inf")
    operations = [(*_span(event, origin), event["name"]) for event in spans if event.get("cat") == "cpu_op"]
    for begin, end, name in sorted(operations, key=lambda each: (each[0], -each[1])):
        if begin >= ended:
            doing = _doing(own, times, begin)
            work.append(Work(begin, end, _part(name, doing), doing, HOST, name))
            ended = end
    return work


def _part(name: str, doing: str) -> str:
    named = kernel_part(name)
    if named == parts.REDUCTION:
        return named
    return _PART_AFTER.get(doing, parts.HEADS if named == parts.LOSS else named or parts.OTHER)


def _doing(own: list[Mark], times: list[float], at: float) -> str:
    """The name of the last mark before ``at``."""
    return own[max(0, bisect_right(times, at) - 1)].name


def _span(event: dict[str, Any], origin: float) -> tuple[float, float]:
    begin = (float(event["ts"]) - origin) / 1000
    return begin, begin + float(event.get("dur", 0.0)) / 1000


def _correlation(event: dict[str, Any]) -> int:
    return int(event.get("args", {}).get("correlation", 0))
