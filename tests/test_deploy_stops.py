"""A script's commands when the script is stopped or killed: they are asked to stop, and have the time to save."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from deploy.demo import __main__ as demo
from deploy.launch import STOPS
from tests.helpers.ranks import ROOT
from trainer.exits import INTERRUPTED, STOPPED
from trainer.ranks import stop

LAUNCH = "commands.launch(1, Path('log')).finish()"
COMMAND = "commands.command('sh', 'rank', script='x')"
SAVE = "sleep 0.3; echo lambert: saved >> log; exit 75"
RANK = """trap '{then}' {signal}
sleep 0.2  # until the script waits
echo $$ > ready
while :; do sleep 0.05; done
"""
LAUNCHER = """trap 'echo launcher ended by SIGTERM >> log; exit 1' TERM
sh rank &
wait
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a script that runs a command; returns it once the command, or the rank, has a handler for ``number``."""
    started: list[subprocess.Popen[str]] = []

    def begin(command: str, number: signal.Signals, then: str = SAVE) -> subprocess.Popen[str]:
        (tmp_path / "rank").write_text(RANK.format(then=then, signal=number.name.removeprefix("SIG")))
        (tmp_path / "deepspeed").write_text(f"#!/bin/sh\n{LAUNCHER}")
        (tmp_path / "deepspeed").chmod(0o755)
        code = f"from pathlib import Path; from deploy import commands; commands.stop_on_signals('x'); {command}"
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        words = [sys.executable, "-c", code]
        started.append(subprocess.Popen(words, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True))
        wait_for(lambda: (tmp_path / "ready").exists() and (tmp_path / "ready").read_text() != "")
        return started[-1]

    yield begin
    with suppress(OSError):  # it has ended, as it should
        os.kill(int((tmp_path / "ready").read_text()), signal.SIGKILL)
    for script in started:
        script.kill()
        script.communicate()


def running(folder: Path) -> bool:
    """Whether the rank is still there."""
    return Path(f"/proc/{(folder / 'ready').read_text().strip()}").exists()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, STOPPED), (signal.SIGINT, INTERRUPTED)])
@pytest.mark.parametrize(("command", "asked"), [(LAUNCH, signal.SIGUSR1), (COMMAND, signal.SIGTERM)])
def test_a_stopped_script_lets_its_command_save(
    tmp_path: Path, start: Start, command: str, asked: signal.Signals, number: signal.Signals, code: int
) -> None:
    script = start(command, asked)
    script.send_signal(number)
    assert script.communicate(timeout=20)[1] == f"x: {number.name}: stopping\n"
    assert script.returncode == code
    assert (tmp_path / "log").read_text().endswith("lambert: saved\n")


def test_a_second_signal_kills_the_ranks(tmp_path: Path, start: Start) -> None:
    script = start(LAUNCH, signal.SIGUSR1, then=":")  # never reaches a step boundary
    script.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert script.poll() is None and running(tmp_path)
    script.send_signal(signal.SIGTERM)
    script.communicate(timeout=20)
    assert script.returncode == STOPPED
    wait_for(lambda: not running(tmp_path))


def test_ctrl_c_ends_the_demo_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    handlers = {number: signal.getsignal(number) for number in STOPS}
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(demo, "ROOT", tmp_path / "demo")
    monkeypatch.setattr(demo, "prepare", lambda: signal.raise_signal(signal.SIGINT))
    try:
        with pytest.raises(SystemExit) as ended:
            demo.main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert ended.value.code == INTERRUPTED and capsys.readouterr().err == "demo: SIGINT: stopping\n"


@pytest.mark.parametrize("script", ["deploy.reference", "deploy.demo"])
def test_a_rank_watches_the_script_above_its_launcher(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """So it stops if the script is killed."""
    launcher = "sh -c 'echo $$; read line; :' deepspeed; :"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(["sh", "-c", launcher, script], **pipes) as started:
        assert started.stdout is not None
        pid = int(started.stdout.readline())
        monkeypatch.setattr(os, "getppid", lambda: pid)
        assert stop._launchers_above() == [pid, started.pid]
        started.communicate("")
