"""Trackers: what is sent to each, that it is sent once, and that a run goes on whatever becomes of a tracker."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import yaml

from tests.helpers.mlflow_server import MlflowServer
from tests.helpers.ranks import ROOT
from trainer.errors import PassingError, TrainerError
from trainer.monitor.trackers import Trackers, require_packages
from trainer.run.lock import hold
from trainer.track import __main__ as command
from trainer.track.about import about, flat, without_secrets
from trainer.track.journal import Batch, Standing, _lines, batches
from trainer.track.points import Point
from trainer.track.sender import Sender, note, read_standing

Records = list[dict[str, Any]]
CONFIG = {"run": {"name": "first", "seed": 1}, "phases": [{"steps": 90, "heldout": None}], "cache": {}}
SECRET = {"run": {"name": "first"}, "phases": [{"train": "https://me:sec@ret@example.com/shards?Signature=secret"}]}


def step(number: int, loss: float = 5.0, **more: Any) -> dict[str, Any]:
    own = {"event": "step", "time": 1.7e9 + number, "step": number, "applied": True, "tokens": 300, "seconds": 0.5}
    return {**own, "loss": loss, "samples": 8 * number, **more}


def steps(first: int, last: int, loss: float = 5.0) -> Records:
    return [step(number, loss) for number in range(first, last + 1)]


def begun(at: int = 0, attempt: int = 0) -> Records:
    """The first records of an attempt that goes on from step ``at``."""
    started = {"event": "start", "time": 1.7e9, "step": at, "rolled_back": 0, "run": "first", "torch": "2.12"}
    return [{"event": "attempt", "time": 1.7e9 + attempt, "restarts": attempt}, started]


def ended(how: str = "done", reason: str = "") -> Records:
    return [{"event": "end", "time": 1.7e9 + 999, "spent": {}, "how": how, "reason": reason}]


def write(folder: Path, *parts: Records, end: str = "") -> Path:
    """Append the records to the journal of the run in ``folder``, which is created."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for part in parts for record in part) + end)
    return folder


def send(folder: Path, to: str = "mlflow", *more: str) -> int:
    return command.main([str(folder), "--to", to, *more])


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowServer]:
    """A server that the environment names."""
    running = MlflowServer()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", running.address)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    yield running
    running.stop()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


# ---- the journal ---------------------------------------------------------------------------------------------


def losses(found: list[Batch]) -> list[tuple[int, float]]:
    return [(point.step, point.values["train/loss"]) for batch in found for point in batch.points]


def read(folder: Path, standing: Standing) -> tuple[list[tuple[int, float]], Standing]:
    found = list(batches(folder / "metrics.jsonl", standing))
    return losses(found), found[-1].standing if found else standing


def test_a_journal_is_read_in_batches_and_continued_where_it_ended(tmp_path: Path) -> None:
    path = write(tmp_path / "run", begun(), steps(1, 120)) / "metrics.jsonl"
    found = list(batches(path, Standing()))
    assert [len(batch.points) for batch in found] == [50, 50, 20]
    assert found[0].facts == {"run": "first", "torch": "2.12"} and found[1].facts == {}
    for number, batch in enumerate(found):  # from wherever it was left
        assert losses(list(batches(path, batch.standing))) == losses(found[number + 1 :])
    last = found[-1].standing
    assert (last.offset, last.highest, last.taken, last.time) == (path.stat().st_size, 120, 120, 1.7e9 + 120)
    write(tmp_path / "run", ended("failed", "no room"))
    [end] = batches(path, last)
    assert (end.points, end.standing.end, end.standing.reason) == ([], "failed", "no room")
    assert list(batches(path, end.standing)) == []


def test_a_line_that_is_being_written_waits_and_a_truncated_one_is_left_out(tmp_path: Path) -> None:
    line = json.dumps(step(3))
    folder = write(tmp_path / "run", begun(), steps(1, 2), end=line[:40])
    found, standing = read(folder, Standing())
    assert [number for number, _ in found] == [1, 2]
    assert read(folder, standing) == ([], standing)
    write(folder, end=line[40:] + "\n" + line[:50] + "\n")  # the second was cut off by a kill
    write(folder, steps(4, 4), end="x" * (5 << 20) + "\n")
    write(folder, steps(5, 5))
    assert [number for number, _ in read(folder, standing)[0]] == [3, 4, 5]


