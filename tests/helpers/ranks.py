"""Runs a test's code on real ranks: one process each, over gloo, as a launcher would start them."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Protocol
from unittest.mock import patch

ROOT = Path(__file__).parent.parent.parent


class Rank(Protocol):
    """The interface of a process that the functions here need."""

    @property
    def returncode(self) -> int | None: ...

    def communicate(self, *, timeout: float) -> tuple[str, str | None]: ...

    def kill(self) -> None: ...


class Forked:
    """A rank forked from the server, with the part of ``Popen`` that tests need. Both streams go to a file."""

    def __init__(self, process: ForkServerProcess, log: Path) -> None:
        self.process, self.log = process, log

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def communicate(self, *, timeout: float) -> tuple[str, str | None]:
        """Its output, once it has ended. Raises TimeoutExpired if it does not end in time."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.log), timeout, self.log.read_text(errors="replace"))
        return self.log.read_text(errors="replace"), None

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()


def free_port() -> int:
    """A port that was free a moment ago, below the range that systems use for outgoing connections."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port := secrets.randbelow(12000) + 20000))
            except OSError:
                continue
            return port


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """The environment that ``torchrun`` gives rank ``rank`` of ``size`` on one node."""
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
    }


def start(size: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """Start ``python arguments`` on ``size`` ranks; stdout and stderr go to one pipe."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=environment(rank, size, port),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]


def fork(size: int, script: str, *arguments: str) -> list[Forked]:
    """Start ``python script arguments`` on ``size`` ranks, on CPUs, without the seconds that imports take.

    ``script`` may be "-c", with the code as the first of the arguments.
    The ranks are processes of their own; they are forked from a server that has imported everything.
    """
    port = free_port()
    return [fork_one(rank, size, port, script, *arguments) for rank in range(size)]


def fork_one(rank: int, size: int, port: int, script: str, *arguments: str, **settings: str | None) -> Forked:
    """Start one of the ranks of :func:`fork`, with its own settings in its environment; None: without that variable."""
    log = Path(tempfile.mkdtemp(dir=_logs().name)) / f"rank-{rank}.log"
    given = {**environment(rank, size, port), "CUDA_VISIBLE_DEVICES": "", **settings}
    call = ({name: value for name, value in given.items() if value is not None}, script, arguments, log)
    log.touch()
    process = server().Process(target=_become, args=call, daemon=True)
    process.start()
    return Forked(process, log)


def finish(processes: Sequence[Rank], timeout: float = 240) -> list[tuple[int, str]]:
    """(exit code, output) of each rank; kills all that are left if one does not end in time."""
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [-1 if process.returncode is None else process.returncode for process in processes]
    return list(zip(codes, outputs, strict=True))


@cache
def _logs() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ranks-")  # removed when this process ends


@cache
def server() -> ForkServerContext:
    """The context whose processes are forked from the server that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.forked_rank", "tests.helpers.ranks"])
    needed = {name: environment(0, 1, 0)[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")}  # by its imports
    with patch.dict(os.environ, needed):
        ensure_running()
    return context


def family(pid: int) -> list[int]:
    """A process and all that it and its children have started, from /proc."""
    children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [pid, *(each for found in children for child in found for each in family(int(child)))]


def _become(environ: dict[str, str], script: str, arguments: Sequence[str], log: Path) -> None:
    """Become ``python script arguments`` in ``environ``, in a forked process."""
    handle = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environ)
    if script == "-c":
        code, *arguments = arguments
        sys.argv = [script, *arguments]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        return
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
