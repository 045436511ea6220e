"""Batches from real shards: every sample once under any cut, and any damage named. New masks: test_trainer_masks.py."""

from __future__ import annotations

import gc
import os
import shutil
import zlib
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.build import build
from data_prep.manifest import file_sha256, load_manifest
from data_prep.settings import make_settings
from data_prep.shards import NO_PAIR, Sample
from kernels.dropout import token_keys
from tests.helpers import ranks
from tests.helpers.raw_samples import CUTS, masks_of, order_of, raw_shards, read_epochs, read_ranks, samples_of, undone
from tests.helpers.runs import lines, wait_for, write_config
from trainer.data.collate import collate
from trainer.data.loader import Loader
from trainer.data.order import Gap
from trainer.errors import PassingError, TrainerError
from trainer.model.batch import IGNORED, MicroBatch
from trainer.model.bert import Bert, ModelConfig

# ---- every sample once, the same for every cut -----------------------------------------------------------


@pytest.mark.parametrize("cut", CUTS)
def test_epochs_are_whole_and_in_order_under_any_cut(tiny_shards: Path, cut: tuple[int, int]) -> None:
    shards, order = raw_shards(tiny_shards), order_of(tiny_shards)
    read = read_epochs(tiny_shards, cut)
    expected = [shards[shard][row] for shard, row in order.take(0, len(read)).tolist()]
    assert [number for number, _ in read] == list(range(len(read)))
    assert [sample for _, sample in read] == expected
    everything = Counter(sample for shard in shards for sample in shard)
    for epoch in range(2):
        part = read[epoch * order.samples : (epoch + 1) * order.samples]
        assert Counter(sample for _, sample in part) == everything


@pytest.mark.parametrize("dynamic", [False, True])  # by token, whose masks keep their number
@pytest.mark.parametrize("cut", CUTS)
def test_all_ranks_know_the_counts_of_the_global_batch(tiny_shards: Path, cut: tuple[int, int], dynamic: bool) -> None:
    masks = masks_of(tiny_shards) if dynamic else None
    steps = read_ranks(tiny_shards, cut, order_of(tiny_shards).samples - 9, 20, masks)
    batches = [batch for step in steps for batch in step.micro_batches]
    lengths = torch.cat([batch.cu_seqlens.diff() for batch in batches])
    assert all(len(step.micro_batches) == cut[1] for step in steps)
    assert {step.counts for step in steps} == {steps[0].counts}
    assert steps[0].counts.targets == sum(batch.labels.numel() for batch in batches)
    assert steps[0].counts.tokens == sum(batch.tokens.numel() for batch in batches) == int(lengths.sum())
    assert steps[0].counts.squares == int((lengths.long() ** 2).sum())
    assert steps[0].counts.pairs == len(lengths) == 20


def test_tokens_balance_over_the_ranks(tiny_shards: Path) -> None:
    for position in range(0, order_of(tiny_shards).samples, 23):
        steps = read_ranks(tiny_shards, (3, 9), position, 27)  # one sequence in each micro-batch
        tokens = [sum(batch.tokens.numel() for batch in step.micro_batches) for step in steps]
        assert max(tokens) - min(tokens) <= 32, tokens  # within one sequence


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("cut", [(2, 2), (4, 1)])
def test_more_parts_than_samples_leave_fillers_without_targets(
    tiny_shards: Path, cut: tuple[int, int], dynamic: bool
) -> None:
    steps = read_ranks(tiny_shards, cut, 0, 3, masks_of(tiny_shards) if dynamic else None)
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


