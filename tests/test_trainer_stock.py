"""The stock pipeline for other people's loops: every sample once, our masks, and the losses of our own model."""

from __future__ import annotations

import math
import pickle
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader

from data_prep.build import build
from data_prep.errors import DataError
from data_prep.manifest import load_manifest
from data_prep.masking import remask
from data_prep.settings import make_settings
from data_prep.shards import NO_PAIR, join
from data_prep.tokenizer import load_tokenizer
from kernels import backend
from tests.helpers.corpora import read_samples
from tests.helpers.file_server import Server, damage
from tests.helpers.pages import blocks
from tests.helpers.ranks import ROOT
from tests.helpers.raw_samples import Raw, order_of, raw_shards, samples_of
from trainer.convert.folder import config_of
from trainer.convert.hugging_face import to_hugging_face
from trainer.data import stock
from trainer.data.cache import CacheConfig
from trainer.data.collate import collate
from trainer.data.loader import Loader
from trainer.data.masks import dynamic_masks
from trainer.data.stock import stock_pipeline
from trainer.errors import TrainerError
from trainer.model.batch import GlobalCounts, MicroBatch
from trainer.model.bert import Bert, ModelConfig

pytestmark = pytest.mark.slow
IGNORED = -100


def raw(ids: Tensor, segments: Tensor, labels: Tensor, label: Tensor | None) -> Raw:
    """A sample of a pipeline without its padding, as `raw_shards` reads it."""
    places = (labels != IGNORED).nonzero()[:, 0].tolist()
    masks = tuple((place, int(ids[place])) for place in places)
    whole = torch.where(labels == IGNORED, ids, labels)
    split = int((segments == 0).sum())
    return Raw(tuple(whole.tolist()), split, NO_PAIR if label is None else 1 - int(label), masks)


def unpadded(batch: dict[str, Any]) -> list[Raw]:
    """The samples of a batch, padded or not."""
    ids, segments, labels = (batch[name] for name in ("input_ids", "token_type_ids", "labels"))
    if "cu_seqlens" in batch:
        lengths = batch["cu_seqlens"].diff().tolist()
        assert batch["max_seqlen"] == max(lengths)
        assert batch["position_ids"].tolist() == [place for n in lengths for place in range(n)]
        rows = list(zip(ids.split(lengths), segments.split(lengths), labels.split(lengths), strict=True))
    else:
        there = batch["attention_mask"].bool()
        assert (labels[~there] == IGNORED).all() and (segments[~there] == 0).all() and (ids[~there] == 0).all()
        rows = [(ids[i][mask], segments[i][mask], labels[i][mask]) for i, mask in enumerate(there)]
    assert all(values.dtype == torch.int64 for values in (ids, segments, labels))
    return [
        raw(*row, None if "next_sentence_label" not in batch else batch["next_sentence_label"][i])
        for i, row in enumerate(rows)
    ]


def samples(pipeline: Any) -> list[Raw]:
    return [sample for batch in pipeline for sample in unpadded(batch)]


@pytest.mark.parametrize("padded", [True, False])
def test_batches_hold_the_shards_samples_with_their_static_masks(tiny_shards: Path, padded: bool) -> None:
    batches = list(stock_pipeline(tiny_shards, 2, padded=padded, shuffle_seed=None))
    assert [sample for batch in batches for sample in unpadded(batch)] == sum(raw_shards(tiny_shards), [])
    if padded:
        longest = [int(batch["attention_mask"].sum(1).max()) for batch in batches]
        assert [batch["input_ids"].shape[1] for batch in batches] == longest and min(longest) < max(longest)


@pytest.mark.parametrize("padded", [True, False])
def test_single_samples_are_for_any_collator(tiny_shards: Path, padded: bool) -> None:
    """Padded ones all have the data set's length, so that any collator stacks them."""
    read = list(stock_pipeline(tiny_shards, padded=padded, shuffle_seed=None))
    lengths = [len(sample.ids) for sample in read_samples(tiny_shards)]
    assert [len(sample["input_ids"]) for sample in read] == ([32] * len(read) if padded else lengths)
    as_batches = [{name: value[None] for name, value in sample.items()} for sample in read]
    assert samples(as_batches) == sum(raw_shards(tiny_shards), [])


def test_new_masks_are_those_of_a_run_with_the_same_seed(tiny_shards: Path) -> None:
    manifest, order = load_manifest(tiny_shards), order_of(tiny_shards)
    masks = dynamic_masks(load_tokenizer(tiny_shards / "tokenizer"), manifest, 9)
    loader = Loader(tiny_shards, manifest, 0, 1, masks)
    ours = [samples_of([loader.read(order, epoch * order.samples, order.samples, 1)]) for epoch in (0, 1)]
    for epoch in (0, 1):
        theirs = samples(stock_pipeline(tiny_shards, 7, mask_seed=9, epochs=[epoch]))
        assert Counter(theirs) == Counter(sample for _, sample in ours[epoch])
    both = samples(stock_pipeline(tiny_shards, 7, mask_seed=9, epochs=range(2)))
    assert Counter(both) == Counter(sample for epoch in ours for _, sample in epoch)
    assert len(set(both)) > 1.9 * order.samples


