"""Randomness as a pure function of a key, identical on every machine and in every version.

A draw depends only on its key, for example (seed, purpose, sample, position), never on earlier draws. So any
process can make any shard, and a rerun makes the same one. The generator is the output function of
SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, figure 16),
applied once per word of the key.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

GAMMA = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
ROUNDS = 6  # rounds of the Feistel network in `shuffled`


def bits(*key: ArrayLike) -> NDArray[np.uint64]:
    """64 random bits for each key; the words of the key are integers or integer arrays and broadcast."""
    state = np.zeros(1, np.uint64)
    for word in key:
        state = state ^ np.asarray(word).astype(np.uint64)
        state += GAMMA
        state ^= state >> SHIFTS[0]
        state *= MULTIPLIERS[0]
        state ^= state >> SHIFTS[1]
        state *= MULTIPLIERS[1]
        state ^= state >> SHIFTS[2]
    return state


def uniform(*key: ArrayLike) -> NDArray[np.float64]:
    """A number in [0, 1) for each key, as a multiple of 2**-53."""
    return (bits(*key) >> np.uint64(11)) * np.float64(2.0**-53)


def permutation(n: int, *key: ArrayLike) -> NDArray[np.int64]:
    """A random order of 0..n-1, int64[n]. For n that fits in memory; otherwise see `shuffled`."""
    return np.argsort(bits(*key, np.arange(n)), kind="stable")


def shuffled(indices: NDArray[np.int64], n: int, *key: ArrayLike) -> NDArray[np.int64]:
    """The place of each of ``indices`` in a random order of 0..n-1, without holding the permutation in memory.

    A balanced Feistel network over the smallest 4**h >= n; results of n or more go through again until
    they fall below n ("cycle walking": Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    result = np.array(indices, np.int64)
    outside = np.arange(len(result))
    while len(outside):
        result[outside] = _feistel(result[outside], half, *key)
        outside = outside[result[outside] >= n]
    return result


def _feistel(values: NDArray[np.int64], half: int, *key: ArrayLike) -> NDArray[np.int64]:
    mask = (1 << half) - 1
    left, right = values >> half, values & mask
    for turn in range(ROUNDS):
        left, right = right, left ^ (bits(*key, turn, right).astype(np.int64) & mask)
    return left << half | right
