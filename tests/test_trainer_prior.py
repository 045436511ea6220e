"""The MLM decoder's first bias: the shards' word frequencies, unless a checkpoint or other weights bring their own."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers import ranks
from tests.helpers.runs import change_record, write_config
from tests.test_trainer_run import train
from trainer.checkpoint.reading import find, load_weights, model_of
from trainer.convert.folder import write_folder
from trainer.errors import TrainerError
from trainer.ranks.world import World
from trainer.run.config import load
from trainer.run.fresh import build_model
from trainer.run.phases import open_phases

CPU = World(0, 1, 0, 1, torch.device("cpu"))
NOTE = (
    "lambert: model.decoder_prior is now unigram, but this run started with zero: the new value is ignored, because it "
    "only affects a run's start\n"
)


def bias(config: Path) -> Tensor:
    """The decoder's bias before the first step."""
    return build_model(open_phases(load(config), CPU)).decoder_bias.detach()


def forget_prior(tree: dict[str, Any]) -> None:
    """Make a checkpoint's record as it was before the setting existed."""
    del tree["record"]["config"]["model"]["decoder_prior"]


def test_the_bias_starts_at_the_log_of_the_shards_own_counts(tiny_shards: Path, tmp_path: Path) -> None:
    counts = np.load(tiny_shards / "token_counts.npy") + 1.0
    found = bias(write_config(tmp_path, tiny_shards, 1))
    assert found[: len(counts)].numpy() == pytest.approx(np.log(counts / counts.sum()), rel=1e-6)
    assert not found[len(counts) :].any()
    assert not bias(write_config(tmp_path, tiny_shards, 1, model={"decoder_prior": "zero"})).any()


@pytest.mark.parametrize("prior", ["unigram", "zero"])
def test_shards_without_their_counts_are_refused_in_one_line(prior: str, own_shards: Path, tmp_path: Path) -> None:
    """Every manifest names the counts, and every run compares its loss with them, so no prior does without."""
    config = load(write_config(tmp_path, own_shards, 1, model={"decoder_prior": prior}))
    path = own_shards / "token_counts.npy"
    np.save(path, np.load(path) + 1)
    start = re.escape(f"problem(s)\n  - phases.0.train: {path}: ")
    with pytest.raises(
        TrainerError, match=start + r"not the histogram in the manifest \(its sha256 differs\): restore"
    ):
        open_phases(config, CPU)
    path.unlink()
    with pytest.raises(TrainerError, match=start + r"no histogram can be read .*: restore it, or build again$"):
        open_phases(config, CPU)


@pytest.mark.slow
def test_a_resume_keeps_the_prior_that_the_run_started_with(tiny_shards: Path, tmp_path: Path) -> None:
    """A run of an earlier version, whose default was zero, or which had no such setting, continues bit for bit."""
    own = {"checkpoint": {"every_steps": 3, "keep": 9}, "metrics": {"log_every_steps": 1}}
    config = write_config(tmp_path, tiny_shards, 6, **own)
    code, said = train(config, "model.decoder_prior=zero")
    assert code == 0, said
    run, whole = tmp_path / "run", tmp_path / "whole"
    shutil.copytree(run, whole)
    shutil.rmtree(run / "step-00000006")
    (run / "latest").write_text("step-00000003")
    change_record(run / "step-00000003", forget_prior)
    assert model_of(find(run)).decoder_prior == "zero"
    [(code, said)] = ranks.finish(ranks.fork(1, "trainer/preflight.py", "--config", str(config)))
    assert code == 0 and NOTE in said and "changed since" not in said, said
    code, said = train(config)
    assert code == 0 and said.count(NOTE) == 1 and "changed since" not in said, said
    ended, expected = find(run), load_weights(find(whole))
    assert ended.folder.name == "step-00000006" and ended.record["config"]["model"]["decoder_prior"] == "zero"
    assert [name for name, tensor in load_weights(ended).items() if not torch.equal(tensor, expected[name])] == []
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["decoder_prior"] == "zero"


@pytest.mark.slow
def test_weights_that_a_run_starts_from_keep_their_bias(tiny_shards: Path, tmp_path: Path) -> None:
    """Unless they have no MLM head: then the prior stays."""
    config = write_config(tmp_path, tiny_shards, 1)
    code, said = train(config, "model.decoder_prior=zero", "phases.0.learning_rate=1e-3")
    assert code == 0, said
    other = (f"run.folder={tmp_path / 'other'}", f"run.weights={tmp_path / 'run'}", "phases.0.learning_rate=1e-30")
    code, said = train(config, *other)
    assert code == 0, said
    trained = load_weights(find(tmp_path / "run"))
    assert trained["decoder_bias"].any()
    assert torch.equal(load_weights(find(tmp_path / "other"))["decoder_bias"], trained["decoder_bias"])

    write_folder(trained, load(config).model, tiny_shards / "tokenizer", tmp_path / "bert")
    file = tmp_path / "bert" / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name.startswith("bert.")}, file)
    bare = (f"run.folder={tmp_path / 'bare'}", f"run.weights={tmp_path / 'bert'}", "phases.0.learning_rate=1e-30")
    code, said = train(config, *bare)
    assert code == 0 and "bert has no MLM head, no NSP head" in said, said
    assert torch.equal(load_weights(find(tmp_path / "bare"))["decoder_bias"], bias(config))
