"""A run in fp16, some of whose steps are skipped: what it counts, and that a stop changes none of it."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path

import pytest

from tests.helpers import ranks
from tests.helpers.runs import lines, write_config
from tests.helpers.trainer_on_ranks import Aim
from trainer.engine.schedule import learning_rate
from trainer.monitor.metrics_log import read_lines
from trainer.run.config import load

pytestmark = pytest.mark.slow

STEPS, WARM_UP = 8, "phases.0.warmup_steps=3"
SKIPPED = (0, 2, 3, 9)  # attempts
SCALES = (
    [1024, 512, 512, 256] + [128] * 4 + [256] * 2 + [128] * 2
)  # halved by each of them, doubled after four good steps
NUMBERS = ("step", "applied", "loss_scale", "position", "samples", "learning_rate", "loss", "gradient_norm")


def train(folder: Path, shards: Path, *aims: Aim, sets: tuple[str, ...] = ()) -> list[int]:
    """The exit codes of two ranks."""
    folder.mkdir(exist_ok=True)
    config = write_config(
        folder,
        shards,
        STEPS,
        engine={"precision": "fp16", "initial_loss_scale": 1024.0, "loss_scale_growth_interval": 4},
        checkpoint={"every_steps": 100},
        metrics={"log_every_steps": 1},
    )
    sets += (WARM_UP, f"phases.0.heldout={shards}", "evaluation.every_steps=6", f"run.folder={folder / 'run'}")
    options = [word for one in sets for word in ("--set", one)]
    plan = json.dumps([asdict(aim) for aim in aims])
    forked = ranks.fork(
        2, "tests/helpers/fp16_on_ranks.py", json.dumps(SKIPPED), str(folder), plan, "--config", str(config), *options
    )
    ended = ranks.finish(forked)
    print(*(said for _, said in ended))
    return [code for code, _ in ended]


@pytest.fixture(scope="module")
def straight(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nobody stops."""
    folder = tmp_path_factory.mktemp("straight")
    assert train(folder, tiny_shards) == [0, 0]
    return folder


def test_a_skipped_step_moves_the_data_the_scale_and_the_dropout_alone(straight: Path) -> None:
    taken, attempts = lines(straight / "run", "step"), range(STEPS + len(SKIPPED))
    assert [line["applied"] for line in taken] == [attempt not in SKIPPED for attempt in attempts]
    assert [line["loss_scale"] for line in taken] == SCALES
    assert [line["position"] for line in taken] == [30 * (attempt + 1) for attempt in attempts]
    assert [line["samples"] for line in taken] == [30 * line["step"] for line in taken]
    [phase] = load(straight / "run.yaml", [WARM_UP]).phases
    assert [line["learning_rate"] for line in taken] == [
        learning_rate(phase, line["step"] + (not line["applied"])) for line in taken
    ]
    assert [line["step"] for line in lines(straight / "run", "heldout")] == [6, 8]
    assert [line["step"] for line in lines(straight / "run", "checkpoint")] == [STEPS]  # none of step 0
    attempted = [note["step"] for note in read_lines(straight / "samples-0.jsonl")]
    assert attempted == list(attempts)  # these key the dropout


def test_stops_after_steps_that_were_skipped_change_nothing(straight: Path, tiny_shards: Path, tmp_path: Path) -> None:
    """One stop comes a step later, while the scale is about to grow; another in an attempt that is skipped itself."""
    for attempt in (4, 9):
        assert train(tmp_path, tiny_shards, Aim(signal.SIGTERM, 1, attempt, "window")) == [75, 75]
    assert train(tmp_path, tiny_shards) == [0, 0]
    ours, theirs = ([[line[n] for n in NUMBERS] for line in lines(f / "run", "step")] for f in (tmp_path, straight))
    assert ours == theirs


def test_a_skipped_step_does_not_end_a_batch_warm_up(tiny_shards: Path, tmp_path: Path) -> None:
    """Attempts 0, 2 and 3 are skipped: four applied steps of 10 and 20 take seven attempts, before and after a stop."""
    grows = "phases.0.batch_warmup=[{steps: 1, global_batch: 10}, {steps: 3, global_batch: 20}]"
    assert train(tmp_path, tiny_shards, Aim(signal.SIGTERM, 1, 2, "window"), sets=(grows,)) == [75, 75]
    assert train(tmp_path, tiny_shards, sets=(grows,)) == [0, 0]
    taken = lines(tmp_path / "run", "step")
    assert [line["applied"] for line in taken] == [attempt not in SKIPPED for attempt in range(len(taken))]
    batches = [10] * 2 + [20] * 5 + [30] * 5
    assert [line["batch"] for line in taken] == batches
    assert [line["position"] for line in taken] == list(accumulate(batches))
