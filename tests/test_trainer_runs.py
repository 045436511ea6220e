"""The list of runs: each run's state and numbers from its files, whatever is in them; and how a run is stopped."""

from __future__ import annotations

import json
import math
import os
import pty
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import ranks
from tests.helpers.journals import NOW, PHASE, PHASES, START, begun, invented, step, write
from tests.helpers.ranks import ROOT
from tests.helpers.runs import lines, wait_for, write_config
from trainer.monitor.history import History, read_history, skim_history
from trainer.run.folder import leave_end
from trainer.run.lock import LOCK_FILE, hold
from trainer.run.stop_request import STOP_FILE
from trainer.runs.__main__ import main
from trainer.runs.status import RunStatus, find_runs, in_order, read_config, read_status
from trainer.runs.table import LONGEST_NAME, clipped, table, text_width

# ---- the journal, skimmed ------------------------------------------------------------------------------------


def standing(history: History, steps: int) -> dict[str, Any]:
    """The part of a history that `skim_history` keeps exact, with this many of the newest steps."""
    exact = ("heldout", "checkpoints", "failed", "plateaus", "restarts", "facts", "end", "spent", "wall", "seen")
    found = {name: getattr(history, name) for name in (*exact, "rank_seconds")}
    found["steps"] = {key: column[-steps:] for key, column in history.steps.items()}
    return found | {"ranks": {key: column[-1:] for key, column in history.ranks.items()}}


def test_a_skimmed_journal_says_the_same(tmp_path: Path) -> None:
    left_out = tails = 0
    for seed in range(150):
        (tmp_path / "metrics.jsonl").write_text(invented(random.Random(seed)))
        skimmed, whole = skim_history(tmp_path, 10), read_history(tmp_path)
        gaps = np.flatnonzero(np.diff(skimmed.steps["step"]) != 1)
        tail = len(skimmed.steps["step"]) - (gaps[-1] + 1 if len(gaps) else 0)  # what a status uses: no gap
        np.testing.assert_equal(standing(skimmed, tail), standing(whole, tail), err_msg=f"seed {seed}")
        left_out, tails = left_out + len(whole.steps["step"]) - len(skimmed.steps["step"]), tails + tail
    assert left_out > 500 and tails > 1000


# ---- a run's state and numbers -------------------------------------------------------------------------------


def locked_by(folder: Path, host: str, at: float) -> None:
    """Leave the lock file of a process that has ended on ``host``, written at a Unix time."""
    (folder / LOCK_FILE).write_text(f"process 1 of {host}\n")
    os.utime(folder / LOCK_FILE, (at, at))


@pytest.mark.parametrize(
    ("end", "host", "age", "state", "reason"),
    [
        ({"how": "done", "reason": ""}, "here", 9e6, "done", ""),
        ({"how": "done", "reason": "reached mlm_loss 2.1"}, "here", 0, "reached", "reached mlm_loss 2.1"),
        ({"how": "stopped", "reason": ""}, "elsewhere", 5, "stopped", ""),
        ({"how": "failed", "reason": "the disk is full\nand more"}, None, 5, "failed", "the disk is full"),
        (None, "here", 1, "killed", ""),  # its lock is free on this machine, so it cannot run
        (None, "elsewhere", 599, "running", ""),  # its lock may be invisible here
        (None, "elsewhere", 601, "silent", "no new line in metrics.jsonl for 10 min 1 s"),
        (None, None, 599, "running", ""),
    ],
)
def test_how_a_run_stands(
    tmp_path: Path, end: dict[str, Any] | None, host: str | None, age: float, state: str, reason: str
) -> None:
    records = begun(tmp_path) + ([{"event": "end", "time": NOW, **end}] if end is not None else [])
    write(tmp_path, records)
    if host is not None:
        locked_by(tmp_path, socket.gethostname() if host == "here" else host, NOW - 30)
    status = read_status(tmp_path, NOW + age)
    assert (status.state, status.reason, status.name, status.step) == (state, reason, "first", 20)


