"""Held-out figures of a model: losses and accuracies, and whether it has learnt from context.

    python -m trainer.evaluate --checkpoint RUN_OR_STEP_FOLDER --heldout SHARDS --train SHARDS

SHARDS is a folder or an address (https://, s3://, anything that fsspec opens).
Beside the loss on all targets stands the loss on the positions that [MASK] replaced, where nothing but
context can tell the word, and two marks for it: the entropy of those targets under the training data's
unigram distribution (what frequencies alone reach), and the same model's loss when the other tokens of
each sequence are shuffled (what it reaches without the order of its context).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data_prep.draws import bits
from data_prep.errors import DataError
from data_prep.manifest import load_manifest
from trainer.batch import IGNORED, MicroBatch
from trainer.cache import Cache, CacheConfig, open_cache
from trainer.checkpoint import load_model
from trainer.errors import TrainerError
from trainer.loader import Loader, filler
from trainer.model import Bert
from trainer.remote import is_remote

_SHUFFLE = 3  # what a permutation is drawn for; see trainer/order.py
_STALL = 30.0  # seconds without a byte of a remote file that end an attempt to fetch it
Change = Callable[[MicroBatch], MicroBatch]


@dataclass(frozen=True)
class EvaluationConfig:
    """When a run evaluates on its phases' held-out shards."""

    every_steps: int | None = None  # null: only when a phase ends
    micro_batch: int = 64  # sequences of one forward on one rank

    def problems(self) -> list[str]:
        """What cannot be, each with its remedy."""
        found = []
        if self.every_steps is not None and self.every_steps < 1:
            found.append(f"every_steps is {self.every_steps}: must be 1 or more, or null for the end of phases only")
        if self.micro_batch < 1:
            found.append(f"micro_batch is {self.micro_batch}: must be 1 or more")
        return found


@torch.no_grad()
def evaluate(
    model: Bert, batches: Iterator[MicroBatch], device: torch.device, in_step: bool = False
) -> dict[str, float]:
    """Mean losses (nats) and accuracies over all ranks' ``batches``, each sample counted once.

    Where no batch has pairs, there is no figure of the second task. Inside a process group every rank calls
    it, with its own share; ``in_step``: a forward is a collective of all ranks, as under ZeRO 3. Dropout is off.
    """
    training = model.training
    model.eval()
    sums = torch.zeros(6, dtype=torch.float64, device=device)
    for batch in _in_step(batches, device) if in_step else batches:
        batch = batch.to(device)
        out = model(batch, None)
        targets, pairs = (batch.labels != IGNORED).sum(), (batch.is_next != IGNORED).sum()
        row = [out.mlm_loss, out.mlm_correct, targets, out.nsp_loss, out.nsp_correct, pairs]
        sums += torch.stack([value.double() for value in row])
    model.train(training)
    if dist.is_initialized():
        dist.all_reduce(sums)
    mlm_loss, mlm_correct, targets, nsp_loss, nsp_correct, pairs = sums.tolist()
    figures = {"mlm_loss": mlm_loss / max(targets, 1), "mlm_accuracy": mlm_correct / max(targets, 1)}
    if pairs:
        figures |= {"nsp_loss": nsp_loss / pairs, "nsp_accuracy": nsp_correct / pairs}
    return figures


