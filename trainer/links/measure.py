"""Time collectives, links and matrix products on the ranks of this process group.

Every rank calls these functions at the same time. A measurement that does not end raises LostError on a GPU; on CPUs,
gloo raises RuntimeError after the process group's timeout.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.errors import LostError, TrainerError
from trainer.links.routes import Route
from trainer.ranks.meeting import numbers
from trainer.ranks.world import World

TRIES = 5  # measurements of each kind
MOST_REPEATS = 50  # operations per measurement
PASSES, MOST_PASSES = 3, 6  # the best one counts, and what looks slow gets more of them
WARM_UPS = 2
ECHOES = 20  # round trips of a small message
SMALL_BYTES = 8  # a message of which only the latency counts
SIZES = (SMALL_BYTES, *(1 << (16 + 2 * power) for power in range(7)))  # bytes: then 64 KiB to 256 MiB
LINK_BYTES = (1 << 20, 1 << 28)  # the smallest and the largest message over a link
COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather")
PRODUCTS = {"cpu": (512, 4, torch.float32), "cuda": (8192, 8, torch.half)}  # side, how many per try, dtype
PRODUCT_TRIES = 10
# names since PyTorch 2.13, and before
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Timing:
    """The time of one collective over all ranks."""

    collective: str
    bytes: int  # of the whole buffer: what each rank reduces, or has after an all-gather
    seconds: float  # median on the slowest rank

    def bus_rate(self, ranks: int) -> float:
        """The bus bandwidth in bytes per second, which compares with a link's rate: of the data that each rank sends.

        It is the algorithm bandwidth times 2 (n - 1) / n for an all-reduce and (n - 1) / n for the others, as
        PERFORMANCE.md of NVIDIA's nccl-tests defines it.
        """
        sent = (2 if self.collective == "all-reduce" else 1) * (ranks - 1) / ranks
        return self.bytes / self.seconds * sent


class Group:
    """The ranks that measure together. ``limit``: seconds that one measurement may take on a GPU."""

    def __init__(self, world: World, limit: float) -> None:
        self.world, self.limit = world, limit
        self.on_gpu = world.device.type == "cuda"

    def mark(self) -> Any:
        """Return a point in time of the device's queue: an event on a GPU, seconds on a CPU."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, what: str) -> None:
        """Wait for the device. Raises LostError if it does not finish in time."""
        end, deadline = self.mark(), time.monotonic() + self.limit
        while self.on_gpu and not end.query():
            if time.monotonic() > deadline:
                raise LostError(f"{what} did not end in {self.limit:.0f} s: a rank is stuck, or a link is broken")

    def seconds(self, run: Callable[[], object], repeats: int, what: str) -> float:
        """The time of this rank's device for an operation, ``repeats`` times in a row."""
        first = self.mark()
        for _ in range(repeats):
            run()
        last = self.mark()
        self.wait(what)
        return steps([first, last])[0]

    def meet(self) -> None:
        """Wait until every rank is here."""
        dist.all_reduce(torch.zeros(1, device=self.world.device))
        self.wait("a barrier of all ranks")

    def gather(self, values: Sequence[float]) -> Tensor:
        """Return every rank's values (ranks, values), fp64, on the CPU."""
        own = torch.tensor(values, dtype=torch.float64, device=self.world.device)
        rows = [torch.empty_like(own) for _ in range(self.world.size)]
        dist.all_gather(rows, own)
        self.wait("gathering the results")
        return torch.stack(rows).cpu()


def steps(marks: Sequence[Any]) -> list[float]:
    """The seconds between each two marks, once the device has reached all."""
    pairs = zip(marks, marks[1:], strict=False)
    return [last - first if isinstance(first, float) else first.elapsed_time(last) / 1000 for first, last in pairs]


# ---- collectives ---------------------------------------------------------------------------------------------


def time_collective(collective: str, group: Group, budget: float) -> list[Timing]:
    """Time a collective at each size, from small to large, until about ``budget`` seconds are used up.

    Two sizes are timed in any case. The first call of each size is not timed, and its result is checked. Raises
    TrainerError if it is wrong.
    """
    timings: list[Timing] = []
    spent = 0.0
    for size in SIZES:
        if len(timings) > 1 and spent + 4 * timings[-1].seconds * (1 + WARM_UPS + TRIES) > budget:
            break
        began = time.perf_counter()
        run, total = _prepared(collective, size, group)
        seconds = _median_seconds(run, group, budget / len(SIZES), f"{collective} of {total:,} bytes")
        slowest, took = group.gather([seconds, time.perf_counter() - began]).amax(0).tolist()
        timings.append(Timing(collective, total, slowest))
        spent += took
    return timings


