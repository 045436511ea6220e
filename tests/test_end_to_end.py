"""The whole program: shards → two ranks, killed, stopped under the real launcher, resumed → export; bad input."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from data_prep.manifest import load_manifest
from data_prep.shards import shard_name, tar_path
from tests.helpers import ranks, runs
from tests.helpers.runs import lines

pytestmark = pytest.mark.slow

STEPS = (60, 40)  # of the two phases
TIMEOUT = 240


@pytest.fixture
def config(tiny_shards: Path, tmp_path: Path) -> dict[str, Any]:
    """A run of two phases over the tiny shards; 300 samples in an epoch, so one ends inside each phase."""
    phase = {"train": str(tiny_shards), "heldout": str(tiny_shards), "sequence_length": 32, "learning_rate": 0.01}
    return {
        "run": {"name": "test", "folder": str(tmp_path / "run"), "seed": 5, "shuffle_window": 2},
        "model": {
            **{"layers": 1, "hidden": 16, "heads": 2, "intermediate": 32, "max_positions": 32},
            "vocab_size": load_manifest(tiny_shards).tokenizer.vocab_size,
        },
        "phases": [
            {**phase, "name": "first", "steps": STEPS[0], "global_batch": 30, "micro_batch": 8, "warmup_steps": 2},
            {**phase, "name": "second", "steps": STEPS[1], "global_batch": 50, "accumulation": 2},
        ],
        "checkpoint": {"every_steps": 10, "keep": 2},
        "metrics": {"port": None, "log_every_steps": 2},
    }


def write(config: dict[str, Any], folder: Path) -> Path:
    path = folder / f"{Path(config['run']['folder']).name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def launch(path: Path, *overrides: str) -> subprocess.Popen[str]:
    """The run on two ranks, as a user starts it."""
    return subprocess.Popen(
        [
            *(shutil.which("deepspeed") or Path(sys.executable).with_name("deepspeed"), "--num_accelerators", "2"),
            *("--master_port", str(ranks.free_port()), "--module", "trainer", "--config", path),
            *(part for override in overrides for part in ("--set", override)),
        ],
        cwd=ranks.ROOT,
        env={
            **os.environ,
            "PYTHONPATH": f"{ranks.ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",  # as many as forked ranks have
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(done: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not done():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)


def fork(path: Path, *overrides: str) -> list[ranks.Forked]:
    """The run on two ranks without a launcher, which takes a tenth of the time."""
    sets = (part for override in overrides for part in ("--set", override))
    return ranks.fork(2, "trainer/__main__.py", "--config", str(path), *sets)


@pytest.fixture
def killed(config: dict[str, Any], tmp_path: Path) -> Path:
    """The folder of a run whose ranks were killed right after its second checkpoint."""
    forked = fork(write(config, tmp_path))
    folder = Path(config["run"]["folder"])
    runs.wait_for(lambda: len(lines(folder, "checkpoint")) > 1, *forked)
    for rank in forked:
        rank.kill()
    ranks.finish(forked)
    return folder


def test_killed_stopped_and_resumed_is_never_killed_and_exports(
    config: dict[str, Any], killed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config["run"]["folder"] = str(tmp_path / "straight")
    straight = ranks.finish(fork(write(config, tmp_path)), TIMEOUT)
    assert [code for code, _ in straight] == [0, 0], straight
    stopped = launch(tmp_path / "run.yaml")
    wait_for(lambda: any(r["restarts"] == 1 for r in lines(killed, "step")), stopped)
    worker(stopped, 1).terminate()  # SIGTERM to one rank stops all of them
    output = stopped.communicate(timeout=TIMEOUT)[0]
    assert stopped.returncode == 75 and "lambert: stopped at step" in output, output
    ended = json.loads((killed / "ended.json").read_text())
    assert ended["how"] == "stopped" and (killed / f"step-{ended['step']:08d}" / "checkpoint.json").exists()

    resumed = ranks.finish(fork(tmp_path / "run.yaml", "run.resume=required"), TIMEOUT)
    assert [code for code, _ in resumed] == [0, 0], resumed
    assert f"at step {ended['step']}" in resumed[0][1]  # nothing was lost
    assert json.loads((killed / "ended.json").read_text())["how"] == "done"
    assert [line["how"] for line in lines(killed, "end")] == ["stopped", "done"]  # the kill left no word
    first, again, last_one = lines(killed, "start")
    assert again["rolled_back"] == max(r["step"] for r in lines(killed, "step") if r["restarts"] == 0) - again["step"]
    furthest = max(r["step"] for r in lines(killed, "step") if r["restarts"] < 2)  # of the killed one, perhaps
    assert (first["rolled_back"], last_one["step"]) == (0, ended["step"])
    assert last_one["rolled_back"] == furthest - ended["step"]

    last = f"step-{sum(STEPS):08d}"
    parts = sorted(path.name for path in (killed / last).glob("part-*"))
    assert len(parts) == 2
    for part in parts:
        ours, theirs = load_file(killed / last / part), load_file(tmp_path / "straight" / last / part)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    numbers = ("loss", "gradient_norm", "position", "phase", "learning_rate", "tokens")
    by_step = {r["step"]: [r[n] for n in numbers] for r in lines(tmp_path / "straight", "step")}
    assert len(by_step) == sum(STEPS)
    after = [r for r in lines(killed, "step") if r["restarts"] > 0]
    assert {r["restarts"] for r in after} == {1, 2}
    assert all([r[n] for n in numbers] == by_step[r["step"]] for r in after)
    assert {r["step"] for r in lines(killed, "step")} == set(by_step)

    from trainer.export import main as export
    from trainer.report import main as report

    assert export(["--checkpoint", str(killed), "--out", str(tmp_path / "bert")]) == 0
    assert "transformers finds every name" in capsys.readouterr().out
    assert report([str(killed)]) == 0
    assert (killed / "report.png").stat().st_size > 10_000


def test_a_killed_rank_ends_the_run_in_one_line_and_leaves_no_orphan(config: dict[str, Any], tmp_path: Path) -> None:
    config["phases"][0]["steps"] = 100_000
    process = launch(write(config, tmp_path))
    folder = Path(config["run"]["folder"])
    wait_for(lambda: lines(folder, "step"), process)
    worker(process, 1).kill()
    killed_at = time.monotonic()
    output = process.communicate(timeout=TIMEOUT)[0]
    assert process.returncode != 0
    assert time.monotonic() - killed_at < 30
    assert "trainer: rank 0: lost contact with another rank" in output
    assert "Traceback" not in output
    assert not [p for p in psutil.process_iter() if _is_ours(p, str(tmp_path))]
    assert not [path for path in folder.glob("step-*") if not (path / "checkpoint.json").is_file()]


def worker(process: subprocess.Popen[str], rank: int) -> psutil.Process:
    """The process of one rank below a launcher."""
    below = psutil.Process(process.pid).children(recursive=True)
    return next(p for p in below if f"--local_rank={rank}" in p.cmdline())


def _is_ours(process: psutil.Process, mark: str) -> bool:
    try:
        return any(mark in part for part in process.cmdline())
    except psutil.Error:
        return False


def run_alone(path: Path, *overrides: str) -> tuple[int, str]:
    """The run on one rank: exit code and output."""
    arguments = [part for override in overrides for part in ("--set", override)]
    [ended] = ranks.finish(ranks.fork(1, "trainer/__main__.py", "--config", str(path), *arguments), TIMEOUT)
    return ended


def refused(path: Path, *overrides: str) -> str:
    """The error of a run that must not start: exit code 2, no traceback."""
    code, output = run_alone(path, *overrides)
    assert code == 2 and "Traceback" not in output, output
    errors = [line for line in output.splitlines() if "error:" in line]
    assert len(errors) == 1, output
    return output


def test_three_mistakes_are_all_listed(config: dict[str, Any], tmp_path: Path) -> None:
    config["model"]["hiden"] = 16
    config["phases"][0]["steps"] = "many"
    config["optimizer"] = {"name": "lamp"}
    output = refused(write(config, tmp_path))
    assert "3 problems" in output
    assert "model.hiden: unknown key; did you mean hidden?" in output
    assert "phases.0.steps: expected a whole number, found str 'many'" in output
    assert "optimizer.name: 'lamp' is not one of lamb, adam" in output


def test_a_vocabulary_that_is_not_the_shards_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    output = refused(write(config, tmp_path), "model.vocab_size=50")
    assert "entries but model.vocab_size is 50" in output
    assert not Path(config["run"]["folder"]).exists()


def test_a_damaged_shard_stops_the_run_by_name(config: dict[str, Any], own_shards: Path, tmp_path: Path) -> None:
    for number in range(len(load_manifest(own_shards).shards)):
        tar = tar_path(own_shards, shard_name(number))
        data = bytearray(tar.read_bytes())
        for offset in range(700, len(data), 1024):  # inside every sample's data
            data[offset] ^= 1
        tar.write_bytes(data)
    config["phases"][0]["train"] = str(own_shards)
    output = refused(write(config, tmp_path))
    assert f"shard {own_shards}/shard-" in output and "is damaged at sample" in output


def test_a_port_in_use_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        output = refused(write(config, tmp_path), f"metrics.port={taken.getsockname()[1]}")
    assert "cannot be opened (Address already in use): set another metrics.port" in output


def test_another_model_or_run_does_not_go_on_from_a_checkpoint(
    config: dict[str, Any], killed: Path, tmp_path: Path
) -> None:
    path, before = tmp_path / "run.yaml", (killed / "config.yaml").read_bytes()
    assert "belongs to another run (model.intermediate was 32, now 48)" in refused(path, "model.intermediate=48")
    assert "model.heads was 2, now 4" in refused(path, "model.heads=4")  # of the same shapes
    assert "exists and run.resume is never" in refused(path, "run.resume=never")
    config["phases"].insert(0, {**config["phases"][1], "name": "new"})
    assert "phases first, in this order" in refused(write(config, tmp_path))
    assert (killed / "config.yaml").read_bytes() == before


def test_a_run_folder_that_cannot_be_is_one_line(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    assert "File exists" in refused(write(config, tmp_path), f"run.folder={tmp_path / 'taken'}")


def test_bf16_that_diverges_ends_the_run(config: dict[str, Any], tmp_path: Path) -> None:
    config["optimizer"] = {"name": "adam", "weight_decay": 10}
    config["phases"][0]["learning_rate"] = 100  # with the decay: weights a thousand times as large each step
    output = refused(write(config, tmp_path), "engine.precision=bf16", "engine.zero_stage=2")
    assert "training diverged" in output


def test_resume_required_without_a_checkpoint_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    assert "no whole checkpoint" in refused(write(config, tmp_path), "run.resume=required")
