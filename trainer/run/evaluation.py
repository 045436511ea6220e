"""Compute held-out metrics: losses and accuracies, and whether a model has learned from context.

Training runs call :func:`evaluate`; the command :mod:`trainer.evaluate` calls :func:`evaluate_context`, which adds
baselines. The loss is taken over all targets, and separately over the positions that [MASK] replaced, where only
context can reveal the word. The latter has two baselines: the entropy of those targets under the training data's
unigram distribution, and the same model's loss when the other tokens of each sequence are shuffled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data_prep.draws import bits
from kernels.cross_entropy import cross_entropy
from trainer.bounds import LARGEST_BATCH, MOST_STEPS, outside
from trainer.data.collate import filler
from trainer.data.loader import Loader
from trainer.errors import TrainerError
from trainer.model.batch import IGNORED, MicroBatch
from trainer.model.bert import Bert, log_unigrams, nsp_classes

_SHUFFLE = 3  # the purpose of this random stream; see trainer/data/order.py
Change = Callable[[MicroBatch], MicroBatch]


@dataclass(frozen=True)
class StopTarget:
    """Held-out metrics that end the run as soon as one evaluation reaches all that are set.

    A loss must be at most the target, an accuracy at least. ``mask_…``: only on the positions that [MASK] replaced.
    """

    mlm_loss: float | None = None  # nats, over all targets
    mlm_accuracy: float | None = None  # share over all targets; MLPerf's target is 0.72
    mask_loss: float | None = None  # nats, only where [MASK] replaced the word
    mask_accuracy: float | None = None  # share only where [MASK] replaced the word
    nsp_loss: float | None = None  # nats, over the pairs
    nsp_accuracy: float | None = None  # share of pairs classified correctly

    @property
    def named(self) -> dict[str, float]:
        """Return the targets that are set."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def problems(self) -> list[str]:
        """Every invalid setting, with what to change."""
        return [
            f"{name} is {value}: must be above 0" + (" and at most 1" if name.endswith("accuracy") else "")
            for name, value in self.named.items()
            if not 0 < value <= (1 if name.endswith("accuracy") else math.inf)
        ] + outside(self, mlm_loss=(-math.inf, 100), mask_loss=(-math.inf, 100), nsp_loss=(-math.inf, 100))

    def reached(self, metrics: dict[str, float]) -> str:
        """Describe the targets as reached; empty if any is not reached, or none is set."""
        for name, value in self.named.items():
            found = metrics.get(name, float("nan"))
            if not (found >= value if name.endswith("accuracy") else found <= value):
                return ""
        return ", ".join(f"{name} {metrics[name]:.4g} (target {value:g})" for name, value in self.named.items())

    def require(self, paired: bool) -> None:
        """Raises TrainerError if an NSP target is set but the held-out data has no pairs."""
        if not paired and (names := [name for name in self.named if name.startswith("nsp_")]):
            raise TrainerError(
                f"evaluation.stop_at.{names[0]} is set, but none of the run's held-out shards has pairs: remove it"
            )


@dataclass(frozen=True)
class EvaluationConfig:
    """When a run evaluates on its phases' held-out shards, and what ends it."""

    every_steps: int | None = None  # null: only when a phase ends
    micro_batch: int = 64  # sequences per forward pass on one rank
    stop_at: StopTarget = field(default_factory=StopTarget)  # the run ends when it is reached: {mlm_accuracy: 0.72}

    def problems(self) -> list[str]:
        """Every invalid setting, with what to change."""
        found = []
        if self.every_steps is not None and self.every_steps < 1:
            found.append(f"every_steps is {self.every_steps}: must be 1 or more, or null for the end of phases only")
        return found + outside(self, every_steps=(-math.inf, MOST_STEPS), micro_batch=(1, LARGEST_BATCH))


@torch.no_grad()
def evaluate(
    model: Bert,
    batches: Iterator[MicroBatch],
    device: torch.device,
    in_step: bool = False,
    mask_id: int | None = None,
) -> dict[str, float]:
    """Mean losses (nats) and accuracies over all ranks' ``batches``, each sample counted once.

    With ``mask_id``, also returns the metrics of the targets that this token replaced, from the same forward pass. If
    no batch has pairs, there are no NSP metrics. Inside a process group every rank calls it with its own share.
    ``in_step``: a forward pass is a collective of all ranks, as under ZeRO 3. Dropout is off.
    """
    training = model.training
    model.eval()
    sums = torch.zeros(9, dtype=torch.float64, device=device)
    for batch in _in_step(batches, device) if in_step else batches:
        batch = batch.to(device)
        results = model(batch, None, partial(_sums, model.predicted, batch, mask_id))
        sums += torch.stack([value.double() for value in results])
    model.train(training)
    if dist.is_initialized():
        dist.all_reduce(sums)
    metrics: dict[str, float] = {}
    for task, (loss, correct, count) in zip(("mlm", "mask", "nsp"), sums.view(3, 3).tolist(), strict=True):
        if count or task == "mlm":
            metrics |= {f"{task}_loss": loss / max(count, 1), f"{task}_accuracy": correct / max(count, 1)}
    return metrics


