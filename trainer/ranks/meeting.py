"""The ranks meet before training and check that they belong to one run, so that a mismatch cannot hang or skew it.

Rank 0 serves a key-value store. Each other rank writes its account there; rank 0 compares them all and writes a verdict
for all. While ranks are missing, it reports which.

Anyone who reaches the port can write to the store. If all ranks are on one node, only that node can reach it. The
ranks' entries are sealed (:mod:`trainer.ranks.seal`). A stranger's entry is reported and ignored, and the rank whose
entry it overwrote writes again.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from data_prep.streams import say_error
from trainer.errors import LostError, TrainerError
from trainer.ranks.seal import seal, unseal

SAY_SECONDS = 10.0  # before the first report of missing ranks; doubled each time
LOOK_SECONDS = 0.2  # between two checks of the store
HEAR_SECONDS = 10.0  # to wait for the verdict before checking whether rank 0 was restarted
READ_SECONDS = 10.0  # for the ranks of a refused run to read why
CHARACTERS_SHOWN = 48  # characters of a value in a message
LOOPBACK = "127.0.0.1"


class StrangeError(RuntimeError):
    """Something in the store was not written by a rank of this run."""


@dataclass(frozen=True)
class Account:
    """A rank's description of itself."""

    host: str
    gpu: str  # its unique id; empty on a CPU
    facts: dict[str, str]  # must be the same on all ranks
    settings: dict[str, str]  # environment variables, which should be the same


