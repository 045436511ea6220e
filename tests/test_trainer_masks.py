"""New masks in each epoch: drawn like the static ones for every unit, and the same for any number of ranks."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep.build import build
from data_prep.manifest import load_manifest
from data_prep.settings import make_settings
from data_prep.vocab import train_tokenizer
from tests.helpers import ranks
from tests.helpers.raw_samples import (
    CUTS,
    Raw,
    masks_of,
    order_of,
    raw_shards,
    read_epochs,
    read_ranks,
    samples_of,
    undone,
)
from tests.helpers.runs import lines, write_config
from trainer.data.loader import Loader
from trainer.data.masks import DynamicMasks
from trainer.data.order import Order
from trainer.errors import TrainerError
from trainer.monitor.metrics_log import read_lines

UNITS = ("token", "word", "ngram", "span")
DEVIATIONS = 5  # that a measured mean may be off: by chance once in 1.7 million times


@pytest.fixture(scope="module")
def shards_of(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The corpus of ``tiny_shards`` masked by a unit, each of its words cut into several tokens."""
    root, corpus = tmp_path_factory.mktemp("units"), tiny_shards.parent / "corpus.txt"
    train_tokenizer([corpus.read_text()], 45, cased=False).save(root / "tokenizer")

    def make(unit: str) -> Path:
        if not (root / unit).exists():
            settings = make_settings(32, samples_per_shard=64, masking=unit)
            build([corpus], root / "tokenizer", root / unit, settings, 1)
        return root / unit

    return make


@pytest.mark.parametrize("unit", UNITS)
def test_each_epoch_masks_each_sample_again(shards_of: Callable[[str], Path], unit: str) -> None:
    folder = shards_of(unit)
    order, masks = order_of(folder), masks_of(folder)
    shards = raw_shards(folder)
    changed = recounted = 0
    seen: dict[tuple[int, int], list[Raw]] = {}
    for number, sample in read_epochs(folder, (2, 3), masks):
        [[shard, row]] = order.take(number, 1).tolist()
        static = shards[shard][row]
        assert replace(sample, masks=static.masks) == static
        assert all(masks.vocabulary.is_ordinary[sample.ids[place]] for place, _ in sample.masks)
        assert 0 < len(sample.masks) <= masks.masking.most
        changed += sample.masks != static.masks
        recounted += len(sample.masks) != len(static.masks)
        seen.setdefault((shard, row), []).append(sample)
    assert len(seen) == order.samples
    again = sum(first.masks == second.masks for first, second, *_ in seen.values())
    share = 0.02 if unit == "token" else 0.1  # there are fewer runs than sets of tokens to choose from
    assert again < share * order.samples and changed > (1 - share) * 2 * order.samples
    assert recounted == 0 if unit == "token" else recounted > 0.02 * order.samples


@pytest.mark.parametrize("unit", UNITS)
def test_with_the_data_sets_own_seed_the_first_epochs_masks_are_the_static_ones(
    shards_of: Callable[[str], Path], unit: str
) -> None:
    """Both are thus draws of the same function, and so are those of other seeds and epochs."""
    folder = shards_of(unit)
    manifest, order = load_manifest(folder), order_of(folder)
    loader = Loader(folder, manifest, 0, 1, masks_of(folder, manifest.settings.seed))
    [first, second] = (samples_of([loader.read(order, e * order.samples, order.samples, 3)]) for e in (0, 1))
    shards = raw_shards(folder)
    static = [shards[shard][row] for shard, row in order.take(0, order.samples).tolist()]
    assert [sample for _, sample in first] == static
    assert sum(sample in static for _, sample in second) < 0.1 * order.samples


@pytest.mark.parametrize("unit", UNITS)
def test_rates_are_those_of_the_static_masks(shards_of: Callable[[str], Path], unit: str) -> None:
    """The mean of a sample's counts over epochs, minus its static count, averages 0 over samples, for each count."""
    folder, epochs = shards_of(unit), 8
    order, masks = order_of(folder), masks_of(folder)
    loader = Loader(folder, load_manifest(folder), 0, 1, masks)
    counts = np.zeros((order.samples, 4))
    for epoch in range(epochs):
        read = samples_of([loader.read(order, epoch * order.samples, order.samples, 3)])
        for (_, sample), (shard, row) in zip(
            read, order.take(epoch * order.samples, order.samples).tolist(), strict=True
        ):
            counts[64 * shard + row] += counts_of(sample, masks.vocabulary.mask)
    static = np.array([counts_of(raw, masks.vocabulary.mask) for shard in raw_shards(folder) for raw in shard])
    difference = counts / epochs - static
    assert np.all(np.abs(difference.mean(axis=0)) <= DEVIATIONS * difference.std(axis=0) / order.samples**0.5)
    assert difference.std(axis=0)[1:].min() > 0.1  # it could have failed
    by_chance = 0.1 / len(masks.vocabulary.ordinary)  # a random token may be the old one
    shares = np.array([0.8, 0.1 - by_chance, 0.1 + by_chance])  # [MASK], another one, the old one
    off = counts[:, 1:] - counts[:, :1] * shares
    assert np.all(np.abs(off.mean(axis=0)) <= DEVIATIONS * off.std(axis=0) / order.samples**0.5)


