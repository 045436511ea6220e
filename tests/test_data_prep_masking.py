"""Masks: rates, what may be masked, what may stand there, and what is masked together.

A measured rate may be 5 standard deviations off the true one, which happens by chance once in 1.7 million times.
"""

from __future__ import annotations

from dataclasses import astuple
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from data_prep import masking as module
from data_prep.draws import bits, uniform
from data_prep.errors import DataError
from data_prep.masking import Masking, Vocabulary, choose, make_samples, make_vocabulary, maskable, remask, replace
from data_prep.pairs import PAIR_DTYPE
from data_prep.settings import make_settings
from data_prep.shards import Sample, decode_samples, join
from data_prep.store import Store
from data_prep.tokenizer import SpecialIds

SPECIALS = SpecialIds(0, 1, 2, 3, 4)
UNITS = ("token", "word", "ngram", "span")
CHANCES = {  # of a run of 1, 2, ... words
    "token": np.ones(1),
    "word": np.ones(1),
    "ngram": np.array([6, 3, 2]) / 11,
    "span": 0.2 * 0.8 ** np.arange(10) / (1 - 0.8**10),
}
DEVIATIONS = 5


def vocabulary_of(size: int) -> Vocabulary:
    return make_vocabulary(size, astuple(SPECIALS), SPECIALS.mask)


def assert_rate(count: float, trials: int, chance: float) -> None:
    """Assert that ``count`` of ``trials`` independent events fits the probability ``chance``."""
    assert abs(count - trials * chance) <= DEVIATIONS * (trials * chance * (1 - chance)) ** 0.5


def rectangle(rows: int, length: int, vocab_size: int, seed: int = 0) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """[CLS] A [SEP] B [SEP] [PAD]s of random lengths, with [UNK]s and words of random lengths."""
    random = np.random.default_rng(seed)
    ids = random.integers(5, vocab_size, (rows, length), np.int32)
    ids[random.random((rows, length)) < 0.05] = SPECIALS.unk
    column, ends = np.arange(length), random.integers(5, length + 1, (rows, 1))
    seps = (column == ends - 1) | (column == ends // 2)
    ids[seps], ids[column >= ends], ids[:, 0] = SPECIALS.sep, SPECIALS.pad, SPECIALS.cls
    continues = random.random((rows, length)) < random.random((rows, 1)) * 0.8
    continues[:, :2] = False
    continues[(column >= ends) | seps | np.roll(seps, 1, axis=1)] = False
    return ids, continues


def one_row(words: list[int], rows: int, vocab_size: int = 100) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """[CLS], words of so many pieces, [SEP]; the same in each of ``rows``."""
    first = [True] + [piece == 0 for size in words for piece in range(size)] + [True]
    ids = np.full((rows, len(first)), vocab_size - 1, np.int32)
    ids[:, 0], ids[:, -1] = SPECIALS.cls, SPECIALS.sep
    return ids, np.tile(~np.array(first), (rows, 1))


def spans_of(
    ids: NDArray[np.int32], continues: NDArray[np.bool_], masking: Masking, seed: int = 1
) -> NDArray[np.int32]:
    """`choose` for samples 0, 1, ... and a vocabulary that just holds the ids."""
    return choose(ids, continues, np.arange(len(ids)), vocabulary_of(int(ids.max()) + 1), masking, seed)


def make_store(tokens: int, vocab_size: int) -> Store:
    random = np.random.default_rng(3)
    ids = random.integers(5, vocab_size, tokens).astype(np.uint16)
    ids[random.random(tokens) < 0.02] = SPECIALS.unk
    continues = (random.random(tokens) < 0.4).astype(np.uint8)
    return Store(ids, continues, np.array([0, tokens]), np.array([[0, 1]]))


def cut_pairs(store: Store, count: int, longest: int) -> NDArray[np.void]:
    """Any pairs of up to ``longest`` tokens."""
    random = np.random.default_rng(4)
    pairs = np.zeros(count, PAIR_DTYPE)
    pairs["a_length"] = random.integers(1, longest, count)
    pairs["b_length"] = random.integers(1, longest - pairs["a_length"] + 1)
    pairs["a_start"], pairs["b_start"] = random.integers(0, len(store.ids) - longest, (2, count))
    pairs["is_next"] = random.integers(0, 2, count)
    return pairs


def same(one: Sample, other: Sample) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(astuple(one), astuple(other), strict=True))


