"""Runs a test's function on real ranks: one process each, over gloo, as a launcher would start them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What ``torchrun`` gives rank ``rank`` of ``size`` on one node."""
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
    }


def start(size: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """``python arguments`` on ``size`` ranks; their output is piped, both streams in one."""
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


def finish(processes: list[subprocess.Popen[str]], timeout: int = 240) -> list[tuple[int, str]]:
    """(exit code, output) of each rank; kills what is left when one does not end in time."""
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def run(size: int, *arguments: str, timeout: int = 240) -> None:
    """Run ``python arguments`` on ``size`` ranks and fail with their output unless all end well."""
    ended = finish(start(size, *arguments), timeout)
    assert all(code == 0 for code, _ in ended), "\n".join(output for _, output in ended)