@pytest.mark.parametrize("masks", [False, True])
def test_steps_leave_gaps_out_and_change_no_other_sample(tiny_shards: Path, masks: bool) -> None:
    """Gaps before, inside and between batches, and over the end of an epoch."""
    whole, manifest = order_of(tiny_shards), load_manifest(tiny_shards)
    gaps = (Gap(0, 4), Gap(30, 10), Gap(52, 20), Gap(whole.samples - 5, 10))
    loader = Loader(tiny_shards, manifest, 0, 1, masks_of(tiny_shards) if masks else None)
    with closing(loader.steps(replace(whole, gaps=gaps), 0, 16, 2)) as steps:
        read = [next(steps) for _ in range(whole.samples // 16)]
    skipped = {number for gap in gaps for number in range(gap.position, gap.position + gap.samples)}
    numbers = [number for number in range(read[-1].following) if number not in skipped]
    samples = dict(pair for step in read for pair in samples_of([step]))
    assert list(samples) == numbers and sum(step.left_out for step in read) == 44
    for number, sample in samples.items():
        assert samples_of([loader.read(whole, number, 1, 1)]) == [(number, sample)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 400])
def test_a_sweep_reads_each_sample_once(tiny_shards: Path, ranks: int) -> None:
    manifest = load_manifest(tiny_shards)
    batches = [batch for rank in range(ranks) for batch in Loader(tiny_shards, manifest, rank, ranks).sweep(16)]
    read = sorted((pair for batch in batches for pair in undone(batch)), key=lambda pair: pair[0])
    assert [sample for _, sample in read] == [sample for shard in raw_shards(tiny_shards) for sample in shard]
    assert [number for number, _ in read] == list(range(order_of(tiny_shards).samples))
    assert max(len(batch.samples) for batch in batches) <= 16


def test_a_micro_batch_by_hand() -> None:
    first = sample([2, 10, 11, 3, 12, 3], 4, 1, {2: 4})
    second = sample([2, 20, 3, 21, 22, 23, 3], 3, 0, {1: 4, 4: 99})
    single = sample([2, 30, 31, 3], 4, NO_PAIR, {2: 31})
    batch = collate([first, second, single], np.array([70, 30, 50]))
    assert batch.tokens.tolist() == [2, 10, 4, 3, 12, 3, 2, 4, 3, 21, 99, 23, 3, 2, 30, 31, 3]
    assert batch.segments.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3]
    assert (batch.cu_seqlens.tolist(), batch.cu_seqlens.dtype, batch.max_seqlen) == ([0, 6, 13, 17], torch.int32, 7)
    assert batch.masked.tolist() == [2, 7, 10, 15] and batch.labels.tolist() == [11, 20, 22, 31]
    assert batch.samples.tolist() == [70, 30, 50] and batch.is_next.tolist() == [1, 0, IGNORED]
    rows = (batch.tokens, batch.segments, batch.positions, batch.samples, batch.masked, batch.labels, batch.is_next)
    assert {row.dtype for row in rows} == {torch.int64}
    moved = batch.to(torch.device("meta"))
    assert moved.max_seqlen == 7 and moved.labels.device.type == moved.cu_seqlens.device.type == "meta"


