"""Runs that send their metrics to trackers while they train: killed, resumed, and with a tracker that is down."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ranks
from tests.helpers.mlflow_server import MlflowServer
from tests.helpers.runs import kept_steps, lines, wait_for, write_config
from tests.helpers.wandb_files import rows, settings
from trainer.track import __main__ as command

pytestmark = pytest.mark.slow

TRACKERS = ["mlflow", "wandb"]


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowServer]:
    running = MlflowServer()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", running.address)
    for name, value in {
        **{"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_DISABLE_TELEMETRY": "true"},
        **{"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"},
    }.items():
        monkeypatch.setenv(name, value)
    yield running
    running.stop()


def train(folder: Path, shards: Path, steps: int, trackers: list[str], linger: float = 15) -> ranks.Forked:
    """Start one rank."""
    metrics = {"port": None, "log_every_steps": 1, "trackers": trackers, "linger_seconds": linger}
    [forked] = ranks.fork(
        1, "trainer/__main__.py", "--config", str(write_config(folder, shards, steps, metrics=metrics))
    )
    return forked


def stopped(forked: ranks.Forked) -> str:
    """The output of a rank that is stopped."""
    forked.send_signal(signal.SIGTERM)
    [(code, output)] = ranks.finish([forked])
    assert code == 75, output
    return output


def losses(folder: Path) -> list[tuple[int, float]]:
    """The steps that count and their losses, as the journal has them."""
    return [(record["step"], record["loss"]) for record in kept_steps(folder)]


def test_a_run_is_sent_while_it_trains_and_stays_one_through_a_kill(
    mlflow: MlflowServer, tiny_shards: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    forked = train(tmp_path, tiny_shards, 10**5, TRACKERS)
    wait_for(lambda: any(run["metrics"] for run in mlflow.runs.values()), forked)  # live
    tracked: dict[str, Any] = next(iter(mlflow.runs.values()))
    assert (tracked["status"], tracked["params"]["run.seed"]) == ("RUNNING", "5")
    wait_for(lambda: lines(run, "checkpoint") and len(lines(run, "step")) % 10, forked)
    for pid in ranks.family(forked.pid)[1:]:
        if b"trainer.track" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGTERM)  # as Slurm sends it to every process of a job
    forked.send_signal(signal.SIGKILL)
    before = lines(run, "step")[-1]["step"]
    wait_for(lambda: tracked["status"] == "KILLED" and "killed" in tracked["tags"].values())
    sent = mlflow.values(tracked, "train/loss")
    assert sent == [(record["step"], record["loss"]) for record in lines(run, "step")]

    [(code, output)] = ranks.finish([train(tmp_path, tiny_shards, last := before + 5, TRACKERS)])
    assert code == 0 and "warning" not in output and "not received" not in output, output
    assert mlflow.runs == {"run0": tracked} and (tracked["status"], tracked["tags"]["state"]) == ("FINISHED", "done")
    again = lines(run, "start")[-1]["step"]
    assert tracked["tags"]["repeated_steps"] == f"{again + 1}-{before}"
    assert mlflow.values(tracked, "train/loss")[len(sent) :] == losses(run)[again:]
    assert tracked["tags"]["changed.phases.0.steps"] == str(last)
    files = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert {row["step"]: row["train/loss"] for path in files for row in rows(path)} == dict(losses(run))
    assert [settings(path)["phases.0.steps"] for path in files if settings(path)][-1] == last


def test_a_tracker_that_is_down_changes_nothing_and_gets_the_run_later(
    mlflow: MlflowServer,
    tiny_shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{ranks.free_port()}")
    for name in ("down", "plain"):
        (tmp_path / name).mkdir()
    forked = train(tmp_path / "down", tiny_shards, 10**5, ["mlflow"], linger=1)
    wait_for(lambda: "mlflow cannot" in forked.log.read_text(), forked)
    output = stopped(forked)
    plain = train(tmp_path / "plain", tiny_shards, 10**5, [])
    wait_for(lambda: len(lines(tmp_path / "plain" / "run", "step")) > 9, plain)
    stopped(plain)
    run = tmp_path / "down" / "run"
    assert [line for line in output.splitlines() if "mlflow" in line] == [
        "lambert: warning: mlflow cannot be reached: Connection refused; training goes on, and what is missing is sent "
        "later",
        f"lambert: mlflow has not received everything; to send the rest: python -m trainer.track {run} --to mlflow",
    ]
    both = [losses(tmp_path / name / "run") for name in ("down", "plain")]
    assert all(one == other for one, other in zip(*both, strict=False)) and min(map(len, both)) > 3
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.address)
    assert command.main([str(run), "--to", "mlflow"]) == 0
    [tracked] = mlflow.runs.values()
    assert mlflow.values(tracked, "train/loss") == losses(run) and tracked["tags"]["state"] == "stopped"
    assert os.listdir(run / "trackers") == ["mlflow"] and "(stopped, step" in capsys.readouterr().out
