"""Opening a run's data: whatever does not fit is told before the ranks meet, all of it at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data_prep.manifest import load_manifest
from trainer.config import Config, RunConfig
from trainer.data import open_phases
from trainer.errors import TrainerError
from trainer.model import ModelConfig
from trainer.schedule import Phase
from trainer.world import World

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
    [data] = open_phases(config(tiny_model, phase(tiny_shards, heldout=str(tiny_shards))), WORLD)
    assert (data.order.sizes, data.order.seed, data.order.window) == ((64, 64, 64, 64, 43), 4, 2)
    assert (data.global_batch, data.micro_batches) == (10, 2)
    assert (data.loader.rank, data.loader.ranks) == (1, 3) and data.heldout is not None


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
    manifest = own_shards / "manifest.json"
    manifest.write_text(manifest.read_text().replace(load_manifest(own_shards).tokenizer.sha256, "0" * 64))
    if use == "train":
        phases = [phase(tiny_shards), phase(own_shards, name="b")]
    else:
        phases = [phase(tiny_shards, heldout=str(own_shards))]
    [line] = problems(tiny_model, *phases)
    assert "made with different tokenizers" in line
