"""The links between ranks to measure, in an order such that no measurement disturbs another. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

Member = TypeVar("Member")
ALL_PAIRS = 8  # up to this many members, every pair of a group is measured; above, neighbors in a ring


class Route(NamedTuple):
    """One direction of the link between two ranks."""

    sender: int
    receiver: int


def routes(hosts: Sequence[str]) -> list[Route]:
    """List the links to measure between ranks on these hosts, in rank order.

    Ranks of a host are paired with each other, and hosts through their ranks with the same local number: so every rank
    sends to its own node and to another one. Both directions of a link are listed.
    """
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    pairs = [pair for ranks in nodes.values() for pair in _pairs(ranks)]
    pairs += [pair for a, b in _pairs(list(nodes)) for pair in zip(nodes[a], nodes[b], strict=False)]
    return [Route(*pair) for pair in pairs]


def _pairs(members: Sequence[Member]) -> list[tuple[Member, Member]]:
    """All ordered pairs of a few members; both directions around the ring of many."""
    count = len(members)
    if count <= ALL_PAIRS:
        return [(a, b) for a in members for b in members if a != b]
    ring = [(members[i], members[(i + 1) % count]) for i in range(count)]
    return ring + [(b, a) for a, b in ring]


def rounds(links: Sequence[Route], hosts: Sequence[str]) -> list[list[Route]]:
    """Split links into rounds that can be measured at the same time.

    In a round, a rank belongs to at most one link, and a host to at most one link that leaves it: ranks of a host may
    share its network card.
    """
    found: list[tuple[list[Route], set[int | str]]] = []
    for link in links:
        ends: set[int | str] = {*link}
        if crosses(link, hosts):
            ends |= {hosts[rank] for rank in link}
        for chosen, busy in found:
            if not busy & ends:
                chosen.append(link)
                busy |= ends
                break
        else:
            found.append(([link], ends))
    return [chosen for chosen, _ in found]


def crosses(link: Route, hosts: Sequence[str]) -> bool:
    """Whether the link leaves its host."""
    return hosts[link.sender] != hosts[link.receiver]