def test_a_line_that_ends_while_it_is_read_comes_next_time() -> None:
    """Its second half, and the lines after it, may arrive between two reads."""

    class Growing(io.BytesIO):
        arrived = [b"one\n", b"tw", b"o\n", b"three\n", b""]

        def readline(self, size: int | None = -1, /) -> bytes:
            return self.arrived.pop(0)

    assert list(_lines(Growing(), 0)) == [(b"one\n", 4)]


@pytest.mark.parametrize("turn", ["start", "rollback"])
def test_steps_that_are_taken_again_are_sent_once_if_nothing_was_sent(tmp_path: Path, turn: str) -> None:
    back = [{"event": turn, "time": 1.7e9, "step": 60, "rolled_back": 30}]
    again = [{"event": turn, "time": 1.7e9, "step": 40, "rolled_back": 60}]
    folder = write(tmp_path / "run", begun(), steps(1, 90, 9.0), back, steps(61, 100, 8.0), again, steps(41, 110, 7.0))
    found, standing = read(folder, Standing())
    assert found == [*((n, 9.0) for n in range(1, 41)), *((n, 7.0) for n in range(41, 111))]
    assert standing.repeats == () and standing.taken == 110


def test_steps_that_were_sent_and_are_taken_again_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", begun(), steps(1, 90, 9.0))
    _, standing = read(folder, Standing())
    write(folder, begun(60, 1), steps(61, 70, 8.0), begun(65, 2), steps(66, 100, 7.0))
    found = list(batches(folder / "metrics.jsonl", standing))
    assert losses(found) == [*((n, 8.0) for n in range(61, 66)), *((n, 7.0) for n in range(66, 101))]
    assert [batch.back for batch in found] == [None, 60] and not found[0].points
    assert found[-1].standing.repeats == ((61, 90),) and found[-1].standing.taken == 130
    write(folder, begun(95, 3), steps(96, 97))
    _, later = read(folder, found[-1].standing)
    assert later.repeats == ((61, 90), (96, 100)) and later.highest == 97


