"""Sentences: where they end in English, Chinese and Japanese, and what is done without any full stop."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.sentences import LONGEST_SENTENCE, WINDOW_CHARACTERS, split_sentences


def test_english() -> None:
    assert split_sentences("Mr. Holmes came. He sat!  So?", "en") == (["Mr. Holmes came.", "He sat!", "So?"], 0)
    assert split_sentences("", "en") == split_sentences(" ", "en") == ([], 0)


@pytest.mark.parametrize("language", ["zh", "ja", "en"])
@pytest.mark.parametrize(
    "sentences",
    [
        ["我喜欢踢足球。", "你呢？", "真的！", "是吗？！", "好。"],
        ["他说：“我来了。”", "然后走了。", "「好！」", "她问（真的？）。"],
        ['他说："好。"', '"你好吗？"', "她问。"],
        ["第一句；还是第一句；仍然是。", "第二句。"],  # a semicolon parts clauses
        ["私は行く。", "「はい。」", "『よし。』", "【注。】", "そうですか？", "はい"],
        ["〔一。〕", "二。", "｢三。｣"],
        ["我 喜欢 足球 。", "你 呢 ？"],
        ["They said 3.5元。", "Then he left."],
    ],
)
def test_chinese_and_japanese_in_any_language(sentences: list[str], language: str) -> None:
    space = " " if " " in sentences[0] else ""
    assert split_sentences(space.join(sentences), language) == (sentences, 0)


@pytest.mark.parametrize(("language", "sentence"), [("en", "This is a sentence. "), ("zh", "我喜欢踢足球，你呢？")])
def test_a_long_paragraph_is_split_as_a_short_one(language: str, sentence: str) -> None:
    """A book in one line. It takes a moment; without windows, whose time grows with the square, it took a minute."""
    count = 20_000
    pieces, cut = split_sentences(sentence * count, language)
    assert pieces == [sentence.strip()] * count and cut == 0


@pytest.mark.parametrize(
    "size",
    [WINDOW_CHARACTERS - 1, WINDOW_CHARACTERS, WINDOW_CHARACTERS + 1, 3 * WINDOW_CHARACTERS, LONGEST_SENTENCE - 2],
)
def test_a_sentence_longer_than_a_window_stays_whole(size: int) -> None:
    sentence = ("word " * LONGEST_SENTENCE)[: size - 2] + "d."
    assert split_sentences(f"First. {sentence} Last.", "en") == (["First.", sentence, "Last."], 0)


@pytest.mark.parametrize("blob", ["x" * (LONGEST_SENTENCE * 5), "word " * 100_000, "足" * (LONGEST_SENTENCE * 3 + 1)])
def test_text_without_a_full_stop_is_cut_and_counted(blob: str) -> None:
    pieces, cut = split_sentences(blob, "en")
    assert cut == len(pieces) - 1 >= 3 and max(map(len, pieces)) <= LONGEST_SENTENCE
    assert (" " if " " in blob else "").join(pieces) == blob.strip()
    assert all(len(piece) > LONGEST_SENTENCE - 10 for piece in pieces[:-1])


PARTS = st.sampled_from(
    ["a", "Mr. ", "B. ", " ", "? ", "。", "”", "」", "“", "「", '"', "x" * 999, "足" * 70, "\n", "😊"]
)


@given(st.lists(PARTS, max_size=60), st.sampled_from(["en", "zh", "xx"]))
def test_nothing_is_lost(parts: list[str], language: str) -> None:
    text = "".join(parts)
    pieces, cut = split_sentences(text, language)
    assert "".join("".join(pieces).split()) == "".join(text.split())
    assert all(piece == piece.strip() and 0 < len(piece) <= LONGEST_SENTENCE for piece in pieces)
    assert cut <= len(text) // (LONGEST_SENTENCE - 1000)