@dataclass(frozen=True)
class Meeting:
    """Where the ranks meet."""

    rank: int
    size: int
    address: str
    port: int
    served: bool  # the launcher serves the store, as torchrun's agent does
    one_node: bool = False  # all ranks are on this node: nobody else needs to reach the store
    secret: str = ""  # known to all ranks; empty: none

    @property
    def place(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def host(self) -> str:
        """The name under which this rank reaches rank 0."""
        return LOOPBACK if self.one_node and not self.served else self.address


@dataclass(frozen=True)
class Verdict:
    """Rank 0's decision on whether the ranks may train together."""

    tokens: list[str]  # of the compared accounts, by rank
    refusal: str  # why they cannot be one run; empty if they can


class Lobby:
    """The store as one rank sees it; everything in it is sealed. ``opened``: the token of rank 0's current attempt."""

    def __init__(self, meeting: Meeting, store: dist.Store) -> None:
        self.meeting, self.store, self.opened = meeting, store, ""

    def open(self, token: str) -> None:
        """Start an attempt; called on rank 0."""
        self.opened = token
        self.store.set("opened", seal(self.meeting.secret, "opened", token))

    def enter(self) -> None:
        """Wait for rank 0's attempt; called on the other ranks. Raises StrangeError."""
        self.opened = self._unsealed("opened", self.store.get("opened"))

    def keep_open(self) -> bool:
        """Restore the entry if a stranger overwrote it, and return whether one did; called on rank 0."""
        if self.store.get("opened") == seal(self.meeting.secret, "opened", self.opened).encode():
            return False
        self.open(self.opened)
        return True

    def put(self, key: str, text: str) -> None:
        """Write a text under ``key``."""
        key = f"{self.opened}/{key}"
        self.store.set(key, seal(self.meeting.secret, key, text))

    def has(self, keys: list[str]) -> bool:
        """Whether all of the keys have an entry."""
        return self.store.check([f"{self.opened}/{key}" for key in keys])

    def read(self, key: str) -> str:
        """Wait for an entry under ``key`` and return it. Raises StrangeError."""
        key = f"{self.opened}/{key}"
        return self._unsealed(key, self.store.get(key))

    def wait(self, key: str, seconds: float) -> None:
        """Wait for an entry under ``key``. Raises RuntimeError if none comes in time."""
        self.store.wait([f"{self.opened}/{key}"], timedelta(seconds=seconds))

    def _unsealed(self, key: str, found: bytes) -> str:
        text = unseal(self.meeting.secret, key, found)
        if text is None:
            raise self.stranger(key.removeprefix(f"{self.opened}/"))
        return text

    def stranger(self, key: str) -> StrangeError:
        """Return the error for a ``key`` with a wrong seal."""
        why = (
            "it was not sealed with this rank's LAMBERT_SECRET"
            if self.meeting.secret
            else "no rank of this run wrote it"
        )
        return StrangeError(f"entry {key!r} is a stranger's: {why}")


def meet(meeting: Meeting, account: Account, timeout: timedelta) -> tuple[dist.Store, list[str]]:
    """Meet the other ranks. Returns the store that all share from now on and, on rank 0, their harmless differences.

    Raises LostError if some ranks do not come in time, TrainerError if the ranks do not belong to one run.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    token = uuid.uuid4().hex  # distinguishes this process's account from one left by an earlier attempt
    reported = ""
    while True:
        try:
            lobby = _enter(meeting, deadline, token)
            if meeting.rank == 0:
                verdict, warnings = _preside(lobby, (token, account), deadline)
            else:
                lobby.put(f"account/{meeting.rank}", json.dumps([token, asdict(account)]))
                verdict, warnings = _hear(lobby, deadline), []
        except (RuntimeError, ValueError, OSError) as error:  # DistError is a RuntimeError
            if meeting.rank == 0 or time.monotonic() > deadline or isinstance(error, ValueError):
                raise LostError(_cannot(meeting, str(error).split(". ")[0])) from None
            if isinstance(error, StrangeError) and str(error) != reported:
                reported = str(error)
                say_error(f"lambert: rank {meeting.rank} at {meeting.place}: {reported}; trying again")
            time.sleep(1)  # rank 0 has just ended or is about to start: wait for the next one
            continue
        if token in verdict.tokens:
            break
        if time.monotonic() > deadline:
            raise LostError(_cannot(meeting, "another run, or an earlier attempt of this one, is using it"))
        time.sleep(1)
    if verdict.refusal:
        _await_readers(lobby)
        raise TrainerError(verdict.refusal if meeting.rank == 0 else "")
    group = seal(meeting.secret, "group", verdict.tokens[0])  # with a secret, nobody else can guess its keys
    return dist.PrefixStore(group, lobby.store), warnings


def _enter(meeting: Meeting, deadline: float, token: str) -> Lobby:
    """Open the store of rank 0's current attempt; torchrun's own store outlives an attempt."""
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    serve, listener = meeting.rank == 0 and not meeting.served, None
    if serve and meeting.one_node:  # by default it would listen on all interfaces
        listener = socket.create_server((LOOPBACK, meeting.port)).detach()
    store = dist.TCPStore(
        meeting.host,
        meeting.port,
        None,
        is_master=serve,
        timeout=left,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener,
    )
    lobby = Lobby(meeting, dist.PrefixStore("lambert", store))
    if meeting.rank == 0:
        lobby.open(token)
    else:
        lobby.enter()
    return lobby


def _preside(lobby: Lobby, own: tuple[str, Account], deadline: float) -> tuple[Verdict, list[str]]:
    """Wait for all accounts and write the verdict; called on rank 0. Also returns the harmless differences."""
    accounts = [own, *_await_others(lobby, deadline)]
    reports = [account for _, account in accounts]
    verdict = Verdict([token for token, _ in accounts], "; ".join(refusals(reports)))
    lobby.put("verdict", json.dumps(asdict(verdict)))
    return verdict, differences("settings", reports)


def _await_others(lobby: Lobby, deadline: float) -> list[tuple[str, Account]]:
    meeting, began, pause = lobby.meeting, time.monotonic(), SAY_SECONDS
    accounts: dict[int, tuple[str, Account]] = {}
    missing, strangers = list(range(1, meeting.size)), set[str]()
    while True:
        missing = [rank for rank in missing if not lobby.has([f"account/{rank}"])]
        found = [str(lobby.stranger("opened"))] if lobby.keep_open() else []
        if not missing:
            accounts, missing, more = _read_all(lobby)  # all at once: a restarted rank has written a new one by now
            found += more
        for line in found:
            if line not in strangers:
                say_error(f"lambert: at {meeting.place}: {line}; it is ignored")
                strangers.add(line)
        if not missing:
            return [accounts[rank] for rank in range(1, meeting.size)]
        now = time.monotonic()
        said = f"{numbers(missing)} of {meeting.size}"
        if now > deadline:
            raise LostError(
                f"after {now - began:.0f} s {said} have not come to {meeting.place}: look for error lines of "
                "theirs, check that their nodes were started and reach this one, or raise run.timeout_seconds"
            )
        if now - began > pause:
            pause *= 2
            say_error(f"lambert: waiting for {said} at {meeting.place}")
        time.sleep(LOOK_SECONDS)


def _read_all(lobby: Lobby) -> tuple[dict[int, tuple[str, Account]], list[int], list[str]]:
    """Return the other ranks' accounts by rank, the ranks without a valid one, and why."""
    accounts, missing, why = dict[int, tuple[str, Account]](), list[int](), list[str]()
    for rank in range(1, lobby.meeting.size):
        try:
            accounts[rank] = read_account(lobby.read(f"account/{rank}"))
        except StrangeError as error:
            missing.append(rank)
            why.append(str(error))
    return accounts, missing, why


def read_account(text: str) -> tuple[str, Account]:
    """Parse the token and the account of a rank. Raises StrangeError for anything else."""
    try:
        token, fields = json.loads(text)
        account = Account(**fields)
        values = [token, account.host, account.gpu, *account.facts.values(), *account.settings.values()]
    except (ValueError, TypeError, AttributeError, RecursionError):
        values = [None]
    if not all(isinstance(value, str) for value in values):
        raise StrangeError(f"an unreadable account: {_shown(text)}")
    return token, account


def _hear(lobby: Lobby, deadline: float) -> Verdict:
    lobby.wait("verdict", min(HEAR_SECONDS, max(1.0, deadline - time.monotonic())))
    text = lobby.read("verdict")
    try:
        verdict = Verdict(**json.loads(text))
        if not isinstance(verdict.tokens, list) or not isinstance(verdict.refusal, str):
            raise TypeError
    except (ValueError, TypeError, RecursionError):
        raise StrangeError(f"an unreadable verdict: {_shown(text)}") from None
    lobby.put(f"read/{lobby.meeting.rank}", "")
    return verdict


def _await_readers(lobby: Lobby) -> None:
    """Wait until the others have read the verdict; called on rank 0, whose store ends with this process."""
    deadline, others = time.monotonic() + READ_SECONDS, [f"read/{rank}" for rank in range(1, lobby.meeting.size)]
    while lobby.meeting.rank == 0 and others and not lobby.has(others) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)


