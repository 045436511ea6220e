"""Weights & Biases offline: what its library wrote to the run's folder, read back."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.helpers.ranks import family
from tests.helpers.wandb_files import messages, rows, settings, summary
from tests.test_track import begun, ended, send, steps, write
from trainer.errors import TrainerError
from trainer.track import __main__ as command
from trainer.track.about import About
from trainer.track.journal import Standing, batches
from trainer.track.sender import Sender, note
from trainer.track.wandb import Wandb


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def written(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))


def test_a_finished_run_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run", begun(), steps(1, 60))
    at = {"time": 1.7e9 + 60, "step": 60}
    heldout = {"event": "heldout", **at, "mlm_loss": 4.5}
    checkpoint = {"event": "checkpoint", "time": 1.7e9, "step": 58, "seconds": 1.5, "stall_seconds": 0.5, "bytes": 10}
    write(folder, [heldout, checkpoint], steps(61, 70), ended("failed", "no room"))
    assert send(folder, "wandb") == send(folder, "wandb") == 0
    [path] = written(folder)
    found = rows(path)
    assert [(row["_step"], row["step"], row["train/loss"]) for row in found] == [(n, n, 5.0) for n in range(1, 71)]
    assert found[59] | {"heldout/mlm_loss": 4.5, "checkpoint/step": 58, "checkpoint/bytes": 10} == found[59]
    assert not any("heldout/mlm_loss" in row for row in found[:59] + found[60:])
    config = settings(path)
    assert (config["run.name"], config["phases.0.steps"], config["phases.0.heldout"]) == ("first", 90, None)
    assert config["ran_with"] == {"run": "first", "torch": "2.12"}
    assert {"state": "failed", "reason": "no room"}.items() <= summary(path).items()
    [run] = [record.run for record in messages(path) if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name) == ("lambert", "first") and path.stem == f"run-{run.run_id}"
    axes = {m.metric.glob_name: m.metric.step_metric for m in messages(path) if m.WhichOneof("record_type") == "metric"}
    assert axes["train/*"] == axes["heldout/*"] == "step" and axes["checkpoint/*"] == "checkpoint/step"
    [exit] = [record.exit for record in messages(path) if record.WhichOneof("record_type") == "exit"]
    assert exit.exit_code == 1
    out = capsys.readouterr().out.splitlines()
    assert out == [f"{folder} (failed, step 70): wandb sync {folder}/wandb/offline-run-*-{run.run_id}"] * 2


def test_a_resumed_run_keeps_its_id_and_counts_its_repeated_steps(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", begun(), steps(1, 9, 9.0), ended("stopped"))
    assert send(folder, "wandb") == 0
    write(folder, begun(6, 1), steps(7, 12, 4.0))
    assert send(folder, "wandb") == 0
    first, second = written(folder)
    assert first.name == second.name
    assert [(row["_step"], row["step"]) for row in rows(first)] == [(n, n) for n in range(1, 10)]
    assert [(row["_step"], row["step"]) for row in rows(second)] == [(n + 3, n) for n in range(7, 13)]
    assert summary(second)["repeated_steps"] == "7-9" and summary(second)["state"] == "running"


def test_files_that_were_removed_are_written_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", begun(), steps(1, 9), ended())
    assert send(folder, "wandb") == 0
    for path in written(folder):
        path.parent.rename(tmp_path / "moved")
    assert send(folder, "wandb") == 0
    [path] = written(folder)
    assert len(rows(path)) == 9 and json.loads(note(folder, "wandb").read_text())["closed"] == "done"


@pytest.mark.parametrize("last", [9, 120])
def test_rows_that_the_library_had_in_memory_when_it_was_killed_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], last: int
) -> None:
    """It is killed before the run is closed, or before more rows."""
    monkeypatch.setattr(command, "RETRY_SECONDS", 0.05)
    folder = write(tmp_path / "run", begun(), steps(1, 9, 9.0))
    note(folder, "wandb").parent.mkdir(parents=True)
    sender = Sender(folder, "wandb")
    sender.send()
    for pid in family(os.getpid())[1:]:
        if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    write(folder, steps(10, last), ended())
    over = Event()
    over.set()
    command._follow(sender, "wandb", over, 20.0, print)
    [path] = written(folder)
    assert [(row["_step"], row["step"]) for row in rows(path)] == [(n, n) for n in range(1, last + 1)]
    [said] = capsys.readouterr().out.splitlines()
    assert said.startswith("warning: wandb ") and said.endswith("; training goes on, and what is missing is sent later")


def test_wandb_that_is_switched_off_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    folder = write(tmp_path / "run", begun(), steps(1, 9), ended())
    monkeypatch.setenv("WANDB_MODE", "disabled")
    wandb.teardown()
    assert send(folder, "wandb") == 2
    said = "trainer.track: error: wandb is switched off: set WANDB_MODE to online or offline, or run wandb enabled"
    assert capsys.readouterr().err.splitlines() == [said]
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()


# ---- online, where the server says which rows it has ---------------------------------------------------------


class Online:
    """The part of the library that is used online, with a server that has rows below ``starting_step``."""

    def __init__(self, starting_step: int) -> None:
        self.starting_step, self.rows, self.url = starting_step, list[tuple[int, int]](), "https://wandb.example/run"
        self.config, self.summary = dict[str, Any](), dict[str, Any]()

    def log(self, values: dict[str, Any], step: int) -> None:
        self.rows.append((step, values["step"]))

    def define_metric(self, name: str, step_metric: str) -> None:
        """Nothing to keep."""


@pytest.mark.parametrize(
    ("noted", "starting_step", "rows"),
    [
        (0, 0, range(1, 10)),  # nothing has arrived
        (6, 7, range(7, 10)),  # all that was noted has arrived
        (6, 4, range(4, 10)),  # less has arrived than was noted: an upload was cut off
        (6, 0, range(1, 10)),  # another server
        (6, 9, range(9, 10)),  # more has arrived than was noted: a sender was killed
        (0, 9, range(9, 10)),  # the note was lost
    ],
)
def test_a_server_gets_the_rows_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: int, starting_step: int, rows: range
) -> None:
    journal = write(tmp_path / "run", begun(), steps(1, noted)) / "metrics.jsonl"
    standing = Standing(offset=journal.stat().st_size, highest=noted) if noted else Standing()
    write(tmp_path / "run", steps(noted + 1, 9))
    server, tracker = Online(starting_step), Wandb()
    monkeypatch.setattr(tracker, "_offline", False)
    monkeypatch.setattr(tracker._library, "init", lambda **settings: server)
    standing = tracker.open(About("0", "run", tmp_path / "run", 0.0, {}), standing)
    for batch in batches(journal, standing):
        tracker.send(batch)
    assert server.rows == [(number, number) for number in rows]
    assert tracker.place == "https://wandb.example/run"


def test_a_key_that_is_missing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Wandb()

    def init(**settings: Any) -> None:
        raise tracker._library.errors.UsageError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr(tracker, "_offline", False)
    monkeypatch.setattr(tracker._library, "init", init)
    with pytest.raises(TrainerError, match="^wandb: No API key configured"):
        tracker.open(About("0", "run", tmp_path, 0.0, {}), Standing())
