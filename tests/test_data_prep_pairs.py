"""Plans of pairs: each segment's source is known, because its start in the store identifies document and sentence."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from data_prep import pairs as module
from data_prep.build import build
from data_prep.errors import DataError
from data_prep.masking import make_vocabulary
from data_prep.pairs import BLOCK_DOCUMENTS, BLOCK_TOKENS, DocumentBlock, PlanCounts, cut_blocks, plan_pairs
from data_prep.settings import Settings, make_settings
from data_prep.shards import NO_PAIR
from data_prep.store import Store
from tests.helpers.corpora import read_samples, segments, write_corpus, write_tokenizer

UNKNOWN = 1
VOCABULARY = make_vocabulary(1000, [0, UNKNOWN, 2, 3], 4)
KINDS = ("nsp", "sop", "single")
CONTROL = {"nsp": 3, "sop": 3, "single": 2}


def make_store(documents: Sequence[Sequence[int]], taking_part: Sequence[int] | None = None) -> Store:
    """Documents by the lengths of their sentences; those of ``taking_part`` are listed, or all."""
    lengths = np.array([length for sentences in documents for length in sentences], np.int64)
    ends = np.cumsum([len(sentences) for sentences in documents])
    rows = np.stack([np.append(0, ends[:-1]), ends], axis=1)
    ids = (5 + np.arange(lengths.sum()) % 995).astype(np.uint16)
    listed = rows if taking_part is None else rows[list(taking_part)]
    return Store(ids, np.zeros(len(ids), np.uint8), np.append(0, np.cumsum(lengths)), listed)


def plan(store: Store, settings: Settings, duplicate: int = 0) -> tuple[NDArray[np.void], PlanCounts]:
    return plan_pairs(store, DocumentBlock(duplicate, 0, len(store.documents)), settings, VOCABULARY)


class Segment(NamedTuple):
    """Tokens start..end-1 of the store, and the row of their document."""

    start: int
    end: int
    document: int


def read(store: Store, pairs: NDArray[np.void]) -> list[tuple[Segment, Segment | None, int]]:
    """A, B and is_next of each pair; no segment is empty, none leaves its document, and all take part."""
    boundaries = store.sentences[store.documents]  # (documents, 2)

    def segment(start: int, length: int) -> Segment:
        [row] = np.flatnonzero((boundaries[:, 0] <= start) & (start + length <= boundaries[:, 1]))
        return Segment(start, start + length, int(row))

    read = []
    for a_start, b_start, a_length, b_length, is_next in pairs.tolist():
        assert a_length > 0 and (b_length == 0) == (is_next == NO_PAIR)
        b = segment(b_start, b_length) if b_length else None
        read.append((segment(a_start, a_length), b, is_next))
    return read


def own_segments(store: Store, pairs: NDArray[np.void], kind: str) -> list[Segment]:
    """All segments except random Bs, in text order."""
    rows = read(store, pairs)
    own = [segment for a, b, is_next in rows for segment in (a, b if is_next or kind == "sop" else None) if segment]
    return sorted(own)


def assert_labels(store: Store, pairs: NDArray[np.void], kind: str) -> None:
    """Assert that two segments of one document meet at a sentence boundary, except for what was cut off there."""
    for a, b, is_next in read(store, pairs):
        if kind == "single":
            assert is_next == NO_PAIR and b is None
            continue
        assert is_next in (0, 1) and b is not None
        assert (a.document == b.document) == (is_next == 1 or kind == "sop")
        if a.document == b.document:
            left, right = (a, b) if is_next else (b, a)
            assert left.end <= right.start
            assert store.sentences[np.searchsorted(store.sentences, left.end)] <= right.start


# ---- all three kinds -----------------------------------------------------------------------------------------


@st.composite
def corpora(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[bool]]:
    """Sentence lengths of each document; which take part; which documents are of unknown words alone."""
    lengths = st.one_of(st.integers(1, 12), st.integers(1, 200))
    documents = draw(st.lists(st.lists(lengths, min_size=1, max_size=12), min_size=1, max_size=12))
    flags = st.lists(st.booleans(), min_size=len(documents), max_size=len(documents))
    taking_part = [row for row, drawn in enumerate(draw(flags)) if drawn] or [len(documents) - 1]
    return documents, taking_part, draw(flags)


@given(
    corpora(),
    st.sampled_from(KINDS),
    st.integers(5, 70),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from(["token", "word"]),
    st.integers(0, 1000),
)
def test_every_token_is_accounted_for(
    corpus: tuple[list[list[int]], list[int], list[bool]], kind: str, length: int, short: float, unit: str, seed: int
) -> None:
    documents, taking_part, unknown = corpus
    store = make_store(documents, taking_part)
    rows = make_store(documents).documents
    for row in np.flatnonzero(unknown):
        store.ids[store.sentences[rows[row, 0]] : store.sentences[rows[row, 1]]] = UNKNOWN
    settings = make_settings(length, pairs=kind, seed=seed, short_sequence_rate=short, masking=unit)
    pairs, counts = plan(store, settings)

    tokens = int(np.diff(store.sentences[store.documents]).sum())
    assert counts.own + counts.truncated + counts.left_over + counts.unmaskable_tokens == counts.tokens == tokens
    own = own_segments(store, pairs, kind)
    assert all(before.end <= after.start for before, after in zip(own, own[1:], strict=False))  # none is used twice
    assert sum(segment.end - segment.start for segment in own) == counts.own
    assert_labels(store, pairs, kind)
    assert np.all(pairs["a_length"] + pairs["b_length"] <= length - CONTROL[kind])
    for a, b, _ in read(store, pairs):
        assert any((store.ids[segment.start : segment.end] != UNKNOWN).any() for segment in (a, b) if segment)
    if not any(unknown):
        assert counts.unmaskable == counts.unmaskable_tokens == 0
    if kind == "single":
        assert counts.left_over == 0
    else:
        assert counts.left_over <= sum(documents[row][-1] for row in taking_part)
    if len(taking_part) == 1 and kind == "nsp":
        assert set(pairs["is_next"]) <= {1}


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_does_not_depend_on_how_the_work_is_cut(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.random.default_rng(0)
    documents = [numbers.integers(1, 30, count).tolist() for count in numbers.integers(1, 40, 60)]
    store = make_store(documents, range(1, 60, 2))
    settings = make_settings(32, pairs=kind)
    whole, counts = plan(store, settings, duplicate=1)
    parts = [plan_pairs(store, DocumentBlock(1, i, i + 1), settings, VOCABULARY) for i in range(30)]
    assert np.array_equal(np.concatenate([pairs for pairs, _ in parts]), whole)
    assert tuple(np.sum([counts for _, counts in parts], axis=0)) == counts
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", 3 * 32)  # three sentences, fewer than many pairs have
    again, counts_again = plan(store, settings, duplicate=1)
    assert np.array_equal(again, whole) and counts_again == counts


@pytest.mark.parametrize("kind", KINDS)
def test_duplicates_and_seeds_differ_and_repeat(kind: str) -> None:
    store = make_store([[7] * 40] * 5)
    settings = make_settings(64, pairs=kind, short_sequence_rate=0.5)
    plans = [plan(store, replace(settings, seed=seed), duplicate) for seed in (1, 2) for duplicate in range(3)]
    assert len({pairs.tobytes() for pairs, _ in plans}) == 6
    assert np.array_equal(plan(store, settings)[0], plans[0][0])


def test_blocks_cover_all_documents_in_every_duplicate() -> None:
    long, short = [1 << 10] * 300, [100] * 7
    store = make_store([short] * 1000 + [long] + [[1]] * 10_000 + [long, short], [*range(0, 900), *range(990, 11_003)])
    tokens = np.diff(store.sentences[store.documents])[:, 0]
    blocks = list(cut_blocks(store, 2))
    half = blocks[: len(blocks) // 2]
    assert blocks == half + [DocumentBlock(1, block.first, block.last) for block in half]
    assert half[0].first == 0 and half[-1].last == len(store.documents)
    assert all(before.last == after.first for before, after in zip(half, half[1:], strict=False))
    for block in half:
        size, count = tokens[block.first : block.last].sum(), block.last - block.first
        assert count == 1 or (count <= BLOCK_DOCUMENTS and size <= BLOCK_TOKENS)
        if block.last < len(tokens):
            assert count == BLOCK_DOCUMENTS or size + tokens[block.last] > BLOCK_TOKENS


@pytest.mark.parametrize("kind", KINDS)
def test_short_samples_spread_over_all_lengths(kind: str) -> None:
    store = make_store([[6] * 400] * 8)
    pairs, _ = plan(store, make_settings(128, pairs=kind, short_sequence_rate=1.0))
    lengths = pairs["a_length"] + pairs["b_length"]
    longest = 128 - CONTROL[kind]
    assert lengths.min() <= 6 and longest - 6 < lengths.max() <= longest
    assert np.histogram(lengths, 6, (2, longest))[0].min() > 0.08 * len(lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_sentences_longer_than_the_sequence(kind: str) -> None:
    store = make_store([[100] * 4] * 500)
    pairs, counts = plan(store, make_settings(32, pairs=kind, short_sequence_rate=0.0))
    longest = 32 - CONTROL[kind]
    assert set((pairs["a_length"] + pairs["b_length"]).tolist()) == {longest}
    if kind == "single":
        assert len(pairs) == 2000 and counts == (0, 2000 * 70, 0, 0, 2000 * 30)
    else:  # 29 tokens: the odd one stays in A
        assert set(pairs["a_length"].tolist()) == {15} and set(pairs["b_length"].tolist()) == {14}


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_of_a_million_tokens(kind: str) -> None:
    numbers = np.random.default_rng(0)
    store = make_store([numbers.integers(1, 40, 50_000).tolist(), [5, 5]])
    pairs, counts = plan(store, make_settings(128, pairs=kind))
    assert sum(counts[1:]) == len(store.ids) and len(pairs) > len(store.ids) / 140
    used = counts.own / len(store.ids)
    assert used > (0.98 if kind == "single" else 0.85)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_without_anything_to_predict_are_left_out(kind: str) -> None:
    store = make_store([[10] * 2, [10] * 2])
    store.ids[:20] = UNKNOWN
    settings = make_settings(64, pairs=kind, short_sequence_rate=0.0)
    for seed in range(20):
        pairs, counts = plan(store, replace(settings, seed=seed))
        made = len(pairs) + counts.unmaskable
        assert made == 2
        if kind == "nsp":  # a random B of the other document can be predicted
            left_out = counts.unmaskable_tokens
            assert (counts.unmaskable, left_out) in {(0, 0), (1, 20)} and set(pairs["is_next"]) <= {0, 1}
        else:
            assert (counts.unmaskable, counts.unmaskable_tokens, counts.own) == (1, 20, 20)
            assert pairs["a_start"][0] >= 20


def test_words_longer_than_the_most_predictions_are_left_out() -> None:
    store = make_store([[12], [12]])
    store.continues[:] = np.arange(24) % 4 > 0  # words of four tokens
    store.continues[12:15] = 0  # except for three of one token in the second document
    for unit, most, left_out in (("token", 3, 0), ("word", 4, 0), ("word", 3, 1)):
        settings = make_settings(32, pairs="single", short_sequence_rate=0.0, masking=unit, max_predictions=most)
        pairs, counts = plan(store, settings)
        assert counts.unmaskable == left_out and counts.unmaskable_tokens == 12 * left_out
        assert pairs["a_start"].tolist() == [0, 12][left_out:]


@pytest.mark.parametrize("kind", ["nsp", "sop"])
def test_a_label_does_not_depend_on_the_length(kind: str) -> None:
    store = make_store([[6] * 800] * 20)
    pairs, _ = plan(store, make_settings(128, pairs=kind, short_sequence_rate=0.5))
    lengths = pairs["a_length"] + pairs["b_length"]
    for group in (pairs[lengths <= 50], pairs[(50 < lengths) & (lengths < 125)], pairs[lengths == 125]):
        assert len(group) > 100
        assert abs(int(group["is_next"].sum()) - len(group) / 2) < 4 * (len(group) / 4) ** 0.5


# ---- next sentence -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "length"), [(5, 64), (5, 16), (100, 32)])
def test_half_of_the_pairs_are_true(words: int, length: int) -> None:
    store = make_store([[words] * 30] * 100)
    pairs, _ = plan(store, make_settings(length))
    assert_labels(store, pairs, "nsp")
    true, count = int(pairs["is_next"].sum()), len(pairs)
    assert abs(true - count / 2) < 4 * (count / 4) ** 0.5
    full = pairs["a_length"] + pairs["b_length"] == length - 3
    assert full.mean() > 0.5


def test_two_documents_of_two_sentences_never_mislabel() -> None:
    store = make_store([[3, 3], [3, 3]])
    true = 0
    for seed in range(200):
        pairs, counts = plan(store, make_settings(16, seed=seed, short_sequence_rate=0.0))
        assert_labels(store, pairs, "nsp")
        assert len(pairs) == 2 and [a.document for a, _, _ in read(store, pairs)] == [0, 1]
        true += int(pairs["is_next"].sum())
        assert counts == (0, 0, 3 * int((pairs["is_next"] == 0).sum()), 0, 6 + 3 * int(pairs["is_next"].sum()))
    assert abs(true - 200) < 4 * 10


def test_one_document_alone_has_true_pairs_only() -> None:
    store = make_store([[4] * 40, [4] * 40], [1])
    pairs, _ = plan(store, make_settings(16))
    assert len(pairs) == 10 and set(pairs["is_next"]) == {1}
    assert_labels(store, pairs, "nsp")


def test_one_sentence_documents_are_partners_only() -> None:
    store = make_store([[5]] * 9 + [[5] * 400])
    pairs, counts = plan(store, make_settings(32))
    rows = read(store, pairs)
    assert {a.document for a, _, _ in rows} == {9}
    assert {b.document for _, b, is_next in rows if b and not is_next} == set(range(9))
    assert counts.left_over in (45, 50)
    pairs, counts = plan(make_store([[5]] * 10), make_settings(32))
    assert len(pairs) == 0 and counts == (0, 0, 50, 0, 0)


def test_random_partners_come_from_everywhere() -> None:
    store = make_store([[10] * 20] * 400, range(0, 400, 40))
    settings = make_settings(64)
    rows = [row for duplicate in range(100) for row in read(store, plan(store, settings, duplicate)[0])]
    partners = Counter(b.document for _, b, is_next in rows if b and not is_next)
    count = partners.total()
    assert count > 2000 and len(partners) == 10
    assert max(abs(n - count / 10) for n in partners.values()) < 5 * (count / 10) ** 0.5
    begins = store.sentences[store.documents[:, 0]]
    first = Counter((b.start - begins[b.document]) // 10 for _, b, is_next in rows if b and not is_next)
    assert len(first) == 20
    assert max(abs(n - count / 20) for n in first.values()) < 5 * (count / 20) ** 0.5


def test_displaced_sentences_are_used_again() -> None:
    store = make_store([[10] * 50] * 50)
    pairs, counts = plan(store, make_settings(63, short_sequence_rate=0.0))  # six sentences fill a pair
    own = own_segments(store, pairs, "nsp")
    for before, after in zip(own, own[1:], strict=False):  # nothing lies between but a document's last sentence
        assert after.start - before.end in ((0,) if before.document == after.document else (0, 10))
    assert counts.truncated == 0 and counts.own + counts.left_over == 50 * 500


# ---- cutting -------------------------------------------------------------------------------------------------


def truncate_seq_pair(a: list[int], b: list[int], most: int, coin: random.Random) -> None:
    """Truncate as in BERT's `create_pretraining_data.py`, in its own words."""
    while len(a) + len(b) > most:
        tokens = a if len(a) > len(b) else b
        if coin.random() < 0.5:
            del tokens[0]
        else:
            tokens.pop()


