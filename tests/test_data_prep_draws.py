"""Draws are pure, uniform, and never change."""

from __future__ import annotations

import numpy as np
import pytest

from data_prep.draws import bits, permutation, shuffled, uniform


def test_bits_never_change() -> None:
    # The first word is SplitMix64's published first output for the seed 0.
    assert bits(0).tolist() == [0xE220A8397B1DCDAF]
    assert bits(1, 2, np.array([3, 4])).tolist() == [15020427595393229491, 14056738641343212577]


def test_bits_broadcast_and_depend_on_the_order_of_the_key() -> None:
    rows, columns = np.arange(5)[:, None], np.arange(7)
    grid = bits(9, rows, columns)
    assert grid.shape == (5, 7)
    assert grid[3, 4] == bits(9, 3, 4)[0] != bits(9, 4, 3)[0]
    assert len(np.unique(grid)) == grid.size


def test_uniform_is_uniform_and_uncorrelated() -> None:
    draws = uniform(3, np.arange(500)[:, None], np.arange(400))
    assert 0 <= draws.min() and draws.max() < 1
    counts = np.histogram(draws, 100, (0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 160  # chi-square with 99 degrees of freedom, p > 0.9999
    for left, right in ((draws[1:], draws[:-1]), (draws[:, 1:], draws[:, :-1])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.01


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_orders_are_permutations(n: int) -> None:
    everything = np.arange(n)
    for order in (permutation(n, 1, 2), shuffled(everything, n, 1, 2)):
        assert sorted(order.tolist()) == everything.tolist()
    whole = shuffled(everything, n, 1, 2)
    parts = [shuffled(part, n, 1, 2) for part in np.array_split(everything, 5)]
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_shuffled_is_far_from_the_identity_and_from_other_keys() -> None:
    everything = np.arange(20_000)
    one, two = shuffled(everything, 20_000, 1), shuffled(everything, 20_000, 2)
    for left, right in ((one, everything), (one, two), (np.diff(one), np.diff(two))):
        assert abs(np.corrcoef(left, right)[0, 1]) < 0.03
    assert abs(np.abs(one - everything).mean() / 20_000 - 1 / 3) < 0.01