def test_the_order_is_a_function_of_seed_and_epoch(tiny_shards: Path) -> None:
    stored = sum(raw_shards(tiny_shards), [])
    keys = ((1, 0), (1, 1), (2, 0))
    orders = [samples(stock_pipeline(tiny_shards, 7, shuffle_seed=seed, epochs=[epoch])) for seed, epoch in keys]
    for order in orders:
        assert order != stored and Counter(order) == Counter(stored)
    assert orders[0] == samples(stock_pipeline(tiny_shards, 7)) and len({tuple(order) for order in orders}) == 3
    moved = np.array([stored.index(sample) for sample in orders[0]])
    assert abs(np.corrcoef(moved, np.arange(len(moved)))[0, 1]) < 0.3  # all shards are mixed


@pytest.mark.parametrize(("part", "off"), [("SHUFFLED", 1), ("permutation", lambda count, *key: np.arange(count))])
def test_shards_and_samples_are_both_shuffled_again_in_each_epoch(
    tiny_shards: Path, monkeypatch: pytest.MonkeyPatch, part: str, off: Any
) -> None:
    monkeypatch.setattr(stock, part, off)  # without one of the two
    stored = sum(raw_shards(tiny_shards), [])
    first, second = (samples(stock_pipeline(tiny_shards, 7, epochs=[epoch])) for epoch in (0, 1))
    assert first != second and first != stored and second != stored and Counter(first) == Counter(stored)


@pytest.mark.parametrize("shuffle_seed", [None, 1])
def test_two_nodes_of_two_workers_read_each_sample_once(
    tiny_shards: Path, monkeypatch: pytest.MonkeyPatch, shuffle_seed: int | None
) -> None:
    read: list[list[Raw]] = []
    for node in range(2):
        monkeypatch.setenv("RANK", str(node))
        monkeypatch.setenv("WORLD_SIZE", "2")
        pipeline = pickle.loads(pickle.dumps(stock_pipeline(tiny_shards, 6, shuffle_seed=shuffle_seed)))
        read.append(samples(DataLoader(pipeline, batch_size=None, num_workers=2)))
        whole = samples(stock_pipeline(tiny_shards, 6, shuffle_seed=shuffle_seed, by_node=False))
        assert Counter(whole) == Counter(sum(raw_shards(tiny_shards), []))
    assert Counter(read[0] + read[1]) == Counter(whole) and min(map(len, read)) > 100
    assert len(set(whole)) == len(whole)


def test_workers_read_a_remote_data_set(server: Server, tiny_shards: Path, cache: Path) -> None:
    pipeline = stock_pipeline(server.address, 6, shuffle_seed=None, cache=CacheConfig(str(cache), 0))
    read = samples(DataLoader(pipeline, batch_size=None, num_workers=2))
    assert Counter(read) == Counter(sum(raw_shards(tiny_shards), [])) and set(server.tars().values()) == {1}
    assert samples(pipeline) == sum(raw_shards(tiny_shards), [])


def test_a_data_set_without_pairs_has_no_second_label(tiny_shards: Path, tmp_path: Path) -> None:
    settings = make_settings(32, samples_per_shard=64, pairs="single")
    build([tiny_shards.parent / "corpus.txt"], tiny_shards.parent / "tokenizer", tmp_path / "out", settings, 1)
    for padded in (True, False):
        batches = list(stock_pipeline(tmp_path / "out", 9, padded=padded, shuffle_seed=None))
        assert not any("next_sentence_label" in batch for batch in batches)
        assert samples(batches) == sum(raw_shards(tmp_path / "out"), [])


def test_transformers_trainer_gets_the_losses_of_our_own_model(
    tiny_shards: Path, tiny_model: ModelConfig, tmp_path: Path
) -> None:
    """Both train on the same samples, from the same weights."""
    pytest.importorskip("accelerate")
    own = replace(tiny_model, dropout=0.0, attention_dropout=0.0)
    ours = Bert(own, 3)
    theirs = transformers.BertForPreTraining(transformers.BertConfig(**config_of(own, 0)))
    theirs.load_state_dict(to_hugging_face(ours.state_dict(), own), strict=False)  # the decoder is tied to the table
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=6, per_device_train_batch_size=8, use_cpu=True, report_to=[], save_strategy="no",
        logging_steps=1, optim="sgd", learning_rate=0.5, lr_scheduler_type="constant", max_grad_norm=0.0,
        disable_tqdm=True
    )  # fmt: skip
    pipeline = stock_pipeline(tiny_shards, mask_seed=9, shuffle_seed=None)
    trainer = transformers.Trainer(theirs, arguments, train_dataset=pipeline)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    with backend.using("torch"):
        expected = [step(ours, batch, 0.5) for batch in our_batches(tiny_shards, 8, 6, mask_seed=9)]
    assert expected[0] > expected[-1] + 0.1
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def our_batches(folder: Path, size: int, count: int, mask_seed: int) -> list[MicroBatch]:
    """The first samples of a data set in micro-batches with new masks, read without webdataset."""
    numbers = np.arange(size * count)
    masks = dynamic_masks(load_tokenizer(folder / "tokenizer"), load_manifest(folder), mask_seed)
    samples = join(list(islice(read_samples(folder), len(numbers))))
    read = list(remask(samples, numbers, masks.vocabulary, masks.masking, masks.seed))
    return [collate(read[first : first + size], numbers[first : first + size]) for first in range(0, len(read), size)]