def fits_binomial(found: NDArray[Any], removed: int) -> bool:
    """Whether the numbers of tokens taken from the front pass a chi-square test against Binomial(removed, 1/2)."""
    expected = np.array([comb(removed, front) / 2**removed for front in range(removed + 1)]) * len(found)
    seen = np.bincount(found, minlength=removed + 1)
    common = expected > 5
    expected = np.append(expected[common], expected[~common].sum())
    seen = np.append(seen[common], seen[~common].sum())
    there = expected > 0
    statistic, freedom = ((seen - expected)[there] ** 2 / expected[there]).sum(), max(1, there.sum() - 1)
    return bool(statistic < freedom + 5 * (2 * freedom) ** 0.5)


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [(20, 20, 32), (20, 20, 33), (5, 60, 32), (60, 5, 32), (16, 40, 48), (300, 300, 64), (14, 15, 31), (1, 400, 9),
     (13, 16, 32), (70, 64, 67)],
)  # fmt: skip
def test_a_pair_is_cut_as_the_original_cuts_it(a: int, b: int, length: int) -> None:
    count = 8000
    store = make_store([[a, b]] * count)
    settings = make_settings(length, short_sequence_rate=0.0)
    pairs, _ = plan(store, settings)
    true = pairs["is_next"] == 1
    start = store.sentences[store.documents[:, 0]][true]
    pairs = pairs[true]
    fronts = np.stack([pairs["a_start"] - start, pairs["b_start"] - start - a])  # tokens taken from the front

    coin = random.Random(1)
    reference = np.zeros((2, 2000), np.int64)
    for i in range(2000):
        tokens_a, tokens_b = list(range(a)), list(range(b))
        truncate_seq_pair(tokens_a, tokens_b, length - 3, coin)
        reference[:, i] = tokens_a[0], tokens_b[0]
    assert set(pairs["a_length"]) == {len(tokens_a)} and set(pairs["b_length"]) == {len(tokens_b)}
    for front, original, removed in zip(fronts, reference, (a - len(tokens_a), b - len(tokens_b)), strict=True):
        assert front.min() >= 0 and front.max() <= removed
        assert abs(front.mean() - removed / 2) <= 4.5 * (removed / 4 / len(front)) ** 0.5
        assert abs(front.mean() - original.mean()) <= 4.5 * (removed / 4 * (1 / len(front) + 1 / 2000)) ** 0.5
        assert abs(front.var() - removed / 4) <= 4.5 * removed / 4 * (2 / len(front)) ** 0.5
        assert fits_binomial(front, removed)
    if min(a - len(tokens_a), b - len(tokens_b)) > 0:
        assert abs(np.corrcoef(fronts)[0, 1]) < 4.5 / len(pairs) ** 0.5