def _in_step(batches: Iterator[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    """``batches``, and then sequences without a target for as long as another rank has more."""
    while True:
        batch = next(batches, None)
        more = torch.tensor(batch is not None, dtype=torch.int32, device=device)
        dist.all_reduce(more, op=dist.ReduceOp.MAX)
        if not more:
            return
        yield filler(0, 0) if batch is None else batch


def only_mask_token(batch: MicroBatch, mask_id: int) -> MicroBatch:
    """The same batch with targets only where [MASK] stands."""
    hidden = batch.tokens[batch.masked] == mask_id
    return dataclasses.replace(batch, labels=torch.where(hidden, batch.labels, IGNORED))


def shuffled_context(batch: MicroBatch, special_ids: tuple[int, ...], seed: int) -> MicroBatch:
    """The same batch with each sequence's ordinary unmasked tokens permuted among their places.

    A permutation is a function of (seed, sample number), so the figure is the same for any number of ranks.
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
    """Mean of -log p over ``targets`` (K,) int64, with p from ``counts`` (V,) int64, one added to each."""
    smoothed = counts.double() + 1
    return float(-(smoothed / smoothed.sum()).log()[targets].mean())


def evaluate_context(model: Bert, loader: Loader, counts: Tensor, device: torch.device, size: int) -> dict[str, float]:
    """:func:`evaluate`, and the figures on [MASK] positions only, shuffled and of the unigrams.

    ``counts`` (V,) int64: how often each token stands in the training samples.
    """
    specials = loader.manifest.tokenizer.specials

    def masked(batch: MicroBatch) -> MicroBatch:
        return only_mask_token(batch, specials.mask)

    def shuffled(batch: MicroBatch) -> MicroBatch:
        return masked(shuffled_context(batch, dataclasses.astuple(specials), 0))

    def run(change: Change) -> dict[str, float]:
        return evaluate(model, map(change, loader.sweep(size)), device)

    plain, hidden, blind = run(lambda batch: batch), run(masked), run(shuffled)
    labels = torch.cat([masked(batch).labels for batch in loader.sweep(size)])
    return {
        **plain,
        "mask_loss": hidden["mlm_loss"],
        "mask_accuracy": hidden["mlm_accuracy"],
        "mask_unigram_entropy": unigram_entropy(labels[labels != IGNORED], counts),
        "mask_loss_shuffled": blind["mlm_loss"],
    }


def main(arguments: list[str] | None = None) -> int:
    """The command line: one process, on a GPU where there is one."""
    parser = argparse.ArgumentParser(prog="python -m trainer.evaluate", description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", required=True, type=Path, help="a run's folder, or one step-… folder in it")
    parser.add_argument("--heldout", required=True, help="held-out shards: a folder or an address")
    parser.add_argument("--train", required=True, help="training shards, for the unigram distribution; likewise")
    parser.add_argument("--micro-batch", type=int, default=64)
    kept = CacheConfig()
    parser.add_argument("--cache-folder", default=kept.folder, help="where remote shards are kept (%(default)s)")
    parser.add_argument("--cache-gigabytes", type=float, default=kept.gigabytes, help="and how many (%(default)s)")
    options = parser.parse_args(arguments)
    if options.micro_batch < 1:
        parser.error(f"--micro-batch is {options.micro_batch}: must be 1 or more")
    cache = CacheConfig(options.cache_folder, options.cache_gigabytes)
    if problems := cache.problems():
        parser.error("; ".join(f"--cache-{problem}" for problem in problems))
    try:
        figures = _evaluate_command(options.checkpoint, options.heldout, options.train, options.micro_batch, cache)
    except (TrainerError, DataError) as error:
        print(f"trainer.evaluate: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(figures, indent=1))
    return 0


def _evaluate_command(checkpoint: Path, heldout: str, train: str, size: int, cache: CacheConfig) -> dict[str, float]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(checkpoint).to(device)
    (heldout_folder, remote), (train_folder, _) = _open(heldout, cache), _open(train, cache)
    manifest, trained = load_manifest(heldout_folder), load_manifest(train_folder)
    for folder, vocab_size in ((heldout, manifest.tokenizer.vocab_size), (train, trained.tokenizer.vocab_size)):
        if vocab_size != model.model.vocab_size:
            raise TrainerError(
                f"{folder} has a vocabulary of {vocab_size} entries but the model of {checkpoint} has "
                f"{model.model.vocab_size}: name the shards that it was trained on"
            )
    if manifest.settings.sequence_length > model.model.max_positions:
        raise TrainerError(
            f"{heldout} has sequences of {manifest.settings.sequence_length} tokens but the model of {checkpoint} has "
            f"{model.model.max_positions} positions: name shorter held-out shards"
        )
    if manifest.tokenizer.sha256 != trained.tokenizer.sha256:
        raise TrainerError(f"{heldout} and {train} were made with different tokenizers: build them with one")
    loader = Loader(heldout_folder, manifest, 0, 1, cache=remote)
    for problem in loader.problems():
        raise TrainerError(problem)
    counted = train_folder / trained.token_counts.file
    try:
        counts = torch.from_numpy(np.load(counted))
    except (OSError, ValueError) as error:
        raise TrainerError(f"{counted} cannot be read ({error}): restore it") from None
    return evaluate_context(model, loader, counts, device, size)


def _open(place: str, config: CacheConfig) -> tuple[Path, Cache | None]:
    """The local folder of a data set, and what fills it if the data set is remote."""
    if not is_remote(place):
        return Path(place), None
    cache = open_cache(place, config, _STALL, 0)
    return cache.folder, cache


if __name__ == "__main__":
    sys.exit(main())