def _cannot(meeting: Meeting, reason: str) -> str:
    return (
        f"rank {meeting.rank} cannot meet the other ranks at {meeting.place} ({' '.join(reason.split())}): check that "
        f"all {meeting.size} were started and reach that address, and that no other run uses the port"
    )


# ---- what differs --------------------------------------------------------------------------------------------


def refusals(accounts: list[Account]) -> list[str]:
    """List why ranks with these accounts, in rank order, cannot form one run; empty if they can."""
    found = [f"{line}: make it the same on all ranks" for line in differences("facts", accounts)]
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
    """List each name in ``part`` ("facts" or "settings") whose value differs between ranks, and who has which."""
    values: list[dict[str, str]] = [getattr(account, part) for account in accounts]
    lines = []
    for name in sorted({name for each in values for name in each}):
        groups: dict[str | None, list[int]] = {}
        for rank, each in enumerate(values):
            groups.setdefault(each.get(name), []).append(rank)
        if len(groups) > 1:
            hosts = {value: _hosts(accounts[rank].host for rank in ranks) for value, ranks in groups.items()}
            parts = [f"{_shown(value)} on {numbers(ranks)} ({hosts[value]})" for value, ranks in groups.items()]
            lines.append(f"{name} is {', '.join(parts)}")
    return lines


def numbers(ranks: Iterable[int]) -> str:
    """Format sorted rank numbers: ``ranks 0 to 3, 7, 9``."""
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
    value = "".join(c if c.isprintable() else "?" for c in value[: CHARACTERS_SHOWN + 1])
    return value if len(value) <= CHARACTERS_SHOWN else value[: CHARACTERS_SHOWN - 1] + "…"