def test_memory_is_pinned_for_a_gpu_alone(tiny_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, order = load_manifest(tiny_shards), order_of(tiny_shards)
    for device, pinned in (("cpu", False), ("cuda:1", True)):
        seen = list[torch.device]()
        monkeypatch.setattr(MicroBatch, "pin", lambda batch, device, seen=seen: seen.append(device) or batch)
        Loader(tiny_shards, manifest, 0, 1, device=torch.device(device)).read(order, 0, 20, 3)
        assert seen == [torch.device(device)] * 3
        monkeypatch.undo()
        batch = collate([sample([2, 10, 3], 3, NO_PAIR, {1: 4})], np.array([0]))
        if not pinned:
            assert batch.pin(torch.device(device)) is batch
    if torch.cuda.is_available():
        ready = batch.pin(torch.device("cuda", 0))
        assert ready.tokens.is_pinned() and ready.cu_seqlens.is_pinned() and ready.max_seqlen == batch.max_seqlen
        assert torch.equal(ready.to(torch.device("cuda", 0)).tokens.cpu(), batch.tokens)


def sample(ids: list[int], split: int, is_next: int, masks: dict[int, int]) -> Sample:
    positions, replacements = (np.array([*numbers], np.int32) for numbers in (masks, masks.values()))
    return Sample(np.array(ids, np.int32), split, is_next, positions, replacements, np.zeros(len(ids), np.bool_))


# ---- another second task, and none ---------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["single", "sop"])
def other_shards(request: pytest.FixtureRequest, tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus of ``tiny_shards`` with other pairs."""
    out: Path = tmp_path_factory.mktemp("other") / request.param
    settings = make_settings(32, samples_per_shard=64, pairs=request.param)
    build([tiny_shards.parent / "corpus.txt"], tiny_shards.parent / "tokenizer", out, settings, processes=1)
    return out


def test_only_pairs_have_a_second_task(other_shards: Path) -> None:
    single = other_shards.name == "single"
    shards, order = raw_shards(other_shards), order_of(other_shards)
    read = read_epochs(other_shards, (2, 3))
    assert [sample for _, sample in read] == [shards[shard][row] for shard, row in order.take(0, len(read)).tolist()]
    assert {sample.is_next for _, sample in read} == ({NO_PAIR} if single else {0, 1})
    steps = read_ranks(other_shards, (2, 3), 0, 48)
    assert {step.counts.pairs for step in steps} == {0 if single else 48}
    for batch in (batch for step in steps for batch in step.micro_batches):
        assert set(batch.is_next.tolist()) == ({IGNORED} if single else {0, 1})
        assert batch.segments.any() != single


def test_a_step_without_pairs_trains_the_words_alone(other_shards: Path, tiny_model: ModelConfig) -> None:
    single = other_shards.name == "single"
    model = Bert(tiny_model)
    [step] = read_ranks(other_shards, (1, 2), 0, 48)

    def loss() -> torch.Tensor:
        total = torch.zeros(())
        for batch in step.micro_batches:
            keys = token_keys(1, 0, batch.samples, batch.positions, batch.cu_seqlens)
            out = model(batch, keys)
            assert (float(out.nsp_loss.detach()) == 0) == single and not (single and int(out.nsp_correct))
            total = total + out.mlm_loss / step.counts.targets + out.nsp_loss / max(step.counts.pairs, 1)
        return total

    before = loss()
    torch.autograd.backward(before)
    head = ("pooler_weight", "pooler_bias", "nsp_weight", "nsp_bias")
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name
        assert bool(parameter.grad.any()) != (single and name in head), name
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert float(loss().detach()) < float(before.detach())


# ---- damage ------------------------------------------------------------------------------------------------


def sweep(folder: Path) -> int:
    return sum(len(batch.samples) for batch in Loader(folder, load_manifest(folder), 0, 1).sweep(64))


def test_one_flipped_bit_is_named_with_its_sample(own_shards: Path) -> None:
    assert sweep(own_shards) == order_of(own_shards).samples
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


def test_a_sample_that_is_none_is_named_though_its_checksum_fits(own_shards: Path) -> None:
    tar, beside, manifest = (own_shards / name for name in ("shard-00002.tar", "shard-00002.idx.npy", "manifest.json"))
    content, index, known = bytearray(tar.read_bytes()), np.load(beside), file_sha256(beside)
    offset, size = index[17, :2].tolist()
    content[offset + 128] ^= 64  # its number of tokens
    index[17, 4] = zlib.crc32(content[offset : offset + size])
    tar.write_bytes(content)
    np.save(beside, index)
    manifest.write_text(manifest.read_text().replace(known, file_sha256(beside)))
    with pytest.raises(TrainerError, match=r"shard-00002\.tar is damaged at sample 17: no sample: .*again$"):
        sweep(own_shards)


def test_damage_ahead_of_training_reaches_the_training_thread(own_shards: Path) -> None:
    (own_shards / "shard-00003.tar").unlink()
    steps = Loader(own_shards, load_manifest(own_shards), 0, 1).steps(order_of(own_shards), 0, 64, 1)
    with pytest.raises(TrainerError, match="shard-00003"):
        for _ in range(6):
            next(steps)


def test_all_missing_and_cut_shards_are_reported_at_once(own_shards: Path) -> None:
    assert Loader(own_shards, load_manifest(own_shards), 0, 1).problems() == []
    (own_shards / "shard-00001.tar").unlink()
    (own_shards / "shard-00003.idx.npy").unlink()
    with (own_shards / "shard-00004.tar").open("ab") as file:
        file.truncate(1000)
    [line] = Loader(own_shards, load_manifest(own_shards), 0, 1).problems()
    size = load_manifest(own_shards).shards[4].bytes
    for name in ("shard-00001.tar", "shard-00003.idx.npy", f"shard-00004.tar (1000 bytes instead of {size})"):
        assert name in line
    assert "shard-00000" not in line and "shard-00002" not in line


def test_a_shard_that_shrinks_while_it_is_open_is_named(own_shards: Path) -> None:
    loader, order = Loader(own_shards, load_manifest(own_shards), 0, 1), order_of(own_shards)
    loader.read(order, 0, 128, 1)  # opens some
    whole = {path: path.read_bytes() for path in sorted(own_shards.glob("*.tar"))}
    for path, data in whole.items():
        for size in (0, 700, len(data) // 2):
            os.truncate(path, size)
            with pytest.raises(TrainerError, match=rf"{path.name} (is truncated|has \d+ bytes)") as error:
                for position in range(0, order.samples, 64):
                    loader.read(order, position, 64, 1)
            assert "\n" not in str(error.value) and not isinstance(error.value, PassingError)
            path.write_bytes(data)  # in place: what is open sees it
    loader.read(order, 0, order.samples, 1)


@pytest.mark.parametrize("size", [0, 10_000])
def test_a_run_whose_shard_shrinks_ends_by_its_name(own_shards: Path, tmp_path: Path, size: int) -> None:
    config = write_config(tmp_path, own_shards, 100_000)
    [rank] = processes = ranks.fork(1, "trainer/__main__.py", "--config", str(config))
    wait_for(lambda: len(lines(tmp_path / "run", "step")) > 20, rank)
    os.truncate(own_shards / "shard-00001.tar", size)
    [(code, output)] = ranks.finish(processes)
    assert code == 2, output
    assert f"shard {own_shards}/shard-00001.tar is truncated: it ends before sample " in output.splitlines()[-1]


def test_loaders_let_go_of_their_files(tiny_shards: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        sweep(tiny_shards)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