def test_a_held_lock_means_that_a_run_runs(tmp_path: Path) -> None:
    """Until its end, after which it lingers for a scrape; and again once it was started again."""
    lock = hold(tmp_path, 0, print)
    assert lock is not None
    os.utime(tmp_path / LOCK_FILE, (NOW, NOW))
    write(tmp_path, begun(tmp_path))
    assert [read_status(tmp_path, NOW + age).state for age in (1, 601)] == ["running", "silent"]
    write(tmp_path, [*begun(tmp_path), {"event": "end", "time": NOW + 1, "how": "stopped"}])
    assert read_status(tmp_path, NOW + 2).state == "stopped"
    os.utime(tmp_path / LOCK_FILE, (NOW + 5, NOW + 5))
    assert read_status(tmp_path, NOW + 6).state == "running"
    lock.close()
    assert read_status(tmp_path, NOW + 6).state == "stopped"


def test_a_run_that_was_asked_to_stop_says_so(tmp_path: Path) -> None:
    write(tmp_path, begun(tmp_path))
    (tmp_path / STOP_FILE).touch()
    found = [read_status(tmp_path, NOW + age) for age in (1, 601)]
    silent = "no new line in metrics.jsonl for 10 min 1 s; asked to stop"
    assert [(status.state, status.reason) for status in found] == [("running", "asked to stop"), ("silent", silent)]


def test_a_checkpoint_that_a_rollback_removed_is_not_the_last(tmp_path: Path) -> None:
    saved = [{"event": "checkpoint", "time": NOW, "step": at, "seconds": 1.0} for at in (5, 10)]
    write(tmp_path, [*begun(tmp_path), *saved, {"event": "rollback", "time": NOW, "step": 5}, step(6)])
    assert read_status(tmp_path, NOW).checkpoint_step == 5


def test_a_slow_run_may_be_silent_for_longer(tmp_path: Path) -> None:
    records = [record | ({"seconds": 60.0} if record["event"] == "step" else {}) for record in begun(tmp_path)]
    write(tmp_path, records, {"phases": PHASES, "metrics": {"log_every_steps": 5}})
    assert [read_status(tmp_path, NOW + age).state for age in (1499, 1501)] == ["running", "silent"]


def test_the_numbers_of_a_run(tmp_path: Path) -> None:
    """Two attempts: an hour on two ranks, a quarter on eight, and 30 steps of the first phase."""
    spent = {"event": "time", "time": NOW - 40, "step": 20, "spent": {"productive": 3000.0, "start": 600.0}}
    heldout = {"event": "heldout", "time": NOW, "step": 20, "mlm_loss": 4.5, "nsp_loss": 0.6}
    saved = {"event": "checkpoint", "time": NOW - 60, "step": 20, "seconds": 1.0, "stall_seconds": 0.1, "bytes": 9}
    again = [{"event": "attempt", "time": NOW - 20, "restarts": 1}, {**START, "time": NOW - 15, "ranks": "8"}]
    more = [step(number, NOW - 30 + number, restarts=1) for number in range(21, 31)]
    compute = {"event": "ranks", "time": NOW, "step": 30, "parts": {}, "compute": [0.1, 0.2, 0.3], "slowest": 5}
    ended = {"event": "time", "time": NOW, "step": 30, "spent": {"productive": 900.0, "start": 0.0}}
    write(tmp_path, [*begun(tmp_path, at=NOW - 40), spent, heldout, saved, *again, *more, compute, ended])
    status = read_status(tmp_path, NOW, price=3.0)
    left = 0.5 / 8 * (70 * 8 + 100 * 16)
    wanted = {
        **{"name": "first", "folder": str(tmp_path), "state": "running", "reason": "", "phase": "short", "step": 30},
        **{"target_steps": 200, "seconds_left": pytest.approx(left), "tokens_per_second": pytest.approx(600.0)},
        **{"heldout_mlm_loss": 4.5, "heldout_nsp_loss": 0.6, "heldout_step": 20},
        **{"goodput": pytest.approx(3900 / (60 + 600)), "gpu_hours": 4.0, "cost": 12.0},
        **{"checkpoint_step": 20, "checkpoint_time": NOW - 60, "slowest_rank": 5, "slowest_ratio": pytest.approx(1.5)},
        **{"restarts": 1, "last_time": NOW},
    }
    assert asdict(status) == wanted
    [_, line] = table([status], NOW)
    cells = "first running short 30/200 2 min 15 s 4.500 600 590.9% 4.0 12.00 20, 1 min 0 s ago 5 (1.50x)"
    assert " ".join(line.split()) == f"{cells} {tmp_path}"


