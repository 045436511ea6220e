"""Masks: rates, what may be masked, and what may stand there."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from data_prep.errors import DataError
from data_prep.masking import choose_positions, make_vocabulary, replace
from data_prep.settings import largest_count
from data_prep.tokenizer import SpecialIds

SPECIALS = SpecialIds(0, 1, 2, 3, 4)


def rows(count: int, length: int, vocab_size: int) -> NDArray[np.int32]:
    """[CLS] ordinary [UNK] ordinary [SEP] [PAD]."""
    ids = 5 + np.arange(count * length, dtype=np.int32).reshape(count, length) * 11 % (vocab_size - 5)
    ids[:, [0, length // 2, -2, -1]] = SPECIALS.cls, SPECIALS.unk, SPECIALS.sep, SPECIALS.pad
    return ids


@pytest.mark.parametrize(("length", "vocab_size"), [(16, 12), (128, 1000)])
def test_rates_and_forbidden_ids(length: int, vocab_size: int) -> None:
    vocabulary = make_vocabulary(vocab_size, SPECIALS)
    ids, samples = rows(4000, length, vocab_size), np.arange(4000)
    chosen = choose_positions(ids, samples, vocabulary, 1, 0.15)
    assert set(chosen.sum(axis=1)) == {round(0.15 * (length - 4))}
    assert ids[chosen].min() >= 5
    counts = chosen[:, ids[0] >= 5].sum(axis=0)  # every position is as likely as any other
    assert abs(counts / counts.mean() - 1).max() < 0.2

    row, position = np.nonzero(chosen)
    labels = ids[chosen]
    there = replace(labels, samples[row], position, vocabulary, 1)
    assert set(np.unique(there)) - {SPECIALS.mask} <= set(range(5, vocab_size))
    masked, kept = (there == SPECIALS.mask).mean(), (there == labels).mean()
    chance = 0.1 / (vocab_size - 5)  # of drawing at random what stood there
    assert abs(masked - 0.8) < 0.02 and abs(kept - 0.1 - chance) < 0.02
    drawn = np.bincount(there[(there != SPECIALS.mask) & (there != labels)], minlength=vocab_size)[5:]
    assert drawn.max() < 3 * drawn.mean() + 10


def test_whole_share_masks_every_ordinary_token() -> None:
    vocabulary = make_vocabulary(12, SPECIALS)
    ids = rows(10, 16, 12)
    assert np.array_equal(choose_positions(ids, np.arange(10), vocabulary, 1, 1.0), ids >= 5)


def test_one_position_at_least_and_none_without_an_ordinary_token() -> None:
    vocabulary = make_vocabulary(12, SPECIALS)
    ids = np.array([[2, 5, 3, 1, 3], [2, 1, 3, 1, 3]], np.int32)
    chosen = choose_positions(ids, np.arange(2), vocabulary, 1, 0.01)
    assert chosen.tolist() == [[False, True, False, False, False], [False] * 5]


def test_a_mask_depends_on_seed_and_sample_only() -> None:
    vocabulary = make_vocabulary(1000, SPECIALS)
    ids, samples = rows(100, 128, 1000), np.arange(100)
    chosen = choose_positions(ids, samples, vocabulary, 1, 0.15)
    alone = choose_positions(ids[70:71, :127], samples[70:71], vocabulary, 1, 0.15)
    assert np.array_equal(alone[0], chosen[70, :127])
    for other in (choose_positions(ids, samples, vocabulary, 2, 0.15), np.roll(chosen, 1, axis=0)):
        assert abs((chosen & other).sum() / chosen.sum() - 0.15) < 0.03


def test_a_vocabulary_without_choice_is_refused() -> None:
    with pytest.raises(DataError, match="vocabulary of 6 pieces is too small"):
        make_vocabulary(6, SPECIALS)


def test_the_cap_follows_from_the_length() -> None:
    assert [largest_count(length, 0.15) for length in (5, 32, 128, 512)] == [1, 4, 19, 76]
