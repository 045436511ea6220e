"""Marks in a profiler's trace, which say what the host is doing from then on.

A mark is an instant and not a span: on a GPU, backward runs in a thread of its own, so a span would have to begin in
one thread and end in another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.profiler import record_function

from trainer.engine.stopwatch import Stopwatch
from trainer.model.bert import Encoder

PREFIX = "lambert: "  # of a mark's name in the trace
# What the host does after a mark. The engine's own stopwatch sets "forward", "backward", "reduce", "optimizer" and, at
# the end of its step, an empty name; the others are set here and in trainer/profile/steps.py.
DATA, FORWARD, HEADS, BACKWARD, LAYERS = "data", "forward", "heads", "backward", "backward of the layers"
REDUCE, OPTIMIZER, AFTER, END = "reduce", "optimizer", "after the step", "end"


def mark(name: str) -> None:
    """Leave a mark in the trace, if a profiler is recording one."""
    with record_function(PREFIX + (name or AFTER)):
        pass


class MarkingStopwatch(Stopwatch):
    """The engine's stopwatch, which also leaves a mark at each boundary."""

    def begin(self, part: str) -> None:
        """Start timing ``part``, or nothing if it is empty."""
        super().begin(part)
        mark(part)


@contextmanager
def heads_marked(model: Encoder) -> Iterator[None]:
    """A context that also marks where forward reaches the heads, and where backward leaves them for the last layer."""

    def after_last_layer(layer: Any, given: Any, outputs: tuple[Tensor, Tensor]) -> None:
        mark(HEADS)
        x, _ = outputs
        if x.requires_grad:
            x.register_hook(lambda gradient: mark(LAYERS))  # type: ignore[no-untyped-call]

    hook = model.layers[-1].register_forward_hook(after_last_layer)
    try:
        yield
    finally:
        hook.remove()