def step(model: Bert, batch: MicroBatch, rate: float) -> float:
    """Take one step of plain gradient descent, and return the loss before it."""
    loss = model(batch, None).mean(GlobalCounts(len(batch.labels), len(batch.is_next), 0, 0))
    for weight, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        weight.data -= rate * gradient
    return float(loss.detach())


# what the page's loops say, and what the test runs
SMALL = {
    "BertConfig(vocab_size=30522)": "BertConfig(**CONFIG)",
    "num_workers=4": "num_workers=2",
    "range(10)": "range(1)",
}
SMALL |= {"max_steps=1000": "max_steps=3, report_to=[], use_cpu=True, disable_tqdm=True", "lr=1e-4": "lr=1e-2"}


def test_the_loops_of_the_page_run(
    tiny_shards: Path, tiny_model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/train-128").symlink_to(tiny_shards)
    page = (ROOT / "docs/webdataset.md").read_text(encoding="utf-8")
    assert all(large in page for large in SMALL)
    loop, with_trainer = blocks(page, "python")
    assert len([line for line in loop.splitlines() if line]) == 10
    names = run(loop, {"CONFIG": config_of(tiny_model, 0)})
    untrained = math.log(tiny_model.vocab_size) + math.log(2)
    assert loss(names) < untrained - 0.3
    pytest.importorskip("accelerate")
    before = loss(names)
    assert loss(run(with_trainer, names)) != before


def run(code: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a block of the page at small size, and return its names."""
    for large, small in SMALL.items():
        code = code.replace(large, small)
    exec(compile(code, "docs/webdataset.md", "exec"), names)
    return names


def loss(names: dict[str, Any]) -> float:
    """The loss of the page's model."""
    names["model"].eval()
    with torch.no_grad():
        return float(names["model"](**names["batch"]).loss)


# ---- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["flipped", "cut", "member", "empty", "gone", "index flipped", "foreign"])
def test_damage_is_named_and_never_skipped(own_shards: Path, kind: str) -> None:
    damage(own_shards, kind)
    with pytest.raises((DataError, OSError), match="shard-00001") as error:
        samples(stock_pipeline(own_shards, 8))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("place", [0, 2 * 512, 30 * 1024 + 1, 3 * 1024 + 156])
def test_a_damaged_tar_header_is_named(own_shards: Path, place: int) -> None:
    """Otherwise the rest of the shard would be skipped silently: tarfile takes such a header for the end of the tar."""
    path = own_shards / "shard-00001.tar"
    content = bytearray(path.read_bytes())
    content[place] ^= 8
    path.write_bytes(content)
    with pytest.raises(DataError, match="shard-00001.tar: webdataset (sees|cannot read).* sample 0000000000"):
        samples(stock_pipeline(own_shards, 8))


def test_a_damaged_remote_shard_is_named(server: Server, cache: Path, no_waits: None) -> None:
    damage(server.folder, "flipped")
    with pytest.raises(TrainerError, match="shard-00001.tar: .*not the manifest's file"):
        samples(stock_pipeline(server.address, 8, cache=CacheConfig(str(cache), 0)))


def test_bad_arguments_cost_one_line(tiny_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: list[tuple[str, Any]] = [("batch_size", 0), ("batch_size", 2.5), ("shuffle_seed", 2**70)]
    wrong += [("epochs", 3), ("epochs", []), ("epochs", [-1]), ("mask_seed", -1)]
    for name, value in wrong:
        with pytest.raises(DataError, match=f"^{name} is .*: must be [^\n]*$"):
            stock_pipeline(tiny_shards, **{name: value})
    stock_pipeline(tiny_shards, np.int64(8), epochs=[np.int64(1)], mask_seed=np.int64(1))  # type: ignore[arg-type,list-item]
    with pytest.raises(DataError, match="holds no manifest.json"):
        stock_pipeline(tmp_path, 8)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(DataError, match="has 5 shards, and this worker gets none: start fewer workers or nodes"):
        next(iter(stock_pipeline(tiny_shards, 8)))
    monkeypatch.setitem(sys.modules, "webdataset", None)
    with pytest.raises(DataError, match=r'^webdataset is not installed \(.*\): pip install "webdataset>=1.0.2"$'):
        stock_pipeline(tiny_shards, 8)
