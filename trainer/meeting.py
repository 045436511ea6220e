"""The ranks' meeting: all come, prove that they are of one run, or the run ends before anything could hang or differ.

Rank 0 holds a store. Each rank leaves its account there; rank 0 compares them, and leaves a verdict for all. While
some are missing it says which.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from data_prep.streams import say_error
from trainer.errors import LostError, TrainerError

SAY_SECONDS = 10.0  # between two lines about those who are missing, doubled each time
LOOK_SECONDS = 0.2  # between two looks
HEAR_SECONDS = 10.0  # that the verdict is waited for, before a look whether rank 0 is another one by now
READ_SECONDS = 10.0  # that a refused run's ranks have to read why
SHOWN = 48  # characters of a value


@dataclass(frozen=True)
class Account:
    """What a rank says of itself."""

    host: str
    gpu: str  # its unique id; empty on a CPU
    facts: dict[str, str]  # must be the same on all ranks
    settings: dict[str, str]  # of the environment: should be


@dataclass(frozen=True)
class Meeting:
    """Where the ranks meet."""

    rank: int
    size: int
    address: str
    port: int
    served: bool  # the launcher holds the store itself, as torchrun's agent does

    @property
    def place(self) -> str:
        return f"{self.address}:{self.port}"


def meet(meeting: Meeting, account: Account, timeout: timedelta) -> tuple[dist.Store, list[str]]:
    """The store that all ranks share from now on; and, on rank 0, in what they differ but may.

    Raises LostError when some do not come in time, TrainerError when the ranks are not of one run.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    token = uuid.uuid4().hex[:8]  # tells this process's account from one that an earlier attempt left
    while True:
        try:
            store = _enter(meeting, deadline, token)
            store.set(f"account/{meeting.rank}", json.dumps([token, asdict(account)]))
            warnings = _preside(store, meeting, deadline) if meeting.rank == 0 else []
            verdict = _hear(store, meeting, deadline)
        except (RuntimeError, ValueError) as error:  # DistError is a RuntimeError
            if meeting.rank == 0 or time.monotonic() > deadline or isinstance(error, ValueError):
                raise LostError(_cannot(meeting, str(error).split(". ")[0])) from None
            time.sleep(1)  # rank 0 has just ended, or is about to start: another one will come
            continue
        if token in verdict["tokens"]:
            break
        if time.monotonic() > deadline:
            raise LostError(_cannot(meeting, "another run, or an earlier attempt of this one, holds the place"))
        time.sleep(1)
    if verdict["refusal"]:
        _await_readers(store, meeting)
        raise TrainerError(verdict["refusal"] if meeting.rank == 0 else "")
    return dist.PrefixStore(verdict["tokens"][0], store), warnings


def _enter(meeting: Meeting, deadline: float, token: str) -> dist.Store:
    """The store of rank 0's present attempt; torchrun's own outlives an attempt."""
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    serve = meeting.rank == 0 and not meeting.served
    store = dist.TCPStore(
        meeting.address, meeting.port, None, is_master=serve, timeout=left, wait_for_workers=False, multi_tenant=True
    )
    lobby = dist.PrefixStore("lambert", store)
    if meeting.rank == 0:
        lobby.set("opened", token)
    return dist.PrefixStore(lobby.get("opened").decode(), lobby)


def _preside(store: dist.Store, meeting: Meeting, deadline: float) -> list[str]:
    """Rank 0: wait for all accounts and leave the verdict. Returns in what they differ but may."""
    accounts = _await_all(store, meeting, deadline)
    told = [Account(**fields) for _, fields in accounts]
    refusal = "; ".join(refusals(told))
    verdict = {"tokens": [token for token, _ in accounts], "refusal": refusal}
    store.set("verdict", json.dumps(verdict))
    return differences("settings", told)


