"""Combining marks that a tokenizer strips are counted, reported if words differ by them, and can be kept."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from data_prep.__main__ import main
from data_prep.combining_marks import count_marks
from data_prep.inspection import describe
from data_prep.manifest import MANIFEST, load_manifest
from data_prep.tokenizer import load_tokenizer
from data_prep.vocab import learn_tokenizer

PAIRS = [  # that differ in a mark alone: Hindi, Thai, Japanese, Bengali, Arabic, Hebrew, Vietnamese, German
    ("कुल", "कल"),
    ("मेरी", "मरी"),
    ("ไม่", "ไม้"),
    ("パンダ", "ハンタ"),
    ("かぎ", "かき"),
    ("কুল", "কল"),
    ("كتَب", "كتُب"),
    ("שָׁלוֹם", "שלום"),
    ("má", "mạ"),
    ("schön", "schon"),
]
HINDI = "मेरी किताब कुल मिलाकर नई है।"


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        ("", (0, 0)),
        ("plain text, 1 2 3", (0, 0)),
        ("café cafe\u0301 Ёлка ᾳ", (4, 0)),
        ("Tiếng Việt", (4, 0)),
        ("❤\ufe0f 1\ufe0f\u20e3 葛\U000e0100", (0, 0)),  # pictures, and a mark that is kept
        ("한국어", (0, 0)),  # decomposed, but nothing is lost
        ("パンダ", (2, 2)),
        ("ไม่", (1, 1)),
        ("कुल मेरी", (2, 2)),  # the other vowel sign has a width, and is kept
        ("שָׁלוֹם", (3, 3)),
    ],
)
def test_marks_that_are_stripped_are_counted(text: str, marks: tuple[int, int]) -> None:
    assert count_marks(text) == marks


def test_scripts_are_told_apart_by_the_names_of_their_marks() -> None:
    """The library's tables are older than Python's: what it does not strip is not counted."""
    western = ("COMBINING CYRILLIC", "COMBINING GREEK", "COMBINING LATIN", "CYRILLIC", "GREEK", "LATIN")
    other = ("HEBREW", "ARABIC", "DEVANAGARI", "BENGALI", "TAMIL", "THAI", "LAO", "MYANMAR", "KHMER", "TIBETAN")
    for code in range(0x10000):  # beyond are the marks of old musical notations
        name = unicodedata.name(chr(code), "") if unicodedata.category(chr(code)) == "Mn" else ""
        if name.startswith(western):
            assert count_marks(chr(code)) in ((0, 0), (1, 0), (2, 0)), name  # some decompose into two
        elif name.startswith(other):
            assert len(set(count_marks(chr(code)))) == 1, name


@pytest.mark.parametrize(("one", "two"), PAIRS)
def test_words_that_differ_in_a_mark_have_the_same_ids_unless_marks_are_kept(
    tmp_path: Path, one: str, two: str
) -> None:
    stripping = learn_tokenizer([one, two], 200, cased=False).tokenizer
    keeping = learn_tokenizer([one, two, "A"], 200, cased=False, keep_accents=True).tokenizer
    assert len({tuple(ids) for ids in stripping.encode([one, two])}) == 1
    assert len({tuple(ids) for ids in keeping.encode([one, two])}) == 2
    assert list(keeping.encode(["A"])) == list(keeping.encode(["a"]))
    keeping.save(tmp_path)
    assert load_tokenizer(tmp_path).settings == keeping.settings
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert [theirs(text)["input_ids"][1:-1] for text in (one, two)] == list(keeping.encode([one, two]))


def built(folder: Path, name: str, texts: list[str], *options: str) -> Path:
    """Build a data set with the command line."""
    for number, text in enumerate(texts):
        (folder / f"{name}-{number}.txt").write_text("\n\n".join([text] * 20), "utf-8")
    inputs = ["--input", *(str(folder / f"{name}-{number}.txt") for number in range(len(texts)))]
    vocabulary, data = str(folder / f"{name}-vocab"), folder / f"{name}-data"
    assert main(["vocab", *inputs, "--out", vocabulary, "--size", "200", *options]) == 0
    more = ["--sequence-length", "32", "--pairs", "single", "--processes", "1"]
    assert main(["build", *inputs, "--tokenizer", vocabulary, "--out", str(data), *more]) == 0
    return data


def test_what_is_stripped_is_in_the_manifest_and_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = built(tmp_path, "hindi", ["The café is closed.", HINDI])
    english, hindi = load_manifest(data).corpus.files
    assert (english.stripped, english.stripped_other) == (20, 0)
    assert hindi.stripped == hindi.stripped_other == 20 * count_marks(HINDI).stripped > 0
    total = english.stripped + hindi.stripped
    assert f"changed: {total} combining marks stripped" in list(describe(load_manifest(data)))
    warned = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warned) == 2 and all(f"{hindi.stripped} combining marks of scripts" in line for line in warned)
    assert "vocab --keep-accents" in warned[0] and "1 file, above all hindi-1.txt: " in warned[1]

    kept = load_manifest(built(tmp_path, "kept", ["The café is closed.", HINDI], "--keep-accents"))
    assert [(file.stripped, file.stripped_other) for file in kept.corpus.files] == [(0, 0)] * 2
    western = built(tmp_path, "west", ["The café is closed. Tiếng Việt. Ёлка.", "京都 한국어 ❤\ufe0f"])
    assert load_manifest(western).corpus.files[0].stripped > 0
    assert "warning" not in capsys.readouterr().err


def test_a_manifest_from_before_marks_were_counted_is_read(tmp_path: Path) -> None:
    data = built(tmp_path, "old", ["The café is closed."])
    content = json.loads((data / MANIFEST).read_text("utf-8"))
    for file in content["corpus"]["files"]:
        del file["stripped"], file["stripped_other"]
    (data / MANIFEST).write_text(json.dumps(content), "utf-8")
    assert load_manifest(data).corpus.files[0].stripped == 0
