"""Measured rates of cards, and the rate of a model that lies between the measured ones. Pure, except for reading files.

``cards.json`` has only rates that `docs/lab.md` records. ``python -m trainer.bench --write FILE`` adds rows in the same
format for another card or model, and ``--rates FILE`` makes the planner use them.

Rates are TFLOP/s of :mod:`trainer.model.flops` over forward and backward passes. They are interpolated between the
measured sizes of micro-batches, lengths and widths: linearly in the length, and in the logarithm of the width. The time
of a micro-batch is taken as linear in its tokens, so a token's time is linear in their inverse. If a width was measured
at fewer lengths than the one with the most, the other lengths are scaled as that one's are. Outside the measured range
the nearest value holds, and :func:`doubts` says so. However few tokens a micro-batch has, it takes
:meth:`Card.least_seconds`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.atomic import replacing
from data_prep.json_text import read_json, shown
from trainer.errors import TrainerError, shortage
from trainer.plan.memory import GIB

CARDS = Path(__file__).with_name("cards.json")
# Picoseconds per updated parameter: docs/lab.md, 2026-11-28, BERT-Large's 336 million. Other cards: the slower one's.
OPTIMIZER_PS = {
    "NVIDIA H100 80GB HBM3": {"lamb": 12.33, "adam": 10.30},
    "NVIDIA H200": {"lamb": 9.35, "adam": 7.38},
}
# Share of a GPU's memory that must stay free: micro-batches may be fuller than any that was drawn, and on an H200 the
# plan was up to 4 % too low (docs/lab.md, 2026-11-29).
SPARE = 0.05
NEAR = 1.2  # beyond the measured range by this factor, a plan says so
LARGEST = 1e12  # of any number in a table


@dataclass(frozen=True)
class Rate:
    """One measurement of the forward and backward pass in fp16."""

    card: str  # CUDA's name of the device
    memory_gib: float  # CUDA's total memory of the device
    layers: int
    hidden: int
    length: int  # of every sequence
    tokens: int  # in the micro-batch
    milliseconds: float
    tflops: float
    date: str
    source: str


@dataclass(frozen=True)
class Card:
    """A GPU as the planner knows it."""

    name: str
    memory_gib: float
    rates: tuple[Rate, ...]  # empty if ``tflops`` was given
    tflops: float | None = None  # the same for every model

    @property
    def room(self) -> float:
        """Bytes that a run may use: all but SPARE of the memory."""
        return (1 - SPARE) * self.memory_gib * GIB

    def rate(self, hidden: int, length: float, tokens: float) -> float:
        """The rate for a model's width and a micro-batch, in TFLOP/s.

        ``length``: the mean over tokens of their sequence's length. ``tokens``: of the micro-batch.
        """
        return self.tflops if self.tflops is not None else interpolated(self.rates, hidden, length, tokens)

    def least_seconds(self, layers: int) -> float:
        """The least time of a micro-batch: the host must launch its kernels, however few tokens it has.

        It is ``layers`` times the shortest measured time per layer, or 0 if the card was measured with large
        micro-batches only. Those with at most half of the largest one's tokens count.
        """
        if self.tflops is not None:
            return 0.0
        half = max(row.tokens for row in self.rates) / 2
        by_layer = [row.milliseconds / row.layers for row in self.rates if row.tokens <= half]
        return layers * min(by_layer, default=0.0) / 1000

    def optimizer_ps(self, optimizer: str) -> float:
        """Picoseconds of an update per parameter."""
        slowest = max(OPTIMIZER_PS.values(), key=lambda times: times[optimizer])
        return OPTIMIZER_PS.get(self.name, slowest)[optimizer]


def read_rates(path: Path) -> list[Rate]:
    """Read a table of rates. Raises TrainerError if it is not one."""
    try:
        found = read_json(path)
        rows = [Rate(**row) for row in found]
    except OSError as error:
        if shortage(error):
            raise
        raise TrainerError(f"{path} cannot be read ({error.strerror}): name a file of trainer.bench --write") from None
    except (ValueError, TypeError) as error:
        raise TrainerError(f"{path} is no table of rates ({error}): write one with trainer.bench --write") from None
    for row in rows:
        for each in fields(Rate):
            value = getattr(row, each.name)
            if each.type == "str":
                good, wanted = isinstance(value, str), "a text"
            else:
                good = type(value) in (int, float) and 0 < value <= LARGEST
                wanted = f"a number above 0, and at most {LARGEST:g}"
            if not good:
                raise TrainerError(f"{path}: {each.name} is {shown(value)}: must be {wanted}; measure it again")
    return rows


def add_rates(path: Path, more: Sequence[Rate]) -> None:
    """Add rows to the table at ``path``, or start one. A row of the same card, model and shape is replaced."""
    rows = [*(read_rates(path) if path.exists() else []), *more]
    found = {(row.card, row.layers, row.hidden, row.length, row.tokens): row for row in rows}
    with replacing(path) as file:
        lines = ",".join(f"\n {json.dumps(asdict(row))}" for row in found.values())
        file.write(f"[{lines}\n]\n".encode())


def choose(rates: Sequence[Rate], name: str) -> Card:
    """The card whose name contains ``name``, such as h100. Raises TrainerError with the known cards."""
    names, wanted = sorted({row.card for row in rates}), name.strip().lower()
    found = [each for each in names if wanted and wanted in each.lower()]
    exact = [each for each in found if each.lower() == wanted]
    if len(exact or found) != 1:
        what = "is ambiguous" if found else "is not in the table"
        raise TrainerError(
            f"--card {shown(name)} {what}: name one of {', '.join(found or names)}; or give --memory and --tflops"
        )
    [card] = exact or found
    rows = tuple(row for row in rates if row.card == card)
    return Card(card, rows[-1].memory_gib, rows)


def interpolated(rates: Sequence[Rate], hidden: int, length: float, tokens: float) -> float:
    """The rate between the measured ones; see the top of this file."""
    by_shape: dict[tuple[int, int], dict[float, float]] = {}
    for row in rates:
        by_shape.setdefault((row.hidden, row.length), {})[1 / row.tokens] = 1 / row.tflops
    by_width: dict[int, dict[int, float]] = {}
    for (width, at), by_tokens in by_shape.items():
        by_width.setdefault(width, {})[at] = 1 / _interp(by_tokens, 1 / tokens)
    model = max(by_width.values(), key=len)
    widths = sorted(by_width)
    values = [_at_length(by_width[width], model, length) for width in widths]
    return float(np.interp(math.log(hidden), np.log(widths), values))


def doubts(card: Card, hidden: int, length: float, tokens: int) -> list[str]:
    """Why a rate may be wrong: what it extends beyond the measurements."""
    if card.tflops is not None:
        return []
    found = []
    for what, value, measured in (
        ("hidden", hidden, [row.hidden for row in card.rates]),
        ("length", length, [row.length for row in card.rates]),
    ):
        low, high = min(measured), max(measured)
        if not low / NEAR <= value <= high * NEAR:
            span = f"{low} to {high}" if low < high else f"{low} only"
            found.append(f"{what} {value:,.0f}: {card.name} was measured at {span}")
    least = min(row.tokens for row in card.rates)
    if tokens < least / 4:
        found.append(f"micro-batches of {tokens:,} tokens: {card.name} was measured at {least:,}; fewer are slower")
    return found


def _at_length(own: dict[int, float], model: dict[int, float], length: float) -> float:
    low, high = min(own), max(own)
    inside = min(max(length, low), high)
    return _interp(own, inside) * _interp(model, length) / _interp(model, inside)


def _interp(known: Mapping[Any, float], where: float) -> float:
    at = sorted(known)
    return float(np.interp(where, at, [known[each] for each in at]))
