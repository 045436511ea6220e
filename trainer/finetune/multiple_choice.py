"""Multiple choice, as in SWAG: which of several continuations follows a context.

Each choice is its own example, [CLS] context [SEP] choice [SEP], with one score from the pooled [CLS]; the softmax runs
over the choices of a record. SWAG's published CSV is read as it is (``sent1``; ``sent2`` begins each of ``ending0`` …
``ending3``). TSV, CSV and JSON lines with other columns work too: one for the context, and either one per choice or a
single one that contains a JSON list. The label is the number of the right choice, from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from data_prep.json_text import parse_json
from kernels.cross_entropy import cross_entropy
from trainer.errors import TrainerError
from trainer.finetune.classification import cut
from trainer.finetune.formats import Row, read_rows
from trainer.finetune.label_counts import LabelCounts, count, says_nothing
from trainer.finetune.task import TaskBatch, Unit, pack, with_targets

Answers = Sequence[NDArray[np.float32]]


@dataclass(frozen=True)
class Choices:
    """Names the columns of the context, the start of each choice, the choices themselves and the label."""

    context: str
    choices: tuple[str, ...]  # a single one contains a JSON list
    beginning: str = ""  # empty if the choices are complete
    label: str = "label"
    no_label: tuple[str, ...] = ()  # label values that mean no label


SWAG = Choices("sent1", tuple(f"ending{number}" for number in range(4)), "sent2")


@dataclass(frozen=True)
class ChoiceRecord:
    """A context and its continuations."""

    line: int
    context: str
    choices: tuple[str, ...]
    target: int | None  # the right one; None if unknown


@dataclass(frozen=True)
class ChoiceTask:
    """Pick the right one of ``choices`` continuations."""

    columns: Choices
    choices: int

    name = "swag"
    measure = "accuracy"
    outputs = 1  # for each choice
    pooled = True
    drops = True
    hidden_head = False
    labels = ()
    dtype = torch.int64
    export_class = "BertForMultipleChoice"

    @classmethod
    def of(cls, training: Path, columns: Choices = SWAG) -> ChoiceTask:
        """Make the task with as many choices as the training file has."""
        return cls(columns, len(read_records(training, columns)[0].choices))

    def read(self, path: Path) -> list[ChoiceRecord]:
        """Read a file's records. TrainerError if one has a different number of choices."""
        return read_records(path, self.columns, self.choices)

    def classes(self, records: Sequence[ChoiceRecord]) -> LabelCounts:
        """Count how often each choice is the right one, by its number."""
        targets = (None if record.target is None else str(record.target) for record in records)
        return count([str(number) for number in range(self.choices)], targets)

    def units(self, record: ChoiceRecord, tokenizer: Tokenizer, longest: int, training: bool) -> list[Unit]:
        """One unit: an example per choice, truncated to ``longest`` tokens, the longer of context and choice first."""
        texts = [record.context, *record.choices]
        first, *seconds = (one.ids for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        head, *others = (pack(tokenizer, *cut(first, second, longest)) for second in seconds)
        return [(head if record.target is None else with_targets(head, record.target), *others)]

    def loss(self, answers: Tensor, batch: TaskBatch) -> Tensor:
        """() fp32: the sum over records of the cross-entropy over their choices."""
        return cross_entropy(answers.view(-1, self.choices), batch.targets)[0]

    def count(self, unit: Unit) -> int:
        """1 if the right choice is known, else 0."""
        return len(unit[0].targets)

    def score(self, records: Sequence[ChoiceRecord], units: Sequence[Unit], answers: Answers) -> dict[str, float]:
        """Accuracy over the records whose right choice is known."""
        right = [
            int(own.argmax()) == record.target
            for record, own in zip(records, answers, strict=True)
            if record.target is not None
        ]
        if not right:
            raise TrainerError(f"{self.name}: there is no record with a label to evaluate on")
        return {"accuracy": sum(right) / len(right)}

    def predictions(
        self, records: Sequence[ChoiceRecord], units: Sequence[Unit], answers: Answers
    ) -> list[dict[str, Any]]:
        """One row per record: its index, the choice, its probability and, if known, the right choice."""
        rows = []
        for index, (record, own) in enumerate(zip(records, answers, strict=True)):  # own (choices, 1)
            shares = np.exp(own.astype(np.float64) - own.max())
            row: dict[str, Any] = {"index": index, "prediction": int(own.argmax())}
            row |= {"probability": round(float(shares.max() / shares.sum()), 6)}
            rows.append(row if record.target is None else row | {"label": record.target})
        return rows


# ---- records ---------------------------------------------------------------------------------------------------


def read_records(path: Path, columns: Choices, choices: int | None = None) -> list[ChoiceRecord]:
    """Read a file's records, each with ``choices`` choices or as many as the first. TrainerError names the line."""
    records = []
    for row in read_rows(path):
        record = _record(path, row, columns)
        choices = choices or len(record.choices)
        if len(record.choices) != choices:
            seen = f"{len(record.choices)} choices instead of {choices}"
            raise TrainerError(f"{path}, line {row.line}: {seen}; each record must have the same number")
        records.append(record)
    return records


def _record(path: Path, row: Row, columns: Choices) -> ChoiceRecord:
    where = f"{path}, line {row.line}"
    values = [_value(row, name, where) for name in columns.choices]
    if len(columns.choices) == 1:
        values = _list(values[0], columns.choices[0], where)
    elif "" in values:
        raise TrainerError(f"{where}: column {columns.choices[values.index('')]} is empty; fill in every choice")
    if len(values) < 2:
        raise TrainerError(f"{where}: {len(values)} choice(s); at least two are needed")
    if columns.beginning:
        beginning = _value(row, columns.beginning, where)
        values = [f"{beginning} {value}" for value in values]
    return ChoiceRecord(
        row.line, _value(row, columns.context, where), tuple(values), _target(row, columns, values, where)
    )


def _value(row: Row, name: str, where: str) -> str:
    value = row.values.get(name)
    if value is None:
        raise TrainerError(f"{where}: no value in column {name}; the row has {', '.join(row.values)}")
    return value


def _list(text: str, name: str, where: str) -> list[str]:
    try:
        value = parse_json(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise TrainerError(f"{where}: column {name} must be a JSON list of non-empty strings")
    return value


def _target(row: Row, columns: Choices, values: list[str], where: str) -> int | None:
    label = row.values.get(columns.label)
    if label is None or says_nothing(label, columns.no_label):
        return None
    if not label.isdecimal() or int(label) >= len(values):
        raise TrainerError(
            f"{where}: {columns.label} is {label!r}; it must be a choice's number, 0 to {len(values) - 1}; if it means "
            f"no label, pass --no-label {label}"
        )
    return int(label)
