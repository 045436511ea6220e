"""A stop that all ranks agree on: a SIGTERM or SIGUSR1 to any of them ends the run at a step's border, the same one.

They look for it after a step, and while they wait for data that may never come.

A launcher that is gone asks for the same, since nobody is left to pass a signal on. A rank cannot agree with one that
has ended, and may wait for it in a collective, where Python runs no signal handler: a thread ends it then.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from concurrent import futures
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from data_prep.streams import say_error
from trainer.exits import LOST
from trainer.ranks.world import World, leave, say_last

PATIENCE = 2.0  # seconds for a rank to say by itself that it lost another one
POLL = 0.2  # seconds between two looks of ranks that wait for data
LAUNCHERS = {"deepspeed", "deepspeed.launcher.launch", "torchrun", "torch.distributed.run", "deploy.launch"}
LAUNCHERS |= {"mpirun", "orterun", "prterun", "orted", "prted"}  # Open MPI 4's and 5's, and theirs on other nodes
# mpirun passes SIGUSR1 on, and waits; at a SIGTERM it kills its ranks within a second
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stop:
    """Listens from its making on, which every rank does together. A second signal changes nothing, also in a save."""

    def __init__(self, world: World, every: int) -> None:
        self.world, self.every = world, every
        self.asked = False  # this rank was
        self.decided = False  # by all ranks: they end at this step's border
        self.broke_off = False  # likewise, instead of waiting for data
        others, launchers = _handles(_beside(world)), _handles(_above())
        signals, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write)  # written whatever the main thread does
        for number in SIGNALS:
            signal.signal(number, self._ask)
        threading.Thread(target=self._watch, args=(signals, others, launchers), name="stop", daemon=True).start()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def agreed(self, step: int) -> bool:
        """Whether any rank was asked to stop; looked at every ``every`` steps, by all ranks together."""
        if step % self.every == 0:
            self.decided = self.sum(self.asked) != [0]
        return self.decided

    def wait(self, task: futures.Future[Any]) -> bool:
        """Wait until ``task`` has ended on all ranks, who call it together.

        False if any rank was asked to stop before: the run ends at this border, and nothing is waited for any longer.
        Raises what this rank's task raises, as soon as it does.
        """
        while True:
            ended = futures.wait([task], POLL).done
            for one in ended:
                one.result()
            behind, asked = self.sum(not ended, self.asked)
            if not behind:
                return True
            if asked:
                self.decided = self.broke_off = True
                return False

    def sum(self, *numbers: int) -> list[int]:
        """Each of the numbers over all ranks, who call it together."""
        total = torch.tensor(numbers, dtype=torch.int64, device=self.world.device)
        dist.all_reduce(total)
        return total.tolist()

    def _watch(self, signals: int, others: list[int], launchers: list[int]) -> None:
        """Wait for a signal or a launcher's end; from then on, for the end of another rank of this node."""
        ready: list[int] = []
        while not (signals in ready and set(SIGNALS) & set(os.read(signals, 64))):
            ready = _first(signals, *launchers)
            if set(ready) & set(launchers):
                self.asked = True
                say_error(f"trainer: rank {self.world.rank}: the launcher is gone: stopping")
                break
        if not others:
            return
        _first(*others)
        time.sleep(PATIENCE)
        if not self.decided:  # after that, ranks end as they finish
            said = "lost contact with another rank, which has ended: it cannot stop at a step's border"
            say_last(f"trainer: rank {self.world.rank}: {said}")
            leave(LOST)


def _beside(world: World) -> list[int]:
    """The processes of the other ranks of this node. Every rank calls it."""
    own = torch.tensor(os.getpid(), device=world.device)
    told = [torch.empty_like(own) for _ in range(world.size)]
    dist.all_gather(told, own)
    first = world.rank - world.local_rank
    return [int(told[rank]) for rank in range(first, first + world.local_size) if rank != world.rank]


def _above() -> list[int]:
    """The launcher's processes above this one: those of ``deepspeed`` alone pass no signal on, and leave orphans."""
    found, pid = list[int](), os.getppid()
    while pid > 1:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            break  # it has just ended, or this system has no /proc
        if not any(Path(word).name in LAUNCHERS for word in words[:5]):
            break  # a shell may end before what it started
        found.append(pid)
        pid = int(status.rpartition(")")[2].split()[1])  # the name before it may hold anything
    return found


def _handles(pids: list[int]) -> list[int]:
    """A file for each process, readable from its end on; none for those that this one cannot see."""
    found = []
    for pid in pids:
        try:
            found.append(os.pidfd_open(pid))
        except (OSError, AttributeError):
            continue  # in another container, or a kernel or Python without it: the launcher's own grace must do
    return found


def _first(*files: int) -> list[int]:
    """Wait until any of the files is readable, and return those that are."""
    poll = select.poll()  # unlike select(), for any number of a file
    for file in files:
        poll.register(file, select.POLLIN)
    return [file for file, _ in poll.poll()]
