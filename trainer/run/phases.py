"""Open the shards of a run's phases for this rank, check them against the configuration, and resolve it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data_prep.draws import bits
from data_prep.errors import DataError
from data_prep.manifest import TOKENIZER_FOLDER, Manifest, load_manifest
from data_prep.tokenizer import load_proven
from trainer.bounds import MOST_STEPS
from trainer.checkpoint.train_state import TrainState
from trainer.checkpoint.trained_tokenizer import token_counts
from trainer.data.cache import Cache, open_cache
from trainer.data.loader import Loader
from trainer.data.masks import dynamic_masks
from trainer.data.order import Order, largest_window
from trainer.data.remote import is_remote
from trainer.data.spread import Spread
from trainer.engine.schedule import Phase, batch_at, batch_of, batch_problems, resolve, samples_in
from trainer.errors import PassingError, TrainerError
from trainer.model.batch import GlobalCounts
from trainer.model.bert import ModelConfig
from trainer.monitor.plateau import Baseline, unigram_loss
from trainer.ranks.world import World
from trainer.run.config import Config

MOST_MIXED = 2**27  # samples in a window; each takes about 30 bytes of memory on every rank
_POSITIONS = 5  # the purpose of this random stream; the others are in trainer/data


@dataclass(frozen=True)
class PhaseData:
    """A phase's shards, opened for this rank."""

    phase: Phase  # resolved: its length in steps, its rates for its batch
    loader: Loader
    heldout: Loader | None
    order: Order
    global_batch: int  # after the batch warm-up, if there is one
    baseline: Baseline

    def batch(self, taken: int) -> tuple[int, int]:
        """``(global batch, micro-batches per rank)`` of the step after ``taken`` steps of the phase."""
        return batch_at(self.phase, taken + 1, self.loader.ranks)

    def weighted(self, counts: GlobalCounts) -> GlobalCounts:
        """The counts of a step, with the phase's weights of the two losses."""
        return replace(counts, mlm_weight=self.phase.mlm_weight, nsp_weight=self.phase.nsp_weight)


def remaining(phases: Sequence[PhaseData], state: TrainState) -> tuple[int, float]:
    """What a run has left after ``state``: samples of the phases counted in steps, seconds of those with minutes."""
    samples, seconds = 0, 0.0
    for data in phases[state.phase :]:
        phase = data.phase
        if phase.minutes is not None:
            seconds += max(0.0, 60 * phase.minutes - state.milliseconds / 1000)
        else:
            ends, taken = (samples_in(phase, steps, data.global_batch) for steps in (phase.steps, state.phase_step))
            samples += max(0, ends - taken)
        state = replace(state, phase_step=0, milliseconds=0)
    return samples, seconds


@dataclass(frozen=True)
class Plan:
    """A run with every phase resolved. Everything after :func:`open_phases` uses this configuration and no other."""

    config: Config  # the length of each phase is in steps, and its rates are for its batch
    phases: tuple[PhaseData, ...]  # the same phases with their shards

    @property
    def timed(self) -> list[str]:
        """The names of the phases that end by time."""
        return [phase.name for phase in self.config.phases if phase.minutes is not None]


def open_phases(config: Config, world: World) -> Plan:
    """Open every phase's shards, check them against the configuration and resolve it.

    Raises TrainerError with all problems, and PassingError if a server of shards does not answer. Needs no process
    group, so an invalid run ends before the ranks meet.
    """
    problems: list[str] = []
    opened = [_open_phase(index, phase, config, world, problems) for index, phase in enumerate(config.phases)]
    loaders = [loader for d in opened if d is not None for loader in (d.loader, d.heldout) if loader is not None]
    hashes = {loader.manifest.tokenizer.sha256 for loader in loaders}
    if len(hashes) > 1:
        problems.append("phases: their shards were made with different tokenizers: build all with one")
    if problems:
        raise TrainerError("\n  - ".join([f"the shards do not fit the run: {len(problems)} problem(s)", *problems]))
    phases = tuple(data for data in opened if data is not None)
    return Plan(replace(config, phases=tuple(data.phase for data in phases)), phases)


