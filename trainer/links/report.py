"""The results of a network check: as lines to read, as JSON, and as problems that end the check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from trainer.links.measure import COLLECTIVES, SMALL_BYTES, Timing
from trainer.links.routes import Route, crosses
from trainer.links.slow import Blame, blame, slow
from trainer.links.wires import BETWEEN_GPUS, ETHERNET, GIGA, INFINIBAND, Wire, looks_like
from trainer.ranks.meeting import numbers

LOW = 0.5  # a warning below this share of what the hardware should give
INSIDE, BETWEEN = "inside a node", "between nodes"
CHECKS = {  # by backend and kind of link
    ("nccl", INSIDE): "`nvidia-smi topo -m`, `nvidia-smi nvlink --status` and NCCL_P2P_DISABLE",
    ("nccl", BETWEEN): "NCCL_SOCKET_IFNAME, NCCL_IB_HCA, NCCL_IB_DISABLE, the ports' rates (`ibstat`), and GPUDirect "
    "RDMA (the kernel module nvidia_peermem)",
    ("gloo", INSIDE): "the cores that each rank may use, and what else runs on the node",
    ("gloo", BETWEEN): "GLOO_SOCKET_IFNAME, the interface's speed (`ethtool`), its errors (`ip -s link`), and other "
    "traffic",
}
CHECKS_OF_RANK = {
    "nccl": "its GPU's clocks and temperature (`nvidia-smi -q -d PERFORMANCE`), and what else uses it",
    "gloo": "the cores it may use (the launcher's binding, OMP_NUM_THREADS), and what else runs on its node",
}


@dataclass(frozen=True)
class Place:
    """What a rank runs on, and what its hardware should give to others."""

    host: str
    device: str
    inside: Wire | None  # to the ranks of its node
    between: Wire | None  # to other nodes


@dataclass(frozen=True)
class Results:
    """Everything that was measured. ``links``: bytes per second and latency in seconds. ``products``: FLOP/s."""

    backend: str
    places: list[Place]  # by rank
    timings: list[Timing]
    links: dict[Route, tuple[float, float]]
    message: int  # bytes sent over each link
    products: list[float]  # by rank

    @property
    def hosts(self) -> list[str]:
        """The host of each rank."""
        return [place.host for place in self.places]

    def with_links(self, links: Mapping[Route, tuple[float, float]]) -> Results:
        """Add another pass over the links: the higher rate and the lower latency count."""
        best = {}
        for link, found in links.items():
            rates, latencies = zip(found, self.links.get(link, found), strict=True)
            best[link] = max(rates), min(latencies)
        return replace(self, links=best)

    def with_products(self, products: Sequence[float]) -> Results:
        """Add another measurement of the ranks' computing: the best one counts."""
        return replace(self, products=[max(pair) for pair in zip(self.products, products, strict=True)])

    def kinds(self) -> dict[str, dict[Route, float]]:
        """The rates of the links of each kind that was measured."""
        found: dict[str, dict[Route, float]] = {}
        for link, (rate, _) in self.links.items():
            found.setdefault(BETWEEN if crosses(link, self.hosts) else INSIDE, {})[link] = rate
        return found

    def suspects(self) -> list[Blame]:
        """What is slow among the links of each kind."""
        return [found for rates in self.kinds().values() if (found := blame(rates))]

    def slow_ranks(self) -> dict[int, float]:
        """The ranks that compute slowly."""
        return slow(dict(enumerate(self.products)))


# ---- as lines ------------------------------------------------------------------------------------------------


def table(results: Results) -> list[str]:
    """Format the collectives: a row per size, with the time, and the bus bandwidth of all but the smallest."""
    ranks = len(results.places)
    by_size: dict[int, dict[str, str]] = {}
    for timing in results.timings:
        small = timing.bytes <= SMALL_BYTES * ranks
        rate = "" if small else _rate(timing.bus_rate(ranks))
        shown = f"{_duration(timing.seconds):>9} {rate:>12}"
        by_size.setdefault(_nominal(timing.bytes, ranks), {})[timing.collective] = shown
    lines = ["".join([f"{'size':>8}", *(f"{name:>22}" for name in COLLECTIVES)])]
    for size, row in sorted(by_size.items()):
        cells = (row.get(name, "").rjust(22) for name in COLLECTIVES)
        lines.append("".join([f"{size_text(size):>8}", *cells]).rstrip())
    return lines


def _nominal(size: int, ranks: int) -> int:
    """The size that was asked for: a buffer is rounded up to a multiple of the ranks."""
    return SMALL_BYTES if size <= SMALL_BYTES * ranks else 1 << (size.bit_length() - 1)


def summary(results: Results) -> list[str]:
    """Format the links by kind, next to what their hardware should give, and the ranks' computing."""
    lines = []
    for kind, rates in results.kinds().items():
        latency = median(results.links[link][1] for link in rates)
        text = (
            f"{len(rates)} links {kind}, {size_text(results.message)} at a time: median {_rate(median(rates.values()))}"
        )
        if len(rates) > 1:
            text += f", {_rate(min(rates.values()))} to {_rate(max(rates.values()))}"
        lines.append(f"{text}; latency {_duration(latency)}; {_compared(results, kind, median(rates.values()))}")
    flops = sorted(results.products)
    lines.append(f"matrix products: {flops[0] / 1e12:.3g} to {flops[-1] / 1e12:.3g} TFLOP/s per rank")
    return lines


