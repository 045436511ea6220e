"""Question answering as in SQuAD 1.1 and 2.0: find the span of a context that answers a question, if there is one.

A context longer than the encoder's input becomes several overlapping windows (cut as in google-research/bert). The head
scores each piece of a window as the answer's first and as its last piece; the scores of [CLS] stand for "no answer
here". An answer is cut out of the context by character offsets, never joined from pieces.

Published choices are kept. Windows without the answer are trained with [CLS] as their answer, so that scores compare
across windows; this holds for 1.1 too, where the authors' code does the same although their comment says otherwise.
And a piece can begin an answer only in the window that shows the most context on its shorter side: published results
depend on it. One choice differs: all spans are compared, not only those of the 20 best first and last pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from trainer.errors import TrainerError
from trainer.finetune.characters import Integers, whole_characters
from trainer.finetune.label_counts import LabelCounts, count
from trainer.finetune.questions import Question, read_questions
from trainer.finetune.squad import best_thresholds, squad_metrics
from trainer.finetune.task import TaskBatch, Unit, pack

Floats = NDArray[np.float32]


class Window(NamedTuple):
    """Maps a window's answer back to its question."""

    question: int  # the question's number
    offsets: Integers  # (pieces, 2), characters of the context: start, and end (exclusive)
    begins: NDArray[np.bool_]  # (pieces,), whether an answer may begin there: no other window shows more context


class Found(NamedTuple):
    """The best answer to a question."""

    text: str
    margin: float  # how far "no answer" outscores it


@dataclass(frozen=True)
class AnswerTask:
    """Find the span that answers a question; ``unanswerable``: some have no answer, as in SQuAD 2.0."""

    unanswerable: bool = False
    threshold: float = 0.0  # give no answer if that outscores the best span by more
    stride: int = 128  # pieces from the start of one window to the start of the next
    longest_question: int = 64  # pieces
    longest_answer: int = 30  # pieces

    measure = "f1"
    outputs = 2  # first and last
    pooled = False
    drops = False
    hidden_head = False
    labels = ()
    dtype = torch.int64
    export_class = "BertForQuestionAnswering"

    @property
    def name(self) -> str:
        """The task's name on the command line."""
        return "squad2" if self.unanswerable else "squad"

    def read(self, path: Path) -> list[Question]:
        """Read a file's questions. TrainerError if one has no answer although the task requires one."""
        questions = read_questions(path)
        if not self.unanswerable:
            for question in questions:
                if question.answers == ():
                    raise TrainerError(f"{question.where}: no answer; use the task squad2, or remove the question")
        return questions

    def classes(self, records: Sequence[Question]) -> LabelCounts:
        """Count the questions with an answer and, in SQuAD 2.0, those without."""
        names = ("answered", "unanswerable") if self.unanswerable else ("answered",)
        return count(names, (None if r.answers is None else names[not r.answers] for r in records))

    def units(self, record: Question, tokenizer: Tokenizer, longest: int, training: bool) -> list[Unit]:
        """One unit per window; the head reads [CLS] and the context. Of several answers, the first is trained on."""
        asked = tokenizer.encode(record.question, add_special_tokens=False).ids[: self.longest_question]
        room = longest - len(asked) - 3
        if room < 1:
            raise TrainerError(
                f"{record.where}: {longest} tokens leave no room for the context after its question; raise --max-length"
            )
        ids, offsets = _pieces(tokenizer, record.context)
        first, last = _gold(record, offsets, training)
        spans = windows(len(ids), room, self.stride)
        owner = most_context(spans, len(ids))
        units: list[Unit] = []
        for number, (start, stop) in enumerate(spans):
            target = (first - start + 1, last - start + 1) if start <= first and last < stop else (0, 0)
            example = replace(
                pack(tokenizer, asked, ids[start:stop]),
                places=(0, *range(len(asked) + 2, len(asked) + 2 + stop - start)),
                targets=() if record.answers is None else target,
                origin=Window(record.number, offsets[start:stop], owner[start:stop] == number),
            )
            units.append((example,))
        return units

    def loss(self, answers: Tensor, batch: TaskBatch) -> Tensor:
        """() fp32, summed over windows: the mean of the cross-entropies of the first and the last piece."""
        rows = by_window(answers, batch)  # (B, 2, S)
        return F.cross_entropy(rows.flatten(0, 1), batch.targets, reduction="sum") / 2

    def count(self, unit: Unit) -> int:
        """Number of windows whose answer is known."""
        return sum(bool(example.targets) for example in unit)

    def score(self, records: Sequence[Question], units: Sequence[Unit], answers: Sequence[Floats]) -> dict[str, float]:
        """F1 and exact match. With unanswerable questions, also by kind, and the best threshold on this file."""
        said = zip(records, self.found(records, units, answers), strict=True)
        known = [(one, [text for text, _ in record.answers]) for record, one in said if record.answers is not None]
        if not known:
            raise TrainerError(f"{self.name}: there is no question with an answer to evaluate on")
        found, golds = zip(*known, strict=True)
        metrics = squad_metrics([self._said(one) for one in found], golds)
        if self.unanswerable:
            metrics |= best_thresholds([one.text for one in found], [one.margin for one in found], golds)
        return metrics

    def predictions(
        self, records: Sequence[Question], units: Sequence[Unit], answers: Sequence[Floats]
    ) -> list[dict[str, Any]]:
        """The answer to each question and, in SQuAD 2.0, how far "no answer" outscores the best span."""
        rows = []
        for record, one in zip(records, self.found(records, units, answers), strict=True):
            row: dict[str, Any] = {"id": record.key, "prediction": self._said(one)}
            margin = round(one.margin, 6) if np.isfinite(one.margin) else None
            rows.append(row | ({"span": one.text, "margin": margin} if self.unanswerable else {}))
        return rows

    def found(self, records: Sequence[Question], units: Sequence[Unit], answers: Sequence[Floats]) -> list[Found]:
        """The best span for each question over all its windows; "" if its context has no pieces."""
        best = {record.number: (-np.inf, "") for record in records}
        nulls = {record.number: np.inf for record in records}
        contexts = {record.number: record.context for record in records}
        for unit, scores in zip(units, answers, strict=True):  # (1 + pieces, 2)
            window: Window = unit[0].origin
            nulls[window.question] = min(nulls[window.question], float(scores[0].sum()))
            total, first, last = best_span(scores[1:].astype(np.float64), window.begins, self.longest_answer)
            if total > best[window.question][0]:
                begin, end = window.offsets[first, 0], window.offsets[last, 1]
                best[window.question] = total, contexts[window.question][begin:end]
        return [Found(text, nulls[number] - total) for number, (total, text) in best.items()]

    def _said(self, found: Found) -> str:
        return "" if self.unanswerable and found.margin > self.threshold else found.text