def _prepared(collective: str, size: int, group: Group) -> tuple[Callable[[], object], int]:
    """Run a collective once and check its result; return what repeats it, and the bytes of its buffer."""
    world = group.world
    share = math.ceil(size / (4 * world.size))  # fp32 elements of a rank
    whole = torch.full((world.size * share,), world.rank + 1.0, device=world.device)
    part = torch.full((share,), world.rank + 1.0, device=world.device)
    each = torch.arange(1.0, world.size + 1, device=world.device)[:, None]
    operations: dict[str, tuple[Callable[[], object], Tensor, Tensor]] = {
        "all-reduce": (partial(dist.all_reduce, whole), whole, each.sum()),
        "reduce-scatter": (partial(_reduce_scatter, part, whole), part, each.sum()),
        "all-gather": (partial(_all_gather, whole, part), whole.view(world.size, share), each),
    }
    run, result, expected = operations[collective]
    run()
    what = f"{collective} of {4 * whole.numel():,} bytes"
    group.wait(what)
    wrong = group.gather([(result != expected).sum().item()])[:, 0]
    if wrong.any():
        bad = numbers(wrong.nonzero()[:, 0].tolist())
        raise TrainerError(f"{what}: wrong result on {bad}: a link or a GPU is broken" if world.is_main else "")
    whole.zero_()  # repeated sums stay finite
    part.zero_()
    return run, 4 * whole.numel()


def _median_seconds(run: Callable[[], object], group: Group, budget: float, what: str) -> float:
    """This rank's median time of an operation, from :data:`TRIES` measurements of several in a row."""

    def measure(repeats: int) -> float:
        group.meet()
        return group.seconds(run, repeats, what) / repeats

    once = float(group.gather([measure(WARM_UPS)]).max())
    repeats = min(MOST_REPEATS, max(1, int(budget / (TRIES * once))))
    return median(measure(repeats) for _ in range(TRIES))


# ---- links ---------------------------------------------------------------------------------------------------


def link_bytes(rate: float, rounds: int, budget: float) -> int:
    """Return the size of a message, a power of two, with which all passes take about ``budget`` seconds."""
    low, high = LINK_BYTES
    wanted = rate * budget / (PASSES * rounds * (TRIES + 1))
    return min(high, max(low, 1 << max(0, int(wanted).bit_length() - 1)))


def time_links(rounds: Sequence[Sequence[Route]], size: int, group: Group) -> dict[Route, tuple[float, float]]:
    """Return each link's rate in bytes per second and latency in seconds, as its receiver measures them."""
    world = group.world
    found = {link: (0.0, 0.0) for each in rounds for link in each}
    data = torch.zeros(size // 4, device=world.device)
    for each in rounds:
        group.meet()
        for link in each:
            if world.rank in link:
                try:
                    found[link] = _time_link(link, data, group)
                except RuntimeError as error:
                    error.add_note(f"the link from rank {link.sender} to rank {link.receiver}")
                    raise
    table = group.gather([number for pair in found.values() for number in pair]).sum(0).view(-1, 2)
    return {link: (rate, latency) for link, (rate, latency) in zip(found, table.tolist(), strict=True)}


def _time_link(link: Route, data: Tensor, group: Group) -> tuple[float, float]:
    """Return the receiver's (bytes per second, latency); zeros on the sender.

    The first message of each kind is not timed, because its receiver may wait for the sender to arrive. The fastest one
    counts: a busy node slows some of them down, a bad link all.
    """
    receives = group.world.rank == link.receiver
    peer = link.sender if receives else link.receiver
    small = data[: SMALL_BYTES // 4]
    marks, echoes = list[Any](), list[Any]()
    for _ in range(TRIES + 1):
        _pass_on(data, peer, receives)
        marks.append(group.mark())
    for _ in range(ECHOES + 1):
        _pass_on(small, peer, not receives)
        _pass_on(small, peer, receives)
        echoes.append(group.mark())
    group.wait(f"the link from rank {link.sender} to rank {link.receiver}")
    if not receives:
        return 0.0, 0.0
    return 4 * data.numel() / min(steps(marks)), median(steps(echoes)) / 2


def _pass_on(data: Tensor, peer: int, receives: bool) -> None:
    """Receive data from a peer or send it."""
    # in a batch, NCCL uses the communicator of all ranks and need not create one for each pair
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv if receives else dist.isend, data, peer)]):
        work.wait()


# ---- computing -----------------------------------------------------------------------------------------------


def time_products(group: Group) -> list[float]:
    """Return the speed of a matrix product on each rank in FLOP/s, all ranks at the same time.

    It is the best of several tries: a short pause by the operating system does not make a rank slow.
    """
    side, count, dtype = PRODUCTS[group.world.device.type]
    # random: on equal numbers a GPU draws less power, and one that is throttled would look like the others
    rng = torch.Generator(group.world.device).manual_seed(0)
    factor = torch.rand(side, side, dtype=dtype, device=group.world.device, generator=rng)
    run = partial(torch.mm, factor, factor)
    group.meet()
    times = [group.seconds(run, count, "a matrix product") for _ in range(PRODUCT_TRIES + WARM_UPS)]
    fastest = 2 * side**3 * count / min(times[WARM_UPS:])
    return [float(row[0]) for row in group.gather([fastest])]