@pytest.mark.parametrize("kind", ["nsp", "sop"])
def test_cut_outside_the_segments_of_a_pair_touch(kind: str) -> None:
    store = make_store([[20] * 30] * 20)
    pairs, counts = plan(store, make_settings(32, pairs=kind, cut="outer", short_sequence_rate=0.5))
    true = [(a, b) for a, b, is_next in read(store, pairs) if is_next and b]
    assert len(true) > 50 and counts.truncated > 0
    assert all(a.end == b.start for a, b in true)
    either, _ = plan(store, make_settings(32, pairs=kind, short_sequence_rate=0.5))
    assert either["a_length"].tolist() == pairs["a_length"].tolist()
    assert not all(a.end == b.start for a, b, is_next in read(store, either) if is_next and b)


def test_a_random_partner_is_cut_at_either_end() -> None:
    store = make_store([[40, 40]] * 4000)
    pairs, _ = plan(store, make_settings(35, short_sequence_rate=0.0))
    random_b = pairs[pairs["is_next"] == 0]
    front = random_b["b_start"] % 40
    assert set(random_b["b_length"]) == {16} and fits_binomial(front, 24)


# ---- sentence order ------------------------------------------------------------------------------------------


def test_half_of_the_ordered_pairs_are_swapped_and_nothing_is_used_twice() -> None:
    store = make_store([[10] * 47] * 100)
    pairs, counts = plan(store, make_settings(63, pairs="sop", short_sequence_rate=0.0))
    assert_labels(store, pairs, "sop")
    assert len(pairs) == 800 and counts == (0, 0, 0, 0, 47_000)  # seven pairs of six sentences and one of five
    assert abs(int(pairs["is_next"].sum()) - 400) < 4 * 200**0.5
    own = own_segments(store, pairs, "sop")
    assert own[0].start == 0 and own[-1].end == 47_000
    assert all(before.end == after.start for before, after in zip(own, own[1:], strict=False))


