"""The ranks' meeting: all come, prove that they are of one run, or the run ends before anything could hang or differ.

Rank 0 holds a store. Each other rank leaves its account there; rank 0 compares all, and leaves a verdict for all. While
some are missing it says which.

Whoever reaches the port can write to the store. On one node that is this node alone. What the ranks leave is sealed
(:mod:`trainer.ranks.seal`). What a stranger wrote is reported and passed over, and the rank whose place it took writes
again.
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

SAY_SECONDS = 10.0  # between two lines about those who are missing, doubled each time
LOOK_SECONDS = 0.2  # between two looks
HEAR_SECONDS = 10.0  # that the verdict is waited for, before a look whether rank 0 is another one by now
READ_SECONDS = 10.0  # that a refused run's ranks have to read why
SHOWN = 48  # characters of a value
LOOPBACK = "127.0.0.1"


class StrangeError(RuntimeError):
    """Something in the store was not written by a rank of this run."""


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
    one_node: bool = False  # all ranks are here: nobody else needs to reach the store
    secret: str = ""  # that all ranks were given; empty: none

    @property
    def place(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def host(self) -> str:
        """Where rank 0 listens, by the name that this rank finds it under."""
        return LOOPBACK if self.one_node and not self.served else self.address


@dataclass(frozen=True)
class Verdict:
    """What rank 0 found."""

    tokens: list[str]  # of the accounts that it compared, by rank
    refusal: str  # why they cannot be one run; empty if they can


class Lobby:
    """The store as one rank sees it; all that it reads and writes is sealed. ``opened``: rank 0's present attempt."""

    def __init__(self, meeting: Meeting, store: dist.Store) -> None:
        self.meeting, self.store, self.opened = meeting, store, ""

    def open(self, token: str) -> None:
        """Rank 0: begin an attempt."""
        self.opened = token
        self.store.set("opened", seal(self.meeting.secret, "opened", token))

    def enter(self) -> None:
        """Another rank: wait for rank 0's attempt. Raises StrangeError."""
        self.opened = self._unsealed("opened", self.store.get("opened"))

    def keep_open(self) -> bool:
        """Rank 0: write again what a stranger overwrote; whether one did."""
        if self.store.get("opened") == seal(self.meeting.secret, "opened", self.opened).encode():
            return False
        self.open(self.opened)
        return True

    def put(self, key: str, text: str) -> None:
        """Leave a text under ``key``."""
        key = f"{self.opened}/{key}"
        self.store.set(key, seal(self.meeting.secret, key, text))

    def has(self, keys: list[str]) -> bool:
        """Whether there is something under all of them."""
        return self.store.check([f"{self.opened}/{key}" for key in keys])

    def read(self, key: str) -> str:
        """What a rank left under ``key``, as soon as there is something. Raises StrangeError."""
        key = f"{self.opened}/{key}"
        return self._unsealed(key, self.store.get(key))

    def wait(self, key: str, seconds: float) -> None:
        """Raises RuntimeError if nothing comes under ``key``."""
        self.store.wait([f"{self.opened}/{key}"], timedelta(seconds=seconds))

    def _unsealed(self, key: str, found: bytes) -> str:
        text = unseal(self.meeting.secret, key, found)
        if text is None:
            raise self.stranger(key.removeprefix(f"{self.opened}/"))
        return text

    def stranger(self, key: str) -> StrangeError:
        """What to say of a ``key`` with a wrong seal."""
        why = "it does not bear this rank's LAMBERT_SECRET" if self.meeting.secret else "no rank of this run wrote it"
        return StrangeError(f"{key!r} there is a stranger's: {why}")