def test_what_is_not_a_journal_is_one_line(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", begun(), [{"event": "step", "step": 1}])
    with pytest.raises(TrainerError, match="metrics.jsonl contains an invalid record .*: name the folder of a run"):
        read(folder, Standing())
    with pytest.raises(TrainerError, match="is shorter than when it was last sent"):
        read(folder, Standing(offset=10**6))


def test_a_run_is_described_by_its_configuration_and_its_journals_first_line(tmp_path: Path) -> None:
    first, second = write(tmp_path / "run", begun()), write(tmp_path / "other", begun(0, 1))
    found = about(first)
    assert (found.name, found.begun, len(found.id)) == ("first", 1.7e9, 16)
    settings = {"run.name": "first", "run.seed": 1, "phases.0.steps": 90, "phases.0.heldout": None, "cache": "{}"}
    assert found.settings == settings
    write(first, steps(1, 9))
    assert about(first).id == found.id != about(second).id
    (first / "config.yaml").unlink()
    assert about(first).name == "run" and about(first).settings == {}
    assert dict(flat([1, [2]])) == {"0": 1, "1.0": 2}


# ---- MLflow, on a server that answers as the real one does ---------------------------------------------------


def only(server: MlflowServer) -> dict[str, Any]:
    [run] = server.runs.values()
    return run


def test_a_finished_run_is_sent_once(tmp_path: Path, mlflow: MlflowServer, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run", begun(), steps(1, 120), ended())
    assert send(folder) == 0
    run = only(mlflow)
    assert (mlflow.experiment, run["name"], run["status"]) == ("lambert", "first", "FINISHED")
    assert (run["start"], run["end"]) == (1.7e12, 1.7e12 + 999_000)
    assert mlflow.values(run, "train/loss") == [(n, 5.0) for n in range(1, 121)]
    assert run["params"] == {
        "run.name": "first",
        "run.seed": "1",
        "phases.0.steps": "90",
        "phases.0.heldout": "null",
    } | {"cache": "{}"}
    assert {"torch": "2.12", "state": "done"}.items() <= run["tags"].items()
    sent = mlflow.batches
    assert send(folder) == 0 and mlflow.batches == sent and only(mlflow)["status"] == "FINISHED"
    first, second = capsys.readouterr().out.splitlines()
    assert first == second == f"{folder} (done, step 120): {mlflow.address}/#/experiments/7/runs/run0"


def test_a_note_that_is_lost_and_a_server_that_is_new_cost_only_time(tmp_path: Path, mlflow: MlflowServer) -> None:
    folder = write(tmp_path / "run", begun(), steps(1, 9), ended())
    assert send(folder) == 0
    note(folder, "mlflow").unlink()
    assert send(folder) == 0 and len(mlflow.values(only(mlflow), "train/loss")) == 9
    mlflow.runs.clear()
    assert send(folder) == 0 and len(mlflow.values(only(mlflow), "train/loss")) == 9


@pytest.mark.parametrize("lasts", [1, 5, 60])
def test_a_journal_that_lost_its_last_lines_is_sent_again(tmp_path: Path, mlflow: MlflowServer, lasts: int) -> None:
    """A kill does this to a run at an address. By now, the journal may be shorter or longer than what was sent."""
    folder = write(tmp_path / "run", begun(), steps(1, 9))
    assert send(folder) == 0
    journal = folder / "metrics.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:-5]))
    write(folder, begun(4, 1)[1:], steps(5, 4 + lasts, 4.0))
    assert send(folder) == 0
    assert mlflow.values(only(mlflow), "train/loss")[9:] == [(n, 4.0) for n in range(5, 5 + lasts)]


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_server_that_dies_while_it_is_sent_to_gets_the_rest_later(
    tmp_path: Path, mlflow: MlflowServer, capsys: pytest.CaptureFixture[str], after: int
) -> None:
    folder = write(tmp_path / "run", begun(), steps(1, 120), ended())
    mlflow.dies_after = after
    mlflow.broken = after == 0
    assert send(folder) == 1
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith("trainer.track: error: mlflow failed: ") and "500" in said
    mlflow.broken, mlflow.dies_after = False, 99
    assert send(folder) == 0
    assert mlflow.values(only(mlflow), "train/loss") == [(n, 5.0) for n in range(1, 121)]
    assert only(mlflow)["status"] == "FINISHED"


def test_a_resumed_run_stays_one_run_which_names_its_repeated_steps(tmp_path: Path, mlflow: MlflowServer) -> None:
    folder = write(tmp_path / "run", begun(), steps(1, 9), ended("stopped"))
    assert send(folder) == 0 and only(mlflow)["status"] == "KILLED" and only(mlflow)["tags"]["state"] == "stopped"
    write(folder, begun(6, 1), steps(7, 12, 4.0))
    changed = CONFIG | {"run": {"name": "first", "seed": 2}}
    (folder / "config.yaml").write_text(yaml.safe_dump(changed))
    assert send(folder) == 0
    run = only(mlflow)
    assert (run["status"], run["tags"]["state"], run["tags"]["repeated_steps"]) == ("RUNNING", "running", "7-9")
    assert run["params"]["run.seed"] == "1" and run["tags"]["changed.run.seed"] == "2"
    assert [value for number, value in mlflow.values(run, "train/loss") if number == 8] == [5.0, 4.0]
    write(folder, begun(12, 2))  # with the first configuration
    assert send(folder) == 0 and run["tags"]["changed.run.seed"] == "1"


def test_a_run_that_was_killed_or_failed_ends_so(tmp_path: Path, mlflow: MlflowServer) -> None:
    folder = write(tmp_path / "run", begun(), steps(1, 9))
    lock = hold(folder, 0, print)
    assert lock is not None
    assert send(folder) == 0 and only(mlflow)["status"] == "RUNNING"
    lock.close()
    assert send(folder) == 0 and only(mlflow)["status"] == "KILLED" and only(mlflow)["tags"]["state"] == "killed"
    write(folder, begun(9, 1), ended("failed", "no room\nsee above"))
    assert send(folder) == 0 and only(mlflow)["status"] == "FAILED"
    assert only(mlflow)["tags"]["reason"] == "no room\nsee above"


def test_a_login_in_an_address_is_never_shown(
    tmp_path: Path, mlflow: MlflowServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "run", begun(), steps(1, 9), ended())
    (folder / "config.yaml").write_text(yaml.safe_dump(SECRET))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.address.replace("//", "//me:secret@"))
    assert send(folder) == 0
    assert only(mlflow)["params"]["phases.0.train"] == "https://example.com/shards"
    mlflow.broken = True
    assert send(folder) == 1
    written = b"".join(path.read_bytes() for path in (folder / "trackers").rglob("*") if path.is_file())
    said = capsys.readouterr()
    assert "secret" not in said.out + said.err and b"secret" not in written
    assert without_secrets("GET s3://b/c#d failed: https://u@h/i?j=k l") == "GET s3://b/c failed: https://h/i l"


def test_an_experiment_that_was_deleted_is_one_line(
    tmp_path: Path, mlflow: MlflowServer, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow.experiment, mlflow.deleted = "lambert", True
    assert send(write(tmp_path / "run", begun(), steps(1, 9))) == 1
    said = "mlflow's experiment lambert was deleted: restore it, or set MLFLOW_EXPERIMENT_NAME to another"
    assert capsys.readouterr().err.splitlines() == [f"trainer.track: error: {said}"] and not mlflow.runs


def test_without_a_server_the_way_out_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "run", begun(), steps(1, 9), ended())
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert send(folder) == 2
    said = "trainer.track: error: MLFLOW_TRACKING_URI is not set: set it to your server, such as http://localhost:5000"
    assert capsys.readouterr().err.splitlines() == [said]


@pytest.mark.parametrize(
    ("to", "variable", "value", "said"),
    [
        ("mlflow", "MLFLOW_TRACKING_URI", "mlruns", "MLFLOW_TRACKING_URI is no address: set it to your server"),
        ("mlflow", "MLFLOW_TRACKING_URI", "ftp://u:secret@host", "mlflow failed: .*unsupported URI 'ftp://host'"),
        ("wandb", "WANDB_MODE", "of", "wandb failed: .*Input should be 'online', 'offline'"),
        ("wandb", "WANDB_PROJECT", "a/b", "wandb failed: Invalid project name 'a/b'"),
    ],
)
def test_a_setting_that_a_library_refuses_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    to: str,
    variable: str,
    value: str,
    said: str,
) -> None:
    import wandb

    folder = write(tmp_path / "run", begun(), steps(1, 9), ended())
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv(variable, value)
    assert send(folder, to) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.match(f"trainer.track: error: {said}", line)