def test_the_lengths_of_an_ordered_pair_do_not_tell_its_label() -> None:
    store = make_store([[30, 30]] * 400)
    pairs, _ = plan(store, make_settings(32, pairs="sop", short_sequence_rate=0.0))
    assert {(a, b) for _, _, a, b, _ in pairs.tolist()} == {(15, 14)} and set(pairs["is_next"]) == {0, 1}


# ---- single segments -----------------------------------------------------------------------------------------


def test_single_segments_use_each_token_once() -> None:
    numbers = np.random.default_rng(0)
    documents = [numbers.integers(1, 30, count).tolist() for count in numbers.integers(1, 40, 200)]
    store = make_store(documents)
    pairs, counts = plan(store, make_settings(32, pairs="single", short_sequence_rate=0.0))
    assert counts == (0, 0, 0, 0, len(store.ids))
    assert pairs["a_start"].tolist() == [0, *np.cumsum(pairs["a_length"])[:-1].tolist()]
    ends = pairs["a_start"] + pairs["a_length"]
    assert np.isin(ends, store.sentences).all()
    following = np.searchsorted(store.sentences, ends, "right")
    last = np.isin(ends, store.sentences[store.documents[:, 1]])
    longer = store.sentences[following[~last]] - pairs["a_start"][~last]
    assert longer.min() > 30  # the next sentence of the document would not have fitted


