"""A lease on an address, so that only one run at a time writes there.

It is a file with a number in its name, ``lease-00000007.json``, and the highest number holds the address. A taker
creates the next number, which a store with conditional puts allows only one to do. The holder writes its own file again
every RENEW_SECONDS. One that has not changed for LEASE_SECONDS, by the taker's own clock, belongs to a dead run: no two
machines' clocks are compared. A released lease stays, marked as free, so numbers only grow: a run that was away for
long finds a higher number and learns that it has lost the address.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from threading import Event, Thread
from typing import Any

from data_prep.json_text import parse_json
from trainer.console import Tell, warn
from trainer.errors import TrainerError
from trainer.store.objects import Objects, WrongFileError

RENEW_SECONDS = 10.0
LEASE_SECONDS = 30.0  # three renewals may fail
POLL_SECONDS = 1.0  # seconds between two looks at another run's lease
_NAME = re.compile(r"lease-(\d{8,})\.json", re.ASCII)


class Lease:
    """A lease that this process holds; a thread renews it. ``on_loss`` is called once if another run has taken it."""

    def __init__(self, objects: Objects, number: int) -> None:
        self.objects, self.number = objects, number
        self.lost = ""  # why it is lost; empty while it is held
        self._content: dict[str, Any] = {
            "holder": f"process {os.getpid()} of {socket.gethostname()}",
            "token": secrets.token_hex(8),
            "renewals": 0,
            "free": False,
        }
        self._ended = Event()
        self._thread: Thread | None = None

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"lease-{self.number:08d}.json"

    def renew(self) -> dict[str, int | None]:
        """Write it again. Returns the names at the address.

        Raises TrainerError if another run has taken it, or if it has been released.
        """
        if self.lost or self._ended.is_set():
            raise TrainerError(self.lost or f"this run no longer writes to {self.objects.address}")
        names = self.objects.names()
        own = _read(self.objects, self.number) if self.name in names else self._content
        if (newest := _newest(names)) > self.number or own["token"] != self._content["token"]:
            holder = _read(self.objects, newest)["holder"]
            self.lost = f"{self.objects.address} has been taken by another run ({holder})"
            raise TrainerError(self.lost)
        self._content["renewals"] += 1
        self.objects.write(self.name, json.dumps(self._content).encode())
        return names

    def keep(self, seen: Callable[[Iterable[str]], None], lost: Callable[[str], None], tell: Tell) -> None:
        """Renew it from a thread. ``seen`` receives the names at the address; ``lost`` is called if it is lost."""

        def keep() -> None:
            failing = False
            while not self._ended.wait(RENEW_SECONDS):
                try:
                    seen(self.renew())
                    failing = False
                except (TrainerError, OSError, MemoryError) as error:
                    if self.lost:
                        lost(self.lost)
                        return
                    if not failing:
                        risk = f"after {LEASE_SECONDS:.0f} s another run may take it"
                        warn(f"the lease on {self.objects.address} cannot be renewed, and {risk}: {error}", tell)
                    failing = True

        self._thread = Thread(target=keep, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Let the next run take it at once. Raises TrainerError if the server does not answer."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if not self.lost:
            self._content["free"] = True
            self.objects.write(self.name, json.dumps(self._content).encode())


def take(objects: Objects, patience: float, tell: Tell) -> Lease:
    """Take the lease on an address; waits up to ``patience`` seconds for another run to end.

    A run that was killed counts as ended LEASE_SECONDS later. Raises TrainerError if the other run does not end.
    """
    until, seen, since = time.monotonic() + patience, None, time.monotonic()
    reported = False
    while True:
        newest = _newest(objects.names())
        content = _read(objects, newest) if newest >= 0 else {"free": True}
        if content != seen:
            seen, since = content, time.monotonic()
        if content["free"] or time.monotonic() - since >= LEASE_SECONDS:
            if (lease := _create(objects, newest + 1)) is not None:
                return lease
            continue
        if time.monotonic() > until:
            raise TrainerError(
                f"{objects.address} is being written by {content['holder']}: wait until it ends, or name another folder"
            )
        if not reported:
            said = f"waiting up to {patience:.0f} s for it to end; if it was killed, {LEASE_SECONDS:.0f} s are enough"
            tell(f"{objects.address} is being written by {content['holder']}: {said}")
        reported = True
        time.sleep(POLL_SECONDS)


def is_lease(name: str) -> bool:
    """Whether this is the name of a lease's file."""
    return _NAME.fullmatch(name) is not None


def _create(objects: Objects, number: int) -> Lease | None:
    """The lease with this number; None if another process has it, or a higher one."""
    lease = Lease(objects, number)
    if not objects.create(lease.name, json.dumps(lease._content).encode()):
        return None
    names = objects.names()
    if _newest(names) > number:  # others have come and gone since this process looked
        objects.delete(lease.name)
        return None
    objects.delete(*(name for name in names if is_lease(name) and name != lease.name))
    return lease


def _newest(names: Iterable[str]) -> int:
    """The highest number of a lease among the names; -1 if there is none."""
    return max((int(found[1]) for name in names if (found := _NAME.fullmatch(name))), default=-1)


def _read(objects: Objects, number: int) -> dict[str, Any]:
    """The content of a lease; of one that is damaged or has just been removed, what a dead run would leave."""
    unknown = {"holder": "an unknown process", "token": "", "renewals": 0, "free": False}
    try:
        found = parse_json(objects.read(f"lease-{number:08d}.json", 4096).decode())
    except (WrongFileError, ValueError):
        return unknown
    return unknown | {key: found[key] for key in unknown if isinstance(found, dict) and key in found}
