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
    """A rank's device, and the rates that its links should reach."""

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
        pairs = {link: (found, self.links.get(link, found)) for link, found in links.items()}
        return replace(self, links={link: (max(a[0], b[0]), min(a[1], b[1])) for link, (a, b) in pairs.items()})

    def with_products(self, products: Sequence[float]) -> Results:
        """Add another measurement of the ranks' computing: the best one counts."""
        return replace(self, products=[max(pair) for pair in zip(self.products, products, strict=True)])

    def kind(self, link: Route) -> str:
        """INSIDE or BETWEEN."""
        return BETWEEN if crosses(link, self.hosts) else INSIDE

    def kinds(self) -> dict[str, dict[Route, float]]:
        """The rates of the links of each kind that was measured."""
        found: dict[str, dict[Route, float]] = {}
        for link, (rate, _) in self.links.items():
            found.setdefault(self.kind(link), {})[link] = rate
        return found

    def suspects(self) -> list[Blame]:
        """The slow links of each kind."""
        return [found for rates in self.kinds().values() if (found := blame(rates))]

    def slow_ranks(self) -> dict[int, float]:
        """The ranks that compute slowly."""
        return slow(dict(enumerate(self.products)))


# ---- as lines ------------------------------------------------------------------------------------------------


def table(results: Results) -> list[str]:
    """Format the collectives: a row per size, with the time, and the bus bandwidth of all but the smallest."""
    ranks = len(results.places)
    rows: dict[int, dict[str, str]] = {}
    for timing in results.timings:
        size, rate = 1 << (timing.bytes.bit_length() - 1), _rate(timing.bus_rate(ranks))  # it was rounded up
        if timing.bytes <= SMALL_BYTES * ranks:
            size, rate = SMALL_BYTES, ""
        rows.setdefault(size, {})[timing.collective] = f"{_duration(timing.seconds):>9} {rate:>12}"
    lines: list[tuple[str, Sequence[str]]] = [("size", COLLECTIVES)]
    lines += [(size_text(size), [row.get(name, "") for name in COLLECTIVES]) for size, row in sorted(rows.items())]
    return ["".join([f"{first:>8}", *(f"{cell:>22}" for cell in cells)]).rstrip() for first, cells in lines]


def summary(results: Results) -> list[str]:
    """Format the links by kind, next to what their hardware should give, and the ranks' computing."""
    lines = []
    for kind, rates in results.kinds().items():
        lowest, rate, highest = min(rates.values()), median(rates.values()), max(rates.values())
        text = f"{len(rates)} links {kind}, {size_text(results.message)} at a time: median {_rate(rate)}"
        if len(rates) > 1:
            text += f", {_rate(lowest)} to {_rate(highest)}"
        latency = median(results.links[link][1] for link in rates)
        lines.append(f"{text}; latency {_duration(latency)}; {_compared(results, kind, rate)}")
    slowest, fastest = min(results.products) / 1e12, max(results.products) / 1e12
    return [*lines, f"matrix products: {slowest:.3g} to {fastest:.3g} TFLOP/s per rank"]


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
            line = f"links {kind} give {_rate(rate)}, {rate / wire.rate:.0%} of {wire.name}"
            found.append(f"{line}: check {CHECKS[results.backend, kind]}")
    return found


# ---- problems ------------------------------------------------------------------------------------------------


def problems(results: Results) -> list[str]:
    """List the slow ranks and links, with hosts and what to check; empty if all are alike."""
    found = []
    typical = median(results.products)
    for rank, rate in results.slow_ranks().items():
        line = f"{_named(results, rank)} computes at {rate / 1e12:.3g} TFLOP/s; the median is {typical / 1e12:.3g}"
        found.append(f"{line}: check {CHECKS_OF_RANK[results.backend]}")
    for kind, rates in results.kinds().items():
        found += [f"{line}: check {CHECKS[results.backend, kind]}" for line in _blamed(results, kind, blame(rates))]
    return found


def _blamed(results: Results, kind: str, found: Blame) -> Iterable[str]:
    typical = f"the median rank reaches {_rate(found.typical)}"
    both = found.senders.keys() & found.receivers.keys()
    for how, rates, named in (
        ("sends and receives", found.senders, both),
        ("sends", found.senders, found.senders.keys() - both),
        ("receives", found.receivers, found.receivers.keys() - both),
    ):
        for rank in sorted(named):
            yield f"{_named(results, rank)} {how} {kind} at {_rate(rates[rank])}; {typical}"
    for link, rate in found.links.items():
        sender, receiver = (_named(results, rank) for rank in link)
        yield f"the link from {sender} to {receiver} gives {_rate(rate)}; {typical} {kind}"


def _named(results: Results, rank: int) -> str:
    return f"{numbers([rank])} ({results.hosts[rank]})"


# ---- as JSON -------------------------------------------------------------------------------------------------


def tree(results: Results) -> dict[str, Any]:
    """Return everything as JSON's types, with rates in bytes per second and times in seconds."""
    ranks, suspects = len(results.places), results.suspects()
    places = zip(results.places, results.products, strict=True)
    return {
        "backend": results.backend,
        "ranks": [{"rank": rank, **asdict(p), "flops_per_second": rate} for rank, (p, rate) in enumerate(places)],
        "collectives": [
            {**asdict(t), "algorithm_bytes_per_second": t.bytes / t.seconds, "bus_bytes_per_second": t.bus_rate(ranks)}
            for t in results.timings
        ],
        "links": [
            {**link._asdict(), "kind": results.kind(link), "bytes": results.message}
            | {"bytes_per_second": rate, "latency_seconds": latency}
            for link, (rate, latency) in results.links.items()
        ],
        "slow": {
            "computing": sorted(results.slow_ranks()),
            "sending": sorted({rank for found in suspects for rank in found.senders}),
            "receiving": sorted({rank for found in suspects for rank in found.receivers}),
            "links": [list(link) for found in suspects for link in found.links],
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
