"""What a run's phases train on: their shards, opened for this rank and checked against the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from data_prep.draws import bits
from data_prep.errors import DataError
from data_prep.manifest import TOKENIZER_FOLDER, Manifest, load_manifest
from data_prep.masking import Masking, make_vocabulary
from data_prep.tokenizer import Tokenizer, load_proven
from trainer.data.cache import Cache, open_cache
from trainer.data.loader import DynamicMasks, Loader
from trainer.data.order import Order, largest_window
from trainer.data.remote import is_remote
from trainer.engine.schedule import Phase, batch_of, batch_problems, resolve
from trainer.errors import TrainerError
from trainer.model.bert import ModelConfig
from trainer.ranks.world import World
from trainer.run.config import Config

MOST_MIXED = 2**27  # samples of a window; each takes some 30 bytes of memory on every rank
_MASKS = 4  # what draws are for; see trainer/data/order.py


@dataclass(frozen=True)
class PhaseData:
    """A phase's shards, opened for this rank."""

    phase: Phase  # as it runs: its length in steps, its rates for its batch
    loader: Loader
    heldout: Loader | None
    order: Order
    global_batch: int
    micro_batches: int  # of this rank in a step


def open_phases(config: Config, world: World) -> list[PhaseData]:
    """Open every phase's shards and check them against the configuration, all problems at once.

    Needs no process group, so a run that cannot be ends before the ranks meet. Raises TrainerError.
    """
    problems: list[str] = []
    opened = [_open_phase(index, phase, config, world, problems) for index, phase in enumerate(config.phases)]
    loaders = [loader for d in opened if d is not None for loader in (d.loader, d.heldout) if loader is not None]
    hashes = {loader.manifest.tokenizer.sha256 for loader in loaders}
    if len(hashes) > 1:
        problems.append("phases: their shards were made with different tokenizers: build them with one")
    if problems:
        raise TrainerError("\n  - ".join([f"the shards do not fit the run: {len(problems)} problem(s)", *problems]))
    return [data for data in opened if data is not None]


def _open_phase(index: int, phase: Phase, config: Config, world: World, problems: list[str]) -> PhaseData | None:
    where, model = f"phases.{index}", config.model
    folders = {"train": phase.train} | ({"heldout": phase.heldout} if phase.heldout is not None else {})
    loaders = {}
    for key, folder in folders.items():
        try:
            path, cache = _open_folder(folder, config, world)
            manifest = load_manifest(path)
        except (DataError, TrainerError) as error:
            problems.append(f"{where}.{key}: {error}")
            continue
        found, masks = _misfits(manifest, phase, model), None
        try:
            tokenizer = load_proven(path / TOKENIZER_FOLDER, manifest.tokenizer.sha256)
            if key == "train" and phase.masks == "dynamic":
                masks = _dynamic_masks(tokenizer, manifest, config.run.seed)
        except DataError as error:
            found.append(str(error))
        loaders[key] = Loader(path, manifest, world.rank, world.size, masks, cache, world.device)
        problems += [f"{where}.{key}: {problem}" for problem in found + loaders[key].problems()]
    if len(loaders) < len(folders):
        return None
    tasks = [loader.manifest.settings.pairs for loader in loaders.values()]
    if tasks[-1] not in (tasks[0], "single"):
        problems.append(
            f"{where}.heldout: its pairs are {tasks[-1]} but those of the training shards are {tasks[0]}, which is "
            "another task: name held-out shards built with the same --pairs"
        )
    sizes = tuple(shard.samples for shard in loaders["train"].manifest.shards)
    order = Order(sizes, config.run.seed, config.run.shuffle_window)
    if (mixed := largest_window(sizes, order.window)) > MOST_MIXED:
        problems.append(
            f"run.shuffle_window is {order.window}: so many shards of {phase.train} hold {mixed:,} samples, which "
            f"would all be mixed at once: lower it until they are {MOST_MIXED:,} or fewer"
        )
    global_batch, micro_batches = batch_of(phase, world.size)
    problems += [f"{where}.{problem}" for problem in batch_problems(phase, world.size, sum(sizes))]
    runs = resolve(phase, global_batch, sum(sizes))
    problems += [f"{where}.{problem}" for problem in runs.problems()]
    return PhaseData(runs, loaders["train"], loaders.get("heldout"), order, global_batch, micro_batches)


def _open_folder(place: str, config: Config, world: World) -> tuple[Path, Cache | None]:
    """The local folder of a data set, and what fills it if the data set is remote."""
    if not is_remote(place):
        return Path(place), None
    # five attempts, perhaps behind as many for another shard, take no longer than a collective may
    cache = open_cache(place, config.cache, config.run.timeout_seconds / 20, world.local_rank)
    return cache.folder, cache


def _misfits(manifest: Manifest, phase: Phase, model: ModelConfig) -> list[str]:
    found = []
    if manifest.tokenizer.vocab_size != model.vocab_size:
        found.append(
            f"its vocabulary has {manifest.tokenizer.vocab_size} entries but model.vocab_size is "
            f"{model.vocab_size}: set model.vocab_size to the shards' size, or build them with the other vocabulary"
        )
    if manifest.settings.sequence_length != phase.sequence_length:
        found.append(
            f"its samples are made for sequence_length {manifest.settings.sequence_length} but the phase says "
            f"{phase.sequence_length}: correct the one or name other shards"
        )
    return found


def _dynamic_masks(tokenizer: Tokenizer, manifest: Manifest, seed: int) -> DynamicMasks:
    """What the run draws new masks of the data set by."""
    settings, specials = manifest.settings, manifest.tokenizer.specials
    vocabulary = make_vocabulary(manifest.tokenizer.vocab_size, tokenizer.never, specials.mask)
    masking = Masking(settings.masking, settings.masked_share, settings.max_predictions)
    return DynamicMasks(vocabulary, masking, int(bits(seed, _MASKS)[0]))  # not the static ones' seed, if it is equal
