"""Network namespaces that act as the nodes of a cluster, each with its own loopback, interface and address.

All nodes are connected to one switch. So is the test itself, with what it starts without :meth:`Node.command`, like a
server outside the cluster.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

INTERFACE = "eth0"  # the interface's name on every node
SPACE = ipaddress.ip_network("198.18.0.0/15")  # reserved for network tests (RFC 2544), so no real network uses it
ROOM = 4  # bits of a cluster's addresses: 13 nodes and the test itself
NAME = "lambert"


@dataclass(frozen=True)
class Node:
    """A network namespace that acts as a node."""

    namespace: str
    address: str

    def command(self, *words: str) -> list[str]:
        """A command that runs ``words`` on this node."""
        return ["ip", "netns", "exec", self.namespace, *words]


@contextlib.contextmanager
def cluster(count: int) -> Iterator[list[Node]]:
    """Create ``count`` nodes; afterwards, remove them and the processes that still run there.

    Names and addresses are unique to this process. Skips the test if namespaces cannot be created.
    """
    if shutil.which("ip") is None:
        pytest.skip("no `ip` here to make network namespaces with: install iproute2")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    _remove_what_died()
    mark = f"{NAME}-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", _switch(mark)], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no network namespaces here: {tried.stderr.strip()}")
    try:
        yield _connect(mark, count)
    finally:
        _remove(mark)


def limit(node: Node, rate: str) -> bool:
    """Limit what a node sends to a rate such as ``400mbit``. False if the machine cannot do that."""
    words = ["qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
    return shutil.which("tc") is not None and not subprocess.run(["tc", "-n", node.namespace, *words]).returncode


def _connect(mark: str, count: int) -> list[Node]:
    """Create a switch with a cable to each node and one to this process's network.

    The switch has its own namespace, which exists already: on a machine with Docker, the firewall rules outside would
    drop what passes over a bridge.
    """
    places = 2 ** (SPACE.max_prefixlen - SPACE.prefixlen - ROOM)
    network = ipaddress.ip_network((int(SPACE[0]) + os.getpid() % places * 2**ROOM, SPACE.max_prefixlen - ROOM))
    switch = ["-n", _switch(mark)]
    _ip(*switch, "link", "add", "bridge", "type", "bridge")
    _ip(*switch, "link", "set", "bridge", "up")
    _cable(mark, "here", [], _here(mark), f"{network[1]}/{network.prefixlen}")
    nodes = [Node(f"{mark}.{number}", str(network[2 + number])) for number in range(count)]
    for node in nodes:
        _ip("netns", "add", node.namespace)
        inside = ["-n", node.namespace]
        _cable(
            mark, f"node{node.namespace.rpartition('.')[2]}", inside, INTERFACE, f"{node.address}/{network.prefixlen}"
        )
        _ip(*inside, "link", "set", "lo", "up")
    return nodes


def _cable(mark: str, port: str, inside: list[str], interface: str, address: str) -> None:
    """Connect a port of the switch to an interface with an address, in the namespace that ``inside`` names."""
    switch = ["-n", _switch(mark)]
    _ip(*inside, "link", "add", interface, "type", "veth", "peer", "name", port, "netns", _switch(mark))
    _ip(*switch, "link", "set", port, "master", "bridge", "up")
    _ip(*inside, "address", "add", address, "dev", interface)
    _ip(*inside, "link", "set", interface, "up")


def _remove(mark: str) -> None:
    """Remove every namespace and interface with this mark. Both ends of a cable go with either end's namespace."""
    for namespace in _namespaces():
        if namespace.rpartition(".")[0] == mark:
            for pid in _ip("netns", "pids", namespace).split():
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(int(pid), signal.SIGKILL)
            _ip("netns", "delete", namespace)


def _remove_what_died() -> None:
    """Remove the clusters of test processes that were killed before they could clean up."""
    marks = {name.rpartition(".")[0] for name in _namespaces() if name.startswith(f"{NAME}-")}
    for mark in marks:
        if not Path("/proc", mark.removeprefix(f"{NAME}-")).exists():
            with contextlib.suppress(AssertionError):  # another test process removes it at the same time
                _remove(mark)


def _switch(mark: str) -> str:
    return f"{mark}.switch"


def _here(mark: str) -> str:
    """The name of this side's interface: at most 15 characters, so it can hold a process id and little else."""
    return f"lt{mark.removeprefix(f'{NAME}-')}"


def _namespaces() -> list[str]:
    """The names of all namespaces; a line of them may end in "(id: 3)"."""
    return [line.split()[0] for line in _ip("netns", "list").splitlines()]


def _ip(*words: str) -> str:
    """Run ``ip`` and return its output."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout
