"""Sentence and sentence-pair tasks: predict a class or a number for each text or pair of texts.

Published files are read unchanged: their first line names the columns, and each task knows the column names of its own
published files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from kernels.cross_entropy import cross_entropy
from trainer.console import Tell
from trainer.errors import TrainerError
from trainer.finetune.formats import Row, read_rows
from trainer.finetune.label_counts import NONE, LabelCounts, count, says_nothing
from trainer.finetune.task import TaskBatch, Unit, fit, pack, with_targets
from trainer.finetune.task_metrics import TASK_METRICS

_AT_ONCE = 4096  # records tokenised together
Answers = Sequence[NDArray[np.float32]]


@dataclass(frozen=True)
class Columns:
    """Names the columns of the texts and of the label."""

    texts: tuple[str, ...]  # one, or two
    label: str


@dataclass(frozen=True)
class Format:
    """The layout of a task's files."""

    columns: tuple[Columns, ...]  # candidates; the first that the file has is used
    headless: tuple[str, ...] = ()  # column names of a file without a header line
    dropped: tuple[str, ...] = ()  # labels of records on which the annotators did not agree
    no_label: tuple[str, ...] = ()  # label values that mean no label
    lower: bool = False  # whether labels are converted to lower case
    skips: bool = False  # whether rows that are too short are skipped rather than rejected


@dataclass(frozen=True)
class SentenceRecord:
    """A text or a pair of texts."""

    line: int
    first: str
    second: str | None
    target: float | None  # the number of the class, or the number itself; None if unknown


