"""Held-out figures of a model: losses and accuracies, and whether it has learnt from context.

    python -m trainer.evaluate --checkpoint RUN_OR_STEP_FOLDER --heldout SHARDS --train SHARDS
    torchrun --nproc-per-node 8 -m trainer.evaluate …     # or another launcher: each sample once

The figures of any number of ranks are the same but for the rounding of sums in another order: some 5e-8 of them.
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
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data_prep.draws import bits
from data_prep.errors import DataError
from data_prep.manifest import TOKENIZER_FOLDER, load_manifest
from data_prep.streams import say_error, write_whole_lines
from data_prep.tokenizer import load_proven
from kernels import backend
from kernels.cross_entropy import cross_entropy
from trainer.batch import IGNORED, MicroBatch
from trainer.bounds import LARGEST_BATCH, MOST_STEPS, outside
from trainer.cache import Cache, CacheConfig, open_cache
from trainer.checkpoint import find, load_model, model_of
from trainer.errors import TrainerError, exit_code, explain
from trainer.exits import DONE
from trainer.loader import Loader, filler
from trainer.model import Bert, log_unigrams, nsp_classes
from trainer.options import OneLineParser, add_kernels, one_line, print_result
from trainer.remote import is_remote
from trainer.vocabulary import require_vocabulary, token_counts
from trainer.world import World, from_launcher, join, leave, speaks_first, together

_SHUFFLE = 3  # what a permutation is drawn for; see trainer/order.py
_STALL = 30.0  # seconds without a byte of a remote file that end an attempt to fetch it
_TIMEOUT = 600  # seconds that ranks wait for one another
Change = Callable[[MicroBatch], MicroBatch]


@dataclass(frozen=True)
class Target:
    """Held-out figures that end the run as soon as one evaluation has all that are named.

    Losses no higher, accuracies no lower; ``mask_…``: on the positions that [MASK] replaced alone.
    """

    mlm_loss: float | None = None
    mlm_accuracy: float | None = None  # MLPerf's mark is 0.72
    mask_loss: float | None = None
    mask_accuracy: float | None = None
    nsp_loss: float | None = None
    nsp_accuracy: float | None = None

    @property
    def named(self) -> dict[str, float]:
        """Those that are asked for."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def problems(self) -> list[str]:
        """What cannot be, each with its remedy."""
        return [
            f"{name} is {value}: must be above 0" + (" and at most 1" if name.endswith("accuracy") else "")
            for name, value in self.named.items()
            if not 0 < value <= (1 if name.endswith("accuracy") else math.inf)
        ] + outside(self, mlm_loss=(-math.inf, 100), mask_loss=(-math.inf, 100), nsp_loss=(-math.inf, 100))

    def reached(self, figures: dict[str, float]) -> str:
        """Which of the figures have reached it, for people; empty where one has not, or nothing is asked for."""
        for name, value in self.named.items():
            found = figures.get(name, float("nan"))
            if not (found >= value if name.endswith("accuracy") else found <= value):
                return ""
        return ", ".join(f"{name} {figures[name]:.4g} ({value:g} was asked for)" for name, value in self.named.items())

    def require(self, paired: bool) -> None:
        """Raises TrainerError where data without pairs are to reach a figure of pairs."""
        if not paired and (names := [name for name in self.named if name.startswith("nsp_")]):
            raise TrainerError(
                f"evaluation.stop_at.{names[0]} is set, but no held-out shards of the run have pairs: remove it"
            )