# ---- windows ---------------------------------------------------------------------------------------------------


def windows(pieces: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Start and end of each window: ``room`` pieces, ``stride`` apart, to the context's end; one window if it is empty.

    Windows start at most half their length apart, so an answer up to that long is complete in one of them.
    """
    spans = [(0, min(room, pieces))]
    while spans[-1][1] < pieces:
        start = spans[-1][0] + min(stride, (room + 1) // 2)
        spans.append((start, min(start + room, pieces)))
    return spans


def most_context(spans: Sequence[tuple[int, int]], pieces: int) -> Integers:
    """(pieces,) The window in which each piece has the most context on its shorter side; ties go to the first."""
    starts, stops = np.array(spans)[:, :, None].transpose(1, 0, 2)  # (windows, 1) each
    at = np.arange(pieces)
    left, right = at - starts, stops - 1 - at  # (windows, pieces)
    context = np.minimum(left, right) + 0.01 * (stops - starts)
    owner: Integers = np.where((left < 0) | (right < 0), -np.inf, context).argmax(0)
    return owner


@lru_cache(1)  # a context's questions come one after another
def _pieces(tokenizer: Tokenizer, context: str) -> tuple[list[int], Integers]:
    encoding = tokenizer.encode(context, add_special_tokens=False)
    return encoding.ids, whole_characters(context, np.array(encoding.offsets, np.int64).reshape(-1, 2))


def _gold(record: Question, offsets: Integers, training: bool) -> tuple[int, int]:
    """First and last piece that share a character with the answer; (-1, -1) if there is none."""
    if not record.answers:
        return -1, -1
    text, begin = record.answers[0]
    first = int(np.searchsorted(offsets[:, 1], begin, side="right"))
    last = int(np.searchsorted(offsets[:, 0], begin + len(text), side="left")) - 1
    if first <= last:
        return first, last
    if training:
        raise TrainerError(f"{record.where}: the vocabulary has no piece for its answer {text!r}; remove it")
    return -1, -1


# ---- scores ----------------------------------------------------------------------------------------------------


def by_window(answers: Tensor, batch: TaskBatch) -> Tensor:
    """(P, 2) -> (B, 2, S): one row of scores per window, padded with -inf. The backward only gathers."""
    starts = batch.cu_seqlens.long()
    edges = torch.searchsorted(batch.places, starts)  # (B + 1,) each window's first place
    window = torch.searchsorted(starts, batch.places, right=True) - 1  # (P,)
    place = torch.arange(len(batch.places), device=answers.device) - edges[window]
    rows = answers.new_full((len(starts) - 1, batch.max_seqlen, 2), -torch.inf)
    return rows.index_put((window, place), answers).transpose(1, 2)


def best_span(scores: NDArray[np.float64], begins: NDArray[np.bool_], longest: int) -> tuple[float, int, int]:
    """(score, first, last) of the best span of at most ``longest`` pieces, from ``scores`` (pieces, 2).

    A span may begin only where ``begins`` is true; the score is -inf if it is true nowhere.
    """
    if not begins.any():
        return -np.inf, 0, 0
    lasts = np.append(scores[:, 1], np.full(longest - 1, -np.inf))
    near = np.lib.stride_tricks.sliding_window_view(lasts, longest)  # (pieces, longest)
    totals = np.where(begins, scores[:, 0] + near.max(1), -np.inf)
    first = int(totals.argmax())
    return float(totals[first]), first, first + int(near[first].argmax())
