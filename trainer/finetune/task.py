"""The parts of a task: its examples as the encoder reads them, its head, and how its answers are scored.

A data file is read into records. A record becomes one unit or several (the windows of a long text), and a unit has one
example or several (the choices of a question). A batch consists of whole units. The head's answers are mapped back to
the records, which are scored by the task's own metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from kernels import dropout
from trainer.finetune.label_counts import LabelCounts
from trainer.model.batch import Rows
from trainer.model.bert import SITES, Encoder, ModelConfig, parameter, pool


@dataclass(frozen=True)
class Example:
    """One sequence, [CLS] A [SEP] or [CLS] A [SEP] B [SEP], and what is asked of it."""

    tokens: tuple[int, ...]
    segments: tuple[int, ...]  # 0 for [CLS] A [SEP], 1 for B [SEP]
    places: tuple[int, ...] = (0,)  # positions in this sequence that the head reads
    targets: tuple[float, ...] = ()  # the right outputs of the head; empty if unknown
    origin: Any = None  # what the task needs to bring an answer back to its record


Unit = tuple[Example, ...]  # one record, or a window of it; never split over micro-batches


@dataclass(frozen=True)
class TaskBatch(Rows):
    """Examples of whole units in one row of tokens."""

    places: Tensor  # (P,) int64, index into T of each position that the head reads, example after example
    targets: Tensor  # (K,) int64 or fp32, as the task's loss needs them; empty if unknown
    weight: float = 1.0  # of its loss; 0 if it only keeps a rank in step with the others


@dataclass(frozen=True)
class TaskCounts:
    """The divisor of a step's loss, counted over the whole global batch."""

    targets: int


class TaskOutput(NamedTuple):
    """Sums over one micro-batch; see ``trainer.model.bert.Output``."""

    loss: Tensor  # () fp32

    def mean(self, counts: TaskCounts) -> Tensor:
        """() fp32: this micro-batch's share of the global batch's loss."""
        return self.loss / max(counts.targets, 1)


class TaskModel(Encoder):
    """An encoder with a linear head, or with one hidden layer, over [CLS] through BERT's pooler, or over tokens."""

    def __init__(self, model: ModelConfig, task: Task, seed: int) -> None:
        """The head is drawn from ``seed``; so is the encoder, until its weights are loaded."""
        super().__init__(model)
        self.task, hidden = task, model.hidden
        if task.pooled:
            self.pooler_weight = parameter(hidden, hidden)
            self.pooler_bias = parameter(hidden)
        if task.hidden_head:
            self.head_in_weight = parameter(hidden, hidden)
            self.head_in_bias = parameter(hidden)
        self.head_weight = parameter(task.outputs, hidden)
        self.head_bias = parameter(task.outputs)
        self.initialise(seed)

    def forward(self, batch: TaskBatch, keys: Tensor | None = None) -> TaskOutput:
        """The loss; ``keys`` (T, 2) int32 turn dropout on, None means evaluation."""
        return TaskOutput(self.task.loss(self.answers(batch, keys), batch) * batch.weight)

    def answers(self, batch: TaskBatch, keys: Tensor | None = None) -> Tensor:
        """The head's outputs, fp32: (B, task.outputs) if pooled, else (P, task.outputs) at ``places``."""
        x, site = self.encode(batch, keys), SITES * (self.model.layers + 1)
        at = batch.cu_seqlens[:-1].long() if self.task.pooled else batch.places
        rows = pool(x, batch, self.pooler_weight, self.pooler_bias) if self.task.pooled else x.index_select(0, at)
        own = None if keys is None else keys.index_select(0, at)  # keys of the tokens that the rows came from
        if self.task.drops:
            rows = dropout.apply(rows, own, site, self.model.dropout)
        if self.task.hidden_head:
            rows = torch.tanh(F.linear(rows, self.head_in_weight, self.head_in_bias))
            rows = dropout.apply(rows, own, site + 1, self.model.dropout)
        return F.linear(rows, self.head_weight, self.head_bias).float()


