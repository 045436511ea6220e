"""The order of samples: a pure function of (seed, epoch), the same for any number of ranks and micro-batches.

It has two levels, so that neither memory nor a remote cache grows with the data set: the shards of an epoch are
permuted, then the samples are permuted inside windows of ``window`` consecutive shards. Epochs follow one another
directly, so every batch is full and simply takes the next samples, even across an epoch boundary. Nothing is padded,
and nothing is left out except the gaps that a configuration or the guard names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from data_prep.draws import permutation
from trainer.bounds import MOST_SAMPLES, outside

_SHARDS, _WINDOW = 1, 2  # the purposes of random streams


@dataclass(frozen=True)
class Gap:
    """Consecutive samples in the order that training skips."""

    position: int  # number of the first sample; in metrics.jsonl, `position` is the number after a step's last one
    samples: int  # how many are skipped

    def __str__(self) -> str:
        return f"samples {self.position} to {self.position + self.samples - 1}"

    def problems(self) -> list[str]:
        """Every invalid setting of this gap, with what to change."""
        return outside(self, position=(0, MOST_SAMPLES), samples=(1, MOST_SAMPLES))


@dataclass(frozen=True)
class Order:
    """The endless sequence of samples over shards of these sizes.

    ``sizes``: samples of each shard; ``window``: number of shards whose samples are shuffled together; ``gaps``: what
    :meth:`numbers` leaves out. The other samples keep their positions.
    """

    sizes: tuple[int, ...]
    seed: int
    window: int
    gaps: tuple[Gap, ...] = ()

    @property
    def samples(self) -> int:
        """Number of samples in an epoch."""
        return sum(self.sizes)

    def window_at(self, position: int) -> tuple[list[int], int]:
        """Return the shards of the window at ``position``, and the position of the next window."""
        epoch, inside = divmod(position, self.samples)
        ends = _window_ends(self, epoch)
        index = int(np.searchsorted(ends, inside, side="right"))
        shards = _shards(self, epoch)[index * self.window : (index + 1) * self.window]
        return shards.tolist(), position - inside + int(ends[index])

    def numbers(self, position: int, count: int) -> NDArray[np.int64]:
        """Return the positions of the next ``count`` samples from ``position`` on, without the gaps: (count,)."""
        numbers = np.arange(position, position + count)
        for gap in sorted(self.gaps, key=lambda gap: gap.position):
            first, end = max(gap.position, position), gap.position + gap.samples
            if first < end:
                numbers[numbers >= first] += end - first
                position = end  # a later gap may overlap this one
        return numbers

    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at these rising positions: (count, 2) rows of (shard, row in it)."""
        runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
        return np.concatenate([self.take(int(run[0]), len(run)) for run in runs])

    def take(self, position: int, count: int) -> NDArray[np.int64]:
        """Return the samples at ``position … position + count - 1``: (count, 2) rows of (shard, row in it)."""
        rows = []
        while count > 0:
            epoch, inside = divmod(position, self.samples)
            ends = _window_ends(self, epoch)
            index = int(np.searchsorted(ends, inside, side="right"))
            start = int(ends[index - 1]) if index else 0
            part = _window(self, epoch, index)[inside - start :][:count]
            rows.append(part)
            position, count = position + len(part), count - len(part)
        return np.concatenate(rows) if rows else np.empty((0, 2), np.int64)


@lru_cache(maxsize=4)
def _shards(order: Order, epoch: int) -> NDArray[np.int64]:
    return permutation(len(order.sizes), order.seed, _SHARDS, epoch)


@lru_cache(maxsize=4)
def _window_ends(order: Order, epoch: int) -> NDArray[np.int64]:
    sizes = np.asarray(order.sizes, np.int64)[_shards(order, epoch)]
    return np.add.reduceat(sizes, np.arange(0, len(sizes), order.window)).cumsum()


@lru_cache(maxsize=4)
def _window(order: Order, epoch: int, index: int) -> NDArray[np.int64]:
    shards = _shards(order, epoch)[index * order.window : (index + 1) * order.window]
    pairs = np.concatenate([np.stack([np.full(order.sizes[s], s), np.arange(order.sizes[s])], axis=1) for s in shards])
    return pairs[permutation(len(pairs), order.seed, _WINDOW, epoch, index)]


def largest_window(sizes: tuple[int, ...], window: int) -> int:
    """Return the largest number of samples that ``window`` shards of these sizes can contain."""
    return sum(sorted(sizes, reverse=True)[:window])


def deal(lengths: NDArray[np.int64], parts: int) -> list[NDArray[np.int64]]:
    """Divide a batch into ``parts`` of nearly equal counts and tokens; a pure function of the lengths.

    The samples are dealt longest first, back and forth (0 1 2 2 1 0 …). Returns the indices of each
    part; every index appears once. Counts differ by at most one.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    ranks = np.arange(len(lengths))
    there = ranks % parts
    part = np.where((ranks // parts) % 2 == 0, there, parts - 1 - there)
    ends = np.cumsum(np.bincount(part, minlength=parts))
    return np.split(longest_first[np.argsort(part, kind="stable")], ends[:-1])
