"""Pairs, read off the private words of each document: labels, lengths, borders."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from corpora import Words, read_samples, segments, write_corpus, write_tokenizer

from data_prep.build import build
from data_prep.errors import DataError
from data_prep.manifest import Manifest
from data_prep.settings import make_settings
from data_prep.shards import Sample


def prepare(
    folder: Path, sentences: list[int], words: int, length: int, short: float = 0.1, duplicates: int = 1
) -> tuple[Manifest, list[tuple[Sample, Words, Words]]]:
    text, tokenizer = write_corpus(folder, sentences, words)
    settings = make_settings(length, short_sequence_rate=short, duplicates=duplicates, samples_per_shard=64)
    manifest = build([text], tokenizer, folder / "out", settings, processes=1)
    return manifest, list(segments(folder / "out"))


def assert_labels(pairs: list[tuple[Sample, Words, Words]]) -> None:
    for sample, a, b in pairs:
        for words in (a.words, b.words):
            assert words == list(range(words[0], words[0] + len(words)))
        if sample.is_next:
            assert b.document == a.document and b.words[0] == a.words[-1] + 1
        else:
            assert b.document != a.document


@pytest.mark.parametrize(("words", "length"), [(5, 64), (5, 16), (100, 32)])
def test_labels_and_lengths(tmp_path: Path, words: int, length: int) -> None:
    manifest, pairs = prepare(tmp_path, [30] * 12, words, length, duplicates=5)
    assert_labels(pairs)
    true = sum(sample.is_next for sample, _, _ in pairs)
    assert true == manifest.counts.is_next and 0.4 < true / len(pairs) < 0.6
    for sample, a, b in pairs:
        assert len(sample.ids) <= length
        assert sample.ids[[0, sample.split - 1, -1]].tolist() == [2, 3, 3]
        assert len(a.words) == sample.split - 2 and len(b.words) == len(sample.ids) - sample.split - 1
    full = sum(len(sample.ids) == length for sample, _, _ in pairs)
    assert full / len(pairs) > 0.6


def test_two_documents_of_two_sentences_never_mislabel(tmp_path: Path) -> None:
    _, pairs = prepare(tmp_path, [2, 2], 3, 16, duplicates=200)
    assert_labels(pairs)
    assert len(pairs) == 400 and {a.document for _, a, _ in pairs} == {0, 1}


def test_short_pairs_spread_over_all_lengths(tmp_path: Path) -> None:
    _, pairs = prepare(tmp_path, [200] * 8, 6, 128, short=1.0)
    lengths = np.array([len(sample.ids) for sample, _, _ in pairs])
    assert lengths.min() < 10 and lengths.max() > 120
    assert np.histogram(lengths, 6, (5, 128))[0].min() > 0.08 * len(lengths)


def test_every_document_starts_pairs_once_a_duplicate(tmp_path: Path) -> None:
    _, pairs = prepare(tmp_path, [4] * 100, 8, 64, short=0.0, duplicates=3)
    starts = Counter(a.document for _, a, _ in pairs)
    assert set(starts) == set(range(100)) and 3 <= min(starts.values()) and max(starts.values()) <= 9


def test_one_sentence_documents_are_partners_only(tmp_path: Path) -> None:
    manifest, pairs = prepare(tmp_path, [1] * 9 + [40], 5, 32, duplicates=5)
    assert_labels(pairs)
    assert manifest.corpus.lone_sentences == 9
    assert {a.document for _, a, _ in pairs} == {9}
    assert {b.document for sample, _, b in pairs if not sample.is_next} == set(range(9))


def test_not_next_partners_come_from_everywhere(tmp_path: Path) -> None:
    _, pairs = prepare(tmp_path, [20] * 10, 10, 64, duplicates=10)
    partners = Counter(b.document for sample, _, b in pairs if not sample.is_next)
    assert min(partners.values()) > 0.5 * max(partners.values())
    assert len({b.words[0] for sample, _, b in pairs if not sample.is_next}) == 20


def test_pairs_of_unknown_words_are_left_out(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("\n\n".join(["😊 😊\n😊\n😊 😊 😊"] * 20 + ["cat dog\ndog cat\ncat"] * 20), "utf-8")
    tokenizer = write_tokenizer(tmp_path / "t", ["cat", "dog"])
    manifest = build([text], tokenizer, tmp_path / "out", make_settings(8), processes=1)
    samples = list(read_samples(tmp_path / "out"))
    assert all(len(sample.positions) and sample.ids[sample.positions].min() >= 5 for sample in samples)
    assert any((sample.ids == 1).any() for sample in samples)
    assert manifest.corpus.files[0].unknown == 120


@pytest.mark.parametrize(
    ("sentences", "message"),
    [([3], "one document only (sentences: 3)"), ([1] * 10, "no pair of sentences: 10 of 10 documents")],
)
def test_a_corpus_without_pairs_is_refused(tmp_path: Path, sentences: list[int], message: str) -> None:
    with pytest.raises(DataError) as error:
        prepare(tmp_path, sentences, 4, 32)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