# ---- following a run -----------------------------------------------------------------------------------------


class Unsteady:
    """A tracker that fails when told to; it keeps what it was sent."""

    place, lasting = "nowhere", True

    def __init__(self, fails: list[bool]) -> None:
        self.fails, self.points, self.states = fails, list[Point](), list[str]()

    def open(self, about: object, standing: Standing) -> Standing:
        self._maybe_fail()
        return standing

    def describe(self, about: object, facts: object) -> None:
        self._maybe_fail()

    def send(self, batch: Batch) -> None:
        self._maybe_fail()
        self.points += batch.points

    def close(self, state: str, standing: Standing) -> None:
        self._maybe_fail()
        self.states.append(state)

    def _maybe_fail(self) -> None:
        if self.fails and self.fails.pop(0):
            raise PassingError("mlflow cannot be reached: Connection refused")


def follow(
    folder: Path, fails: list[bool], monkeypatch: pytest.MonkeyPatch, patience: float = math.inf
) -> tuple[Unsteady, list[str]]:
    """Follow a run to a tracker that fails in these calls. Returns it and the lines that were printed."""
    tracker, said, over = Unsteady(fails), list[str](), Event()
    over.set()
    note(folder, "mlflow").parent.mkdir(parents=True)
    monkeypatch.setattr("trainer.track.sender.tracker", lambda name: tracker)
    monkeypatch.setattr(command, "RETRY_SECONDS", 0.01)
    command._follow(Sender(folder, "mlflow"), "mlflow", over, patience, said.append)
    return tracker, said