def choose_slowly(ids: NDArray[np.int32], continues: NDArray[np.bool_], sample: int, masking: Masking) -> list[int]:
    """`choose` with seed 1 for one row and a unit of words, one word after the other."""
    boundaries = [*np.flatnonzero(~continues).tolist(), len(ids)]
    left = wanted = min(masking.most, max(1, round(masking.share * int((ids >= 5).sum()))))
    free = [bool((ids[begin:end] >= 5).all()) for begin, end in pairwise(boundaries)]
    order = sorted((int(bits(1, module.CHOICE, sample, boundaries[k])[0]), k) for k, whole in enumerate(free) if whole)
    runs = []
    for _, k in order:
        n = 1 + int((uniform(1, module.LENGTH, sample, boundaries[k]) >= np.cumsum(CHANCES[masking.unit])[:-1]).sum())
        while n and not (
            k + n < len(boundaries) and all(free[k : k + n]) and boundaries[k + n] - boundaries[k] <= left
        ):
            n -= 1
        runs.append((k, k + n))
        left -= boundaries[k + n] - boundaries[k]
        free[k : k + n] = [False] * n
    if left == wanted:
        shortest = sorted((boundaries[k + 1] - boundaries[k], draw, k) for draw, k in order)[:1]
        runs = [(k, k + 1) for size, _, k in shortest if size <= masking.most]
    spans = [-1] * len(ids)
    for first, last in runs:
        spans[boundaries[first] : boundaries[last]] = [boundaries[first]] * (boundaries[last] - boundaries[first])
    return spans


