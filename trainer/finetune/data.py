"""A task's records as token ids: tokenised once, stored flat, and cut into micro-batches by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trainer.data.order import Order, deal
from trainer.errors import TrainerError
from trainer.finetune.label_counts import LabelCounts
from trainer.finetune.task import Batched, Task, TaskBatch, TaskCounts, Unit

Integers = NDArray[np.int64]
SHARE = 16  # bits of a sample's number that say which example of its unit it is; see task.collate


class UnitTable:
    """Units in flat arrays. ``batch`` makes the same batches as ``task.collate``, without a Python loop."""

    def __init__(self, units: Sequence[Unit], task: Task, classes: LabelCounts | None = None) -> None:
        self.classes = classes or {}  # class counts of the records behind the units
        examples = [example for unit in units for example in unit]
        self.dtype = task.dtype
        self.examples = _counts(units)  # (U,) examples of each unit
        self.counts = np.array([task.count(unit) for unit in units], np.int64)  # (U,) targets of each unit
        self.sizes = _counts([example.tokens for example in examples])  # (E,) tokens of each example
        self.places_of = _counts([example.places for example in examples])
        self.targets_of = _counts([example.targets for example in examples])
        self.tokens = _flat([example.tokens for example in examples], np.int32)
        self.segments = _flat([example.segments for example in examples], np.uint8)
        self.places = _flat([example.places for example in examples], np.int64)
        self.targets = _flat([example.targets for example in examples], np.float64)
        self.first = _starts(self.examples)  # (U,) each unit's first example
        self.lengths = np.add.reduceat(self.sizes, self.first) if len(units) else self.sizes  # (U,) tokens of each unit
        self.answers = np.add.reduceat(np.ones_like(self.sizes) if task.pooled else self.places_of, self.first)
        self._starts = [_starts(counts) for counts in (self.sizes, self.places_of, self.targets_of)]

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, rows: Integers, samples: Integers, weight: float = 1.0) -> TaskBatch:
        """The units of ``rows`` as one micro-batch, with a sample number for each."""
        own = self.examples[rows]
        chosen = spans(self.first[rows], own)  # (B,) examples
        sizes, places = self.sizes[chosen], self.places_of[chosen]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        tokens = spans(self._starts[0][chosen], sizes)
        number = np.repeat(samples << SHARE, own) + spans(np.zeros_like(own), own)
        at = self.places[spans(self._starts[1][chosen], places)] + np.repeat(starts[:-1], places)
        targets = self.targets[spans(self._starts[2][chosen], self.targets_of[chosen])]
        return TaskBatch(
            tokens=torch.from_numpy(self.tokens[tokens].astype(np.int64)),
            segments=torch.from_numpy(self.segments[tokens].astype(np.int64)),
            positions=torch.from_numpy(spans(np.zeros_like(sizes), sizes)),
            cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
            max_seqlen=int(sizes.max()),
            samples=torch.from_numpy(number),
            places=torch.from_numpy(at),
            targets=torch.from_numpy(targets).to(self.dtype),
            weight=weight,
        )


def spans(first: Integers, counts: Integers) -> Integers:
    """Concatenated runs of consecutive numbers: ``counts[i]`` of them from ``first[i]`` on."""
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(int(counts.sum()))


def _counts(parts: Sequence[Sequence[Any]]) -> Integers:
    return np.fromiter(map(len, parts), np.int64, len(parts))


def _starts(counts: Integers) -> Integers:
    return np.cumsum(counts) - counts


def _flat(parts: Sequence[Sequence[float]], dtype: Any) -> NDArray[Any]:
    return np.fromiter((value for part in parts for value in part), dtype)


# ---- files -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluationFile:
    """A file to evaluate on: its records, their units in order, and the units as a table."""

    path: Path
    records: list[Any]
    units: list[Unit]
    table: UnitTable

    @property
    def known(self) -> bool:
        """Whether any record has an answer."""
        return bool(self.table.counts.any())


def read_evaluation_file(path: Path, task: Task, tokenizer: Tokenizer, longest: int) -> EvaluationFile:
    """Read a file to evaluate on or, if it has no answers, to predict."""
    records = task.read(path)
    units = flat_units(task, records, tokenizer, longest, training=False)
    if not units:
        raise TrainerError(f"{path} has nothing to predict: check that its texts are not empty")
    return EvaluationFile(path, records, units, UnitTable(units, task, task.classes(records)))


def read_training(path: Path, task: Task, tokenizer: Tokenizer, longest: int) -> UnitTable:
    """Read a training file, keeping only units with a target."""
    records = task.read(path)
    units = flat_units(task, records, tokenizer, longest, training=True)
    units = [unit for unit in units if task.count(unit)]
    if not units:
        raise TrainerError(f"{path} has no labels to train on: add them, or name their column (--label-column)")
    return UnitTable(units, task, task.classes(records))


def flat_units(task: Task, records: list[Any], tokenizer: Tokenizer, longest: int, training: bool) -> list[Unit]:
    """The units of all records, in order."""
    if isinstance(task, Batched):
        made = task.all_units(records, tokenizer, longest, training)
    else:
        made = [task.units(record, tokenizer, longest, training) for record in records]
    return [unit for units in made for unit in units]


# ---- steps -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """How a step's batch is split: into ``parts`` micro-batches, of which this rank has ``first`` … ``end - 1``."""

    parts: int
    first: int
    end: int


def cut_of(batch: int, micro_batch: int | None, rank: int, ranks: int) -> Cut:
    """Split into micro-batches of at most ``micro_batch`` units, equally many on each rank; None: one per rank."""
    each = 1 if micro_batch is None else -(-batch // (ranks * micro_batch))
    return Cut(ranks * each, rank * each, (rank + 1) * each)


def take(table: UnitTable, order: Order, position: int, count: int, cut: Cut) -> tuple[list[TaskBatch], TaskCounts]:
    """This rank's micro-batches of the ``count`` units from ``position`` on, and the counts of the whole batch.

    A micro-batch that would be empty gets some other unit, whose loss has weight 0.
    """
    rows = order.take(position, count)[:, 1]
    batches = []
    for part in deal(table.lengths[rows], cut.parts)[cut.first : cut.end]:
        own, weight = (part, 1.0) if len(part) else (np.zeros(1, np.int64), 0.0)
        batches.append(table.batch(rows[own], position + own, weight))
    return batches, TaskCounts(int(table.counts[rows].sum()))