@dataclass(frozen=True)
class SentenceTask:
    """Predict a class for each record, with ``labels`` in the order of the head's outputs; without labels, a number."""

    name: str
    measure: str
    metrics: tuple[str, ...]  # names in task_metrics.TASK_METRICS
    format: Format
    labels: tuple[str, ...]
    hidden_head: bool
    tell: Tell  # receives reports of what was skipped
    pooled: bool = True
    drops: bool = True
    export_class: str = "BertForSequenceClassification"

    @property
    def outputs(self) -> int:
        """One per class; one for a number."""
        return max(1, len(self.labels))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the targets."""
        return torch.int64 if self.labels else torch.float32

    def read(self, path: Path) -> list[SentenceRecord]:
        """Read a file's records; without a label column they have no labels. See ``read_records``."""
        return read_records(path, self.format, self.labels, self.tell)

    def classes(self, records: Sequence[SentenceRecord]) -> LabelCounts:
        """Count the records of each class; for numbers, report how many there are, the lowest and the highest."""
        if self.labels:
            return count(self.labels, (None if r.target is None else self.labels[int(r.target)] for r in records))
        known = [record.target for record in records if record.target is not None]
        counts: LabelCounts = {"numbers": len(known)} | ({"lowest": min(known), "highest": max(known)} if known else {})
        return counts | ({NONE: len(records) - len(known)} if len(known) < len(records) else {})

    def units(self, record: SentenceRecord, tokenizer: Tokenizer, longest: int, training: bool) -> list[Unit]:
        """The record as one unit, truncated to ``longest`` tokens."""
        return self.all_units([record], tokenizer, longest, training)[0]

    def all_units(
        self, records: Sequence[SentenceRecord], tokenizer: Tokenizer, longest: int, training: bool
    ) -> list[list[Unit]]:
        """One unit of one example per record; ``_AT_ONCE`` records are tokenised together."""
        made: list[list[Unit]] = []
        for start in range(0, len(records), _AT_ONCE):
            part = records[start : start + _AT_ONCE]
            texts = [record.first for record in part] + [r.second for r in part if r.second is not None]
            ids = [one.ids for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
            seconds = iter(ids[len(part) :])
            for record, first in zip(part, ids, strict=False):
                second = None if record.second is None else next(seconds)
                example = pack(tokenizer, *cut(first, second, longest))
                made.append([(example if record.target is None else with_targets(example, record.target),)])
        return made

    def loss(self, answers: Tensor, batch: TaskBatch) -> Tensor:
        """Summed cross-entropy of the classes, or summed squared error."""
        if self.labels:
            return cross_entropy(answers, batch.targets)[0]
        return (answers[:, 0] - batch.targets).square().sum()

    def count(self, unit: Unit) -> int:
        """1 if the label is known, else 0."""
        return sum(len(example.targets) for example in unit)

    def score(self, records: Sequence[SentenceRecord], units: Sequence[Unit], answers: Answers) -> dict[str, float]:
        """The task's metrics over the records whose label is known."""
        said = np.concatenate(answers)  # (records, outputs)
        known = [row for row, record in enumerate(records) if record.target is not None]
        if not known:
            raise TrainerError(f"{self.name}: there is no record with a label to evaluate on")
        gold = np.array([records[row].target for row in known])
        if self.labels:
            gold, values = gold.astype(np.int64), said[known].argmax(1)
        else:
            values = said[known, 0].astype(np.float64)
        return {name: TASK_METRICS[name](gold, values) for name in self.metrics}

    def predictions(
        self, records: Sequence[SentenceRecord], units: Sequence[Unit], answers: Answers
    ) -> list[dict[str, Any]]:
        """One row per record: its index, the prediction, a class's probability and, if known, the label."""
        rows = []
        for index, (record, own) in enumerate(zip(records, np.concatenate(answers).astype(np.float64), strict=True)):
            if self.labels:
                shares = np.exp(own - own.max())
                row = {"index": index, "prediction": self.labels[int(own.argmax())]}
                row |= {"probability": round(float(shares.max() / shares.sum()), 6)}
                gold: Any = None if record.target is None else self.labels[int(record.target)]
            else:
                row, gold = {"index": index, "prediction": round(float(own[0]), 6)}, record.target
            rows.append(row if gold is None else row | {"label": gold})
        return rows


# ---- records ---------------------------------------------------------------------------------------------------


def read_records(path: Path, form: Format, labels: Sequence[str], tell: Tell) -> list[SentenceRecord]:
    """Read a file's records, which have one of ``labels`` each or, if that is empty, a number.

    ``tell`` receives a report of what is skipped. Raises TrainerError, with file and line, for missing columns and
    unknown labels.
    """
    rows, columns = open_file(path, form)
    for other in form.columns:
        if other != columns and {*other.texts, other.label} <= rows[0].values.keys():
            used, unused = ", ".join((*columns.texts, columns.label)), ", ".join((*other.texts, other.label))
            tell(f"{path}: using columns {used}, not {unused}: choose others with --text-columns and --label-column")
    numbers = {label: float(number) for number, label in enumerate(labels)}
    records, short, undecided = [], 0, 0
    for row in rows:
        label = _label(row, columns, form)
        texts = [row.values.get(name) for name in columns.texts]
        first, second = texts[0], texts[-1] if len(texts) > 1 else None
        if any(text is None for text in texts):
            if not form.skips:
                missing = columns.texts[texts.index(None)]
                raise TrainerError(f"{path}, line {row.line}: no value in column {missing}")
            short += 1
            continue
        if label in form.dropped:
            undecided += 1
            continue
        assert first is not None
        records.append(
            SentenceRecord(
                row.line, first, second, _target(label, numbers, f"{path}, line {row.line}: {columns.label}")
            )
        )
    left = [(short, "are too short"), (undecided, "have no label that the annotators agreed on")]
    if said := [f"{count} that {what}" for count, what in left if count]:
        tell(f"{path}: of {len(rows):,} records, skipped {', '.join(said)}")
    return records


def open_file(path: Path, form: Format) -> tuple[list[Row], Columns]:
    """Read a file's rows, and find which of the candidate columns it has."""
    rows = read_rows(path, form.headless, [columns.texts for columns in form.columns])
    names = {name for row in rows for name in row.values}
    fits = [columns for columns in form.columns if set(columns.texts) <= names]
    if not fits:
        wanted = " or ".join(", ".join(columns.texts) for columns in form.columns)
        raise TrainerError(
            f"{path} has no columns {wanted}, only {', '.join(sorted(names))}: name them with --text-columns"
        )
    return rows, next((columns for columns in fits if columns.label in names), fits[0])


def find_labels(path: Path, form: Format) -> tuple[str, ...]:
    """Find the labels of a training file, sorted as numbers if all are numbers, else by name."""
    rows, columns = open_file(path, form)
    found = {_label(row, columns, form) for row in rows} - {*form.dropped}
    labels = [label for label in found if label is not None]
    if len(labels) < 2:
        raise TrainerError(
            f"{path} has {len(labels)} label(s) in column {columns.label}: name the right column with --label-column, "
            "or pass --regression for numbers"
        )
    if all(label.removeprefix("-").isdecimal() for label in labels):
        return tuple(sorted(labels, key=int))
    return tuple(sorted(labels))


def _label(row: Row, columns: Columns, form: Format) -> str | None:
    """The row's label; None if it has none."""
    label = row.values.get(columns.label)
    if label is None or says_nothing(label, form.no_label):
        return None
    return label.lower() if form.lower else label


def _target(label: str | None, numbers: dict[str, float], where: str) -> float | None:
    if label is None:
        return None
    if numbers:
        if label not in numbers:
            known = ", ".join(list(numbers)[:10])
            remedy = f"if it means no label, pass --no-label {label}"
            raise TrainerError(f"{where} is {label!r}, which is not one of {known}; {remedy}")
        return numbers[label]
    try:
        value = float(label)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise TrainerError(f"{where} is {label!r}, which is not a number")
    return value


def cut(first: list[int], second: list[int] | None, longest: int) -> tuple[list[int], list[int] | None]:
    """Truncate both so that with [CLS] and [SEP] they have at most ``longest`` tokens; see ``task.fit``."""
    if second is None:
        return first[: longest - 2], None
    a, b = fit(len(first), len(second), longest - 3)
    return first[:a], second[:b]