def meet(meeting: Meeting, account: Account, timeout: timedelta) -> tuple[dist.Store, list[str]]:
    """The store that all ranks share from now on; and, on rank 0, in what they differ but may.

    Raises LostError when some do not come in time, TrainerError when the ranks are not of one run.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    token = uuid.uuid4().hex  # tells this process's account from one that an earlier attempt left
    told = ""
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
            if isinstance(error, StrangeError) and str(error) != told:
                told = str(error)
                say_error(f"lambert: rank {meeting.rank} at {meeting.place}: {told}; trying again")
            time.sleep(1)  # rank 0 has just ended, or is about to start: another one will come
            continue
        if token in verdict.tokens:
            break
        if time.monotonic() > deadline:
            raise LostError(_cannot(meeting, "another run, or an earlier attempt of this one, holds the place"))
        time.sleep(1)
    if verdict.refusal:
        _await_readers(lobby)
        raise TrainerError(verdict.refusal if meeting.rank == 0 else "")
    group = seal(meeting.secret, "group", verdict.tokens[0])  # with a secret, nobody else can name its keys
    return dist.PrefixStore(group, lobby.store), warnings


def _enter(meeting: Meeting, deadline: float, token: str) -> Lobby:
    """The store of rank 0's present attempt; torchrun's own outlives an attempt."""
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    serve, listener = meeting.rank == 0 and not meeting.served, None
    if serve and meeting.one_node:  # by itself it would listen on all interfaces
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
    """Rank 0: wait for all accounts and leave the verdict. Also returns in what they differ but may."""
    accounts = [own, *_await_others(lobby, deadline)]
    told = [account for _, account in accounts]
    verdict = Verdict([token for token, _ in accounts], "; ".join(refusals(told)))
    lobby.put("verdict", json.dumps(asdict(verdict)))
    return verdict, differences("settings", told)


def _await_others(lobby: Lobby, deadline: float) -> list[tuple[str, Account]]:
    meeting, began, pause = lobby.meeting, time.monotonic(), SAY_SECONDS
    accounts: dict[int, tuple[str, Account]] = {}
    missing, strangers = list(range(1, meeting.size)), set[str]()
    while True:
        missing = [rank for rank in missing if not lobby.has([f"account/{rank}"])]
        found = [str(lobby.stranger("opened"))] if lobby.keep_open() else []
        if not missing:
            accounts, missing, more = _read_all(lobby)  # all at once: a rank that came again has another one by now
            found += more
        for line in found:
            if line not in strangers:
                say_error(f"lambert: at {meeting.place}: {line}; it is passed over")
                strangers.add(line)
        if not missing:
            return [accounts[rank] for rank in range(1, meeting.size)]
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


def _read_all(lobby: Lobby) -> tuple[dict[int, tuple[str, Account]], list[int], list[str]]:
    """The other ranks' accounts by rank, the ranks that have none, and why."""
    accounts, missing, why = dict[int, tuple[str, Account]](), list[int](), list[str]()
    for rank in range(1, lobby.meeting.size):
        try:
            accounts[rank] = read_account(lobby.read(f"account/{rank}"))
        except StrangeError as error:
            missing.append(rank)
            why.append(str(error))
    return accounts, missing, why


def read_account(text: str) -> tuple[str, Account]:
    """The token and the account of a rank. Raises StrangeError for anything else."""
    try:
        token, fields = json.loads(text)
        account = Account(**fields)
        values = [token, account.host, account.gpu, *account.facts.values(), *account.settings.values()]
    except (ValueError, TypeError, AttributeError, RecursionError):
        values = [None]
    if not all(isinstance(value, str) for value in values):
        raise StrangeError(f"an account that cannot be read there: {_shown(text)}")
    return token, account


def _hear(lobby: Lobby, deadline: float) -> Verdict:
    lobby.wait("verdict", min(HEAR_SECONDS, max(1.0, deadline - time.monotonic())))
    text = lobby.read("verdict")
    try:
        verdict = Verdict(**json.loads(text))
        if not isinstance(verdict.tokens, list) or not isinstance(verdict.refusal, str):
            raise TypeError
    except (ValueError, TypeError, RecursionError):
        raise StrangeError(f"a verdict that cannot be read there: {_shown(text)}") from None
    lobby.put(f"read/{lobby.meeting.rank}", "")
    return verdict


def _await_readers(lobby: Lobby) -> None:
    """Rank 0's store ends with it."""
    deadline, others = time.monotonic() + READ_SECONDS, [f"read/{rank}" for rank in range(1, lobby.meeting.size)]
    while lobby.meeting.rank == 0 and others and not lobby.has(others) and time.monotonic() < deadline:
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
    value = "".join(c if c.isprintable() else "?" for c in value[: SHOWN + 1])
    return value if len(value) <= SHOWN else value[: SHOWN - 1] + "…"
