"""Runs the commands of a script: each is printed as a user could type it, and a failure ends the script."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from trainer.exits import FAILED


def section(title: str) -> None:
    """Print the heading of a stage."""
    print(f"\n== {title}", flush=True)


def command(*arguments: object, script: str, quiet: bool = False) -> str:
    """Print a command and run it; end ``script`` if it fails. Returns its standard output if ``quiet``."""
    texts = [str(argument) for argument in arguments]
    print(f"$ {shlex.join(texts)}", flush=True)
    done = subprocess.run(texts, stdout=subprocess.PIPE if quiet else None, check=False)
    if done.returncode != 0:
        fail(script, f"{texts[2]} ended with code {done.returncode}; see the line above", done.returncode)
    return done.stdout.decode() if quiet else ""


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
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def finish(self) -> int:
        """Wait for the end and return the exit code. If interrupted, as by Ctrl-C, kill launcher and ranks."""
        try:
            code = self.process.wait()
            self.printer.join(timeout=10)
            return code
        finally:
            if self.process.poll() is None:
                self.kill()


def launch(ranks: int, log: Path, *arguments: object, port: int | None = None) -> Launch:
    """Start ``trainer`` with some ranks on this machine. Prints Lambert's own lines; all lines go to ``log``.

    ``port``: where the ranks meet; None: at DeepSpeed's default.
    """
    place = () if port is None else ("--master_port", port)
    own = ("--num_accelerators", ranks, *place, "--module", "trainer", *arguments)
    texts = ["deepspeed", *(str(argument) for argument in own)]
    print(f"$ {shlex.join(texts)}", flush=True)
    process = subprocess.Popen(texts, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    assert process.stdout is not None
    printer = threading.Thread(target=_show, args=(process.stdout, log), daemon=True)
    printer.start()
    return Launch(process, printer)


def _show(stream: IO[bytes], path: Path) -> None:
    """Print Lambert's lines from the launcher's output, and log all of them."""
    with path.open("ab") as log:
        for line in stream:
            log.write(line)
            log.flush()
            if line.startswith((b"lambert:", b"trainer:")):
                print(line.decode(errors="replace"), end="", flush=True)