@pytest.mark.parametrize("fails", [[True] * 4, *([False] * works + [True] for works in range(6))])
def test_a_tracker_that_is_down_is_reported_once_and_gets_everything_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: list[bool]
) -> None:
    """It fails when the run is opened, described, at each of its three batches, and when it is closed."""
    folder = write(tmp_path / "run", begun(), steps(1, 120), ended())
    tracker, said = follow(folder, fails, monkeypatch)
    assert [point.step for point in tracker.points] == [*range(1, 121)] and tracker.states == ["done"]
    reason = "mlflow cannot be reached: Connection refused"
    assert said == [f"warning: {reason}; training goes on, and what is missing is sent later"]


def test_a_tracker_that_stays_down_is_given_up_after_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "run", begun(), steps(1, 9), ended())
    with pytest.raises(PassingError, match="Connection refused"):
        follow(folder, [True] * 1000, monkeypatch, patience=0.2)


def test_two_processes_do_not_send_the_same_run_to_the_same_tracker(
    tmp_path: Path, mlflow: MlflowServer, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "run", begun(), steps(1, 9), ended())
    lock = hold(note(folder, "mlflow").parent, 0, print)
    assert lock is not None
    assert send(folder) == 2 and send(folder, "tensorboard") == 0
    lock.close()
    said = f"trainer.track: error: another process is sending {folder} to mlflow: wait until it has ended, or end it"
    assert capsys.readouterr().err.splitlines() == [said]
    assert send(folder) == 0


def test_mistakes_cost_one_line(tmp_path: Path, mlflow: MlflowServer, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").write_text('{"event": "att')
    damaged = write(tmp_path / "run", begun())
    note(damaged, "mlflow").parent.mkdir(parents=True)
    note(damaged, "mlflow").write_text('{"offset": 1}')
    for folder, expected in {
        tmp_path / "nothing": f"no metrics.jsonl in {tmp_path / 'nothing'}: name the folder of a run",
        empty: f"{empty / 'metrics.jsonl'} is empty: try again once the run has started",
        damaged: f"{note(damaged, 'mlflow')} is damaged: remove it, and everything is sent again",
    }.items():
        assert send(folder) == 2
        assert capsys.readouterr().err.splitlines() == [f"trainer.track: error: {expected}"]
    with pytest.raises(SystemExit):
        command.main(["s3://bucket/run", "--to", "mlflow"])
    assert "s3://bucket/run is an address: copy its metrics.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "nothing").exists() and not (empty / "trackers").exists()


def test_a_package_that_is_missing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainer.monitor.trackers.find_spec", lambda name: None)
    said = "the tracker mlflow is not installed: pip install mlflow-skinny"
    with pytest.raises(TrainerError, match=f"^{said}$"):
        require_packages(["mlflow"])
    require_packages([])
    assert send(tmp_path) == 2 and said in capsys.readouterr().err


def test_a_sender_that_ends_before_its_run_does_so_quietly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It ends first when the run waits for a scrape."""
    trackers = Trackers(["tensorboard"], write(tmp_path / "run", begun(), steps(1, 9), ended()), 5.0)
    [sender] = trackers._processes.values()
    assert sender.wait(60) == 0
    trackers.wait(0.0)
    assert capfd.readouterr() == ("", "")


def test_a_sender_needs_no_torch() -> None:
    """Its process would take seconds to start and 300 MB."""
    modules = "trainer.track.__main__, trainer.track.mlflow, trainer.track.wandb, trainer.track.tensorboard"
    done = subprocess.run([sys.executable, "-c", f"import sys, {modules}; sys.exit('torch' in sys.modules)"], cwd=ROOT)
    assert done.returncode == 0


def test_a_standing_is_read_back_as_it_was_written(tmp_path: Path, mlflow: MlflowServer) -> None:
    folder = write(tmp_path / "run", begun(), steps(1, 9))
    note(folder, "mlflow").parent.mkdir(parents=True)
    sender = Sender(folder, "mlflow")
    sender.send()
    write(folder, begun(5, 1), steps(6, 7))
    sender.send()
    assert read_standing(note(folder, "mlflow")) == sender.standing
    assert replace(sender.standing, time=0.0, offset=0, tail="") == Standing(highest=7, repeats=((6, 9),))
