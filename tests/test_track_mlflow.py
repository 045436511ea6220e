"""A real MLflow server: what it has of a run, which it is sent more than once, and while it is killed and restarted."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.helpers.ranks import free_port
from tests.test_track import begun, ended, send, steps, write
from trainer.track.sender import note

pytestmark = [
    pytest.mark.mlflow,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("alembic") is None, reason="no MLflow server here: pip install mlflow"),
]


class Running:
    """The server, with its own database."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        store = ("--backend-store-uri", f"sqlite:///{folder}/runs.db", "--default-artifact-root", str(folder))
        words = ("server", *store, "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1")
        self.command = [sys.executable, "-m", "mlflow", *words]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + 120
        while True:
            try:
                urlopen(f"{self.address}/health", timeout=5).close()
                return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < until
                time.sleep(0.2)

    def stop(self) -> None:
        """Kill it with its workers."""
        subprocess.run(["pkill", "-KILL", "--session", str(self.process.pid)])
        self.process.wait()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    running = Running(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", running.address)
    yield running
    running.stop()


def only(server: Running) -> tuple[Any, list[tuple[int, float]]]:
    """The run, and its losses in the order of steps and times."""
    from mlflow import MlflowClient

    client = MlflowClient(server.address)
    experiment = client.get_experiment_by_name("lambert")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    return run, [(each.step, each.value) for each in sorted(history, key=lambda each: (each.step, each.timestamp))]


def test_a_real_server_has_each_value_once(server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run", begun(), steps(1, 120))
    assert send(folder) == 0
    run, found = only(server)
    assert (run.info.run_name, run.info.status, run.info.start_time) == ("first", "RUNNING", 1.7e12)
    assert run.data.params["phases.0.steps"] == "90" and run.data.tags["torch"] == "2.12"
    assert found == [(n, 5.0) for n in range(1, 121)]

    note(folder, "mlflow").unlink()  # everything is sent again
    write(folder, ended("failed", "no room"))
    assert send(folder) == 0
    run, found = only(server)
    assert found == [(n, 5.0) for n in range(1, 121)]
    assert (run.info.status, run.info.end_time) == ("FAILED", 1.7e12 + 999_000)

    server.stop()
    resumed = [record | {"time": record["time"] + 500} for record in steps(91, 130, 4.0)]
    write(folder, begun(90, 1), resumed, ended())
    assert send(folder) == 1
    assert capsys.readouterr().err.startswith("trainer.track: error: mlflow cannot be reached: ")
    server.start()
    assert send(folder) == 0
    run, found = only(server)
    both = [pair for n in range(91, 121) for pair in ((n, 5.0), (n, 4.0))]
    assert found == [*((n, 5.0) for n in range(1, 91)), *both, *((n, 4.0) for n in range(121, 131))]
    assert (run.info.status, run.data.tags["repeated_steps"], run.data.tags["reason"]) == ("FINISHED", "91-120", "")