def test_a_document_of_one_sentence_is_a_single_segment() -> None:
    store = make_store([[5], [400], [5]])
    fronts = []
    for seed in range(300):
        pairs, counts = plan(store, make_settings(32, pairs="single", seed=seed, short_sequence_rate=0.0))
        assert pairs["a_length"].tolist() == [5, 30, 5] and counts == (0, 370, 0, 0, 40)
        assert pairs["a_start"][[0, 2]].tolist() == [0, 405]
        fronts.append(int(pairs["a_start"][1]) - 5)
    assert abs(np.mean(fronts) - 185) < 4.5 * (370 / 4 / 300) ** 0.5
    assert abs(np.var(fronts) / (370 / 4) - 1) < 4.5 * (2 / 300) ** 0.5


# ---- the whole way, from text --------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "length"), [(5, 128), (100, 32)])
def test_samples_read_as_planned(tmp_path: Path, words: int, length: int) -> None:
    text, tokenizer = write_corpus(tmp_path, [12] * 6, words)
    manifest = build([text], tokenizer, tmp_path / "out", make_settings(length), processes=1)
    rows = list(segments(tmp_path / "out"))
    assert sum(sample.is_next for sample, _, _ in rows) == manifest.counts.is_next
    for sample, a, b in rows:
        assert len(sample.ids) <= length
        assert sample.ids[[0, sample.split - 1, -1]].tolist() == [2, 3, 3]
        assert len(a.words) == sample.split - 2 and len(b.words) == len(sample.ids) - sample.split - 1
        for segment in (a.words, b.words):
            assert segment == list(range(segment[0], segment[0] + len(segment)))
        assert (b.document == a.document) == bool(sample.is_next)
        if sample.is_next:
            assert b.words[0] > a.words[-1]


def test_pairs_of_unknown_words_are_left_out(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("\n\n".join(["😊 😊\n😊\n😊 😊 😊"] * 20 + ["cat dog\ndog cat\ncat"] * 20), "utf-8")
    tokenizer = write_tokenizer(tmp_path / "t", ["cat", "dog"])
    manifest = build([text], tokenizer, tmp_path / "out", make_settings(8), processes=1)
    samples = list(read_samples(tmp_path / "out"))
    assert all(len(sample.positions) and sample.ids[sample.positions].min() >= 5 for sample in samples)
    assert any((sample.ids == UNKNOWN).any() for sample in samples)
    assert manifest.corpus.files[0].unknown == 120


@pytest.mark.parametrize(
    ("sentences", "message"),
    [([3], "one document only (sentences: 3)"), ([1] * 10, "no pair of sentences: 10 of 10 documents")],
)
def test_a_corpus_without_pairs_is_refused(tmp_path: Path, sentences: list[int], message: str) -> None:
    text, tokenizer = write_corpus(tmp_path, sentences, 4)
    with pytest.raises(DataError) as error:
        build([text], tokenizer, tmp_path / "out", make_settings(32), processes=1)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