class Task(Protocol):
    """A task: pure, made from its name and its data. Raises TrainerError, with file and line, for unusable data."""

    @property
    def name(self) -> str:
        """The task's name on the command line."""

    @property
    def measure(self) -> str:
        """The metric of ``score`` that decides: higher is better."""

    @property
    def outputs(self) -> int:
        """Number of outputs of the head for each row."""

    @property
    def pooled(self) -> bool:
        """Whether the head reads [CLS] through the pooler, or the tokens at ``places``."""

    @property
    def drops(self) -> bool:
        """Whether dropout comes before the head."""

    @property
    def hidden_head(self) -> bool:
        """Whether the head has a hidden layer."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes, in order; empty if there are none."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the targets."""

    @property
    def export_class(self) -> str:
        """The transformers class with this linear head over a BERT, as "BertForTokenClassification"; empty if none."""

    def read(self, path: Path) -> list[Any]:
        """Read a file's records."""

    def classes(self, records: Sequence[Any]) -> LabelCounts:
        """Count the records with each answer, by its name, and those without one."""

    def units(self, record: Any, tokenizer: Tokenizer, longest: int, training: bool) -> list[Unit]:
        """A record as units of examples of at most ``longest`` tokens; ``training``: only those to train on."""

    def loss(self, answers: Tensor, batch: TaskBatch) -> Tensor:
        """The loss: () fp32, summed over the targets."""

    def count(self, unit: Unit) -> int:
        """Number of targets in a unit: the terms that its loss sums."""

    def score(
        self, records: Sequence[Any], units: Sequence[Unit], answers: Sequence[NDArray[np.float32]]
    ) -> dict[str, float]:
        """The task's metrics, from all units of the records, in order, and the head's answers to each.

        Answers to a unit: (examples, outputs) if pooled, else (places of all its examples, outputs).
        """

    def predictions(
        self, records: Sequence[Any], units: Sequence[Unit], answers: Sequence[NDArray[np.float32]]
    ) -> list[dict[str, Any]]:
        """The prediction for each record, in order, as a row of plain values for a TSV or JSON-lines file."""


@runtime_checkable
class Batched(Protocol):
    """A task that can tokenise many records at once, which is faster than ``Task.units`` one by one."""

    def all_units(self, records: Sequence[Any], tokenizer: Tokenizer, longest: int, training: bool) -> list[list[Unit]]:
        """``Task.units`` of each record."""


def collate(units: Sequence[Unit], samples: Sequence[int], targets: torch.dtype) -> TaskBatch:
    """Combine whole units into one micro-batch. ``samples``: a number for each unit, which keys its dropout."""
    examples = [example for unit in units for example in unit]
    lengths = [len(example.tokens) for example in examples]
    starts = np.cumsum([0, *lengths])
    numbers = [sample << 16 | place for sample, unit in zip(samples, units, strict=True) for place in range(len(unit))]
    places = [at + place for at, example in zip(starts.tolist(), examples, strict=False) for place in example.places]
    return TaskBatch(
        tokens=torch.tensor([token for example in examples for token in example.tokens]),
        segments=torch.tensor([segment for example in examples for segment in example.segments]),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        max_seqlen=max(lengths),
        samples=torch.tensor(numbers),
        places=torch.tensor(places, dtype=torch.int64),
        targets=torch.tensor([target for example in examples for target in example.targets], dtype=targets),
    )


def fit(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of each side of a pair to keep for a total of at most ``room``; the longer side loses first.

    As in google-research/bert's ``_truncate_seq_pair``: last tokens are dropped, the second side's if both are equally
    long.
    """
    if first + second <= room:
        return first, second
    kept = min(first, max(room - second, (room + 1) // 2))
    return kept, room - kept


def pack(tokenizer: Tokenizer, first: Sequence[int], second: Sequence[int] | None = None) -> Example:
    """Make [CLS] first [SEP], or [CLS] first [SEP] second [SEP], from token ids that already fit."""
    cls, sep = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    assert cls is not None and sep is not None  # a BERT's tokenizer
    a = (cls, *first, sep)
    b = () if second is None else (*second, sep)
    return Example((*a, *b), (0,) * len(a) + (1,) * len(b))


def with_targets(example: Example, *targets: float) -> Example:
    """The example with the right outputs of its head."""
    return replace(example, targets=targets)
