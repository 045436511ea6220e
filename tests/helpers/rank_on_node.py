"""Runs the trainer on a node of its own, as torchrun would start it there; tests run it on each rank.

    python tests/helpers/rank_on_node.py NAMESPACE,NAMESPACE,… ADDRESS TRAINER-ARGUMENTS…

Rank R runs in the R-th namespace. The ranks meet at ADDRESS, which is rank 0's.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from pathlib import Path

import trainer.__main__ as program
from tests.helpers import nodes

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000  # of sched.h


def main() -> None:
    namespaces, address, *arguments = sys.argv[1:]
    enter(namespaces.split(",")[int(os.environ["RANK"])])
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": address}
    os.environ["GLOO_SOCKET_IFNAME"] = nodes.INTERFACE
    sys.argv = ["trainer", *arguments]
    program.main()


def enter(namespace: str) -> None:
    """Move this thread, the only one so far, and those it starts; there, the host name is the namespace's name."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0 or libc.unshare(CLONE_NEWUTS) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)
    socket.sethostname(namespace)


if __name__ == "__main__":
    main()