def test_a_cost_that_is_not_known_is_not_zero(tmp_path: Path) -> None:
    status = read_status(write(tmp_path, begun(tmp_path)), NOW, price=3.0)  # no record of time yet
    assert (status.gpu_hours, status.cost) == (None, None)


def test_the_time_left(tmp_path: Path) -> None:
    """The cases: batch warm-up, the second of two phases, and phases that end by time."""
    warm = PHASES[0] | {"batch_warmup": [{"steps": 50, "global_batch": 4}]}
    timed = {key: value for key, value in PHASES[1].items() if key != "steps"} | {"minutes": 10.0}
    for phases, at, left in (
        ([warm, PHASES[1]], 0, 0.5 / 8 * (30 * 4 + 50 * 8 + 100 * 16)),
        ([PHASES[0], timed], 0, 0.5 * 80 + 600),
        ([PHASES[0] | {"steps": 10}, PHASES[1]], 1, 0.5 / 8 * 90 * 16),
        ([timed, PHASES[0]], 0, None),
    ):
        records = [record | ({"phase": at} if record["event"] == "step" else {}) for record in begun(tmp_path)]
        status = read_status(write(tmp_path, records, {"phases": phases}), NOW)
        assert status.seconds_left == (left if left is None else pytest.approx(left)), phases
        assert (status.target_steps is None) == (timed in phases)


def test_the_speed_is_that_of_the_newest_steps_of_a_phase(tmp_path: Path) -> None:
    records = begun(tmp_path, 20)
    records += [step(20 + n, phase=1, samples=160 + 16 * n, seconds=2.0, tokens=500) for n in range(1, 6)]
    status = read_status(write(tmp_path, records, {"phases": [PHASES[0] | {"steps": 20}, PHASES[1]]}), NOW)
    assert (status.phase, status.tokens_per_second, status.seconds_left) == ("long", 250.0, 95 * 2.0)


def test_a_run_without_a_step_is_listed(tmp_path: Path) -> None:
    status = read_status(write(tmp_path, begun(tmp_path, 0)), NOW)
    assert (status.state, status.step, status.seconds_left, status.target_steps) == ("running", 0, None, 200)


@pytest.mark.parametrize("name", ["config.yaml", LOCK_FILE])
def test_a_pipe_in_a_runs_folder_is_not_waited_for(tmp_path: Path, name: str) -> None:
    run = write(tmp_path / "a", begun(tmp_path, at=NOW))
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    both = os.open(run / name, os.O_RDWR) if name == "config.yaml" else None  # somebody could write, but does not
    try:
        assert read_status(run, NOW).step == 20
    finally:
        if both is not None:
            os.close(both)


def test_a_configuration_is_not_read_through_a_link(tmp_path: Path) -> None:
    """It may lead to a file that is not its reader's business, and a page shows the configuration."""
    run = write(tmp_path / "a", begun(tmp_path))
    (run / "config.yaml").rename(tmp_path / "secret.yaml")
    (run / "config.yaml").symlink_to(tmp_path / "secret.yaml")
    assert read_config(run) == {} and read_config(write(tmp_path / "b", begun(tmp_path))) != {}


# ---- the list ------------------------------------------------------------------------------------------------


def test_runs_are_found_once_and_in_order(tmp_path: Path) -> None:
    for name, at, end in (("a", 5, "done"), ("b/deep", 9, "failed"), ("c", 1, ""), ("d", 3, "")):
        ended = [{"event": "end", "time": NOW + at, "how": end}] if end else []
        write(tmp_path / name, [*begun(tmp_path, at=NOW + at), *ended])
    tuned = write(tmp_path / "tuned", [{"event": "step", "step": 1, "loss": 1.0}])  # by trainer.finetune
    (tuned / "config.yaml").unlink()
    write(tmp_path / "a" / "step-00000100", begun(tmp_path))
    found = find_runs([tmp_path, tmp_path / "b", tmp_path / "a"])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["a", "b/deep", "c", "d"]
    listed = in_order(read_status(path, NOW + 10) for path in found)
    assert [Path(status.folder).name for status in listed] == ["d", "c", "deep", "a"]


