"""Opening a run's data: every mismatch is reported at once, before the ranks meet."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.manifest import load_manifest
from data_prep.tokenizer import load_tokenizer
from trainer.engine.schedule import Phase
from trainer.errors import TrainerError
from trainer.model.bert import ModelConfig
from trainer.ranks.world import World
from trainer.run.config import Config, RunConfig
from trainer.run.phases import open_phases

WORLD = World(1, 3, 1, 3, torch.device("cpu"))


def config(model: ModelConfig, *phases: Phase) -> Config:
    return Config(RunConfig("r", "unused", seed=4, shuffle_window=2), model, phases)


def phase(train: Path, **more: object) -> Phase:
    return replace(Phase("a", str(train), 32, 5, 1e-3, global_batch=10, micro_batch=2), **more)  # type: ignore[arg-type]


def problems(model: ModelConfig, *phases: Phase) -> list[str]:
    with pytest.raises(TrainerError) as error:
        open_phases(config(model, *phases), WORLD)
    return str(error.value).split("\n  - ")[1:]


def test_a_fitting_run_opens(tiny_shards: Path, tiny_model: ModelConfig) -> None:
    [data] = open_phases(config(tiny_model, phase(tiny_shards, heldout=str(tiny_shards))), WORLD).phases
    sizes = tuple(shard.samples for shard in load_manifest(tiny_shards).shards)
    assert (data.order.sizes, data.order.seed, data.order.window) == (sizes, 4, 2) and len(sizes) == 5
    assert data.batch(0) == (10, 2)
    assert (data.loader.rank, data.loader.ranks) == (1, 3) and data.heldout is not None
    assert data.loader.masks is data.heldout.masks is None


def test_the_plan_has_the_resolved_phases_alone(tiny_shards: Path, tiny_model: ModelConfig) -> None:
    given = phase(tiny_shards, steps=0, epochs=2.0, reference_batch=40, warmup_steps=1)
    plan = open_phases(config(tiny_model, given, replace(given, name="b", steps=7, epochs=None)), WORLD)
    assert plan.config.phases == tuple(data.phase for data in plan.phases)
    samples = sum(shard.samples for shard in load_manifest(tiny_shards).shards)
    assert [each.steps for each in plan.config.phases] == [-(-2 * samples // 10), 7]
    assert {each.learning_rate for each in plan.config.phases} == {1e-3 / 2}
    assert all(each.epochs is each.reference_batch is None for each in plan.config.phases)


def test_everything_that_does_not_fit_is_told_at_once(
    tiny_shards: Path, own_shards: Path, tiny_model: ModelConfig, tmp_path: Path
) -> None:
    (own_shards / "shard-00001.tar").unlink()
    (own_shards / "shard-00003.idx.npy").unlink()
    model = replace(tiny_model, vocab_size=50)
    found = problems(model, phase(own_shards, heldout=str(tmp_path)), phase(tiny_shards, name="b", sequence_length=16))
    assert len(found) == 5
    assert found[0].startswith("phases.0.train: its vocabulary has 120 entries but model.vocab_size is 50")
    assert found[1].startswith(f"phases.0.train: {own_shards}: missing")
    assert "shard-00001.tar, shard-00003.idx" in found[1]
    assert found[2].startswith(f"phases.0.heldout: {tmp_path} holds no manifest.json")
    assert found[3].startswith("phases.1.train: its vocabulary has 120 entries")
    assert found[4].startswith("phases.1.train: its samples are made for sequence_length 32 but the phase says 16")


@pytest.mark.parametrize("use", ["train", "heldout"])
def test_another_vocabulary_of_the_same_size_is_refused(
    tiny_shards: Path, own_shards: Path, tiny_model: ModelConfig, use: str
) -> None:
    pieces = own_shards / "tokenizer" / "tokenizer.json"
    pieces.write_text(pieces.read_text().replace('"ba"', '"ab"'))
    (own_shards / "tokenizer" / "vocab.txt").unlink()
    rewrite(own_shards, load_manifest(own_shards).tokenizer.sha256, load_tokenizer(own_shards / "tokenizer").sha256())
    if use == "train":
        phases = [phase(tiny_shards), phase(own_shards, name="b")]
    else:
        phases = [phase(tiny_shards, heldout=str(own_shards))]
    [line] = problems(tiny_model, *phases)
    assert "made with different tokenizers" in line


def rewrite(folder: Path, old: str, new: str) -> None:
    """Change entries of the manifest."""
    manifest = folder / "manifest.json"
    text = manifest.read_text()
    assert text.count(old) == 1
    manifest.write_text(text.replace(old, new))


@pytest.mark.parametrize(("train", "heldout"), [("nsp", "sop"), ("sop", "nsp"), ("single", "nsp")])
def test_held_out_pairs_of_another_task_are_refused(
    tiny_shards: Path, own_shards: Path, tiny_model: ModelConfig, train: str, heldout: str, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(own_shards, tmp_path / "heldout"))
    rewrite(own_shards, '"pairs": "nsp"', f'"pairs": "{train}"')
    rewrite(other, '"pairs": "nsp"', f'"pairs": "{heldout}"')
    [line] = problems(tiny_model, phase(own_shards, heldout=str(other)))
    assert line.startswith(f"phases.0.heldout: its pairs are {heldout} but those of the training shards are {train}")
    rewrite(other, f'"pairs": "{heldout}"', '"pairs": "single"')  # has no metric of a second task
    open_phases(config(tiny_model, phase(own_shards, heldout=str(other))), WORLD)


def test_shards_without_pairs_need_a_weight_of_the_mlm_loss(own_shards: Path, tiny_model: ModelConfig) -> None:
    open_phases(config(tiny_model, phase(own_shards, mlm_weight=0)), WORLD)
    rewrite(own_shards, '"pairs": "nsp"', '"pairs": "single"')
    assert problems(tiny_model, phase(own_shards, mlm_weight=0)) == [
        "phases.0.mlm_weight is 0, but the shards have no sentence pairs and so no other loss: raise it"
    ]
    open_phases(config(tiny_model, phase(own_shards, nsp_weight=0)), WORLD)


# ---- new masks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["token", "word", "ngram", "span"])
def test_new_masks_are_drawn_as_the_data_set_says(own_shards: Path, tiny_model: ModelConfig, unit: str) -> None:
    if unit != "token":
        rewrite(own_shards, '"masking": "token"', f'"masking": "{unit}"')
    dynamic = phase(own_shards, heldout=str(own_shards), masks="dynamic")
    [data] = open_phases(config(tiny_model, dynamic), WORLD).phases
    assert data.loader.masks is not None and data.heldout is not None and data.heldout.masks is None
    settings = load_manifest(own_shards).settings
    masking = data.loader.masks.masking
    assert (masking.unit, masking.share) == (unit, settings.masked_share)
    assert masking.most == settings.max_predictions
    never = np.flatnonzero(~data.loader.masks.vocabulary.is_ordinary).tolist()
    assert never == sorted(load_tokenizer(own_shards / "tokenizer").never)
    counts = data.loader.read(data.order, 0, 10, 2).counts  # refuses masks of another number than it knows
    assert data.loader.masks.keeps_counts == (unit == "token") and counts.targets > 0
    other = config(tiny_model, dynamic)
    [again] = open_phases(replace(other, run=replace(other.run, seed=5)), WORLD).phases
    assert again.loader.masks is not None and again.loader.masks.seed != data.loader.masks.seed


def test_new_masks_need_the_data_sets_own_tokenizer(
    tiny_shards: Path, own_shards: Path, tiny_model: ModelConfig
) -> None:
    dynamic = phase(own_shards, masks="dynamic")
    pieces = own_shards / "tokenizer" / "tokenizer.json"
    pieces.write_text(pieces.read_text().replace('"ba"', '"ab"'))
    [line] = problems(tiny_model, dynamic)
    assert "tokenizer is not the manifest's tokenizer (its sha256 differs): restore it" in line
    shutil.rmtree(own_shards / "tokenizer")
    [line] = problems(tiny_model, dynamic)
    assert line.startswith(f"phases.0.train: tokenizer folder {own_shards / 'tokenizer'} does not exist")