def counts_of(sample: Raw, mask: int) -> list[int]:
    """Targets, and how many of them became [MASK], became another token, and stayed."""
    masked = sum(there == mask for _, there in sample.masks)
    stayed = sum(there == sample.ids[place] for place, there in sample.masks)
    return [len(sample.masks), masked, len(sample.masks) - masked - stayed, stayed]


@pytest.mark.parametrize("unit", ["token", "span"])
@pytest.mark.parametrize("cut", CUTS[1:])
def test_new_masks_do_not_depend_on_the_cut(shards_of: Callable[[str], Path], cut: tuple[int, int], unit: str) -> None:
    folder = shards_of(unit)
    assert read_epochs(folder, cut, masks_of(folder)) == read_epochs(folder, CUTS[0], masks_of(folder))


@pytest.mark.slow
def test_ranks_count_the_targets_of_a_step_together(shards_of: Callable[[str], Path], tmp_path: Path) -> None:
    """1, 2 and 3 ranks train across an epoch's end on equal samples, masks, counts and, within rounding, losses."""
    runs = [train(shards_of("span"), tmp_path / str(size), size) for size in (1, 2, 3)]
    assert len({number for step in runs[0][0] for number, _ in step}) == 420 > order_of(shards_of("span")).samples
    for samples, targets, numbers in runs[1:]:
        assert (samples, targets) == runs[0][:2]
        np.testing.assert_allclose(numbers, runs[0][2], rtol=1e-5)


def train(shards: Path, folder: Path, size: int) -> tuple[list[list[tuple[int, int]]], list[int], list[list[float]]]:
    """Each step of a run with new masks: (number, checksum) of its samples, its targets, its losses and norm."""
    folder.mkdir()
    config = write_config(folder, shards, 14, metrics={"port": None, "log_every_steps": 1})
    options = ("--config", str(config), "--set", "phases.0.masks=dynamic", "--set", f"run.folder={folder / 'run'}")
    ended = ranks.finish(ranks.fork(size, "tests/helpers/trainer_on_ranks.py", str(folder), "[]", *options))
    assert [code for code, _ in ended] == [0] * size, ended
    records = [read_lines(path) for path in sorted(folder.glob("samples-*.jsonl"))]
    assert len(records) == size
    steps = list(zip(*records, strict=True))  # of all ranks
    targets = [{note["targets"] for note in step} for step in steps]
    assert targets == [{sum(note["own_targets"] for note in step)} for step in steps]
    samples = [sorted((number, crc) for note in step for number, crc in note["samples"]) for step in steps]
    names = ("mlm_loss", "nsp_loss", "gradient_norm")
    numbers = [[line[name] for name in names] for line in lines(folder / "run", "step")]
    return samples, [count for [count] in targets], numbers


def test_new_masks_depend_on_seed_epoch_and_sample_alone(tiny_shards: Path) -> None:
    """They do not depend on where the order puts a sample."""
    manifest = load_manifest(tiny_shards)

    def epochs(masks: DynamicMasks, order: Order) -> list[Counter[Raw]]:
        loader, size = Loader(tiny_shards, manifest, 0, 1, masks), order.samples
        return [Counter(sample for _, sample in samples_of([loader.read(order, e * size, size, 4)])) for e in (0, 1)]

    first = epochs(masks_of(tiny_shards), order_of(tiny_shards, seed=5))
    assert first == epochs(masks_of(tiny_shards), order_of(tiny_shards, seed=6))
    assert not (first[0] & first[1]).total() > 5
    other = epochs(masks_of(tiny_shards, seed=4), order_of(tiny_shards, seed=5))
    assert not (first[0] & other[0]).total() > 5


def test_equal_samples_of_two_shards_get_masks_of_their_own(own_shards: Path) -> None:
    manifest = load_manifest(own_shards)
    for name in ("{}.tar", "{}.idx.npy"):
        shutil.copy(own_shards / name.format("shard-00000"), own_shards / name.format("shard-00001"))
    twins = tuple(replace(manifest.shards[0], name=f"shard-0000{number}") for number in range(2))
    loader = Loader(own_shards, replace(manifest, shards=twins), 0, 1, masks_of(own_shards))
    order = Order((64, 64), 5, 2)
    masks = dict[int, list[Raw]]()
    for number, sample in samples_of([loader.read(order, 0, 128, 1)]):
        masks.setdefault(int(order.take(number, 1)[0, 1]), []).append(sample)
    assert len(masks) == 64 and all(a.ids == b.ids for a, b in masks.values())
    assert sum(a.masks == b.masks for a, b in masks.values()) < 5


def test_a_sweep_keeps_the_static_masks(tiny_shards: Path) -> None:
    loader = Loader(tiny_shards, load_manifest(tiny_shards), 0, 1, masks_of(tiny_shards))
    read = [sample for batch in loader.sweep(64) for _, sample in undone(batch)]
    assert read == [sample for shard in raw_shards(tiny_shards) for sample in shard]


def test_masks_of_another_number_are_refused(tiny_shards: Path) -> None:
    masks = masks_of(tiny_shards)
    masks = replace(masks, masking=replace(masks.masking, share=0.3, most=32))
    with pytest.raises(
        TrainerError, match="changed the number of masked tokens; set `masks: static` or rebuild"
    ) as error:
        read_ranks(tiny_shards, (1, 1), 0, 8, masks)
    assert "\n" not in str(error.value) and str(tiny_shards) in str(error.value)