def test_a_linked_run_is_found_under_its_own_folder_first(tmp_path: Path) -> None:
    """A link to a run elsewhere counts. Links are not followed further, or a loop or a data set would be searched."""
    top = tmp_path / "runs"
    write(top / "zero", begun(tmp_path))
    write(tmp_path / "scratch" / "big", begun(tmp_path))
    for name, target in (
        ("latest", top / "zero"),
        ("big", tmp_path / "scratch" / "big"),
        ("loop", top),
        ("gone", top / "x"),
    ):
        (top / name).symlink_to(target)
    (top / "data").symlink_to(tmp_path / "scratch")
    assert [path.name for path in find_runs([top])] == ["zero", "big"]


GOOD = {"phases": PHASES}
DAMAGED: tuple[tuple[str, list[dict[str, Any]], object, str], ...] = (  # name, journal, configuration, and its state
    ("binary", [], GOOD, "unreadable"),
    ("types", [step(1, tokens="many")], GOOD, "unreadable"),
    ("listed", [{"event": "heldout", "step": []}], GOOD, "unreadable"),
    ("huge", [step(10**300)], GOOD, "unreadable"),
    ("ranks", [{**START, "ranks": "two", "time": NOW}], GOOD, "unreadable"),
    ("nan", [*begun(Path(), 3), step(4, tokens=float("nan"), seconds=float("inf"), mlm_loss=None)], GOOD, "running"),
    ("text", begun(Path(), 3), "phases", "running"),
    ("words", begun(Path(), 3), {"phases": [PHASE | {"steps": "many"}]}, "running"),
    ("none", begun(Path(), 3), {"phases": [None]}, "running"),
    ("batch", begun(Path(), 3), {"phases": [PHASE | {"global_batch": "8", "micro_batch": 8}]}, "running"),
    ("nansteps", begun(Path(), 3), {"phases": [PHASES[0] | {"steps": math.nan}]}, "running"),
    ("every", begun(Path(), 3), GOOD | {"metrics": {"log_every_steps": math.inf}}, "running"),
    ("half", begun(Path(), 3), {"phases": [{"name": "a"}], "metrics": {"log_every_steps": None}}, "running"),
    ("phase", [*begun(Path(), 3), step(4, phase=7)], GOOD, "running"),
    (
        "lacks",
        [*begun(Path(), 3), step(4, phase=None), {"event": "ranks", "step": 4, "parts": {}, "compute": [1, 1, 1]}],
        GOOD,
        "running",
    ),
    ("zero", begun(Path(), 3, ranks="0"), {"phases": PHASES[1:]}, "running"),
    ("ends", [*begun(Path(), 3), {"event": "time", "time": math.inf, "spent": {"data": math.inf}}], GOOD, "unreadable"),
    ("back", [*begun(Path(), 3), step(4, phase=-1)], GOOD, "running"),
)