def _sums(predicted: int, batch: MicroBatch, mask_id: int | None, mlm: Tensor, nsp: Tensor) -> tuple[Tensor, ...]:
    """Return (loss, correct, count) for all targets, for those that ``mask_id`` replaced, and for the pairs: nine ().

    ``predicted``: number of ids, from 0 on, that the logits ``mlm`` cover.
    """
    hidden = only_mask_token(batch, mask_id).labels if mask_id is not None else torch.full_like(batch.labels, IGNORED)
    out: tuple[Tensor, ...] = ()
    for logits, labels, classes in (
        (mlm, batch.labels, predicted),
        (mlm, hidden, predicted),
        (nsp, nsp_classes(batch), 2),
    ):
        out += (*cross_entropy(logits, labels, classes), (labels != IGNORED).sum())
    return out


def _in_step(batches: Iterator[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    """Yield ``batches``, then sequences without a target for as long as another rank has more."""
    while True:
        batch = next(batches, None)
        more = torch.tensor(batch is not None, dtype=torch.int32, device=device)
        dist.all_reduce(more, op=dist.ReduceOp.MAX)
        if not more:
            return
        yield filler(0, 0) if batch is None else batch


def only_mask_token(batch: MicroBatch, mask_id: int) -> MicroBatch:
    """Return the batch with targets only at [MASK] tokens."""
    hidden = batch.tokens[batch.masked] == mask_id
    return dataclasses.replace(batch, labels=torch.where(hidden, batch.labels, IGNORED))


def shuffled_context(batch: MicroBatch, special_ids: tuple[int, ...], seed: int) -> MicroBatch:
    """Return the batch with each sequence's ordinary unmasked tokens permuted among their positions.

    The permutation depends only on (seed, sample number), so it is the same for any number of ranks.
    """
    tokens = batch.tokens.clone()
    free = ~torch.isin(tokens, torch.tensor(special_ids))
    free[batch.masked] = False
    bounds = batch.cu_seqlens.tolist()
    for number, start, end in zip(batch.samples.tolist(), bounds[:-1], bounds[1:], strict=True):
        places = start + torch.nonzero(free[start:end]).view(-1)
        draws = bits(seed, _SHUFFLE, number, np.arange(len(places)))
        tokens[places] = tokens[places][torch.from_numpy(np.argsort(draws, kind="stable"))]
    return dataclasses.replace(batch, tokens=tokens)


def unigram_entropy(targets: Tensor, counts: Tensor) -> float:
    """Return the mean of -log p over all ranks' ``targets`` (K,) int64; p comes from ``counts`` (V,) int64 plus one."""
    rarities = -log_unigrams(counts)[targets]
    sums = torch.tensor([float(rarities.sum()), len(targets)], dtype=torch.float64)
    if dist.is_initialized():
        sums = sums.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def evaluate_context(model: Bert, loader: Loader, counts: Tensor, device: torch.device, size: int) -> dict[str, float]:
    """Run :func:`evaluate` and add the unigram and shuffled-context baselines for the [MASK] positions.

    ``counts`` (V,) int64: how often each token occurs in the training samples.
    """
    specials = loader.manifest.tokenizer.specials

    def shuffled(batch: MicroBatch) -> MicroBatch:
        return shuffled_context(batch, dataclasses.astuple(specials), 0)

    def run(change: Change) -> dict[str, float]:
        return evaluate(model, map(change, loader.sweep(size)), device, mask_id=specials.mask)

    plain, blind = run(lambda batch: batch), run(shuffled)
    labels = [only_mask_token(batch, specials.mask).labels for batch in loader.sweep(size)]
    targets = torch.cat([torch.empty(0, dtype=torch.int64), *labels])  # a rank may have no sample
    return {
        **plain,
        "mask_unigram_entropy": unigram_entropy(targets[targets != IGNORED], counts[: model.predicted]),
        "mask_loss_shuffled": blind["mask_loss"],
    }
