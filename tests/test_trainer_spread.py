"""Random first positions: the same for any number of ranks, over the whole range, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.manifest import load_manifest
from tests.helpers.raw_samples import order_of
from trainer.data.flat import Flat
from trainer.data.loader import Loader
from trainer.data.spread import Spread, spread
from trainer.engine.schedule import Phase
from trainer.model.batch import MicroBatch

ROWS = 96
SPREAD = Spread(ROWS, seed=7)


def read(folder: Path, ranks: int, parts: int, spread: Spread | None = SPREAD) -> list[MicroBatch]:
    """All micro-batches of one step of 64 samples, over all ranks."""
    manifest, order = load_manifest(folder), order_of(folder)
    loaders = [Loader(folder, manifest, rank, ranks, spread=spread) for rank in range(ranks)]
    return [batch for loader in loaders for batch in loader.read(order, 32, 64, parts).micro_batches]


def first_positions(batches: list[MicroBatch]) -> dict[int, int]:
    """The first position of each sample, by its number."""
    return {
        int(number): int(batch.positions[start])
        for batch in batches
        for number, start in zip(batch.samples, batch.cu_seqlens[:-1], strict=True)
    }


def test_each_sequence_moves_as_a_whole_and_nothing_else_changes(tiny_shards: Path) -> None:
    for plain, moved in zip(read(tiny_shards, 1, 2, None), read(tiny_shards, 1, 2), strict=True):
        lengths = plain.cu_seqlens.diff().long()
        shift = moved.positions - plain.positions
        assert torch.equal(shift, shift[plain.cu_seqlens[:-1]].repeat_interleave(lengths))
        assert int(shift.min()) >= 0 and int(moved.positions.max()) < ROWS
        for name in ("tokens", "segments", "cu_seqlens", "samples", "masked", "labels", "is_next"):
            assert torch.equal(getattr(plain, name), getattr(moved, name)), name
        assert plain.max_seqlen == moved.max_seqlen


@pytest.mark.parametrize("cut", [(1, 4), (2, 1), (3, 2)])
def test_places_do_not_depend_on_ranks_or_micro_batches(tiny_shards: Path, cut: tuple[int, int]) -> None:
    places = first_positions(read(tiny_shards, 1, 1))
    assert len(places) == 64 and len(set(places.values())) > 16
    assert first_positions(read(tiny_shards, *cut)) == places


def test_every_place_is_equally_likely() -> None:
    """A sequence of 5 tokens in 8 rows has 4 places; its last one ends at the last row."""
    count = 4000
    flat = Flat(
        tokens=np.zeros(5 * count, np.int64),
        segments=np.zeros(5 * count, np.int64),
        positions=np.tile(np.arange(5), count),
        cu_seqlens=np.arange(0, 5 * count + 1, 5, dtype=np.int32),
        max_seqlen=5,
        samples=np.arange(count),
        masked=np.empty(0, np.int64),
        labels=np.empty(0, np.int64),
        is_next=np.zeros(count, np.int64),
    )
    moved = spread(flat, Spread(8, seed=1))
    first = moved.positions[flat.cu_seqlens[:-1]]
    counts = np.bincount(first, minlength=8).tolist()
    assert counts[4:] == [0] * 4
    assert all(abs(n - count / 4) < 5 * (count * 3 / 16) ** 0.5 for n in counts[:4]), counts
    assert int(moved.positions.max()) == 7


def test_a_range_below_the_sequence_length_is_refused() -> None:
    phase = Phase("a", "shards", 32, 100, 0.1, global_batch=8, micro_batch=4, spread_positions=31)
    [problem] = phase.problems()
    assert problem.startswith("spread_positions is 31 but sequence_length is 32: raise it")
