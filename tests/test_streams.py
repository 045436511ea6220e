"""Ranks that print into one log at the same time write whole lines, even if Python does not buffer, as in images."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from tests.helpers import ranks

pytestmark = pytest.mark.slow

EVALUATE = ["trainer.evaluate", "--checkpoint", "nowhere", "--heldout", "nowhere", "--train", "nowhere"]
FINETUNE = ["trainer.finetune", *"--task mrpc --model nowhere --train nowhere --dev nowhere --out nowhere".split()]


def written(*words: str) -> list[bytes]:
    """The writes of ``python -m words`` to both of its streams, one by one: on a socket, each is a message."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.setblocking(False)
    with ours, theirs:
        environ = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ranks.ROOT)}
        command, log = [sys.executable, "-m", *words], theirs.fileno()
        subprocess.run(command, env=environ, cwd="/", stdout=log, stderr=log, timeout=120, check=False)
        found = []
        while True:
            try:
                found.append(ours.recv(1 << 16))
            except BlockingIOError:
                return found


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["deploy.launch", "--nproc-per-node", "2", "--config", "nowhere"], 2),  # its own, and a rank's
        (["trainer.preflight", "--config", "nowhere"], 1),
        (EVALUATE, 1),
        (FINETUNE, 2),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_line_is_one_write(words: list[str], lines: int) -> None:
    found = written(*words)
    assert len(found) == lines, found
    assert all(one.endswith(b"\n") and one.count(b"\n") == 1 for one in found), found
