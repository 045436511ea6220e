"""Runs whose number of nodes may change: what node 0 decides, and who may speak on its port."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.elastic import open_office, take_part
from deploy.node import Node
from deploy.office import GUESTS, Office
from deploy.roster import AFTER_FAILURE, AFTER_SILENCE, LAST_CALL, LONGEST_PAUSE, PATIENCE, PAUSE, STUCK, Roster
from deploy.wire import LONGEST_LINE, Message, Wire
from tests.helpers.ranks import free_port

# ---- what node 0 decides -------------------------------------------------------------------------------------


class Nodes:
    """A roster with a clock, and what each node was told last."""

    def __init__(self, least: int, most: int, restarts: int = 20) -> None:
        self.roster, self.now = Roster(least, most, 1, restarts, lambda: 7), 0.0

    def look(self, seconds: float = 0.0) -> dict[int, list[Message]]:
        self.now += seconds
        told: dict[int, list[Message]] = {}
        for node, message in self.roster.look(self.now):
            told.setdefault(node, []).append(message)
        return told

    def join(self, *nodes: int) -> dict[int, list[Message]]:
        for node in nodes:
            self.roster.join(node, 1, self.now)
        return self.look()

    def end(self, **codes: int) -> dict[int, list[Message]]:
        for node, code in codes.items():
            self.roster.end(int(node[1:]), code)
        return self.look()


def started(*nodes: int) -> dict[int, list[Message]]:
    return {node: [{"start": place, "nodes": len(nodes), "port": 7}] for place, node in enumerate(nodes)}


def everybody(message: Message, *nodes: int) -> dict[int, list[Message]]:
    return {node: [message] for node in nodes}


SAVE, OWN = {"save": True}, {"end": None, "why": ""}


def test_all_nodes_start_at_once_and_fewer_after_a_last_call() -> None:
    assert Nodes(2, 3).join(0, 1, 2) == started(0, 1, 2)
    nodes = Nodes(2, 3)
    assert nodes.join(0, 2) == {}
    assert nodes.look(LAST_CALL - 1) == {} and nodes.look(1) == started(0, 2)
    nodes = Nodes(2, 3)
    assert nodes.join(1, 2) == nodes.look(LAST_CALL) == {}  # not without node 0
    assert nodes.join(0) == started(0, 1, 2)


def test_too_few_nodes_end_with_3_after_their_patience() -> None:
    nodes = Nodes(2, 4)
    assert nodes.join(0) == nodes.look(PATIENCE) == {}
    why = "error: after 600 s 1 node(s) are here, but the run needs 2: start more, or lower --nnodes 2:4"
    assert nodes.look(1) == {0: [{"end": 3, "why": why}]} and nodes.roster.over


def test_a_lost_node_is_gone_on_without_and_taken_back() -> None:
    nodes = Nodes(2, 3)
    nodes.join(0, 1, 2)
    nodes.roster.fail(0)  # it has noticed
    assert nodes.look() == everybody({"kill": AFTER_FAILURE}, 0, 1, 2)
    nodes.roster.lose(1, "no sign of it", silent=True)
    assert nodes.look() == everybody({"kill": AFTER_SILENCE}, 0, 2)
    nodes.roster.fail(2)
    assert nodes.look() == {}  # they know
    assert nodes.end(n0=3) == {}
    assert nodes.end(n2=137) == started(0, 2)  # at once
    assert nodes.join(1) == everybody(SAVE, 0, 2)
    assert nodes.end(n0=75) == {} and nodes.end(n2=75) == started(0, 1, 2)
    assert nodes.end(n0=0, n1=0, n2=0) == everybody(OWN, 0, 1, 2)


def test_a_node_that_was_asked_to_stop_leaves_and_node_0_stops_the_run() -> None:
    nodes = Nodes(1, 3)
    nodes.join(0, 1, 2)
    nodes.roster.leave(2)
    assert nodes.look() == everybody(SAVE, 0, 1, 2)
    assert nodes.end(n0=75, n1=75, n2=75) == started(0, 1)
    nodes.roster.lose(2, "it closed the connection")
    assert nodes.look() == {}
    nodes.roster.leave(0)
    assert nodes.look() == everybody(SAVE, 0, 1)
    assert nodes.end(n0=75, n1=75) == everybody(OWN, 0, 1)


def test_a_node_that_leaves_too_few_is_waited_for_aloud() -> None:
    nodes = Nodes(2, 2)
    nodes.join(0, 1)
    nodes.roster.leave(1)
    assert nodes.look() == everybody(SAVE, 0, 1)
    assert nodes.end(n0=75, n1=75) == {} and nodes.roster.said[-1] == "nodes here: 0; waiting for at least 2"
    nodes.roster.lose(1, "it closed the connection")
    assert nodes.join(1) == started(0, 1)


def test_failures_are_tried_again_after_growing_pauses_and_not_forever() -> None:
    nodes = Nodes(2, 2, restarts=2)
    nodes.join(0, 1)
    nodes.roster.fail(1)
    assert nodes.look() == everybody({"kill": AFTER_FAILURE}, 0, 1)
    assert nodes.end(n0=3, n1=1) == nodes.look(PAUSE - 1) == {}
    assert nodes.look(1) == started(0, 1)
    assert nodes.end(n0=3, n1=1) == nodes.look(2 * PAUSE - 1) == {}
    assert nodes.look(1) == started(0, 1)
    assert nodes.end(n0=3, n1=1) == everybody(OWN, 0, 1)
    nodes = Nodes(1, 2)
    nodes.join(0, 1)
    nodes.roster.lose(1, "it closed the connection")
    assert nodes.look() == {0: [SAVE, {"kill": AFTER_FAILURE}]}  # the ranks may all be alive
    assert nodes.end(n0=75) == started(0)
    nodes = Nodes(1, 2)
    nodes.join(0, 1)
    nodes.look(LONGEST_PAUSE)
    assert nodes.end(n0=1, n1=3) == nodes.look(PAUSE - 1) == {} and nodes.look(1) == started(0, 1)
    nodes.look(LONGEST_PAUSE)  # a long attempt: the next failure is another one
    assert nodes.end(n0=1, n1=3) == nodes.look(PAUSE - 1) == {} and nodes.look(1) == started(0, 1)


def test_a_node_whose_ranks_cannot_be_killed_is_gone_on_without() -> None:
    """A driver may hold a rank whose GPU has failed: SIGKILL does not end it, but its launcher gives signs of life."""
    nodes = Nodes(1, 3)
    nodes.join(0, 1, 2)
    nodes.roster.fail(1)
    assert nodes.look() == everybody({"kill": AFTER_FAILURE}, 0, 1, 2)
    assert nodes.end(n0=3, n2=3) == nodes.look(AFTER_FAILURE + STUCK) == {}
    assert nodes.look(1) == {1: [{"away": True}]} | started(0, 2)
    nodes.roster.end(1, 1)  # too late
    assert nodes.join(1) == everybody(SAVE, 0, 2)


def test_a_run_is_done_when_rank_0_says_so() -> None:
    nodes = Nodes(2, 2)
    nodes.join(0, 1)
    nodes.end(n1=0)
    assert nodes.end(n0=137) == nodes.look(PAUSE - 1) == {} and nodes.look(1) == started(0, 1)
    assert nodes.end(n0=0, n1=0) == everybody(OWN, 0, 1)


def test_all_nodes_have_the_same_number_of_ranks() -> None:
    nodes = Nodes(1, 2)
    nodes.join(0)
    nodes.roster.join(1, 8, nodes.now)
    why = "error: this node has 8 rank(s), but node 0 has 1: set --nproc-per-node to the same number"
    assert nodes.look() == {1: [{"end": 2, "why": why}]} and nodes.roster.here == {0}


@pytest.mark.parametrize("codes", [{"n0": 2, "n1": 2}, {"n0": 75, "n1": 75}, {"n0": 0, "n1": 1}])
def test_what_cannot_get_better_or_was_asked_for_is_not_tried_again(codes: dict[str, int]) -> None:
    nodes = Nodes(2, 3)
    nodes.join(0, 1)
    assert nodes.look(LAST_CALL) == started(0, 1)
    assert nodes.end(**codes) == everybody(OWN, 0, 1)


def test_all_nodes_end_as_refused_if_one_was() -> None:
    """Else an init system would start the others again, and they would be refused again."""
    nodes = Nodes(2, 2)
    nodes.join(0, 1)
    why = "the run ended with exit code 2 on node 1: see the last lines there"
    assert nodes.end(n0=3, n1=2) == {0: [{"end": 2, "why": why}], 1: [OWN]}


def test_a_node_that_returns_unfit_does_not_end_the_run() -> None:
    """Its file system is not mounted, or its code is old; but a refusal without newcomers ends the run."""
    nodes = Nodes(2, 3)
    nodes.join(0, 1)
    nodes.look(LAST_CALL)
    nodes.join(2)
    assert nodes.end(n0=75, n1=75) == started(0, 1, 2)
    told = nodes.end(n0=2, n1=2, n2=2)
    assert told.pop(2) == [{"end": 2, "why": "the run was refused with this node: see node 0"}]
    assert told == started(0, 1)
    assert nodes.end(n0=2, n1=2) == everybody(OWN, 0, 1)


# ---- what a node does ----------------------------------------------------------------------------------------


def test_the_reason_of_each_failed_attempt_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """A rank that the kernel killed has no last line of its own."""
    start = {"start": 1, "nodes": 2, "port": 8}
    orders = iter([start, start, start, {"end": None}])
    killed = (137, "lambert: rank 1 was killed by SIGKILL", False)
    outcomes = iter([killed, (75, "lambert: stopped", False), (3, "lost rank 0", True)])
    own: Any = SimpleNamespace(node=Node(1, 2, 1, "node-0", 7), leaving=False, seen=math.inf)
    own.connect, own.next, own.send = lambda: None, lambda: next(orders), lambda message: None
    assert take_part(own, lambda node: next(outcomes), lambda seconds: False) == (3, "lost rank 0", True)
    assert capfd.readouterr().err == "lambert: rank 1 was killed by SIGKILL\n"


# ---- who may speak on its port -------------------------------------------------------------------------------


class Port:
    """An office on a port of this host, which looks around when it is told to."""

    def __init__(self, secret: str = "secret") -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.office = Office(self.listener, Roster(1, 3, 1, 20, lambda: 7), secret)

    def call(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname(), 5)

    def wire(self, secret: str = "secret") -> Wire:
        return Wire(self.call(), secret, answers=False)

    def look(self, times: int = 4) -> None:
        for _ in range(times):
            self.office.look()
            time.sleep(0.01)


@pytest.fixture
def port() -> Iterator[Port]:
    made = Port()
    yield made
    for wire in [*made.office.nodes.values(), *made.office.guests]:
        wire.close()
    made.listener.close()


def test_a_node_is_heard_and_told(port: Port, capfd: pytest.CaptureFixture[str]) -> None:
    wire = port.wire()
    wire.send({"node": 0, "ranks": 1})
    port.look(1)
    wire.receive()  # the office's first line, after which ours goes
    port.look()
    assert port.office.roster.here == {0} and "nodes here: 0; the run takes 1 to 3" in capfd.readouterr().err
    port.office.nodes[0].heard -= 4  # it was started again, and its old connection is dead
    other = port.wire()
    other.send({"node": 0, "ranks": 1})
    port.look(1)
    other.receive()
    port.look()
    assert len(port.office.nodes) == 1 and port.office.roster.here == {0}
    with pytest.raises(OSError, match="closed"):
        wire.receive()
    third = port.wire()
    third.send({"node": 0, "ranks": 1})  # by mistake: the other one lives
    port.look(1)
    third.receive()
    port.look()
    with pytest.raises(OSError, match="closed"):
        third.receive()
    other.close()
    port.look()
    assert port.office.roster.here == set()


@pytest.mark.parametrize(
    "lines",
    [
        [b"GET / HTTP/1.1"],
        [b"0" * 32, b'{"node": 1, "ranks": 1}'],  # no seal
        [b"0" * 5000],
        [b"0" * 32, b"\xff" * 100],
        [b"0" * 32, b"0" * 64 + b"[" * 4000],
        [],
    ],
)
def test_a_stranger_is_cut_off(port: Port, monkeypatch: pytest.MonkeyPatch, lines: list[bytes]) -> None:
    monkeypatch.setattr("deploy.office.INTRODUCTION", 0.02)
    stranger = port.call()
    for line in lines:
        stranger.sendall(line + b"\n")
    port.look()
    assert not port.office.guests and not port.office.roster.here
    stranger.settimeout(5)
    with contextlib.suppress(ConnectionError):
        assert len(stranger.recv(1000)) == 33 and stranger.recv(1000) == b""


@pytest.mark.parametrize(
    "message", [{}, {"node": 3, "ranks": 1}, {"node": True, "ranks": 1}, {"node": "0", "ranks": 1}, {"node": 1}]
)
def test_what_is_no_node_is_cut_off(port: Port, message: Message) -> None:
    wire = port.wire()
    wire.send(message)
    port.look(1)
    wire.receive()
    port.look()
    assert not port.office.guests and not port.office.nodes


def test_another_secret_and_a_repeated_line_are_no_ones(port: Port) -> None:
    wire = port.wire("another")
    wire.send({"node": 1, "ranks": 1})
    port.look(1)
    wire.receive()
    port.look()
    assert not port.office.guests and not port.office.nodes
    ours, theirs = socket.socketpair()
    left, right = Wire(ours, "secret", answers=True), Wire(theirs, "secret", answers=False)
    left.receive(), right.receive()
    left.send({"save": True})
    line = theirs.recv(4096, socket.MSG_PEEK)
    assert right.receive() == [{"save": True}]
    ours.send(line)
    with pytest.raises(OSError, match="LAMBERT_SECRET"):
        right.receive()


def test_a_node_that_is_sent_away_may_come_back(port: Port) -> None:
    wire = port.wire()
    wire.send({"node": 1, "ranks": 1})
    port.look(1)
    wire.receive()
    port.look()
    vars(port.office.roster)["look"] = lambda now: [(1, {"away": True})]
    port.look()
    assert not port.office.nodes
    with pytest.raises(OSError, match="closed"):
        wire.receive() and wire.receive()


def test_a_single_node_listens_on_loopback_only() -> None:
    for most, address in ((1, "127.0.0.1"), (2, "::" if socket.has_dualstack_ipv6() else "0.0.0.0")):
        with contextlib.closing(open_office(Node(0, most, 1, "127.0.0.1", free_port(), 1), "")) as office:
            assert office.listener.getsockname()[0] == address


def test_nothing_is_sealed_for_a_nonce_of_a_strangers_choice() -> None:
    """A seal of this one would be one for the entry "opened" in the ranks' store."""
    ours, theirs = socket.socketpair()
    wire = Wire(theirs, "secret", answers=False)
    wire.send({"node": 1, "ranks": 1})
    ours.send(b"opened\0" + b"0" * 25 + b"\n")
    with pytest.raises(OSError, match="no launcher of ours"):
        wire.receive()
    assert len(ours.recv(1000)) == 33


def test_an_endless_line_is_not_kept() -> None:
    ours, theirs = socket.socketpair()
    wire = Wire(theirs, "", answers=True)
    ours.send(b"0" * 3 * LONGEST_LINE)
    assert wire.receive() == []
    with pytest.raises(OSError, match="too long"):
        wire.receive()


def test_guests_are_few(port: Port) -> None:
    calls = [port.call() for _ in range(GUESTS + 10)]
    port.look()
    assert len(port.office.guests) == GUESTS
    for call in calls:
        call.close()