@pytest.mark.parametrize("unit", ["token", "word"])
@pytest.mark.parametrize(("length", "vocab_size"), [(16, 12), (128, 1000)])
def test_the_rate_is_exact_and_the_same_everywhere(unit: str, length: int, vocab_size: int) -> None:
    ids, continues = one_row([1] * (length - 2), 4000, vocab_size)
    ids[:, length // 2], ids[:, -2:] = SPECIALS.unk, (SPECIALS.sep, SPECIALS.pad)
    chosen = spans_of(ids, continues, Masking(unit, 0.15, length)) >= 0
    wanted = round(0.15 * (length - 4))
    assert set(chosen.sum(axis=1)) == {wanted} and (ids[chosen] >= 5).all()
    for count in chosen[:, ids[0] >= 5].sum(axis=0):
        assert_rate(count, 4000, wanted / (length - 4))


@pytest.mark.parametrize("unit", UNITS)
def test_replacements_are_80_10_10_and_uniform(unit: str) -> None:
    vocabulary = vocabulary_of(1000)
    samples, positions = (axis.ravel() for axis in np.indices((2000, 100)))
    nothing = np.full(len(samples), -7, np.int32)  # so that what is kept is seen
    there = replace(nothing, samples, positions, positions, vocabulary, Masking(unit, 0.15, 20), 1)
    assert_rate((there == SPECIALS.mask).sum(), len(there), 0.8)
    assert_rate((there == -7).sum(), len(there), 0.1)
    drawn = there[(there != SPECIALS.mask) & (there != -7)]
    counts = np.bincount(drawn, minlength=1000)
    assert np.array_equal(np.flatnonzero(counts), np.arange(5, 1000))
    chi_square = ((counts[5:] - counts[5:].mean()) ** 2 / counts[5:].mean()).sum()  # 994 degrees of freedom
    assert abs(chi_square - 994) <= DEVIATIONS * (2 * 994) ** 0.5


@pytest.mark.parametrize(("unit", "alike"), [("span", 1.0), ("ngram", 0.8**4 + 2 * 0.1**4)])
def test_a_span_is_replaced_as_a_whole_and_other_runs_are_not(unit: str, alike: float) -> None:
    samples, positions = (axis.ravel() for axis in np.indices((5000, 8)))
    labels, masking = np.full(len(samples), -7, np.int32), Masking(unit, 0.15, 20)
    there = replace(labels, samples, positions, positions // 4 * 4, vocabulary_of(1000), masking, 1).reshape(-1, 4)
    kind = np.where(there == SPECIALS.mask, 0, np.where(there == -7, 2, 1))  # (runs, 4)
    assert_rate((kind == kind[:, :1]).all(axis=1).sum(), len(kind), alike)
    for number, chance in enumerate((0.8, 0.1, 0.1)):
        assert_rate((kind[:, 0] == number).sum(), len(kind), chance)
    random = there[(kind == 1).all(axis=1)]
    assert (random == random[:, :1]).all(axis=1).mean() < 0.01  # each position draws its own token


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("share", "most"), [(0.15, 20), (0.15, 3), (0.5, 64), (1.0, 64)])
def test_only_ordinary_tokens_in_whole_words_within_the_budget(unit: str, share: float, most: int) -> None:
    ids, continues = rectangle(500, 64, 200)
    spans = spans_of(ids, continues, Masking(unit, share, most))
    chosen, ordinary = spans >= 0, (ids >= 5).sum(axis=1)
    assert ids[chosen].min() >= 5 and chosen.sum(axis=1).max() <= most
    wanted = np.minimum(most, np.maximum(1, np.rint(share * ordinary)))
    if unit == "token":
        assert np.array_equal(chosen.sum(axis=1), np.minimum(wanted, ordinary))
        assert np.array_equal(spans[chosen], np.nonzero(chosen)[1])
        return
    words = np.cumsum(~continues, axis=1)
    for row in range(500):
        word, taken = words[row], set(words[row, chosen[row]])
        assert set(np.flatnonzero(chosen[row])) == set(np.flatnonzero(np.isin(word, list(taken))))
        assert chosen[row].sum() <= wanted[row] or len(taken) == 1  # one that is longer than what is wanted
        for start in set(spans[row, chosen[row]]):
            run = np.flatnonzero(spans[row] == start)
            assert np.array_equal(run, start + np.arange(len(run)))  # so that it holds no [SEP] and no [UNK]
            assert len(set(word[run])) <= len(CHANCES[unit])


@pytest.mark.parametrize("unit", UNITS[1:])
@pytest.mark.parametrize(("share", "most"), [(0.15, 20), (0.15, 3), (0.02, 4), (0.6, 64)])
def test_runs_are_those_of_a_plain_loop(unit: str, share: float, most: int) -> None:
    ids, continues = rectangle(100, 48, 200, seed=most)
    spans = spans_of(ids, continues, Masking(unit, share, most))
    for row in range(100):
        assert spans[row].tolist() == choose_slowly(ids[row], continues[row], row, Masking(unit, share, most))


@pytest.mark.parametrize("unit", UNITS[1:])
@pytest.mark.parametrize(
    ("words", "unknown", "share", "most", "taken", "rate"),
    [
        ([30, 3], [], 0.15, 5, {(31, 32, 33)}, 1),  # a word longer than the cap is never cut, one at [SEP] is whole
        ([30], [], 0.15, 5, {()}, 1),
        ([4, 3, 1], [], 1.0, 5, {(1, 2, 3, 4, 8), (5, 6, 7, 8)}, 1 / 2),  # one that does not fit is skipped
        ([4, 3, 5, 3], [], 0.01, 5, {(5, 6, 7), (13, 14, 15)}, 1 / 2),  # all longer than wanted: any of the shortest
        ([1, 3, 1], [3], 1.0, 64, {(1, 5)}, 1),  # [UNK] within a word
        ([2, 3, 1], [], 0.5, 3, {(1, 2, 6), (3, 4, 5)}, 2 / 3),  # six Chinese characters in given words
    ],
)
def test_words_by_hand(
    unit: str, words: list[int], unknown: list[int], share: float, most: int, taken: set[tuple[int, ...]], rate: float
) -> None:
    ids, continues = one_row(words, 2000)
    ids[:, unknown] = SPECIALS.unk
    masks = [tuple(np.flatnonzero(row >= 0).tolist()) for row in spans_of(ids, continues, Masking(unit, share, most))]
    assert set(masks) == taken
    if unit == "word":
        assert_rate(masks.count(min(taken)), 2000, rate)


@pytest.mark.parametrize("unit", ["ngram", "span"])
def test_lengths_of_runs_are_the_papers(unit: str) -> None:
    chances, budget, rows, length = CHANCES[unit], 10, 1000, 2000
    expected = np.zeros((budget + 1, budget + 1))  # runs of each length where so many tokens are left
    for left in range(1, budget + 1):
        for n, chance in enumerate(chances, start=1):
            expected[left, min(n, left)] += chance
            expected[left] += chance * expected[left - min(n, left)]
    ids, continues = one_row([1] * length, rows)
    spans = spans_of(ids, continues, Masking(unit, 0.5, budget))
    row, position = np.nonzero(spans >= 0)
    assert set(np.bincount(row)) == {budget}
    starts, sizes = np.unique(row * (length + 2) + spans[row, position], return_counts=True)
    counts = np.zeros((rows, budget + 1))
    np.add.at(counts, (starts // (length + 2), sizes), 1)
    error = abs(counts.mean(axis=0) - expected[budget])
    # Runs that are cut since they meet another one or the end: the tokens near a run or the end, of all tokens.
    cut = expected[budget].sum() * (budget + len(chances)) / length
    assert (error <= DEVIATIONS * counts.std(axis=0) / rows**0.5 + cut).all()
    assert unit != "span" or abs(np.arange(1, 11) @ chances - 3.8) < 0.05


@pytest.mark.parametrize("unit", UNITS)
def test_a_mask_depends_on_seed_and_sample_only(unit: str) -> None:
    vocabulary, masking = vocabulary_of(1000), Masking(unit, 0.15, 20)
    ids, continues = rectangle(200, 128, 1000)
    samples = 1000 + np.arange(200)
    spans = choose(ids, continues, samples, vocabulary, masking, 1)
    for row, pad in product(range(0, 200, 11), (0, 1, 200)):
        one, n = slice(row, row + 1), int(np.flatnonzero(ids[row] != SPECIALS.pad)[-1]) + 1
        wide = np.pad(ids[one, :n], ((0, 0), (0, pad)), constant_values=SPECIALS.mask)
        flags = np.pad(continues[one, :n], ((0, 0), (0, pad)))
        alone = choose(wide, flags, samples[one], vocabulary, masking, 1)[0]
        assert np.array_equal(alone[:n], spans[row, :n]) and (alone[n:] == -1).all()


@pytest.mark.parametrize("unit", UNITS)
def test_masks_of_other_epochs_and_samples_are_independent(unit: str) -> None:
    ids, continues = one_row([1, 2] * 30, 3000)
    mask, next_epoch = (spans_of(ids, continues, Masking(unit, 0.15, 20), seed) >= 0 for seed in (1, 2))
    for other in (next_epoch, np.roll(mask, 1, axis=0)):
        overlap = (mask & other).sum(axis=1)  # (rows,)
        expected = mask.mean(axis=0) @ other.mean(axis=0)  # share ** 2 of the tokens, were all positions alike
        assert abs(overlap.mean() - expected) <= DEVIATIONS * overlap.std() / 3000**0.5
        assert unit != "token" or abs(expected / 90 / (14 / 90) ** 2 - 1) < 0.01


@pytest.mark.parametrize("unit", UNITS)
def test_new_masks_with_the_old_seed_are_the_old_masks(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, vocabulary = make_store(5000, 300), vocabulary_of(300)
    pairs, settings = cut_pairs(store, 300, 61), make_settings(64, seed=9, masking=unit, max_predictions=8)
    masking = Masking(unit, settings.masked_share, settings.max_predictions)
    samples = list(make_samples(store, pairs, 40, vocabulary, SPECIALS, settings))
    other = remask(join(samples), 40 + np.arange(300), vocabulary, masking, seed=10)
    pairs_of_masks = [(a, b) for a, b in zip(samples, other, strict=True) if len(a.positions) == 8]
    assert sum(np.array_equal(a.positions, b.positions) for a, b in pairs_of_masks) < 0.1 * len(pairs_of_masks)

    monkeypatch.setattr(module, "TOKENS_AT_ONCE", 3 * 64)  # other samples next to each, and other widths
    some = np.random.default_rng(1).permutation(300)
    again = remask(join([samples[i] for i in some]), 40 + some, vocabulary, masking, seed=9)
    assert all(same(samples[i], sample) for i, sample in zip(some, again, strict=True))
    apart = make_samples(store, pairs[37:60], 40 + 37, vocabulary, SPECIALS, settings)
    assert all(same(one, other) for one, other in zip(samples[37:60], apart, strict=True))
    assert len(remask(decode_samples([]), np.arange(0), vocabulary, masking, seed=9)) == 0


def test_the_layout_of_a_pair_and_of_a_single_segment() -> None:
    ids = np.arange(10, 30, dtype=np.uint16)
    store = Store(ids, np.ones(20, np.uint8), np.array([0, 20]), np.array([[0, 1]]))  # cut within a word anywhere
    pairs = np.array([(2, 10, 3, 2, 1), (5, 0, 4, 0, 2)], PAIR_DTYPE)
    two, one = make_samples(store, pairs, 0, vocabulary_of(40), SPECIALS, make_settings(16))
    assert two.ids.tolist() == [2, 12, 13, 14, 3, 20, 21, 3] and (two.split, two.is_next) == (5, 1)
    assert two.continues.tolist() == [False, False, True, True, False, False, True, False]
    assert one.ids.tolist() == [2, 15, 16, 17, 18, 3] and (one.split, one.is_next) == (6, 2)
    assert one.continues.tolist() == [False, False, True, True, True, False]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("share", [0.15, 1.0])
def test_documents_of_five_tokens_and_a_vocabulary_of_twelve(unit: str, share: float) -> None:
    store, vocabulary = make_store(20_000, 12), vocabulary_of(12)
    pairs = np.array([(start, start + 2, 2, 3, 1) for start in range(0, 20_000, 5)], PAIR_DTYPE)
    settings, lengths = make_settings(16, masking=unit, masked_share=share), np.tile([2, 3], 4000)
    may = maskable(store.ids, store.continues, lengths, vocabulary, Masking(unit, share, settings.max_predictions))
    samples = list(make_samples(store, pairs, 0, vocabulary, SPECIALS, settings))
    assert [len(sample.positions) > 0 for sample in samples] == may.reshape(-1, 2).any(axis=1).tolist()
    replaced, labels = [], []
    for sample in samples:
        assert len(sample.positions) <= settings.max_predictions
        assert (np.diff(sample.positions) > 0).all()
        if unit == "token" and share == 1.0:
            assert np.array_equal(sample.positions, np.flatnonzero(sample.ids >= 5))
        labels.append(sample.ids[sample.positions])
        replaced.append(sample.replacements)
    label, there = np.concatenate(labels), np.concatenate(replaced)
    assert label.min() >= 5 and set(np.unique(there)) == {SPECIALS.mask, *range(5, 12)}
    if unit != "span":  # whose tokens are not independent
        assert_rate((there == SPECIALS.mask).sum(), len(there), 0.8)
        assert_rate((there == label).sum(), len(there), 0.1 + 0.1 / 7)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("most", [1, 2, 20])
def test_maskable_is_what_gets_a_target(unit: str, most: int) -> None:
    vocabulary, masking = vocabulary_of(200), Masking(unit, 0.15, most)
    ids, continues = rectangle(500, 12, 200, seed=most)
    ids[np.random.default_rng(0).random(ids.shape) < 0.5] = SPECIALS.unk
    got = (choose(ids, continues, np.arange(500), vocabulary, masking, 1) >= 0).any(axis=1)
    assert np.array_equal(maskable(ids.ravel(), continues.ravel(), np.full(500, 12), vocabulary, masking), got)
    assert got.any() and not got.all()


def test_rows_and_segments_end_words_and_segments_may_be_empty() -> None:
    one = spans_of(np.full((2, 3), 9, np.int32), np.ones((2, 3), np.bool_), Masking("span", 1.0, 3))
    assert (one == 0).all()
    vocabulary, masking = vocabulary_of(20), Masking("word", 0.15, 1)
    ids, continues = np.array([9, 9, 1, 9, 9], np.uint16), np.array([1, 1, 0, 1, 1], np.uint8)
    lengths = np.array([0, 1, 1, 2, 0, 1, 0])
    assert maskable(ids, continues, lengths, vocabulary, masking).tolist() == [0, 1, 1, 0, 0, 1, 0]
    none: NDArray[Any] = np.empty(0, np.uint16)
    assert maskable(none, none, np.array([0, 0]), vocabulary, masking).tolist() == [False, False]


def test_a_vocabulary_without_choice_is_refused() -> None:
    with pytest.raises(DataError, match="vocabulary of 6 pieces is too small"):
        make_vocabulary(6, [0, 1, 2, 3], 4)
    with pytest.raises(DataError, match="vocabulary of 64 pieces is too small"):
        make_vocabulary(64, range(63), 4)
    assert make_vocabulary(9, [0, 1, 2, 8], 4).ordinary.tolist() == [3, 5, 6, 7]


def test_the_cap_binds() -> None:
    ids, continues = one_row([1] * 509, 10)
    for unit, (most, wanted) in product(UNITS, ((20, 20), (make_settings(512).max_predictions, 76))):
        assert set((spans_of(ids, continues, Masking(unit, 0.15, most)) >= 0).sum(axis=1)) == {wanted}
