"""The metrics log: a line cut short by a kill or a full disk is lost, but never its neighbors or the run."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from trainer.monitor.metrics_log import MetricsLog, newest_steps, past, read_lines, tokens_per_second


def test_what_is_written_is_read_and_null_stands_for_what_is_not_finite(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    inf, nan = float("inf"), float("nan")
    log.write([{"event": "step", "step": 1, "loss": 0.1 + 0.2, "gradient_norm": inf, "note": 'ü "\n'}])
    log.write([{"event": "ranks", "compute": [1.0, nan, -inf], "parts": {"data": nan, "forward": 2.0}, "ok": True}])
    assert read_lines(tmp_path / "metrics.jsonl") == [
        {"event": "step", "step": 1, "loss": 0.1 + 0.2, "gradient_norm": None, "note": 'ü "\n'},
        {"event": "ranks", "compute": [1.0, None, None], "parts": {"data": None, "forward": 2.0}, "ok": True},
    ]


@pytest.mark.parametrize("cut", ['{"step": 1}\n{"st', '{"step": 1}\n', '{"step": 1}'])
def test_an_attempt_goes_on_after_a_line_that_a_kill_cut(tmp_path: Path, cut: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(cut)
    log = MetricsLog(path)
    log.write([{"step": 2}])
    log.write([{"step": 3}])
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]
    assert "\n\n" not in path.read_text()


def test_lines_that_are_none_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\x00\x00\x00\n7\n\xff\xfe{"step": 2}\n[{"step": 3}]\n\n{"step": 4}\n')
    assert [line["step"] for line in read_lines(path)] == [1, 4]


def test_lines_too_deep_or_too_long_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    deep, digits = b'{"a": ' * 100_000, b'{"step": ' + b"9" * 5000 + b"}"
    path.write_bytes(b'{"step": 1}\n' + deep + b"\n" + digits + b"\n" + b" " * (3 << 20) + b'\n{"step": 4}\n')
    assert [line["step"] for line in read_lines(path)] == [1, 4]
    assert past(path) == (4, 0, False)


def test_a_full_disk_costs_lines_and_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write([{"step": 1}])
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 8, unlimited[1]))
    try:
        for step in (2, 3, 4):
            log.write([{"step": step}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    log.write([{"step": 5}])
    [said] = capsys.readouterr().out.splitlines()
    assert said.startswith(f"lambert: {path}: losing lines until it can be written again: ")
    assert [line["step"] for line in read_lines(path)] == [1, 5]
    path.unlink()
    path.mkdir()
    log.write([{"step": 6}])
    assert len(capsys.readouterr().out.splitlines()) == 1  # losing lines a second time is reported again


def test_the_last_step_is_the_highest_of_all_attempts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert past(path) == (0, 0, False)
    log = MetricsLog(path)
    log.write([{"event": "step", "step": step} for step in (98, 99, 100, 101)])
    log.write(
        [{"event": "attempt", "restarts": 1}, {"event": "attempt", "restarts": 2}, {"event": "start", "step": 97}]
    )
    log.write([{"event": "checkpoint_failed", "step": 98, "reason": '"step": 5000'}, {"event": "end"}])
    with path.open("a") as file:
        file.write(json.dumps({"event": "step", "step": 1029})[:26])  # killed while it wrote: 10 is to be seen
    assert past(path) == (101, 2, False)


@pytest.mark.parametrize("event", ["start", "rollback"])
def test_the_newest_steps_are_those_that_led_to_the_last_one(tmp_path: Path, event: str) -> None:
    """Steps that were taken again may differ: before a rollback, their loss may be NaN, which is null here."""
    path = tmp_path / "metrics.jsonl"
    bad = [{"event": "step", "step": step, "mlm_loss": float("nan")} for step in (3, 4)]
    good = [{"event": "step", "step": step, "mlm_loss": 7.0} for step in range(1, 7)]
    MetricsLog(path).write([*good[:2], *bad, {"event": event, "time": 1.0, "step": 2}, *good[2:]])
    assert newest_steps(path, 10, 5) == good[:5]
    assert newest_steps(path, 3, 6) == good[3:]


def test_a_plateau_lasts_until_it_is_left(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for on in (True, False, True):
        MetricsLog(path).write([{"event": "plateau", "time": 1.0, "step": 3, "on": on, "sign": "collapsed"}])
        MetricsLog(path).write([{"event": "step", "step": 4, "on": not on}])
        assert past(path) == (4, 0, on)


def test_a_rate_needs_time() -> None:
    assert tokens_per_second({"tokens": 300, "seconds": 0.5}) == 600
    assert tokens_per_second({"tokens": 300, "seconds": 0.0}) is None
