"""Cleaning: what is changed, what is not, and that no known word is lost beside what it is written with."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.cleaning import clean
from data_prep.tokenizer import load_tokenizer

SYMBOLS = {*range(0x2190, 0x2C00), *range(0x1F000, 0x1FC00)}


def test_every_character_between_two_letters() -> None:
    """The definition, stated once more over all of Unicode."""
    for code in (*range(0xD800), *range(0xE000, 0x110000)):
        character = chr(code)
        if character.isspace():
            wanted = "a b", 0
        elif unicodedata.category(character) == "Cc" or code == 0x200B:
            wanted = "a b", 1
        elif code in SYMBOLS:
            wanted = f"a {character} b", 1
        else:
            wanted = f"a{character}b", 0
        assert clean(f"a{character}b") == wanted, hex(code)


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
        ("glad😊", "glad 😊", 1),
        ("glad 😊 so", "glad 😊 so", 0),
        ("glad\x00😊", "glad 😊", 1),
        ("😊" * 1000, " ".join("😊" * 1000), 1000),
        ("東京タワー", "東京タワー", 0),
        ("x≤y→z", "x ≤ y → z", 2),
        ("a👩🏽\u200d💻b", "a 👩🏽\u200d💻 b", 4),  # a woman, her skin, a computer
        ("❤\ufe0fok", "❤\ufe0f ok", 2),
        ("🇩🇪🇫🇷🇬", "🇩🇪 🇫🇷 🇬", 5),
        ("🏳\ufe0f\u200d🌈x", "🏳\ufe0f\u200d🌈 x", 4),
        ("😊\u200dx", "😊 \u200dx", 1),
        ("≤\u0338", "≤\u0338", 0),
        ("1\ufe0f\u20e3", "1\ufe0f\u20e3", 0),
        (
            "soft\u00adhyphen, caf\ufffd, \ufeffmark, می\u200cخواهم",
            "soft\u00adhyphen, caf\ufffd, \ufeffmark, می\u200cخواهم",
            0,
        ),
    ],
)
def test_what_is_changed_and_counted(text: str, cleaned: str, changed: int) -> None:
    assert clean(text) == (cleaned, changed)


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
    tokenizer = load_tokenizer(tmp_path)
    texts = ["hello\u200bworld", "hello\x00world", "glad😊", "東京タワー", "😊" * 3, "hello\ufeff"]
    found = [[pieces[i] for i in ids] for ids in tokenizer.encode([clean(text)[0] for text in texts])]
    assert found[:3] == [["hello", "world"], ["hello", "world"], ["glad", "[UNK]"]]
    assert found[3] == ["東", "京", "タ", "##ワ", "##ー"]
    assert found[4:] == [["[UNK]"] * 3, ["hello"]]
