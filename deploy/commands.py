"""Runs the commands of a script: each is printed as a user could type it, and a failure ends the script.

Each command has a process group of its own, so Ctrl-C reaches only the script, which asks the command to stop and waits
for it. If the script is killed, ranks notice it as they notice the end of a launcher (trainer/ranks/stop.py).
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

from deploy.launch import STOPS
from trainer.exits import FAILED, INTERRUPTED, STOPPED


def stop_on_signals(script: str, more: str = "") -> None:
    """Make SIGTERM, Ctrl-C and a closed terminal stop the running command and end ``script`` with one line."""

    def stop(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):  # the terminal may be gone
            print(f"{script}: {signal.Signals(number).name}: stopping{more}", file=sys.stderr)
        raise SystemExit(INTERRUPTED if number == signal.SIGINT else STOPPED)

    for number in STOPS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets SIGHUP
            signal.signal(number, stop)


def section(title: str) -> None:
    """Print the heading of a stage."""
    print(f"\n== {title}", flush=True)


def command(*arguments: object, script: str, quiet: bool = False) -> str:
    """Print a command and run it; end ``script`` if it fails. Returns its standard output if ``quiet``."""
    texts = [str(argument) for argument in arguments]
    process = _start(texts, stdout=subprocess.PIPE if quiet else None)
    try:
        out, _ = process.communicate()
    except BaseException:
        process.terminate()
        try:
            process.wait()
        finally:  # it has ended, or the user was not willing to wait
            _signal_group(process, signal.SIGKILL)
        raise
    if process.returncode != 0:
        fail(script, f"{texts[2]} ended with code {process.returncode}; see the line above", process.returncode)
    return out.decode() if quiet else ""


def fail(script: str, what: str, code: int = FAILED) -> NoReturn:
    """End ``script`` with an error line, and with the exit code of the stage that failed unless a signal killed it."""
    print(f"{script}: error: {what}", file=sys.stderr)
    raise SystemExit(code if code > 0 else FAILED)


@dataclass(frozen=True)
class Launch:
    """A run under DeepSpeed's launcher, which has its own process group, and the thread that prints its lines."""

    process: subprocess.Popen[bytes]
    printer: threading.Thread

    def kill(self) -> None:
        """Send SIGKILL to launcher and ranks, and wait for the launcher."""
        _signal_group(self.process, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Let the ranks save at the next step boundary, and wait until they have ended. If interrupted, kill them.

        SIGUSR1 asks the ranks and ends DeepSpeed's launcher, which would kill them 30 s after a SIGTERM.
        """
        _signal_group(self.process, signal.SIGUSR1)
        try:
            self.printer.join()  # ends when no process holds the pipe any more
        finally:
            self.kill()

    def finish(self) -> int:
        """Wait for the end and return the exit code. If interrupted, stop the ranks first."""
        try:
            code = self.process.wait()
            self.printer.join(timeout=10)
        except BaseException:
            self.stop()
            raise
        return code


def launch(ranks: int, log: Path, *arguments: object, port: int | None = None) -> Launch:
    """Start ``trainer`` with some ranks on this machine. Prints Lambert's own lines; all lines go to ``log``.

    ``port``: where the ranks meet; None: at DeepSpeed's default.
    """
    place = () if port is None else ("--master_port", port)
    own = ("--num_accelerators", ranks, *place, "--module", "trainer", *arguments)
    texts = ["deepspeed", *(str(argument) for argument in own)]
    process = _start(texts, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    printer = threading.Thread(target=_show, args=(process.stdout, log), daemon=True)
    printer.start()
    return Launch(process, printer)


def _start(texts: list[str], **streams: Any) -> subprocess.Popen[bytes]:
    """Print a command and start it in its own process group."""
    print(f"$ {shlex.join(texts)}", flush=True)
    return subprocess.Popen(texts, start_new_session=True, **streams)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process and all that it started."""
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, number)


def _show(stream: IO[bytes], path: Path) -> None:
    """Print Lambert's lines from the launcher's output, and log all of them."""
    with path.open("ab") as log:
        for line in stream:
            log.write(line)
            log.flush()
            if line.startswith((b"lambert:", b"trainer:")):
                with suppress(OSError):  # the terminal may be gone
                    print(line.decode(errors="replace"), end="", flush=True)
