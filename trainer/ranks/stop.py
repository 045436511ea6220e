"""Stop all ranks together: a request to any of them ends the run on every rank at the same step boundary.

The request is SIGTERM, SIGUSR1, or a file that one of the ranks looks for.

Ranks check for a stop after a step, and while they wait for data that may never come.

If the launcher dies, we stop too: nobody is left to forward signals. If another rank dies, a rank cannot agree with it
and may wait for it in a collective, where Python runs no signal handlers. A thread then ends this rank.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from data_prep.streams import say_error
from trainer.exits import LOST
from trainer.ranks.world import World, leave, say_last

LOST_RANK_SECONDS = 2.0  # seconds for a rank to report on its own that it lost another one
STOP_POLL_SECONDS = 0.2  # seconds between two checks while ranks wait for data
LAUNCHERS = {"deepspeed", "deepspeed.launcher.launch", "torchrun", "torch.distributed.run", "deploy.launch"}
LAUNCHERS |= {
    "deploy.reference",
    "deploy.demo",
}  # scripts that start deepspeed's launcher in a process group of its own
LAUNCHERS |= {"mpirun", "orterun", "prterun", "orted", "prted"}  # Open MPI 4 and 5, and their daemons on other nodes
# mpirun forwards SIGUSR1 and waits; on SIGTERM it kills its ranks within a second
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stop:
    """Listens for signals once created, which all ranks do together. A second signal has no effect, even in a save.

    ``requested`` is a second way to ask this rank, looked at whenever the ranks agree.
    """

    def __init__(self, world: World, every: int, requested: Callable[[], bool] | None = None) -> None:
        self.world, self.every, self.requested = world, every, requested
        self.asked = False  # this rank was asked to stop
        self.decided = False  # all ranks agreed: they end at this step boundary
        self.broke_off = False  # they also stopped waiting for data
        others, launchers = _handles(_others_on_node(world)), _handles(_launchers_above())
        signals, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write)  # written even while the main thread is blocked
        for number in SIGNALS:
            signal.signal(number, self._ask)
        threading.Thread(target=self._watch, args=(signals, others, launchers), name="stop", daemon=True).start()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def _wanted(self) -> bool:
        if not self.asked and self.requested is not None and self.requested():
            self.asked = True  # nothing sets it to False, so no signal in between is lost
        return self.asked

    def agreed(self, step: int) -> bool:
        """Whether any rank was asked to stop. All ranks check together, every ``every`` steps."""
        if step % self.every == 0:
            self.decided = self.sum(self._wanted()) != [0]
        return self.decided

    def wait(self, task: futures.Future[Any]) -> bool:
        """Wait until ``task`` has ended on all ranks, which call this together.

        Returns False if any rank was asked to stop first: the run then ends at this step boundary without waiting
        longer. Raises what this rank's task raises, as soon as it does.
        """
        while True:
            ended = futures.wait([task], STOP_POLL_SECONDS).done
            for one in ended:
                one.result()
            behind, asked = self.sum(not ended, self._wanted())
            if not behind:
                return True
            if asked:
                self.decided = self.broke_off = True
                return False

    def sum(self, *numbers: int) -> list[int]:
        """Sum each of the numbers over all ranks, which call this together."""
        total = torch.tensor(numbers, dtype=torch.int64, device=self.world.device)
        dist.all_reduce(total)
        return total.tolist()

    def _watch(self, signals: int, others: list[int], launchers: list[int]) -> None:
        """Wait for a signal or the launcher's end, then for the end of another rank on this node."""
        ready: list[int] = []
        while not (signals in ready and set(SIGNALS) & set(os.read(signals, 64))):
            ready = _first(signals, *launchers)
            if set(ready) & set(launchers):
                self.asked = True
                say_error(f"trainer: rank {self.world.rank}: the launcher has ended: stopping")
                break
        if not others:
            return
        _first(*others)
        time.sleep(LOST_RANK_SECONDS)
        if not self.decided:  # once decided, ranks end in any order
            said = "lost contact with another rank, which has ended: cannot stop at a step boundary"
            say_last(f"trainer: rank {self.world.rank}: {said}")
            leave(LOST)


def _others_on_node(world: World) -> list[int]:
    """Return the process ids of the other ranks on this node. Every rank calls it."""
    own = torch.tensor(os.getpid(), device=world.device)
    gathered = [torch.empty_like(own) for _ in range(world.size)]
    dist.all_gather(gathered, own)
    first = world.rank - world.local_rank
    return [int(gathered[rank]) for rank in range(first, first + world.local_size) if rank != world.rank]


def _launchers_above() -> list[int]:
    """Return the launcher's processes above this one. ``deepspeed``'s own forward no signals and leave orphans."""
    found, pid = list[int](), os.getppid()
    while pid > 1:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            break  # it has just ended, or there is no /proc
        if not any(Path(word).name in LAUNCHERS for word in words[:5]):
            break  # a shell may end before the processes it started
        found.append(pid)
        pid = int(status.rpartition(")")[2].split()[1])  # the name before it may contain anything
    return found


def _handles(pids: list[int]) -> list[int]:
    """Open a pidfd for each process, readable once it ends; skips processes that cannot be seen."""
    found = []
    for pid in pids:
        try:
            found.append(os.pidfd_open(pid))
        except (OSError, AttributeError):
            continue  # in another container, or no pidfd support: rely on the launcher's grace period
    return found


def _first(*files: int) -> list[int]:
    """Wait until any of the files is readable, and return those that are."""
    poll = select.poll()  # unlike select(), it takes file numbers above 1023
    for file in files:
        poll.register(file, select.POLLIN)
    return [file for file, _ in poll.poll()]