@dataclass(frozen=True)
class EvaluationConfig:
    """When a run evaluates on its phases' held-out shards, and what ends it."""

    every_steps: int | None = None  # null: only when a phase ends
    micro_batch: int = 64  # sequences of one forward on one rank
    stop_at: Target = field(default_factory=Target)  # the run ends when it is reached: {mlm_accuracy: 0.72}

    def problems(self) -> list[str]:
        """What cannot be, each with its remedy."""
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

    With ``mask_id`` also those of the targets where it stands alone, from the same forward. Where no batch has
    pairs, there is no figure of the second task. Inside a process group every rank calls it, with its own
    share; ``in_step``: a forward is a collective of all ranks, as under ZeRO 3. Dropout is off.
    """
    training = model.training
    model.eval()
    sums = torch.zeros(9, dtype=torch.float64, device=device)
    for batch in _in_step(batches, device) if in_step else batches:
        batch = batch.to(device)
        told = model(batch, None, partial(_sums, model.predicted, batch, mask_id))
        sums += torch.stack([value.double() for value in told])
    model.train(training)
    if dist.is_initialized():
        dist.all_reduce(sums)
    figures: dict[str, float] = {}
    for task, (loss, correct, count) in zip(("mlm", "mask", "nsp"), sums.view(3, 3).tolist(), strict=True):
        if count or task == "mlm":
            figures |= {f"{task}_loss": loss / max(count, 1), f"{task}_accuracy": correct / max(count, 1)}
    return figures


def _sums(predicted: int, batch: MicroBatch, mask_id: int | None, mlm: Tensor, nsp: Tensor) -> tuple[Tensor, ...]:
    """Loss, right answers and number of all targets, of those where ``mask_id`` stands, and of the pairs: nine ().

    ``predicted``: how many ids, from 0 on, the logits ``mlm`` are of.
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

    A permutation is a function of (seed, sample number), so it is the same for any number of ranks.
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
    """Mean of -log p over all ranks' ``targets`` (K,) int64, with p from ``counts`` (V,) int64, one added to each."""
    rarities = -log_unigrams(counts)[targets]
    sums = torch.tensor([float(rarities.sum()), len(targets)], dtype=torch.float64)
    if dist.is_initialized():
        sums = sums.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def evaluate_context(model: Bert, loader: Loader, counts: Tensor, device: torch.device, size: int) -> dict[str, float]:
    """:func:`evaluate`, and for the [MASK] positions the marks of the unigrams and of a shuffled context.

    ``counts`` (V,) int64: how often each token stands in the training samples.
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


def main(arguments: list[str] | None = None) -> int:
    """The command line: one process, or as many as a launcher starts, on GPUs where there are some."""
    write_whole_lines()
    parser = OneLineParser(prog="python -m trainer.evaluate", description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", required=True, type=Path, help="a run's folder, or one step-… folder in it")
    parser.add_argument("--heldout", required=True, help="held-out shards: a folder or an address")
    parser.add_argument("--train", required=True, help="training shards, for the unigram distribution; likewise")
    parser.add_argument("--micro-batch", type=int, default=64)
    add_kernels(parser)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed's launcher adds it
    kept = CacheConfig()
    parser.add_argument("--cache-folder", default=kept.folder, help="where remote shards are kept (%(default)s)")
    parser.add_argument("--cache-gigabytes", type=float, default=kept.gigabytes, help="and how many (%(default)s)")
    parser.add_argument(
        "--cache-redirects", nargs="+", default=(), metavar="URL", help="https://host: where a server may redirect to"
    )
    options = parser.parse_args(arguments)
    if problems := EvaluationConfig(micro_batch=options.micro_batch).problems():
        parser.error("; ".join(f"--{problem.replace('_', '-')}" for problem in problems))
    cache = CacheConfig(options.cache_folder, options.cache_gigabytes, tuple(options.cache_redirects))
    if problems := cache.problems():
        parser.error("; ".join(f"--cache-{problem}" for problem in problems))
    try:
        world = from_launcher("auto")
        with backend.using(options.kernels):
            backend.resolve(world.device.type)
            command = partial(_evaluate_command, options, cache, world)
            if world.size > 1:
                return _on_ranks(command, world)
            print_result(json.dumps(command(), indent=1))
    except (TrainerError, DataError, backend.UnavailableError, OSError, MemoryError) as error:
        if not speaks_first():
            time.sleep(3)  # all ranks found the same, as a rule: the first one says it, and the launcher ends us
        say_error(f"trainer.evaluate: error: {one_line(explain(error))}")
        return exit_code(error)
    return 0


def _on_ranks(command: Callable[[], dict[str, float]], world: World) -> NoReturn:
    """The command among other ranks; rank 0 prints. Ends the process."""
    from trainer.__main__ import guard

    def meet_and_run() -> None:
        join(world, _TIMEOUT)
        together(lambda: None, world)  # a rank that fails by itself at once would leave others behind in the meeting
        try:
            figures = command()
        except DataError as error:
            raise TrainerError(one_line(error)) from None
        together(lambda: print_result(json.dumps(figures, indent=1)) if world.is_main else None, world)

    guard(world, meet_and_run)
    leave(DONE)


def _evaluate_command(options: argparse.Namespace, cache: CacheConfig, world: World) -> dict[str, float]:
    checkpoint, heldout, train = options.checkpoint, options.heldout, options.train
    tell = partial(print, "trainer.evaluate:", file=sys.stderr) if world.is_main else _silent
    found = find(checkpoint, tell)
    shape = model_of(found)
    (heldout_folder, remote), (train_folder, _) = _open(heldout, cache, world), _open(train, cache, world)
    manifest, trained = load_manifest(heldout_folder), load_manifest(train_folder)
    for folder, vocab_size in ((heldout, manifest.tokenizer.vocab_size), (train, trained.tokenizer.vocab_size)):
        if vocab_size != shape.vocab_size:
            raise TrainerError(
                f"{folder} has a vocabulary of {vocab_size} entries but the model of {checkpoint} has "
                f"{shape.vocab_size}: name the shards that it was trained on"
            )
    if manifest.settings.sequence_length > shape.max_positions:
        raise TrainerError(
            f"{heldout} has sequences of {manifest.settings.sequence_length} tokens but the model of {checkpoint} has "
            f"{shape.max_positions} positions: name shorter held-out shards"
        )
    require_vocabulary(found, manifest.tokenizer.sha256, heldout, tell)
    if manifest.tokenizer.sha256 != trained.tokenizer.sha256:
        raise TrainerError(f"{heldout} and {train} were made with different tokenizers: build them with one")
    tokenizer = load_proven(heldout_folder / TOKENIZER_FOLDER, manifest.tokenizer.sha256)
    model = load_model(found, tokenizer.fillers).to(world.device)
    loader = Loader(heldout_folder, manifest, world.rank, world.size, cache=remote)
    for problem in loader.problems():
        raise TrainerError(problem)
    counts = token_counts(train_folder, trained)
    kernels = backend.resolve(world.device.type)
    tell(f"kernels: {kernels.name} ({kernels.reason})")
    return evaluate_context(model, loader, counts, world.device, options.micro_batch)


def _silent(text: str) -> None:
    """Another rank says it."""


def _open(place: str, config: CacheConfig, world: World) -> tuple[Path, Cache | None]:
    """The local folder of a data set, and what fills it if the data set is remote."""
    if not is_remote(place):
        return Path(place), None
    cache = open_cache(place, config, _STALL, world.local_rank)
    return cache.folder, cache


if __name__ == "__main__":
    sys.exit(main())
