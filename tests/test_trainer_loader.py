"""Batches from real shards: every sample once under any cut, and any damage named."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.manifest import load_manifest
from data_prep.shards import Sample
from trainer.batch import IGNORED, MicroBatch
from trainer.errors import TrainerError
from trainer.loader import Loader, StepBatch, collate
from trainer.order import Order

CUTS = [(1, 1), (1, 4), (2, 3), (3, 2), (7, 1)]  # ranks, micro-batches a rank


@dataclass(frozen=True)
class Raw:
    """A sample as its .npy says, read with ``tarfile`` and ``numpy`` alone."""

    ids: tuple[int, ...]
    split: int
    is_next: int
    masks: tuple[tuple[int, int], ...]  # (position, what stands there)


def raw_shards(folder: Path) -> list[list[Raw]]:
    """All samples, by shard."""
    shards = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            files = [tar.extractfile(member) for member in tar.getmembers()]
            shards.append([_raw(np.load(io.BytesIO(file.read())).tolist()) for file in files if file is not None])
    return shards


def _raw(numbers: list[int]) -> Raw:
    n, split, is_next, m, *rest = numbers
    assert len(rest) == n + 2 * m
    return Raw(tuple(rest[:n]), split, is_next, tuple(zip(rest[n : n + m], rest[n + m :], strict=True)))


def undone(batch: MicroBatch) -> list[tuple[int, Raw]]:
    """(sample number, sample) of each sequence of a micro-batch, its mask undone."""
    out = []
    bounds = batch.cu_seqlens.tolist()
    unmasked = batch.tokens.clone()
    unmasked[batch.masked] = batch.labels
    for b, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        assert batch.positions[start:end].tolist() == list(range(end - start))
        segments = batch.segments[start:end].tolist()
        assert segments == sorted(segments) and end - start <= batch.max_seqlen
        places = [int(place) for place in batch.masked if start <= place < end]
        masks = tuple((place - start, int(batch.tokens[place])) for place in places)
        raw = Raw(tuple(unmasked[start:end].tolist()), segments.index(1), int(batch.is_next[b]), masks)
        out.append((int(batch.samples[b]), raw))
    return out


def order_of(folder: Path, seed: int = 5) -> Order:
    return Order(tuple(shard.samples for shard in load_manifest(folder).shards), seed, window=2)


def read_ranks(folder: Path, ranks: int, micro_batches: int, position: int, global_batch: int) -> list[StepBatch]:
    """One step of each rank."""
    manifest = load_manifest(folder)
    loaders = [Loader(folder, manifest, rank, ranks) for rank in range(ranks)]
    return [loader.read(order_of(folder), position, global_batch, micro_batches) for loader in loaders]


def samples_of(steps: list[StepBatch]) -> list[tuple[int, Raw]]:
    """(number, sample) of one step over its ranks, by number; fillers are left out."""
    batches = [batch for step in steps for batch in step.micro_batches if batch.is_next[0] != IGNORED]
    return sorted((pair for batch in batches for pair in undone(batch)), key=lambda pair: pair[0])


# ---- every sample once, the same for every cut -----------------------------------------------------------


@pytest.mark.parametrize(("ranks", "micro_batches"), CUTS)
def test_epochs_are_whole_and_in_order_under_any_cut(tiny_shards: Path, ranks: int, micro_batches: int) -> None:
    shards, order = raw_shards(tiny_shards), order_of(tiny_shards)
    read: list[tuple[int, Raw]] = []
    while len(read) < 2 * order.samples:  # 299 is no multiple of 48: borders of epochs lie inside batches
        read += samples_of(read_ranks(tiny_shards, ranks, micro_batches, len(read), 48))
    expected = [shards[shard][row] for shard, row in order.take(0, len(read)).tolist()]
    assert [number for number, _ in read] == list(range(len(read)))
    assert [sample for _, sample in read] == expected
    everything = Counter(sample for shard in shards for sample in shard)
    for epoch in range(2):
        part = read[epoch * order.samples : (epoch + 1) * order.samples]
        assert Counter(sample for _, sample in part) == everything


@pytest.mark.parametrize(("ranks", "micro_batches"), CUTS)
def test_all_ranks_know_the_counts_of_the_global_batch(tiny_shards: Path, ranks: int, micro_batches: int) -> None:
    steps = read_ranks(tiny_shards, ranks, micro_batches, 290, 20)
    batches = [batch for step in steps for batch in step.micro_batches]
    lengths = torch.cat([batch.cu_seqlens.diff() for batch in batches])
    assert all(len(step.micro_batches) == micro_batches for step in steps)
    assert {step.counts for step in steps} == {steps[0].counts}
    assert steps[0].counts.targets == sum(batch.labels.numel() for batch in batches)
    assert steps[0].counts.tokens == sum(batch.tokens.numel() for batch in batches) == int(lengths.sum())
    assert steps[0].counts.squares == int((lengths.long() ** 2).sum())
    assert steps[0].counts.pairs == len(lengths) == 20


def test_tokens_balance_over_the_ranks(tiny_shards: Path) -> None:
    for position in range(0, 299, 23):
        steps = read_ranks(tiny_shards, 3, 9, position, 27)  # one sequence in each micro-batch
        tokens = [sum(batch.tokens.numel() for batch in step.micro_batches) for step in steps]
        assert max(tokens) - min(tokens) <= 32, tokens  # within one sequence


def test_more_parts_than_samples_leave_fillers_without_targets(tiny_shards: Path) -> None:
    steps = read_ranks(tiny_shards, 2, 2, 0, 3)
    batches = [batch for step in steps for batch in step.micro_batches]
    fillers = [batch for batch in batches if batch.is_next[0] == IGNORED]
    assert len(batches) == 4 and len(fillers) == 1
    assert fillers[0].labels.numel() == fillers[0].masked.numel() == 0
    assert fillers[0].cu_seqlens.tolist() == [0, fillers[0].tokens.numel()]
    assert [number for number, _ in samples_of(steps)] == [0, 1, 2]
    assert steps[0].counts.pairs == 3


def test_steps_are_reads_one_after_the_other(tiny_shards: Path) -> None:
    loader = Loader(tiny_shards, load_manifest(tiny_shards), 1, 2)
    order = order_of(tiny_shards)
    with closing(loader.steps(order, 250, 16, 2)) as steps:
        for position, step in zip(range(250, 400, 16), steps, strict=False):
            expected = loader.read(order, position, 16, 2)
            assert (step.position, step.samples, step.counts) == (position, 16, expected.counts)
            assert samples_of([step]) == samples_of([expected])
            assert step.wait_seconds >= 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 400])
def test_a_sweep_reads_each_sample_once(tiny_shards: Path, ranks: int) -> None:
    manifest = load_manifest(tiny_shards)
    batches = [batch for rank in range(ranks) for batch in Loader(tiny_shards, manifest, rank, ranks).sweep(16)]
    read = sorted((pair for batch in batches for pair in undone(batch)), key=lambda pair: pair[0])
    assert [sample for _, sample in read] == [sample for shard in raw_shards(tiny_shards) for sample in shard]
    assert [number for number, _ in read] == list(range(299))
    assert max(len(batch.samples) for batch in batches) <= 16


def test_a_micro_batch_by_hand() -> None:
    first = Sample(np.array([2, 10, 11, 3, 12, 3], np.int32), 4, 1, np.array([2], np.int32), np.array([4], np.int32))
    second = Sample(
        np.array([2, 20, 3, 21, 22, 23, 3], np.int32), 3, 0, np.array([1, 4], np.int32), np.array([4, 99], np.int32)
    )
    batch = collate([first, second], np.array([70, 30]))
    assert batch.tokens.tolist() == [2, 10, 4, 3, 12, 3, 2, 4, 3, 21, 99, 23, 3]
    assert batch.segments.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6]
    assert (batch.cu_seqlens.tolist(), batch.cu_seqlens.dtype, batch.max_seqlen) == ([0, 6, 13], torch.int32, 7)
    assert batch.masked.tolist() == [2, 7, 10] and batch.labels.tolist() == [11, 20, 22]
    assert batch.samples.tolist() == [70, 30] and batch.is_next.tolist() == [1, 0]
    rows = (batch.tokens, batch.segments, batch.positions, batch.samples, batch.masked, batch.labels, batch.is_next)
    assert {row.dtype for row in rows} == {torch.int64}
    moved = batch.to(torch.device("meta"))
    assert moved.max_seqlen == 7 and moved.labels.device.type == moved.cu_seqlens.device.type == "meta"


# ---- damage ------------------------------------------------------------------------------------------------


def sweep(folder: Path) -> int:
    return sum(len(batch.samples) for batch in Loader(folder, load_manifest(folder), 0, 1).sweep(64))


def test_one_flipped_bit_is_named_with_its_sample(own_shards: Path) -> None:
    assert sweep(own_shards) == 299
    path = own_shards / "shard-00002.tar"
    data = bytearray(path.read_bytes())
    data[17 * 1024 + 512 + 140] ^= 1  # a member takes two blocks here: this is in sample 17's ids
    path.write_bytes(data)
    with pytest.raises(TrainerError, match=r"shard-00002\.tar is damaged at sample 17: .*build the shards again$"):
        sweep(own_shards)


@pytest.mark.parametrize("damage", "tar cut,tar empty,tar gone,index cut,index gone,a folder,swapped".split(","))
def test_a_shard_that_is_not_the_manifests_is_named(own_shards: Path, damage: str) -> None:
    tar, index = own_shards / "shard-00001.tar", own_shards / "shard-00001.idx.npy"
    match damage.split():
        case ["tar", "cut"]:
            tar.write_bytes(tar.read_bytes()[:-600])
        case ["tar", "empty"]:
            tar.write_bytes(b"")
        case ["index", "cut"]:
            index.write_bytes(index.read_bytes()[:-40])
        case [_, "gone"]:
            (tar if damage == "tar gone" else index).unlink()
        case ["a", "folder"]:
            tar.unlink()
            tar.mkdir()
        case ["swapped"]:  # a whole and sound shard of the same size and count, but another one
            assert tar.stat().st_size == (own_shards / "shard-00000.tar").stat().st_size
            shutil.copy(own_shards / "shard-00000.tar", tar)
            shutil.copy(own_shards / "shard-00000.idx.npy", index)
    with pytest.raises(TrainerError, match="shard-00001") as error:
        sweep(own_shards)
    assert "\n" not in str(error.value) and "restore it" in str(error.value)


def test_damage_ahead_of_training_reaches_the_training_thread(own_shards: Path) -> None:
    (own_shards / "shard-00003.tar").unlink()
    steps = Loader(own_shards, load_manifest(own_shards), 0, 1).steps(order_of(own_shards), 0, 64, 1)
    with pytest.raises(TrainerError, match="shard-00003"):
        for _ in range(6):
            next(steps)


def test_all_missing_and_cut_shards_are_told_at_once(own_shards: Path) -> None:
    assert Loader(own_shards, load_manifest(own_shards), 0, 1).problems() == []
    (own_shards / "shard-00001.tar").unlink()
    (own_shards / "shard-00003.idx.npy").unlink()
    with (own_shards / "shard-00004.tar").open("ab") as file:
        file.truncate(1000)
    [line] = Loader(own_shards, load_manifest(own_shards), 0, 1).problems()
    for name in ("shard-00001.tar", "shard-00003.idx.npy", "shard-00004.tar (1000 bytes instead of 45056)"):
        assert name in line
    assert "shard-00000" not in line and "shard-00002" not in line
