"""Evaluates a model on a file: each record once, with the same metrics for any number of ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from trainer.finetune.data import EvaluationFile, Integers, UnitTable
from trainer.finetune.task import Task, TaskModel
from trainer.ranks.world import World, broadcast_text, together

AT_ONCE = 32  # units in one forward: the same split, and so the same metrics, for any number of ranks
Answers = list[NDArray[np.float32]]


@dataclass(frozen=True)
class Judged:
    """Metrics on a file. ``constant``: the model gives the same answer for every input, as a failed run does."""

    metrics: dict[str, float]
    constant: bool


@torch.no_grad()
def answer(model: TaskModel, table: UnitTable, world: World) -> Answers:
    """The head's answers to each unit, in order. All ranks call this: each computes a share and receives all."""
    training = model.training
    model.eval()
    order = np.argsort(-table.lengths, kind="stable")
    groups = [order[start : start + AT_ONCE] for start in range(0, len(order), AT_ONCE)]
    made = []
    for rows in groups[world.rank :: world.size]:
        batch = table.batch(rows, rows).pin(world.device).to(world.device)
        made.append(model.answers(batch).flatten())
    model.train(training)
    return _gather(torch.cat(made) if made else torch.zeros(0, device=world.device), groups, table, model.task, world)


def judge(answers: Answers, part: EvaluationFile, task: Task, world: World) -> Judged:
    """Score a file on rank 0, and return its metrics on every rank. Raises TrainerError as the task does."""

    def score() -> str:
        if not world.is_main:
            return ""
        metrics = {
            name: value if math.isfinite(value) else 0.0  # NaN: a correlation with constant values
            for name, value in task.score(part.records, part.units, answers).items()
        }
        return json.dumps({"metrics": metrics, "constant": is_constant(answers, part.table, task)})

    scored = json.loads(broadcast_text(together(score, world), world))
    return Judged(scored["metrics"], scored["constant"])


def is_constant(answers: Answers, table: UnitTable, task: Task) -> bool:
    """Whether a model gives the same class, or the same number up to rounding, though the targets differ."""
    if len(np.unique(table.targets)) < 2:
        return False
    rows = np.concatenate(answers)
    if task.labels:
        return len(np.unique(rows.argmax(1))) == 1
    return task.outputs == 1 and float(np.ptp(rows)) <= 1e-3 * max(1.0, float(np.abs(rows).max()))


def _gather(own: torch.Tensor, groups: Sequence[Integers], table: UnitTable, task: Task, world: World) -> Answers:
    """Collect all ranks' answers, by unit."""
    shares = [groups[rank :: world.size] for rank in range(world.size)]
    sizes = [sum(int(table.answers[rows].sum()) for rows in share) * task.outputs for share in shares]
    padded = own.new_zeros(max(sizes))
    padded[: len(own)] = own
    gathered = [torch.empty_like(padded) for _ in shares]
    dist.all_gather(gathered, padded)
    found: list[NDArray[np.float32] | None] = [None] * len(table)
    for share, size, flat in zip(shares, sizes, gathered, strict=True):
        rows = np.concatenate([*share, np.zeros(0, np.int64)])
        ends = np.cumsum(table.answers[rows])
        parts = np.split(flat[:size].cpu().numpy().reshape(-1, task.outputs), ends[:-1]) if len(rows) else []
        for row, part in zip(rows.tolist(), parts, strict=True):
            found[row] = part
    return [part for part in found if part is not None]