def _await_all(store: dist.Store, meeting: Meeting, deadline: float) -> list[tuple[str, dict[str, Any]]]:
    began, pause = time.monotonic(), SAY_SECONDS
    missing = list(range(meeting.size))
    while missing := [rank for rank in missing if not store.check([f"account/{rank}"])]:
        now = time.monotonic()
        said = f"{numbers(missing)} of {meeting.size}"
        if now > deadline:
            raise LostError(
                f"after {now - began:.0f} s {said} have not come to {meeting.place}: look for their own lines, check "
                "that their nodes were started and reach this one, or raise run.timeout_seconds"
            )
        if now - began > pause:
            pause *= 2
            say_error(f"lambert: waiting for {said} at {meeting.place}")
        time.sleep(LOOK_SECONDS)
    return [json.loads(store.get(f"account/{rank}")) for rank in range(meeting.size)]


def _hear(store: dist.Store, meeting: Meeting, deadline: float) -> dict[str, Any]:
    store.wait(["verdict"], timedelta(seconds=min(HEAR_SECONDS, max(1.0, deadline - time.monotonic()))))
    verdict: dict[str, Any] = json.loads(store.get("verdict"))
    if meeting.rank != 0:
        store.add("read", 1)
    return verdict


def _await_readers(store: dist.Store, meeting: Meeting) -> None:
    """Rank 0's store ends with it."""
    deadline = time.monotonic() + READ_SECONDS
    while meeting.rank == 0 and store.add("read", 0) < meeting.size - 1 and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)


def _cannot(meeting: Meeting, reason: str) -> str:
    return (
        f"rank {meeting.rank} cannot meet the other ranks at {meeting.place} ({' '.join(reason.split())}): check that "
        f"all {meeting.size} were started and reach that address, and that no other run holds the port"
    )


# ---- what differs --------------------------------------------------------------------------------------------


def refusals(accounts: list[Account]) -> list[str]:
    """Why ranks with these accounts cannot be one run, by rank; empty where they can."""
    found = [f"{line}: make that the same everywhere" for line in differences("facts", accounts)]
    owners: dict[tuple[str, str], list[int]] = {}
    for rank, account in enumerate(accounts):
        owners.setdefault((account.host, account.gpu), []).append(rank)
    hosts: dict[str, list[int]] = {}
    for rank, account in enumerate(accounts):
        hosts.setdefault(account.host, []).append(rank)
    for host, ranks in hosts.items():
        if ranks != list(range(ranks[0], ranks[-1] + 1)):
            found.append(f"{host} has {numbers(ranks)}: place them in blocks (mpirun --map-by slot, srun -m block)")
    for (host, gpu), ranks in owners.items():
        if gpu and len(ranks) > 1:
            found.append(f"{numbers(ranks)} ({host}) share one GPU: start at most one rank for each GPU of the node")
    return found


def differences(part: str, accounts: list[Account]) -> list[str]:
    """A line for each name of ``part`` ("facts" or "settings") that is not the same on all ranks: which has what."""
    told: list[dict[str, str]] = [getattr(account, part) for account in accounts]
    lines = []
    for name in sorted({name for each in told for name in each}):
        groups: dict[str | None, list[int]] = {}
        for rank, each in enumerate(told):
            groups.setdefault(each.get(name), []).append(rank)
        if len(groups) > 1:
            hosts = {value: _hosts(accounts[rank].host for rank in ranks) for value, ranks in groups.items()}
            parts = [f"{_shown(value)} on {numbers(ranks)} ({hosts[value]})" for value, ranks in groups.items()]
            lines.append(f"{name} is {', '.join(parts)}")
    return lines


def numbers(ranks: Iterable[int]) -> str:
    """``ranks 0 to 3, 7 and 9`` of some numbers in order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(a) if a == b else f"{a} {'and' if b == a + 1 else 'to'} {b}" for a, b in runs]
    return ("rank " if len(parts) == 1 and runs[0][0] == runs[0][1] else "ranks ") + ", ".join(parts)


def _hosts(names: Iterable[str]) -> str:
    found = sorted(set(names))
    return found[0] if len(found) == 1 else f"{found[0]} and {len(found) - 1} more"


def _shown(value: str | None) -> str:
    if value is None:
        return "not set"
    return value if len(value) <= SHOWN else value[: SHOWN - 1] + "…"
