"""The launcher of a script, with a stand-in for deepspeed; test_docs.py starts the real one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deploy import commands


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The script that takes the launcher's place, once a test has written it."""
    path = tmp_path / "bin/deepspeed"
    path.parent.mkdir()
    path.touch(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return path


def test_a_launch_prints_lamberts_lines_and_logs_all(
    stand_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in.write_text('#!/bin/sh\necho "got $*"\necho "lambert: step 1"\necho "trainer: rank 0" >&2\nexit 75\n')
    words = "--num_accelerators 2 --master_port 1234 --module trainer --config run.yaml"
    log = tmp_path / "log"
    assert commands.launch(2, log, "--config", "run.yaml", port=1234).finish() == 75
    assert capsys.readouterr().out == f"$ deepspeed {words}\nlambert: step 1\ntrainer: rank 0\n"
    assert log.read_text() == f"got {words}\nlambert: step 1\ntrainer: rank 0\n"
    assert commands.launch(1, log).finish() == 75
    assert capsys.readouterr().out.startswith("$ deepspeed --num_accelerators 1 --module trainer\n")
    assert log.read_text().count("got ") == 2


def test_a_launch_is_killed_with_its_ranks(stand_in: Path, tmp_path: Path) -> None:
    """A rank that lives would keep the pipe open, and the thread that reads it alive."""
    stand_in.write_text("#!/bin/sh\nsleep 600 &\necho lambert: started\nwait\n")
    launched = commands.launch(1, tmp_path / "log")
    launched.kill()
    launched.printer.join(60)
    assert not launched.printer.is_alive() and launched.process.returncode == -9
