"""``micro_batch: auto``: the planner's number, the same on all ranks, and kept by a run that resumes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.helpers.runs import lines, write_config
from tests.test_trainer_run import train
from trainer.checkpoint.reading import newest
from trainer.errors import TrainerError
from trainer.plan import micro_batch
from trainer.plan.__main__ import main
from trainer.plan.memory import CONTEXT_BYTES, GIB
from trainer.plan.micro_batch import Room
from trainer.ranks.world import World
from trainer.run.config import load
from trainer.run.phases import Plan, open_phases

AUTO, BATCH = "phases.0.micro_batch=auto", "phases.0.global_batch=20000"
WORLD = World(0, 2, 0, 2, torch.device("cpu"))


@pytest.fixture
def config(tiny_shards: Path, tmp_path: Path) -> Path:
    return write_config(tmp_path, tiny_shards, 7)


def opened(config: Path, monkeypatch: pytest.MonkeyPatch, *rooms: int | Room, more: Sequence[str] = ()) -> Plan:
    """The run's plan, settled on ranks whose GPUs have these bytes."""
    both = [Room(room, room) if isinstance(room, int) else room for room in rooms]
    monkeypatch.setattr(micro_batch, "gather_texts", lambda text, world: [json.dumps(room) for room in both])
    monkeypatch.setattr(micro_batch, "together", lambda action, world: action())
    monkeypatch.setattr(micro_batch, "broadcast_text", lambda text, world: text)
    return micro_batch.settle(open_phases(load(config, [AUTO, BATCH, *more]), WORLD), WORLD, WORLD.size)


def test_the_smallest_gpu_and_the_planner_decide(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = opened(config, monkeypatch, 1950 << 20, 1908 << 20)
    [phase], [data] = plan.config.phases, plan.phases
    assert "phases.0.micro_batch: auto is " in capsys.readouterr().out and data.phase is phase
    assert isinstance(phase.micro_batch, int) and 100 < phase.micro_batch < 9_000
    assert data.batch(0) == (20_000, -(-10_000 // phase.micro_batch))
    words = ["--config", str(config), "--gpus", "2", "--memory", "1908MiB", "--tflops", "100", "--set", BATCH, "--set"]
    assert main([*words, AUTO, "--json", str(tmp_path / "plan.json")]) == 0
    [planned] = json.loads((tmp_path / "plan.json").read_text())["phases"]
    assert phase.micro_batch == planned["largest_micro_batch"]["1"]
    assert planned["accumulation"] == data.batch(0)[1]


@pytest.mark.parametrize(
    ("rooms", "said"),
    [
        ((GIB // 2, 80 * GIB), "phases.0.micro_batch is auto, but not even one sequence fits into 95% of 0.50 GiB"),
        ((0, 0), "phases.0.micro_batch is auto, which needs a GPU, and this run is on CPUs: set a number"),
    ],
)
def test_no_answer_takes_one_line(
    rooms: tuple[int, int], said: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TrainerError) as error:
        opened(config, monkeypatch, *rooms)
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_the_context_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, room in ((70 * GIB, 70 * GIB + CONTEXT_BYTES), (80 * GIB, 80 * GIB)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 80 * GIB))
        assert micro_batch._room(torch.device("cuda")) == (room, 80 * GIB)
    assert micro_batch._room(torch.device("cpu")) == (0, 0)


@pytest.mark.parametrize(
    ("before", "room", "number"),
    [
        (76, 160 * GIB, 76),  # larger GPUs
        (76, 80 * GIB, 76),
        (76, Room(4 * GIB, 80 * GIB), 76),  # a process that just died still holds memory
        (76, 75 * GIB, 71),
        (76, Room(70 * GIB, 75 * GIB), 66),
        (10_000, 80 * GIB, 76),  # all that a rank had on larger GPUs
        (20_000, 10_000 * GIB, 20_000),  # more than a rank has now: 10,000
        (20_000, 9_999 * GIB, 9_499),
    ],
)
def test_a_resumed_run_lowers_its_number_only_if_it_no_longer_fits(
    before: int,
    room: int | Room,
    number: int,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A sequence takes 1 GiB here, and 5 % of the memory stays free."""
    monkeypatch.setattr(micro_batch, "_most", lambda plan, data, ranks, room: int(0.95 * room / GIB + 1e-9))
    monkeypatch.setattr(micro_batch, "stored", lambda folder: {"only": before})
    assert opened(config, monkeypatch, room).config.phases[0].micro_batch == number
    assert (f"; the {before:,} of the run's checkpoint do not fit on 2 rank(s)" in capsys.readouterr().out) == (
        number != before
    )


def test_what_the_planner_refuses_says_who_asked_it(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_only = ["engine.kernels=torch"]
    said = "^phases.0.micro_batch is auto, which asks the planner: engine.kernels is torch, but a plan knows only "
    with pytest.raises(TrainerError, match=said):
        opened(config, monkeypatch, 80 * GIB, more=torch_only)
    monkeypatch.setattr(micro_batch, "stored", lambda folder: {"only": 9})
    assert opened(config, monkeypatch, 80 * GIB, more=torch_only).config.phases[0].micro_batch == 9


def test_every_phase_without_a_number_is_reported(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = yaml.safe_load(config.read_text())
    two["phases"].append(two["phases"][0] | {"name": "next"})
    config.write_text(yaml.safe_dump(two))
    more = [AUTO.replace("0", "1"), BATCH.replace("phases.0", "phases.1")]
    with pytest.raises(TrainerError) as error:
        opened(config, monkeypatch, 0, more=more)
    said = str(error.value)
    assert "phases.0.micro_batch is auto" in said and "phases.1.micro_batch is auto" in said and "\n" not in said


@pytest.mark.slow
def test_a_run_that_resumes_keeps_its_number(config: Path, tmp_path: Path) -> None:
    """The test runs on CPUs, where no number can be found."""
    code, said = train(config, AUTO)
    assert code == 2 and "phases.0.micro_batch is auto, which needs a GPU" in said and "Traceback" not in said, said
    run = tmp_path / "run"
    shutil.rmtree(run, ignore_errors=True)
    code, said = train(config, "phases.0.micro_batch=7")
    assert code == 0, said
    code, said = train(config, AUTO, "phases.0.steps=9")
    assert code == 0 and "phases.0.micro_batch: auto is 7, as before, from the run's checkpoint" in said, said
    assert "changed since that checkpoint: phases.0.steps was 7, now 9" in said and "micro_batch was" not in said, said
    found: Any = newest(run)[0]
    assert found.record["config"]["phases"][0]["micro_batch"] == load(run / "config.yaml").phases[0].micro_batch == 7
    assert [line["step"] for line in lines(run, "step")][-1] == 9
