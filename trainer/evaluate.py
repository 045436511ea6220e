"""Evaluate a checkpoint on held-out shards, on one process or many ranks, and print the metrics as JSON.

    python -m trainer.evaluate --checkpoint RUN_OR_STEP_FOLDER --heldout SHARDS --train SHARDS
    torchrun --nproc-per-node 8 -m trainer.evaluate …     # any launcher works; each sample is counted once

The number of ranks changes the metrics only by rounding, since sums are taken in another order: about 5e-8 of a value.
SHARDS is a folder or an address (https://, s3://, or anything else that fsspec opens).
This is the command; the metrics themselves are computed and explained in :mod:`trainer.run.evaluation`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from data_prep.errors import DataError
from data_prep.manifest import TOKENIZER_FOLDER, load_manifest
from data_prep.options import CommandParser
from data_prep.streams import write_whole_lines
from data_prep.tokenizer import load_proven
from kernels import backend
from trainer.checkpoint.average import average, select, steps
from trainer.checkpoint.fetched import fetched
from trainer.checkpoint.reading import Checkpoint, load_model, model_of, read
from trainer.checkpoint.trained_tokenizer import require_vocabulary, token_counts
from trainer.console import Tell, complain, print_result, silent, teller
from trainer.data.cache import Cache, CacheConfig, open_cache
from trainer.data.loader import Loader
from trainer.data.remote import is_remote
from trainer.errors import TrainerError, exit_code, one_line
from trainer.exits import DONE
from trainer.options import CHECKPOINT, add_average, add_kernels, path_or_address
from trainer.ranks.world import World, broadcast_text, from_launcher, join, leave, speaks_first, together
from trainer.run.evaluation import EvaluationConfig, evaluate_context

_STALL = 30.0  # seconds without a byte before an attempt to fetch a remote file is given up
_TIMEOUT = 600  # seconds that ranks wait for one another


def main(arguments: list[str] | None = None) -> int:
    """Run the command as one process or as a launcher's ranks, on GPUs if there are any."""
    write_whole_lines()
    parser = CommandParser(prog="python -m trainer.evaluate", description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", required=True, type=path_or_address, help=CHECKPOINT)
    add_average(parser)
    parser.add_argument("--heldout", required=True, help="held-out shards: a folder or an address")
    parser.add_argument(
        "--train", required=True, help="training shards, for the unigram baseline: a folder or an address"
    )
    parser.add_argument("--micro-batch", type=int, default=64)
    add_kernels(parser)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed's launcher adds it
    kept = CacheConfig()
    parser.add_argument("--cache-folder", default=kept.folder, help="where remote shards are kept (%(default)s)")
    parser.add_argument(
        "--cache-gigabytes", type=float, default=kept.gigabytes, help="size limit of that cache (%(default)s)"
    )
    parser.add_argument(
        "--cache-redirects",
        nargs="+",
        default=(),
        metavar="URL",
        help="other origins that a shard server may redirect to, such as https://host",
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
            time.sleep(3)  # usually all ranks fail alike: the first one reports it and the launcher ends us
        complain("trainer.evaluate", error)
        return exit_code(error)
    return 0


def _on_ranks(command: Callable[[], dict[str, float]], world: World) -> NoReturn:
    """Run the command on every rank; rank 0 prints the result. Ends the process."""
    from trainer.ranks.ending import guard

    def meet_and_run() -> None:
        join(world, _TIMEOUT)
        together(lambda: None, world)  # otherwise a rank that fails at once would leave the others waiting
        try:
            metrics = command()
        except DataError as error:
            raise TrainerError(one_line(error)) from None
        together(lambda: print_result(json.dumps(metrics, indent=1)) if world.is_main else None, world)

    guard(world, meet_and_run)
    leave(DONE)


def _evaluate_command(options: argparse.Namespace, cache: CacheConfig, world: World) -> dict[str, float]:
    checkpoint, heldout, train = options.checkpoint, options.heldout, options.train
    tell = teller("trainer.evaluate") if world.is_main else silent
    checkpoints = _select(checkpoint, options.average, cache.folder, tell, world)
    found = checkpoints[0]
    shape = model_of(found)
    (heldout_folder, remote), (train_folder, _) = _open(heldout, cache, world), _open(train, cache, world)
    manifest, trained = load_manifest(heldout_folder), load_manifest(train_folder)
    for folder, vocab_size in ((heldout, manifest.tokenizer.vocab_size), (train, trained.tokenizer.vocab_size)):
        if vocab_size != shape.vocab_size:
            raise TrainerError(
                f"{folder} has a vocabulary of {vocab_size} entries but the model of {checkpoint} has "
                f"{shape.vocab_size}: name the shards that the model was trained on"
            )
    if manifest.settings.sequence_length > shape.max_positions:
        raise TrainerError(
            f"{heldout} has sequences of {manifest.settings.sequence_length} tokens but the model of {checkpoint} has "
            f"{shape.max_positions} positions: name shorter held-out shards"
        )
    require_vocabulary(found, manifest.tokenizer.sha256, heldout, tell)
    if manifest.tokenizer.sha256 != trained.tokenizer.sha256:
        raise TrainerError(f"{heldout} and {train} were made with different tokenizers: build both with one")
    tokenizer = load_proven(heldout_folder / TOKENIZER_FOLDER, manifest.tokenizer.sha256)
    model = load_model(found, tokenizer.fillers, average(checkpoints)).to(world.device)
    loader = Loader(heldout_folder, manifest, world.rank, world.size, cache=remote)
    for problem in loader.problems():
        raise TrainerError(problem)
    counts = token_counts(train_folder, trained)
    kernels = backend.resolve(world.device.type)
    tell(f"weights: {steps(checkpoints)} of {found.folder.parent}")
    tell(f"kernels: {kernels.name} ({kernels.reason})")
    return evaluate_context(model, loader, counts, world.device, options.micro_batch)


def _select(place: Path | str, count: int | None, cache: str, tell: Tell, world: World) -> list[Checkpoint]:
    """The checkpoints to average. Rank 0 selects for all ranks: a run that is still training may save another one."""

    def choose() -> list[Checkpoint]:
        return select(fetched(place, tell, count, cache), count, tell)

    if world.size == 1:
        return choose()
    chosen = together(lambda: choose() if world.is_main else [], world)
    places = [str(found.folder) if isinstance(place, Path) else _address_of(place, found) for found in chosen]
    names = broadcast_text("\n".join(places), world).splitlines()
    local = isinstance(place, Path)
    return together(lambda: [read(Path(name) if local else fetched(name, tell, None, cache)) for name in names], world)


def _address_of(place: str, found: Checkpoint) -> str:
    """The address of a checkpoint that was chosen from ``place``, which is its run or the checkpoint itself."""
    name = found.folder.name
    return place if place.rstrip("/").endswith(f"/{name}") else f"{place.rstrip('/')}/{name}"


def _open(place: str, config: CacheConfig, world: World) -> tuple[Path, Cache | None]:
    """Return the local folder of a data set, and the cache that fills it if the data set is remote."""
    if not is_remote(place):
        return Path(place), None
    cache = open_cache(place, config, _STALL, world.local_rank)
    return cache.folder, cache


if __name__ == "__main__":
    sys.exit(main())
