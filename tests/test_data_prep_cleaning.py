"""Cleaning: what separates words, what doesn't, and that no known word is lost next to other characters."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep import cleaning
from data_prep.cleaning import clean
from data_prep.tokenizer import DEFAULT_SETTINGS, SPECIALS, bert_encoder, load_tokenizer
from data_prep.vocab import train_tokenizer

SYMBOLS = {*range(0x2190, 0x2C00), *range(0x1F000, 0x1FC00)}


def test_every_character_between_two_letters() -> None:
    """Checks the definition again, on all of Unicode."""
    for code in (*range(0xD800), *range(0xE000, 0x110000)):
        character = chr(code)
        if character.isspace():
            wanted = "a b", 0
        elif unicodedata.category(character) == "Cc" or code == 0x200B:
            wanted = "a b", 1
        else:
            wanted = f"a{character}b", 0
        assert clean(f"a{character}b") == wanted, hex(code)


def test_the_tokenizer_parts_words_where_bert_does_and_at_controls_and_symbols() -> None:
    ours = train_tokenizer(["a b"], 20, cased=True).encoder
    bert = bert_encoder([*SPECIALS, "a", "b"], DEFAULT_SETTINGS | {"do_lower_case": False})
    codes = [*range(0x3100), *range(0xFE00, 0x10000), *range(0x1E000, 0x20000), *range(0xE0000, 0xE0100)]
    texts = [f"a{chr(code)}b" for code in codes]
    found, plain = (encoder.encode_batch(texts, add_special_tokens=False) for encoder in (ours, bert))
    for code, words, as_bert in zip(codes, found, plain, strict=True):
        if chr(code).isspace() or unicodedata.category(chr(code)) == "Cc" or code == 0x200B:
            assert words.offsets == [(0, 1), (2, 3)], hex(code)
        elif code in SYMBOLS:
            assert words.offsets == [(0, 1), (1, 2), (2, 3)], hex(code)
        else:
            assert words.offsets == as_bert.offsets, hex(code)


def test_the_patterns_are_the_same_in_every_dialect_of_regular_expressions() -> None:
    """JavaScript's and Swift's readers of tokenizer.json have no \\K, no \\G, and other escapes."""
    assert not set(cleaning.CONTROLS + cleaning.SYMBOLS) & set("\\(){}?+.^$")


@pytest.mark.parametrize(
    ("text", "cleaned", "changed"),
    [
        ("", "", 0),
        (" \t\n", "", 0),
        ("\x00\u200b", "", 2),
        ("  two  words\u3000 \u2028", "two words", 0),
        ("hello\u200bworld", "hello world", 1),
        ("hello\x00\x00 \x00world\x00", "hello world", 4),
        ("don\x92t", "don t", 1),
        ("glad😊", "glad😊", 0),
        ("glad\x00😊", "glad 😊", 1),
        ("東京タワー", "東京タワー", 0),
        (
            "soft\u00adhyphen, caf\ufffd, \ufeffmark, می\u200cخواهم",
            "soft\u00adhyphen, caf\ufffd, \ufeffmark, می\u200cخواهم",
            0,
        ),
    ],
)
def test_what_is_changed_and_counted(text: str, cleaned: str, changed: int) -> None:
    assert clean(text) == (cleaned, changed)


@pytest.mark.parametrize("cased", [False, True])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("glad😊", "glad 😊"),
        ("glad 😊 so", "glad 😊 so"),
        ("glad\x00😊", "glad 😊"),
        ("😊" * 1000, " ".join("😊" * 1000)),
        ("x≤y→z", "x ≤ y → z"),
        ("x≠y", "x ≠ y"),  # one that has accents, by the tables of Unicode
        ("a👩🏽\u200d💻b", "a 👩🏽 💻 b"),  # a woman and her skin, a computer
        ("❤\ufe0fok", "❤\ufe0f ok"),
        ("🇩🇪🇫🇷🇬", "🇩🇪 🇫🇷 🇬"),
        ("🏳\ufe0f\u200d🌈x", "🏳\ufe0f 🌈 x"),
        ("😊\u200dx", "😊 x"),
        ("≤\u0338y", "≤\u0338 y"),
        ("⏭\u20e3y", "⏭\u20e3 y"),
    ],
)
def test_symbols_are_words(text: str, words: str, cased: bool) -> None:
    tokenizer = train_tokenizer([words], 200, cased)
    found = tokenizer.encoder.encode(text, add_special_tokens=False)
    again = tokenizer.encoder.encode(words, add_special_tokens=False)
    assert found.ids == again.ids and tokenizer.specials.unk not in found.ids
    spans = dict.fromkeys(found.word_ids, "")
    for word, (start, end) in zip(found.word_ids, found.offsets, strict=True):
        spans[word] += text[start:end]
    strip = {ord(character): None for character in ("" if cased else "\ufe0f\u0338")}
    assert [span.translate(strip) for span in spans.values()] == words.translate(strip).split(" ")


CHARACTERS = st.one_of(
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from(" \t\x00\x85\u200b\u200d\ufe0f\u2028\u0301a😊👩💻🏽🇩🇪→\U000e0067"),
)


@given(st.text(CHARACTERS))
def test_clean_text_is_left_as_it_is(text: str) -> None:
    cleaned, changed = clean(text)
    assert clean(cleaned) == (cleaned, 0)
    assert cleaned == " ".join(cleaned.split()) and "\x00" not in cleaned
    assert (changed == 0) == (cleaned == " ".join(text.split()))
    kept = [c for c in text if not c.isspace() and unicodedata.category(c) != "Cc" and c != "\u200b"]
    assert [c for c in cleaned if c != " "] == kept


def test_known_words_survive_what_stands_beside_them(tmp_path: Path) -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "glad", "東", "京", "タ", "##ワ", "##ー"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    tokenizer = load_tokenizer(tmp_path).with_cleaning()
    texts = ["hello\u200bworld", "hello\x00world", "glad😊", "東京タワー", "😊" * 3, "hello\ufeff"]
    found = [[pieces[i] for i in ids] for ids in tokenizer.encode(texts)]
    assert found[:3] == [["hello", "world"], ["hello", "world"], ["glad", "[UNK]"]]
    assert found[3] == ["東", "京", "タ", "##ワ", "##ー"]
    assert found[4:] == [["[UNK]"] * 3, ["hello"]]