def _open_phase(index: int, phase: Phase, config: Config, world: World, problems: list[str]) -> PhaseData | None:
    where, model = f"phases.{index}", config.model
    folders = {"train": phase.train} | ({"heldout": phase.heldout} if phase.heldout is not None else {})
    loaders = {}
    for key, folder in folders.items():
        try:
            path, cache = _open_folder(folder, config, world)
            manifest = load_manifest(path)
        except PassingError as error:  # the rest would only wait for the same server
            raise PassingError(f"{where}.{key}: {error}") from None
        except (DataError, TrainerError) as error:
            problems.append(f"{where}.{key}: {error}")
            continue
        found, masks = misfits(manifest, phase, model), None
        try:
            tokenizer = load_proven(path / TOKENIZER_FOLDER, manifest.tokenizer.sha256)
            if key == "train" and phase.masks == "dynamic":
                masks = dynamic_masks(tokenizer, manifest, config.run.seed)
        except DataError as error:
            found.append(str(error))
        places = _spread(phase, config.run.seed) if key == "train" else None
        loaders[key] = Loader(path, manifest, world.rank, world.size, masks, cache, world.device, places)
        problems += [f"{where}.{key}: {problem}" for problem in found + loaders[key].problems()]
    if len(loaders) < len(folders):
        return None
    tasks = [loader.manifest.settings.pairs for loader in loaders.values()]
    if tasks[-1] not in (tasks[0], "single"):
        problems.append(
            f"{where}.heldout: its pairs are {tasks[-1]} but those of the training shards are {tasks[0]}, "
            "another task: name held-out shards built with the same --pairs"
        )
    if tasks[0] == "single" and phase.mlm_weight == 0:
        problems.append(
            f"{where}.mlm_weight is 0, but the shards have no sentence pairs and so no other loss: raise it"
        )
    train = loaders["train"]
    order = _order(train, phase, config, problems)
    global_batch, _ = batch_of(phase, world.size)
    problems += [f"{where}.{problem}" for problem in batch_problems(phase, world.size, sum(order.sizes))]
    runs = resolve(phase, global_batch, sum(order.sizes))
    problems += [f"{where}.{problem}" for problem in runs.problems()]
    try:
        frequencies = unigram_loss(token_counts(train.folder, train.manifest))
    except TrainerError as error:
        problems.append(f"{where}.train: {error}")
        return None
    warmup_steps = MOST_STEPS if runs.mlm_weight == 0 else runs.warmup_steps  # its MLM loss is not to be judged
    baseline = Baseline(frequencies, warmup_steps, runs.warmup_minutes)
    return PhaseData(runs, train, loaders.get("heldout"), order, global_batch, baseline)


def _order(train: Loader, phase: Phase, config: Config, problems: list[str]) -> Order:
    sizes = tuple(shard.samples for shard in train.manifest.shards)
    order = Order(sizes, config.run.seed, config.run.shuffle_window, phase.pass_over)
    if (mixed := largest_window(order.sizes, order.window)) > MOST_MIXED:
        problems.append(
            f"run.shuffle_window is {order.window}: so many shards of {train.folder} hold {mixed:,} samples, all "
            f"shuffled at once: lower it until there are {MOST_MIXED:,} or fewer"
        )
    return order


def _open_folder(place: str, config: Config, world: World) -> tuple[Path, Cache | None]:
    """Return the local folder of a data set, and the cache that fills it if the data set is remote."""
    if not is_remote(place):
        return Path(place), None
    # five attempts, perhaps after five for another shard, must fit into the timeout of a collective
    cache = open_cache(place, config.cache, config.run.timeout_seconds / 20, world.local_rank)
    return cache.folder, cache


def misfits(manifest: Manifest, phase: Phase, model: ModelConfig) -> list[str]:
    """List how a data set does not fit a phase and the model, each with what to change."""
    found = []
    if manifest.tokenizer.vocab_size != model.vocab_size:
        found.append(
            f"its vocabulary has {manifest.tokenizer.vocab_size} entries but model.vocab_size is "
            f"{model.vocab_size}: set model.vocab_size to the shards' size, or build them with the other vocabulary"
        )
    if manifest.settings.sequence_length != phase.sequence_length:
        found.append(
            f"its samples are made for sequence_length {manifest.settings.sequence_length} but the phase says "
            f"{phase.sequence_length}: change sequence_length or name other shards"
        )
    return found


def _spread(phase: Phase, seed: int) -> Spread | None:
    rows = phase.spread_positions
    return None if rows is None else Spread(rows, int(bits(seed, _POSITIONS)[0]))
