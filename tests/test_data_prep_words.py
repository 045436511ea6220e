"""The cache of words gives the tokenizer's own ids for any text, and knows which pieces continue a word."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data_prep import words as words_module
from data_prep.cleaning import clean
from data_prep.combining_marks import count_marks
from data_prep.tokenizer import Tokenizer, load_tokenizer
from data_prep.vocab import learn_tokenizer
from data_prep.words import WordCache
from tests.helpers.corpora import write_tokenizer

TEXT = ["The cat sat on the mat, the fat cat!", "I like playing soccer", "我喜欢踢足球", "Ça déjà vu — 9|9 ^ ~"] * 5
U2 = np.dtype("<u2")
PARTING = "\t\x00\x85\u200b\u200d\u00ad\u20e3\ufe0f\u2028😊👩💻🏽🇩🇪→≠"
ANY_TEXT = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("aAé中喜 \u0301\u0345|,.#'İß”…—" + PARTING)))


@pytest.fixture(scope="module", params=["cased", "uncased", "keeps accents"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    kept = request.param == "keeps accents"
    return learn_tokenizer(TEXT, 150, request.param == "cased", keep_accents=kept).tokenizer


@example(sentences=["⁔ — x⁔"])  # two that differ in the middle of three bytes
@given(sentences=st.lists(ANY_TEXT, max_size=8))
def test_ids_are_the_tokenizers_own(tokenizer: Tokenizer, sentences: list[str]) -> None:
    cleaned = [clean(sentence)[0] for sentence in sentences]
    for given_words in (False, True):
        encoded = WordCache(tokenizer, U2, given_words).encode(cleaned)
        expected = list(tokenizer.encode(sentences))
        assert list(tokenizer.encode(cleaned)) == expected
        assert encoded.lengths.tolist() == [len(ids) for ids in expected]
        assert encoded.ids.tolist() == [id for ids in expected for id in ids]
        text = "".join(cleaned)
        assert encoded.marks == (count_marks(text) if tokenizer.strips_accents else (0, 0))
        assert encoded.ids.dtype == U2 and encoded.continues.shape == encoded.ids.shape


def test_a_full_cache_starts_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = WordCache(tokenizer, U2, given_words=False)
    whole = [cache.encode([text]).ids.tolist() for text in TEXT]
    monkeypatch.setattr(words_module, "MOST_CHARACTERS", 20)
    small = WordCache(tokenizer, U2, given_words=False)
    assert [small.encode([text]).ids.tolist() for text in TEXT] == whole
    assert small.characters < cache.characters


@given(words=st.lists(st.text(st.sampled_from("abcABC09.,-'[]|“—…")), max_size=30))
def test_plain_words_are_cut_as_the_tokenizer_does(tokenizer: Tokenizer, words: list[str]) -> None:
    text = [clean(" ".join(words))[0], "a" * 100, "a" * 101, "[MASK] [unused0]"]
    encoded = WordCache(tokenizer, U2, given_words=False).encode(text)
    assert encoded.ids.tolist() == [id for ids in tokenizer.encode(text) for id in ids]


@given(words=st.lists(st.integers(1, 19).flatmap(lambda n: st.text(st.sampled_from("abé喜"), min_size=n, max_size=n))))
def test_words_that_differ_anywhere_are_told_apart(tokenizer: Tokenizer, words: list[str]) -> None:
    """Words up to 16 bytes are compared as numbers, longer ones as strings; in a small memo, they evict each other."""
    text = [" ".join(words), " ".join(reversed(words)), " ".join(word[:-1] + "c" for word in words)]
    expected = [id for ids in tokenizer.encode(text) for id in ids]
    for memo_bits in (0, 1, 18):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(words_module, "MEMO_BITS", memo_bits)
            cache = WordCache(tokenizer, U2, given_words=False)
            for _ in range(2):
                assert cache.encode(text).ids.tolist() == expected, memo_bits


def test_pieces_of_a_word_continue_it(tmp_path: Path) -> None:
    loaded = load_tokenizer(write_tokenizer(tmp_path / "t", ["play", "##ing", ",", "我", "喜", "欢", "x"]))

    def continues(text: str, given_words: bool) -> list[int]:
        return list(WordCache(loaded, U2, given_words).encode([text, text]).continues)

    assert continues("playing, play", False) == [0, 1, 0, 0] * 2
    assert continues("我 喜欢 x喜欢", False) == [0] * 6 * 2
    assert continues("我 喜欢 x喜欢", True) == [0, 0, 1, 0, 0, 1] * 2
    assert continues("喜欢,喜欢 playing喜", True) == [0, 1, 0, 0, 1, 0, 1, 0] * 2
