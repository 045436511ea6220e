"""Name the ranks and links that are much slower than the others. Pure.

A rank waits for its slowest peer in every collective, so a collective's times do not show which rank is slow. Links do:
if all links by which a rank sends are slow, although its peers receive well from others, that rank is slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from trainer.links.routes import Route

SLOW = 0.5  # slow is less than this share of the median
Key = TypeVar("Key")


@dataclass(frozen=True)
class Blame:
    """The slow ranks and the other slow links, each with its rate in bytes per second."""

    senders: dict[int, float]
    receivers: dict[int, float]
    links: dict[Route, float]
    typical: float  # median of what the ranks reach over their best links; bytes per second

    def __bool__(self) -> bool:
        return bool(self.senders or self.receivers or self.links)


def slow(rates: Mapping[Key, float]) -> dict[Key, float]:
    """Return the rates below half of their median."""
    limit = SLOW * median(rates.values()) if rates else 0.0
    return {key: rate for key, rate in rates.items() if rate < limit}


def blame(rates: Mapping[Route, float]) -> Blame:
    """Find what is slow among links of one kind, given their rates in bytes per second.

    A rank with a single link in a direction is never blamed, because the link's other end may be the slow one.
    """
    sending = _best((link.sender, rate) for link, rate in rates.items())
    receiving = _best((link.receiver, rate) for link, rate in rates.items())
    senders, receivers = slow(sending), slow(receiving)
    left = {link: rate for link, rate in rates.items() if link[0] not in senders and link[1] not in receivers}
    best = [*sending.values(), *receiving.values()] or rates.values()
    return Blame(senders, receivers, slow(left), median(best))


def _best(rates: Iterable[tuple[int, float]]) -> dict[int, float]:
    """The best rate of each rank that has more than one."""
    found: dict[int, list[float]] = {}
    for rank, rate in rates:
        found.setdefault(rank, []).append(rate)
    return {rank: max(each) for rank, each in found.items() if len(each) > 1}
