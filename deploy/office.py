"""The office of node 0's launcher, which hears from all launchers and tells them what to do: a roster's sockets.

Node 0 also runs rank 0, which alone writes the run's journal and names its checkpoints: nodes that are cut off from
node 0 can never train on by themselves.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress

from data_prep.streams import say_error
from deploy.roster import Roster
from deploy.wire import Message, Wire

POLL = 0.2  # seconds between two looks at the connections
PULSE = 1.0  # seconds between two signs of life
SILENCE = 20.0  # seconds without one after which the other end counts as lost; short cuts of a network pass
INTRODUCTION = 5.0  # seconds for a new connection to say which node it is
GUESTS = 64  # connections that have not said it
FAREWELL = 5.0  # seconds for the nodes to read how the run ended


class Office:
    """Serves a roster on a listening socket. It never blocks: :meth:`look` is called again and again."""

    def __init__(self, listener: socket.socket, roster: Roster, secret: str) -> None:
        listener.setblocking(False)
        self.listener, self.roster, self.secret = listener, roster, secret
        self.nodes: dict[int, Wire] = {}
        self.guests: list[Wire] = []  # oldest first
        self._pulse = 0.0

    def close(self) -> None:
        """Close the port. If the run is over, wait until the nodes know it."""
        until = time.monotonic() + FAREWELL
        while self.roster.over and self.nodes and time.monotonic() < until:
            self.look()
            time.sleep(POLL / 4)
        for wire in [*self.guests, *self.nodes.values()]:
            wire.close()
        self.listener.close()

    def look(self) -> None:
        """Hear everybody, and tell the nodes what the roster decides."""
        now = time.monotonic()
        self._accept()
        for wire in list(self.guests):
            self._hear(None, wire, now)
        for node, wire in list(self.nodes.items()):
            self._hear(node, wire, now)
        self._tell(now)

    def _accept(self) -> None:
        with suppress(OSError):  # no more are waiting
            for _ in range(GUESTS):
                connection, _ = self.listener.accept()
                if len(self.guests) >= GUESTS:
                    self.guests.pop(0).close()
                self.guests.append(Wire(connection, self.secret, answers=True))

    def _hear(self, node: int | None, wire: Wire, now: float) -> None:
        """Take in what a node, or a guest who may be one, has sent; lose it if it is silent or not one of ours."""
        silent = False
        try:
            for message in wire.receive():
                if node is None:
                    node = self._introduce(wire, message, now)
                else:
                    self._take(node, message)
            silent = now - wire.heard > (INTRODUCTION if node is None else SILENCE)
            if silent:
                raise ConnectionError(f"no sign of it for {now - wire.heard:.0f} s")
        except (OSError, ValueError, KeyError, TypeError) as error:
            if node is None:
                self.guests.remove(wire)
            elif self.nodes.get(node) is wire:
                del self.nodes[node]
                self.roster.lose(node, str(error), silent)
            wire.close()

    def _introduce(self, wire: Wire, message: Message, now: float) -> int:
        """Give a guest the place of the node that it says it is.

        An older connection of that node is dead if it is silent; if it is not, two launchers have one number.
        """
        node, ranks = message["node"], message["ranks"]
        if not (type(node) is type(ranks) is int and 0 <= node < self.roster.most):
            raise ValueError("it is no node of this run")
        if (old := self.nodes.get(node)) is not None:
            if now - old.heard < 3 * PULSE:
                raise ValueError("another launcher has its number")
            self.roster.lose(node, "it was started again")
            old.close()
        self.guests.remove(wire)
        self.nodes[node] = wire
        self.roster.join(node, ranks, now)
        return node

    def _take(self, node: int, message: Message) -> None:
        if "ended" in message:
            self.roster.end(node, int(message["ended"]))
        elif "failing" in message:
            self.roster.fail(node)
        elif "leaving" in message:
            self.roster.leave(node)

    def _tell(self, now: float) -> None:
        orders = self.roster.look(now)
        for line in self.roster.said:
            say_error(f"lambert: {line}")
        self.roster.said = []
        if now - self._pulse >= PULSE:
            self._pulse = now
            orders += [(node, {}) for node in self.nodes]
        for node, order in orders:
            if node in self.nodes and "away" in order:
                self.nodes.pop(node).close()
            elif node in self.nodes:
                self.nodes[node].send(order)
