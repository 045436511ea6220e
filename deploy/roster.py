"""The nodes that are here, and what each should do next: node 0's decisions in a run whose number of nodes may change.

A run is a series of attempts, each on fixed nodes. An attempt ends when a node is lost, a rank fails, or a node arrives
or leaves; the next one resumes from the newest whole checkpoint. This is a state machine without clocks or sockets;
:mod:`deploy.office` has those.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from deploy.wire import Message
from trainer.exits import DONE, INTERRUPTED, LOST, REFUSED, STOPPED

LAST_CALL = 30.0  # seconds without an arrival after which the first attempt starts on fewer nodes than allowed
PATIENCE = 600.0  # seconds to wait for enough nodes, or for node 0
AFTER_SILENCE = 5.0  # seconds until the ranks are killed once a node is silent: they cannot save, and most of them hang
AFTER_FAILURE = 25.0  # the same if a rank or a launcher has ended: others may still save, or wait for a last scrape
STUCK = 60.0  # seconds after the kill until a node whose ranks still run is lost: a driver may hold a rank for good
PAUSE, LONGEST_PAUSE = 10.0, 320.0  # seconds before the attempt after a rank has failed; doubled if that fails soon too
TRIAL = 600.0  # seconds in which a refusal counts as the fault of the nodes that have just arrived
Order = tuple[int, Message]  # a node, and what it is told


@dataclass
class Attempt:
    """One start of the ranks."""

    nodes: list[int]  # in the order of their ranks
    newcomers: set[int]  # those that were not in the attempt before
    began: float
    running: set[int]  # nodes whose ranks have not ended
    codes: dict[int, int] = field(default_factory=dict)  # of nodes whose ranks have
    lost: bool = False  # a node is gone
    saving: bool = False  # all nodes were told to save and end
    kill_after: float = math.inf  # seconds that all nodes were told
    lost_at: float = math.inf  # when nodes whose ranks still run count as lost


class Roster:
    """The nodes of a run that needs ``least`` and takes ``most``, all with ``ranks`` ranks. Node 0 is one of them.

    ``restarts``: how many attempts may fail. ``port``: finds a free port of node 0, where an attempt's ranks meet.
    """

    def __init__(self, least: int, most: int, ranks: int, restarts: int, port: Callable[[], int]) -> None:
        self.least, self.most, self.ranks, self.restarts, self.port = least, most, ranks, restarts, port
        self.here: set[int] = set()
        self.leaving: set[int] = set()  # nodes that were asked to stop
        self.over = False
        self.said: list[str] = []  # lines for people, not printed yet
        self._attempt: Attempt | None = None
        self._before: set[int] = set()  # the nodes of the last attempt
        self._attempts = self._failures = 0
        self._pause = 0.0
        self._starts_at, self._waits_since = math.inf, math.nan
        self._orders: list[Order] = []

    def join(self, node: int, ranks: int, now: float) -> None:
        """A node is here."""
        if ranks != self.ranks:
            why = f"this node has {ranks} rank(s), but node 0 has {self.ranks}: set --nproc-per-node to the same number"
            self._orders.append((node, {"end": REFUSED, "why": f"error: {why}"}))
            return
        self.here.add(node)
        if not self._attempts:
            self._starts_at = now + LAST_CALL
            self._waits_since = now if math.isnan(self._waits_since) else self._waits_since
            self.said.append(f"nodes here: {listed(self.here)}; the run takes {self.least} to {self.most}")
        else:
            self.said.append(f"node {node} is here" + ("; the others save, then all go on" if self._attempt else ""))
        self._save()

    def lose(self, node: int, why: str, silent: bool = False) -> None:
        """A node is gone. ``silent``: without a sign, as at a power loss."""
        self.here.discard(node)
        self.leaving.discard(node)
        if self._attempt is not None and node in self._attempt.running:
            self.said.append(f"lost node {node}: {why}")
            self._attempt.running.discard(node)
            self._attempt.lost = True
            if not silent:  # perhaps only its launcher has ended, or the connection: its ranks can still save
                self._save()
            self._kill(self._attempt, AFTER_SILENCE if silent else AFTER_FAILURE)

    def leave(self, node: int) -> None:
        """A node was asked to stop. If it is node 0, the run stops."""
        self.leaving.add(node)
        self._save()

    def fail(self, node: int) -> None:
        """A rank of a node has failed."""
        if self._attempt is not None and node in self._attempt.running:
            self._kill(self._attempt, AFTER_FAILURE)

    def end(self, node: int, code: int) -> None:
        """All ranks of a node have ended."""
        if self._attempt is not None and node in self._attempt.running:
            self._attempt.running.discard(node)
            self._attempt.codes[node] = code

    def look(self, now: float) -> list[Order]:
        """Return what nodes are to be told now."""
        attempt = self._attempt
        if attempt is not None and attempt.running:
            self._lose_stuck(attempt, now)
        if attempt is not None and not attempt.running:
            self._attempt, self._waits_since, self._starts_at = None, now, now
            self._judge(attempt, now)
        if self._attempt is None and not self.over:
            self._begin(now)
        orders, self._orders = self._orders, []
        return orders

    def _save(self) -> None:
        if self._attempt is not None and not self._attempt.saving:
            self._attempt.saving = True
            self._orders += [(node, {"save": True}) for node in self._attempt.running]

    def _kill(self, attempt: Attempt, seconds: float) -> None:
        if seconds < attempt.kill_after:
            attempt.kill_after = seconds
            self._orders += [(node, {"kill": seconds}) for node in attempt.running]

    def _lose_stuck(self, attempt: Attempt, now: float) -> None:
        """Give up nodes whose ranks survived SIGKILL. They may come back once those have ended."""
        if attempt.kill_after < math.inf:
            attempt.lost_at = min(attempt.lost_at, now + attempt.kill_after + STUCK)
        if now > attempt.lost_at:
            for node in sorted(attempt.running):
                self.lose(node, "its ranks do not end, even when they are killed")
                self._orders.append((node, {"away": True}))

    def _judge(self, attempt: Attempt, now: float) -> None:
        """Decide what follows an attempt that has ended on all nodes."""
        codes = set(attempt.codes.values())
        final, clean = codes & {DONE, REFUSED, INTERRUPTED}, codes == {STOPPED} and not attempt.lost
        if attempt.codes.get(0) != DONE:
            final.discard(DONE)  # rank 0 ends last, and has not written how the run ended
        tried = set(attempt.nodes) - attempt.newcomers
        on_trial = attempt.newcomers and final == {REFUSED} and now - attempt.began < TRIAL
        self._before = set(attempt.nodes)
        missing = len(self.here - self.leaving) < self.least
        waiting = f"nodes here: {listed(self.here - self.leaving)}; waiting for at least {self.least}"
        if clean and attempt.saving and 0 not in self.leaving:
            self.said += [waiting] if missing else []
            return
        self._failures += not clean
        pause, self._pause = self._pause, 0.0
        if final and not (on_trial and 0 in tried and len(tried & self.here) >= self.least):
            self._finish(attempt, min(final))
        elif clean or 0 in self.leaving:  # clean: a rank itself was asked to stop
            self._finish(attempt, STOPPED)
        elif self._failures > self.restarts:
            self.said.append(f"{self._failures} attempts have failed, more than --max-restarts allows")
            self._finish(attempt, LOST)
        elif final:
            self.said.append(
                f"the run was refused with the new nodes {listed(attempt.newcomers)}: going on without them"
            )
            for node in attempt.newcomers & self.here:
                self._orders.append((node, {"end": REFUSED, "why": "the run was refused with this node: see node 0"}))
            self.here -= attempt.newcomers
            self._before = tried
        elif missing:
            self.said.append(waiting)
        elif not attempt.lost:
            soon = now - attempt.began < LONGEST_PAUSE
            self._pause = min(2 * pause, LONGEST_PAUSE) if pause and soon else PAUSE
            self._starts_at = now + self._pause

    def _begin(self, now: float) -> None:
        """Start an attempt, or end the run if nodes have been missing for too long."""
        nodes = sorted(self.here - self.leaving)
        if 0 in self.leaving:
            self._finish(None, STOPPED)
        elif 0 in nodes and len(nodes) >= self.least and (now >= self._starts_at or self._complete(nodes)):
            newcomers = set(nodes) - self._before if self._attempts else set[int]()
            self._attempt = Attempt(nodes, newcomers, now, set(nodes))
            self._attempts += 1
            failed = f"; {self._failures} of {self.restarts} restarts used" if self._failures else ""
            self.said.append(f"attempt {self._attempts}: nodes {listed(nodes)}{failed}")
            place = {"nodes": len(nodes), "port": self.port()}
            self._orders += [(node, {"start": index, **place}) for index, node in enumerate(nodes)]
        elif now > self._waits_since + PATIENCE:
            why = f"after {PATIENCE:.0f} s {len(nodes)} node(s) are here, but the run needs {self.least}"
            self._finish(None, LOST, f"error: {why}: start more, or lower --nnodes {self.least}:{self.most}")

    def _complete(self, nodes: list[int]) -> bool:
        """Whether the first attempt need not wait for more nodes."""
        return not self._attempts and len(nodes) == self.most

    def _finish(self, attempt: Attempt | None, code: int, why: str = "") -> None:
        """End the run. A node whose ranks ended in the last attempt knows its code and reason better than we do.

        But if the run was refused, all nodes end with that, so that none is started again.
        """
        self.over = True
        codes = {} if attempt is None else attempt.codes
        nodes = [node for node in codes if codes[node] == code] or [0]
        why = why or f"the run ended with exit code {code} on node {listed(nodes)}: see the last lines there"
        for node in self.here:
            own = node in codes and (code != REFUSED or node in nodes)
            self._orders.append((node, {"end": None if own else code, "why": "" if own else why}))


def listed(nodes: set[int] | list[int]) -> str:
    """Format node numbers: ``0, 1, 3``."""
    return ", ".join(str(node) for node in sorted(nodes))
