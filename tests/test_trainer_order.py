"""The order of samples: every epoch reads each sample once, no matter how the order is queried or cut."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.draws import bits
from trainer.data.order import Gap, Order, deal

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=12).map(tuple)
ORDERS = st.builds(Order, SIZES, st.integers(0, 2**63 - 1), st.integers(1, 6))


def rows(order: Order, position: int, count: int) -> list[tuple[int, int]]:
    return [(shard, row) for shard, row in order.take(position, count).tolist()]


@given(ORDERS)
def test_each_epoch_reads_each_sample_exactly_once(order: Order) -> None:
    everything = {(shard, row) for shard, size in enumerate(order.sizes) for row in range(size)}
    for epoch in range(3):
        taken = rows(order, epoch * order.samples, order.samples)
        assert len(taken) == len(everything) and set(taken) == everything


@given(ORDERS, st.integers(0, 200), st.lists(st.integers(0, 40), max_size=6))
def test_pieces_equal_the_whole_over_boundaries_of_epochs(order: Order, position: int, counts: list[int]) -> None:
    whole = order.take(position, sum(counts))
    at, pieces = position, [np.empty((0, 2), np.int64)]
    for count in counts:
        pieces.append(order.take(at, count))
        at += count
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


@given(ORDERS, st.integers(0, 60), st.integers(1, 30), st.lists(st.builds(Gap, st.integers(0, 90), st.integers(1, 20))))
def test_gaps_leave_samples_out_and_move_no_other(order: Order, position: int, count: int, gaps: list[Gap]) -> None:
    """Gaps may overlap, and may begin before the position."""
    left_out = {number for gap in gaps for number in range(gap.position, gap.position + gap.samples)}
    every = [number for number in range(position, position + count + len(left_out)) if number not in left_out]
    numbers = replace(order, gaps=tuple(gaps)).numbers(position, count)
    assert numbers.tolist() == every[:count]
    assert order.rows(numbers).tolist() == [order.take(number, 1)[0].tolist() for number in numbers.tolist()]


def test_epochs_and_seeds_differ_and_runs_do_not() -> None:
    order = Order((20,) * 8, 5, 2)
    epochs = [rows(order, epoch * 160, 160) for epoch in range(9)]
    assert len({tuple(epoch) for epoch in epochs}) == 9
    assert len({epoch[0][0] for epoch in epochs}) > 2  # shards move too, not their samples alone
    assert epochs == [rows(Order((20,) * 8, 5, 2), epoch * 160, 160) for epoch in range(9)]
    assert rows(Order((20,) * 8, 6, 2), 0, 160) != epochs[0]


def test_the_order_is_frozen() -> None:
    """A changed order would silently break every resume: these numbers may never change."""
    assert rows(Order((3, 4, 5), 7, 2), 10, 6) == [(1, 2), (1, 1), (0, 1), (1, 1), (1, 0), (0, 2)]


def test_a_window_bounds_the_shards_in_use_and_mixes_them() -> None:
    order = Order((50,) * 12, 3, 4)
    for window in range(3):
        shards = Counter(shard for shard, _ in rows(order, window * 200, 200))
        assert sorted(shards.values()) == [50] * 4
        runs = rows(order, window * 200, 200)
        neighbours = sum(a[0] == b[0] for a, b in zip(runs, runs[1:], strict=False))
        assert neighbours < 80  # 50 are expected of a true mixture, 196 of shards one after the other
        displacement = np.abs(np.argsort([row for _, row in runs], kind="stable") - np.arange(200)).mean()
        assert displacement > 40  # 67 are expected


@given(ORDERS, st.integers(0, 200))
def test_windows_are_what_the_samples_are_taken_from(order: Order, position: int) -> None:
    shards, end = order.window_at(position)
    assert len(shards) <= order.window and len(set(shards)) == len(shards)
    assert end > position and {shard for shard, _ in rows(order, position, end - position)} <= set(shards)
    start = end - sum(order.sizes[shard] for shard in shards)  # a window is read as a whole
    assert set(rows(order, start, end - start)) == {
        (shard, row) for shard in shards for row in range(order.sizes[shard])
    }
    assert order.window_at(start) == order.window_at(end - 1) == (shards, end)
    assert order.window_at(end)[1] > end


@pytest.mark.parametrize("sizes", [(10, 10, 4), (24,), (1,), (9, 2)], ids=str)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("ranks", range(1, 6))
def test_ranks_step_together_through_uneven_and_few_shards(
    sizes: tuple[int, ...], micro_batches: int, ranks: int
) -> None:
    """Shards are not divided among the ranks, batches are: all ranks take equal steps and no sample is left out."""
    order = Order(sizes, 5, 8)
    batch = 4 * ranks * micro_batches
    steps = -(-3 * order.samples // batch)
    seen = list[tuple[int, int]]()
    for step in range(steps):
        picks = order.take(step * batch, batch)
        parts = deal(np.array([5 + row for _, row in picks.tolist()]), ranks * micro_batches)
        assert [len(part) for part in parts] == [4] * ranks * micro_batches
        seen += [(shard, row) for shard, row in picks[np.sort(np.concatenate(parts))].tolist()]
    for epoch in range(3):
        part = seen[epoch * order.samples : (epoch + 1) * order.samples]
        assert sorted(part) == [(shard, row) for shard, size in enumerate(sizes) for row in range(size)]


def test_tokens_of_ranks_are_nearly_equal() -> None:
    """Lengths are like those of BERT's pairs: most nearly fill the sequence, a tenth is shorter."""
    draws = bits(3, np.arange(50)[:, None, None], np.arange(256)[:, None], np.arange(3)) / 2**64
    rest = np.floor(np.log(1 - draws[..., 0]) / np.log(1 - 1 / 12))
    lengths = np.where(draws[..., 1] < 0.1, 5 + np.floor(124 * draws[..., 2]), np.maximum(128 - rest, 5))
    assert 110 < lengths.mean() < 118 and lengths.min() < 10 and lengths.max() == 128
    for batch in lengths.astype(np.int64):
        tokens = [int(batch[part].sum()) for part in deal(batch, 8)]
        assert max(tokens) <= 1.02 * np.mean(tokens)


@given(st.lists(st.integers(5, 512), max_size=200), st.integers(1, 30))
def test_a_batch_is_dealt_whole_and_evenly(lengths: list[int], parts: int) -> None:
    dealt = deal(np.array(lengths, np.int64), parts)
    assert len(dealt) == parts
    assert sorted(int(i) for part in dealt for i in part) == list(range(len(lengths)))
    counts = [len(part) for part in dealt]
    assert max(counts) - min(counts) <= 1
    if lengths and len(lengths) % (2 * parts) == 0:
        tokens = [sum(lengths[i] for i in part) for part in dealt]
        assert max(tokens) - min(tokens) <= max(lengths) - min(lengths)


@pytest.mark.parametrize("parts", [1, 2, 3, 6, 12])
def test_evenly_spread_lengths_are_dealt_to_equal_sums(parts: int) -> None:
    lengths = np.arange(10, 34)
    assert {int(lengths[part].sum()) for part in deal(lengths, parts)} == {int(lengths.sum()) // parts}


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 12])
def test_equal_lengths_are_dealt_by_position(parts: int) -> None:
    """Ties are broken by place, so that equal lengths give one cut on every machine."""
    dealt = deal(np.full(24, 32), parts)
    assert [int(part[0]) for part in dealt] == list(range(parts))
