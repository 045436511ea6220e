"""A run's folder: one run at a time; a refused start changes nothing in it; a stop saves first."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.helpers import ranks
from tests.helpers.runs import lines, wait_for, write_config
from tests.helpers.trainer_on_ranks import Aim
from trainer.checkpoint.shared_folder import _wait_for_parts
from trainer.errors import TrainerError
from trainer.monitor.history import read_history
from trainer.run.lock import hold
from trainer.run.resume_checks import require_own_folder

pytestmark = pytest.mark.slow


def test_a_folder_is_held_by_one_and_the_next_waits_for_its_end(tmp_path: Path) -> None:
    reported: list[str] = []
    first = hold(tmp_path / "run", 0, reported.append)
    assert first is not None and not reported
    with pytest.raises(TrainerError, match=r"run is being written by process \d+ of \S+: wait until it ends, or name"):
        hold(tmp_path / "run", 0.3, reported.append)
    assert len(reported) == 1 and "waiting up to 0 s for it to end" in reported[0]
    threading.Timer(0.5, first.close).start()
    second = hold(tmp_path / "run", 20, reported.append)
    assert second is not None
    second.close()


def test_a_file_system_without_locks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    reported: list[str] = []
    monkeypatch.setattr("fcntl.flock", fail)
    assert hold(tmp_path, 0, reported.append) is None
    assert reported == [
        f"warning: {tmp_path} cannot be locked (No locks available): nothing keeps a second run out of it"
    ]


def test_a_run_whose_metrics_log_was_moved_away_keeps_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "step-00000003").mkdir()
    require_own_folder(tmp_path)
    (tmp_path / "step-00000003").rmdir()
    with pytest.raises(TrainerError, match="contains config.yaml, which no run wrote"):
        require_own_folder(tmp_path)


def test_a_save_whose_folder_is_gone_fails_instead_of_waiting_for_ever(tmp_path: Path) -> None:
    draft, failures = tmp_path / "draft", list[str]()
    draft.mkdir()

    def wait() -> None:
        try:
            _wait_for_parts(draft, 2, threading.Event())
        except TrainerError as error:
            failures.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.1)
    shutil.rmtree(draft)
    thread.join(10)
    assert failures == [f"{draft} was removed during the save: check what else writes to or cleans its folder"]


def test_the_same_command_started_twice_waits_and_is_refused_and_harms_nothing(
    tiny_shards: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, tiny_shards, 400, run={"timeout_seconds": 4}, checkpoint={"every_steps": 1})
    first = ranks.fork(2, "trainer/__main__.py", "--config", str(config))
    wait_for(lambda: len(lines(tmp_path / "run", "checkpoint")) > 2, *first)
    for code, said in ranks.finish(ranks.fork(2, "trainer/__main__.py", "--config", str(config))):
        assert code == 2 and said.count("is being written by process") <= 2, said
    assert all(process.returncode is None for process in first)
    first[0].send_signal(signal.SIGTERM)
    assert [code for code, _ in ranks.finish(first)] == [75, 75]
    assert not lines(tmp_path / "run", "checkpoint_failed")


def test_a_start_that_is_refused_changes_nothing(tiny_shards: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny_shards, 3)
    command = ("trainer/__main__.py", "--config", str(config))
    [(code, said)] = ranks.finish(ranks.fork(1, *command))
    assert code == 0, said
    run = tmp_path / "run"
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file() and path.name != ".lock"}
    for change, message in (("run.resume=never", "run.resume is never"), ("run.seed=6", "seed was 5, now 6")):
        [(code, said)] = ranks.finish(ranks.fork(1, *command, "--set", change))
        assert code == 2 and message in said, said
        assert before == {p.name: p.read_bytes() for p in run.iterdir() if p.is_file() and p.name != ".lock"}
    assert json.loads((run / "ended.json").read_text())["how"] == "done" and read_history(run).end == "done"


@pytest.mark.parametrize("name", ["manifest.json", "config.yaml"])
def test_a_folder_that_is_none_of_a_runs_is_refused_and_left_alone(
    tiny_shards: Path, tmp_path: Path, name: str
) -> None:
    config = write_config(tmp_path, tiny_shards, 3)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("mine")
    [(code, said)] = ranks.finish(ranks.fork(1, "trainer/__main__.py", "--config", str(config)))
    assert code == 2 and f"run contains {name}, which no run wrote: name another folder" in said, said
    assert [path.read_text() for path in (tmp_path / "run").iterdir()] == ["mine"]


def live(folder: Path, shards: Path, steps: int, *aims: Aim) -> tuple[int, str]:
    """One start of a run of one rank that evaluates after each 4 steps."""
    folder.mkdir(exist_ok=True)
    often, each = {"every_steps": 4}, {"port": None, "log_every_steps": 1}
    path, plan = write_config(folder, shards, steps, evaluation=often, metrics=each), [aim.__dict__ for aim in aims]
    own = ("--config", str(path), "--set", f"run.folder={folder / 'run'}", "--set", f"phases.0.heldout={shards}")
    [ended] = ranks.finish(ranks.fork(1, "tests/helpers/trainer_on_ranks.py", str(folder), json.dumps(plan), *own))
    return ended


@pytest.mark.parametrize(("step", "steps"), [(4, 9), (8, 8)])
def test_a_stop_saves_first_and_who_goes_on_evaluates_the_step(
    tiny_shards: Path, tmp_path: Path, step: int, steps: int
) -> None:
    """This also holds at the end of the last phase: without its metrics the run is stopped, not done."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert live(straight, tiny_shards, steps)[0] == 0
    code, said = live(stopped, tiny_shards, steps, Aim(signal.SIGTERM, 0, step - 1, "window"))
    assert code == 75 and json.loads((stopped / "run" / "ended.json").read_text()) == {"how": "stopped", "step": step}
    assert [record["step"] for record in lines(stopped / "run", "heldout")] == list(range(4, step, 4)), said
    code, said = live(stopped, tiny_shards, steps)
    assert code == 0 and json.loads((stopped / "run" / "ended.json").read_text())["how"] == "done", said
    names = ("step", "mlm_loss", "nsp_loss")
    ours, theirs = ([[r[name] for name in names] for r in lines(f / "run", "heldout")] for f in (stopped, straight))
    assert ours == theirs and [metrics[0] for metrics in ours] == sorted({4, 8, steps})
