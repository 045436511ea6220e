"""Runs that collapse and runs that learn: what they say, and that their numbers are the same however they run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.runs import lines, write_config
from tests.test_trainer_run import train
from trainer.monitor.plateau import BLOCK, PATIENCE

pytestmark = pytest.mark.slow

STEPS = BLOCK * PATIENCE["collapsed"] + 40


def test_a_run_at_an_absurd_rate_warns_once_and_a_learning_one_never(tiny_shards: Path, tmp_path: Path) -> None:
    model = {"layers": 2}
    for name, rate, warnings in (("absurd", 0.1, 1), ("sane", 1e-3, 0)):
        (tmp_path / name).mkdir()
        config = write_config(tmp_path / name, tiny_shards, STEPS, model=model, optimizer={"name": "adam"})
        code, said = train(config, f"phases.0.learning_rate={rate}", "phases.0.warmup_steps=10", "phases.0.power=0")
        assert code == 0, said
        assert said.count("on the unigram plateau") == warnings, said
        assert [event["sign"] for event in lines(tmp_path / name / "run", "plateau")] == ["collapsed"] * warnings


def test_the_share_is_the_same_for_any_ranks_and_stage(tiny_shards: Path, tmp_path: Path) -> None:
    found = []
    for size, stage in ((1, 1), (2, 3)):
        (tmp_path / str(size)).mkdir()
        config = write_config(tmp_path / str(size), tiny_shards, 4, engine={"zero_stage": stage})
        code, said = train(config, size=size)
        assert code == 0, said
        found.append([step["token_variance"] for step in lines(tmp_path / str(size) / "run", "step")])
    assert found[0] == pytest.approx(found[1], rel=1e-4) and len(set(found[0])) == 4


def test_the_unigram_loss_is_the_entropy_of_the_shards_tokens(tiny_shards: Path, tmp_path: Path) -> None:
    code, said = train(write_config(tmp_path, tiny_shards, 1))
    assert code == 0, said
    counts = np.load(tiny_shards / "token_counts.npy")
    shares = counts[counts > 0] / counts.sum()
    [step] = lines(tmp_path / "run", "step")
    assert step["unigram_loss"] == pytest.approx(-(shares * np.log(shares)).sum(), rel=1e-2)