def _compared(results: Results, kind: str, rate: float) -> str:
    wire = expected(results, kind)
    if wire is not None:
        return f"{rate / wire.rate:.0%} of {wire.name}, {_rate(wire.rate)}"
    if kind == INSIDE and results.backend == "gloo":
        return "through the node's memory"
    between = ETHERNET if results.backend == "gloo" else (*INFINIBAND, *ETHERNET)
    like = looks_like(rate, BETWEEN_GPUS if kind == INSIDE else between)
    return f"the hardware is not known; looks like {like.name}, {_rate(like.rate)}"


def expected(results: Results, kind: str) -> Wire | None:
    """Return what links of this kind should give: that of the rank with the slowest hardware, if known."""
    wires = [place.inside if kind == INSIDE else place.between for place in results.places]
    known = [wire for wire in wires if wire is not None]
    return min(known, key=lambda wire: wire.rate) if len(known) == len(wires) else None


def warnings(results: Results) -> list[str]:
    """List the kinds of links that are much slower than their hardware, with what to check."""
    found = []
    for kind, rates in results.kinds().items():
        wire, rate = expected(results, kind), median(rates.values())
        if wire is not None and rate < LOW * wire.rate:
            found.append(
                f"links {kind} give {_rate(rate)}, {rate / wire.rate:.0%} of {wire.name}: check "
                f"{CHECKS[results.backend, kind]}"
            )
    return found


# ---- problems ------------------------------------------------------------------------------------------------


def problems(results: Results) -> list[str]:
    """List the slow ranks and links, with hosts and what to check; empty if all are alike."""
    found = []
    typical = median(results.products)
    for rank, rate in results.slow_ranks().items():
        found.append(
            f"{_named(results, rank)} computes at {rate / 1e12:.3g} TFLOP/s; the median is {typical / 1e12:.3g}: check "
            f"{CHECKS_OF_RANK[results.backend]}"
        )
    for kind, rates in results.kinds().items():
        found += [f"{line}: check {CHECKS[results.backend, kind]}" for line in _blamed(results, kind, blame(rates))]
    return found


def _blamed(results: Results, kind: str, found: Blame) -> Iterable[str]:
    both = {rank: rate for rank, rate in found.senders.items() if rank in found.receivers}
    for how, slow_ones in (
        ("sends and receives", both),
        ("sends", {rank: rate for rank, rate in found.senders.items() if rank not in both}),
        ("receives", {rank: rate for rank, rate in found.receivers.items() if rank not in both}),
    ):
        for rank, rate in slow_ones.items():
            typical = _rate(found.typical)
            yield f"{_named(results, rank)} {how} {kind} at {_rate(rate)}; the median rank reaches {typical}"
    for link, rate in found.links.items():
        yield (
            f"the link from {_named(results, link.sender)} to {_named(results, link.receiver)} gives {_rate(rate)}; "
            f"the median rank reaches {_rate(found.typical)} {kind}"
        )


def _named(results: Results, rank: int) -> str:
    return f"{numbers([rank])} ({results.hosts[rank]})"


# ---- as JSON -------------------------------------------------------------------------------------------------


def tree(results: Results) -> dict[str, Any]:
    """Return everything as JSON's types, with rates in bytes per second and times in seconds."""
    ranks, kinds = len(results.places), results.kinds()
    slow_links = [link for found in results.suspects() for link in found.links]
    return {
        "backend": results.backend,
        "ranks": [
            {"rank": rank, **asdict(place), "flops_per_second": results.products[rank]}
            for rank, place in enumerate(results.places)
        ],
        "collectives": [
            {
                **asdict(timing),
                "algorithm_bytes_per_second": timing.algorithm_rate,
                "bus_bytes_per_second": timing.bus_rate(ranks),
            }
            for timing in results.timings
        ],
        "links": [
            {
                "sender": link.sender,
                "receiver": link.receiver,
                "kind": kind,
                "bytes": results.message,
                "bytes_per_second": rate,
                "latency_seconds": results.links[link][1],
            }
            for kind, rates in kinds.items()
            for link, rate in rates.items()
        ],
        "slow": {
            "computing": sorted(results.slow_ranks()),
            "sending": sorted({rank for found in results.suspects() for rank in found.senders}),
            "receiving": sorted({rank for found in results.suspects() for rank in found.receivers}),
            "links": [list(link.ends) for link in slow_links],
        },
        "problems": problems(results),
        "warnings": warnings(results),
    }


# ---- units ---------------------------------------------------------------------------------------------------


def _rate(rate: float) -> str:
    return f"{rate / GIGA:.3g} GB/s"


def _duration(seconds: float) -> str:
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def size_text(size: int) -> str:
    """Format a number of bytes: ``64 KiB``."""
    for power, unit in ((20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size >> power} {unit}"
    return f"{size} B"