def test_a_damaged_run_takes_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It hides no other run and moves no cursor, and the data contain no NaN."""
    for name, records, config, _ in DAMAGED:
        write(tmp_path / name, records, config)
    (tmp_path / "binary" / "metrics.jsonl").write_bytes(bytes(range(256)) * 100)
    escape = write(tmp_path / "escape", begun(tmp_path, 3, run="\x1b[2Jgone"), end='{"event": "step", "st')
    (escape / "config.yaml").write_text("phases: [\x00")
    states = {name: state for name, _, _, state in DAMAGED}
    found = {Path(status.folder).name: status for status in (read_status(path, NOW) for path in find_runs([tmp_path]))}
    assert {name: status.state for name, status in found.items()} == {**states, "escape": "running"}
    assert [found[name].target_steps for name in ("text", "words", "none", "batch", "nansteps")] == [None] * 5
    assert [found[name].phase for name in ("phase", "back")] == ["7", "-1"]
    assert main([str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert not err and "\x1b" not in out and "?[2Jgone" in out
    assert all(len(re.findall(rf"/{name}$", out, re.M)) == 1 for name in found), out
    assert main([str(tmp_path), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert len(tree["runs"]) == len(found) and set(tree) == {"time", "runs"}
    names = [each.name for each in fields(RunStatus)]
    assert all(list(run) == names for run in tree["runs"])


def test_a_narrow_terminal_gets_fewer_columns(tmp_path: Path) -> None:
    runs = [RunStatus(f"run-{number}", "a/folder", "failed", "why " * 30, step=number) for number in range(3)]
    whole = table(runs, NOW)
    assert whole[0].split() == ["run", "state", "step", "folder"] and len(whole) == 7
    for width in (10, 30, 60):
        lines = table(runs, NOW, width)
        assert len(lines) == 7 and max(map(len, lines)) <= width
    assert table(runs, NOW, 29)[0].split() == ["run", "state", "step", "folder"]
    assert table(runs, NOW, 28)[0].split() == ["run", "state", "step"]


def test_names_of_any_length_and_script_keep_the_table_straight() -> None:
    """Chinese characters take two columns, an accent of its own none."""
    names = ("plain", "実験" * 30, "e\u0301" * 30, "x" * 300)
    lines = table([RunStatus(name, "a/folder", "failed", "why", step=1) for name in names], NOW, 80)
    assert {text_width(line[: line.index("failed")]) for line in lines[1:5]} == {LONGEST_NAME + 2}
    assert max(map(text_width, lines)) <= 80 and all(line.endswith(": failed: why") for line in lines[5:])
    assert [clipped("実験", width) for width in (1, 2, 3, 4)] == ["", "実", "実", "実験"]


def test_a_note_says_which_of_two_runs_of_one_name_it_is_about() -> None:
    runs = [RunStatus(name, folder, "failed", "why") for name, folder in (("a", "x"), ("a", "y"), ("b", "z"))]
    assert table(runs, NOW)[-3:] == ["x: failed: why", "y: failed: why", "b: failed: why"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere is not a folder: name the folders that contain runs"),
        (["x" * 5000], "xxx"),
        (["stop", "x" * 5000, "--below", "."], "no run xxx"),
        ([".", "--price", "-1"], "argument --price: -1 must be a number above 0"),
        ([".", "--watch"], "--watch needs a terminal: leave it out, or use --json"),
        ([".", "--watch", "--json"], "argument --json: not allowed with argument --watch"),
        (["stop", "third", "--below", "."], "no run third below .: give its folder, or --below"),
        (["stop", "first", "--below", "."], "first names 2 runs: give the folder of one: one, two"),
        (["stop", "one"], "first is not running: its state is done"),
        (["stop", "broken"], "broken is not running: its state is unreadable (broken/metrics.jsonl contains"),
        (["compare", "one"], "compare needs two or more different runs"),
        (["compare", "one", "./one"], "compare needs two or more different runs"),
        (["compare", "one", "two", "--picture", "a.pdf"], "--picture a.pdf: wanted a file whose name ends in .png"),
        (["compare", "one", "broken"], "broken/metrics.jsonl contains an invalid record"),
    ],
)
def test_a_mistake_takes_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "one", [*begun(tmp_path), {"event": "end", "time": NOW, "how": "done"}])
    write(tmp_path / "two", begun(tmp_path))
    write(tmp_path / "broken", [{**step(1), "tokens": []}])
    try:
        code = main(words)
    except SystemExit as end:
        code = int(str(end.code))
    [line] = capsys.readouterr().err.splitlines()
    assert code == 2 and line.startswith(f"trainer.runs: error: {said}"), line
    assert not list(tmp_path.rglob(STOP_FILE))


def test_no_runs_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs below {tmp_path}\n"


def test_any_name_can_be_printed_anywhere(tmp_path: Path) -> None:
    write(tmp_path / "ü", begun(tmp_path, run="über"))
    (tmp_path / os.fsdecode(b"none\xff")).mkdir()
    for folder, encoding, wanted in (
        ("ü", "ascii", "?ber "),
        (os.fsdecode(b"none\xff"), "utf-8", "no runs below none?"),
    ):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}
        command = [sys.executable, "-m", "trainer.runs", folder]
        said = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, check=True).stdout.decode()
        assert wanted in said, said


def until(terminal: int, text: str) -> str:
    """Read what a program prints on its terminal, up to ``text``."""
    said = ""
    while text not in said:
        assert select.select([terminal], [], [], 20)[0], said
        assert len(said) < 100_000, said
        said += os.read(terminal, 4096).decode()
    return said


def test_watch_draws_over_the_last_table_until_ctrl_c(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", begun(tmp_path, at=time.time()))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "trainer.runs", "--watch", str(tmp_path), "--every", "0.05"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "70", "LINES": "10"}
    watching = subprocess.Popen(command, cwd=ROOT, env=env, stdout=theirs, stderr=theirs)
    try:
        said = until(ours, " 20/200 ")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(step(21, time.time())) + "\n")
        said += until(ours, " 21/200 ")
        for number in range(9):
            shutil.copytree(folder, tmp_path / f"copy-{number}")
        said += until(ours, "4 more lines do not fit: ")
        said += until(ours, "4 more lines do not fit: ")
        watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 130
    finally:
        watching.kill()
    assert said.startswith("\x1b[2J\x1b[H") and said.count("\x1b[2J") == 1 and "Traceback" not in said
    frame = [re.sub(r"\x1b\[\w", "", line) for line in said.split("\x1b[H")[-2].splitlines()]
    assert len(frame) <= 9 and max(map(len, frame)) <= 70


# ---- compare -------------------------------------------------------------------------------------------------


def test_a_comparison_shows_only_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"run": {"name": "x", "seed": 1}, "optimizer": {"name": "lamb", "beta1": 0.9}, "phases": [PHASES[0]]}
    heldout = {"event": "heldout", "time": NOW, "step": 20, "mlm_loss": 4.25, "mlm_accuracy": 0.25}
    write(tmp_path / "a", [*begun(tmp_path, run="a_b"), heldout], config)
    write(tmp_path / "b", begun(tmp_path, run="_$b^"), config | {"optimizer": {"name": "adam", "beta1": 0.9}})
    longer = [record | ({"nsp_loss": None} if record["event"] == "step" else {}) for record in begun(tmp_path, 30)]
    write(tmp_path / "c", longer, config | {"run": {"name": "y", "seed": 2}, "phases": PHASES})
    names, picture = [str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "c")], tmp_path / "curves.png"
    assert main(["compare", *names, "--picture", str(picture)]) == 0
    blocks = [block.splitlines() for block in capsys.readouterr().out.split("\n\n")]
    assert [line.split() for line in blocks[0]] == [
        ["settings", "a_b", "_$b^", "first"],
        ["run.seed", "1", "1", "2"],
        ["optimizer.name", "lamb", "adam", "lamb"],
        ["phases.1", "-", "-", "long"],
    ]
    assert blocks[1] == ["ran with: no difference"]
    rows = {line[:21].strip(): line[21:].split() for line in blocks[2]}
    assert rows["step"] == ["20", "20", "30"] and rows["held-out MLM loss"] == ["4.250", "-", "-"]
    assert rows["training NSP loss"] == ["0.700", "0.700", "-"] and rows["held-out MLM accuracy"] == ["25.0%", "-", "-"]
    assert blocks[3] == [str(picture)] and picture.read_bytes().startswith(b"\x89PNG")


def test_runs_of_one_name_are_told_apart_by_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, begun(tmp_path))
    (tmp_path / "b" / "config.yaml").unlink()
    assert main(["compare", str(tmp_path / "a"), "b", "--below", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"no readable config.yaml in {tmp_path / 'b'}" in said and said.count(str(tmp_path / "a")) == 1


def test_a_comparison_of_runs_without_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with only NaN shows none and has nothing to draw. Labels stay short."""
    nothing = dict.fromkeys(("mlm_loss", "nsp_loss", "samples", "tokens"))
    for name in ("a", "b"):
        steps = [record | (nothing if record["event"] == "step" else {}) for record in begun(tmp_path)]
        write(tmp_path / name, [*steps, {**START, "time": NOW, "step": 20, "run": name * 300}])
    words = ["compare", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "nan" not in said and max(map(len, said.splitlines())) < 100
    assert main([*words, "--picture", str(tmp_path / "a.png")]) == 2 and not (tmp_path / "a.png").exists()
    assert (
        capsys.readouterr().err == "trainer.runs: error: none of these runs has a loss to draw: leave out --picture\n"
    )


# ---- stop ----------------------------------------------------------------------------------------------------


def start(folder: Path, shards: Path) -> list[ranks.Forked]:
    folder.mkdir(exist_ok=True)
    return ranks.fork(2, "trainer/__main__.py", "--config", str(write_config(folder, shards, 60)))


def bits(folder: Path) -> tuple[list[tuple[float, ...]], dict[str, str]]:
    """The numbers of every step as it counted, and the hashes of the last checkpoint's weights and moments."""
    steps = {line["step"]: (line["loss"], line["gradient_norm"], line["position"]) for line in lines(folder, "step")}
    newest = sorted(folder.glob("step-*"))[-1]
    return list(steps.values()), json.loads((newest / "checkpoint.json").read_text())["parts"]


def test_stop_names_the_folder_of_the_run_that_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty name, such as that of an unset variable, is not the run of the current folder."""
    folder = write(tmp_path / "runs" / "one", begun(tmp_path, at=time.time()))
    monkeypatch.chdir(folder)
    assert main(["stop", ""]) == 2 and main(["stop", "", "--below", "."]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == ["trainer.runs: error: the name of a run is empty: give its name or its folder"] * 2
    assert not (folder / STOP_FILE).exists()
    assert main(["stop", "."]) == 0 and (folder / STOP_FILE).exists()
    monkeypatch.chdir(tmp_path)
    assert main(["stop", "first"]) == 0
    said = capsys.readouterr().out.splitlines()
    asked = "asked first ({}) to stop: it will save at its next logged step and end with exit code 75"
    assert said == [asked.format("."), asked.format("runs/one")]


def test_a_run_without_a_name_has_that_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write(tmp_path / "one", [step(1)]))
    assert read_status(Path(), NOW).name == "one"


def test_a_request_that_cannot_be_removed_fails_no_finished_run(tmp_path: Path) -> None:
    (tmp_path / STOP_FILE).mkdir()
    leave_end(tmp_path, "done", 7)
    assert json.loads((tmp_path / "ended.json").read_text()) == {"how": "done", "step": 7}


@pytest.mark.slow
def test_a_run_that_was_asked_to_stop_resumes_to_equal_bits(
    tiny_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "asked" / "run"
    forked = start(run.parent, tiny_shards)
    wait_for(lambda: len(lines(run, "step")) >= 4, *forked)
    assert main(["stop", "test", "--below", str(tmp_path)]) == 0
    said = f"asked test ({run}) to stop: it will save at its next logged step and end with exit code 75\n"
    assert capsys.readouterr().out == said
    ended = ranks.finish(forked)
    assert [code for code, _ in ended] == [75, 75], ended
    last = json.loads((run / "ended.json").read_text())
    assert last["how"] == "stopped" and 4 <= last["step"] < 60
    assert f"a stop was requested: {run / STOP_FILE}" in ended[0][1] and not (run / STOP_FILE).exists()
    status = read_status(run, time.time())
    assert (status.state, status.step, status.checkpoint_step) == ("stopped", last["step"], last["step"])

    (run / STOP_FILE).touch()  # as if the run had been killed before it saw it
    ended = ranks.finish(start(run.parent, tiny_shards))
    assert [code for code, _ in ended] == [0, 0] and "resumed from" in ended[0][1], ended
    assert read_status(run, time.time()).state == "done" and main(["stop", str(run)]) == 2
    straight = ranks.finish(start(tmp_path / "straight", tiny_shards))
    assert [code for code, _ in straight] == [0, 0], straight
    assert bits(run) == bits(tmp_path / "straight" / "run")


def test_a_folder_that_cannot_be_written_takes_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, begun(tmp_path, at=time.time()))

    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("trainer.runs.stopping.request", refuse)
    assert main(["stop", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"trainer.runs: error: {tmp_path} cannot be written: Permission denied\n"


def test_the_page_names_every_key_of_the_data() -> None:
    page = (ROOT / "docs/runs.md").read_text(encoding="utf-8")
    assert [each.name for each in fields(RunStatus) if f"`{each.name}`" not in page] == []
