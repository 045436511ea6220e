"""A node's part in a run whose number of nodes may change: it does what node 0's office says, attempt after attempt.

PyTorch's own elastic launcher is not used: its rendezvous unpickles what anyone who reaches its port has written, it
compares clocks of different nodes, it starts a refused run again, and it notices a lost node only when the ranks do.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from data_prep.streams import say_error
from deploy.node import LaunchError, Node
from deploy.office import POLL, PULSE, SILENCE, Office
from deploy.roster import AFTER_FAILURE, AFTER_SILENCE, PATIENCE, Roster
from deploy.wire import Message, Wire
from trainer.exits import DONE, LOST, STOPPED
from trainer.ranks.network import free_port

LOOPBACK = "127.0.0.1"
CONNECT = 3.0  # seconds for a connection to be made
Outcome = tuple[int, str, bool]  # the exit code, the reason, and whether a rank's last line already states it


class Member:
    """This node's connection to the office on node 0. Node 0's own member also lets the office work."""

    poll = POLL

    def __init__(self, node: Node, secret: str) -> None:
        self.node, self.secret = node, secret
        self.office = None if node.number else open_office(node, secret)
        self.leaving = False  # this node was asked to stop
        self._wire: Wire | None = None
        self._inbox: deque[Message] = deque()
        self._pulse = self._tried = 0.0
        self._known = False  # whether the office has sent something over this connection
        self._told = False  # whether it was reported that the office cannot be reached
        self.seen = time.monotonic()  # when the office was last heard

    @property
    def connected(self) -> bool:
        """Whether there is a connection."""
        return self._wire is not None

    def connect(self) -> None:
        """Try to reach the office, at most once a second."""
        if self._wire is not None or time.monotonic() < self._tried + PULSE:
            return
        self._tried = time.monotonic()
        host = LOOPBACK if self.node.number == 0 else self.node.address
        try:
            connection = socket.create_connection((host, self.node.port), CONNECT)
        except OSError as error:  # not there yet, or its name is not
            self._tell(f"does not answer yet ({error.strerror or error})")
            return
        self._wire, self._known = Wire(connection, self.secret, answers=False), False
        self._inbox.clear()
        self.send({"node": self.node.number, "ranks": self.node.ranks})

    def send(self, message: Message) -> None:
        """Tell the office something, if it can be reached."""
        if self._wire is not None:
            self._wire.send(message)

    def fail(self) -> None:
        """Tell the office that a rank of this node has failed."""
        self.send({"failing": True})

    def leave(self) -> None:
        """Tell the office that this node was asked to stop."""
        self.leaving = True
        self.send({"leaving": True})

    def close(self) -> None:
        """Close the connection: the office waits for that once the run is over."""
        if self._wire is not None:
            self._wire.close()
        if self.office is not None:
            self.office.close()

    def next(self) -> Message | None:
        """Return the office's next order, if there is one. If the office is lost, that is to end the ranks."""
        if self.office is not None:
            self.office.look()
        if self._inbox or self._wire is None:
            return self._inbox.popleft() if self._inbox else None
        now, silent = time.monotonic(), False
        try:
            if now > self._pulse + PULSE:
                self._pulse = now
                self._wire.send({})
            if found := self._wire.receive():
                self.seen, self._known, self._told = now, True, False
                self._inbox.extend(message for message in found if message)
            silent = now - self._wire.heard > SILENCE
            if silent:
                raise ConnectionError(f"no sign of it for {now - self._wire.heard:.0f} s")
        except OSError as error:
            if self._known:
                say_error(f"lambert: lost node 0's launcher: {error}")
            else:
                self._tell(f"does not let this node in ({error}): check --node-rank and LAMBERT_SECRET")
            self._wire.close()
            self._wire = None
            return {"kill": AFTER_SILENCE} if silent else {"save": True, "kill": AFTER_FAILURE}
        return self._inbox.popleft() if self._inbox else None

    def _tell(self, what: str) -> None:
        if not self._told:
            say_error(f"lambert: node 0's launcher at {self.node.address}:{self.node.port} {what}; trying again")
        self._told = True


def open_office(node: Node, secret: str) -> Office:
    """Listen on all addresses of node 0, or on loopback if no other node may come.

    Raises LaunchError if the port is in use.
    """
    alone = node.nodes == 1
    both = socket.has_dualstack_ipv6() and not alone
    place = (LOOPBACK if alone else "", node.port)
    try:
        listener = socket.create_server(place, family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise LaunchError(f"error: port {node.port}: {why}: set another --master-port") from None
    assert node.least is not None
    return Office(listener, Roster(node.least, node.nodes, node.ranks, node.restarts, partial(free_port, "")), secret)


def take_part(member: Member, attempt: Callable[[Node], Outcome], pause: Callable[[float], bool]) -> Outcome:
    """Start the ranks as often as the office says, and return how this node ends.

    ``attempt``: starts the ranks in a place and waits for them. ``pause``: waits; True if a stop was requested.
    """
    node, last = member.node, (LOST, "", False)
    while True:
        member.connect()
        order = member.next() or {}
        if "start" in order:
            last = attempt(replace(node, number=order["start"], nodes=order["nodes"], port=order["port"]))
            member.send({"ended": last[0]})
            code, reason, said = last
            if code not in (DONE, STOPPED) and not said:  # the next attempt may be long, and end otherwise
                say_error(reason)
        elif "end" in order:
            return last if order["end"] is None or member.leaving else (order["end"], f"lambert: {order['why']}", False)
        if member.leaving and (node.number or not member.connected):
            return last
        if time.monotonic() > member.seen + PATIENCE:
            why = f"node 0's launcher at {node.address}:{node.port} has not answered for {PATIENCE:.0f} s"
            return LOST, f"lambert: error: {why}: start it, or check --master-addr", False
        if not order and pause(POLL) and not member.leaving:
            last = (STOPPED, "lambert: stopped while it waited for other nodes", False)
            member.leave()
