"""Text files: formats, borders of documents, and one clear line for each kind of damage."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.corpus import Source, find_sources, parse_where, read_chunks, read_paragraphs
from data_prep.errors import DataError
from data_prep.sentences import LONGEST, split_sentences


def read(path: Path, where: tuple[str, str] | None = None) -> list[tuple[bool, str]]:
    return list(read_paragraphs(Source(path, path.name), where))


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)],
)
def test_both_formats_plain_and_compressed(tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]) -> None:
    text, records = tmp_path / f"a.txt{suffix}", tmp_path / f"b.jsonl{suffix}"
    text.write_bytes(compress("\ufeff\r\nOne.\r\nTwo.\n\n\n \nThree é.".encode()))
    lines = [{"text": "One.\nTwo.\n\n\nThree é.", "split": "a"}, {"text": " \n"}, {"text": "No."}]
    records.write_bytes(compress("\n".join(map(json.dumps, lines)).encode()))
    assert read(text) == [(True, "One."), (False, "Two."), (True, "Three é.")]
    assert read(records, ("split", "a")) == [(True, "One. Two."), (False, "Three é.")]


def test_sources_are_sorted_and_named_without_the_machine(tmp_path: Path) -> None:
    names = ("in/b.txt", "in/a/wiki.en.v1.1.jsonl.gz", "in/a/x.txt", "in/README.md", "c.txt", "linked/d.txt")
    for name in (*names, "in/.hidden.txt", "in/.git/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "linked")
    found = [source.name for source in find_sources([tmp_path / "in", tmp_path / "c.txt"])]
    assert found == ["a/wiki.en.v1.1.jsonl.gz", "a/x.txt", "b.txt", "link/d.txt", "c.txt"]


def test_inputs_that_would_spoil_the_data_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for inputs, where, message in (
        ([tmp_path, tmp_path / "a.txt"], None, "is given twice"),
        ([tmp_path], ("split", "train"), "selects on a field"),
        ([tmp_path / "b.txt"], None, "does not exist"),
    ):
        with pytest.raises(DataError, match=message):
            find_sources(inputs, where)
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).touch()
    with pytest.raises(DataError, match="its name is not UTF-8"):
        find_sources([tmp_path])


@pytest.mark.parametrize(
    ("condition", "taken"),
    [("keep=true", [0]), ("keep=True", [1]), ("keep=1", [2]), ("keep=null", [3]), ("keep=None", []), ("x=null", [])],
)
def test_where_compares_as_json_spells(tmp_path: Path, condition: str, taken: list[int]) -> None:
    values = [True, "True", 1, None]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": str(i), "keep": v}) for i, v in enumerate(values)))
    assert [int(text) for _, text in read(tmp_path / "a.jsonl", parse_where(condition))] == taken


def test_a_document_may_span_chunks(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("word " * 20_000 + "\n" + "word " * 40_000 + "\nlast\n\nnext")
    chunks = list(read_chunks([Source(path, "long.txt")], None))
    assert [[document for document, _ in chunk.paragraphs] for chunk in chunks] == [[1, 1], [1, 2]]


def test_sentences_are_split_and_long_ones_cut() -> None:
    assert split_sentences("Mr. Holmes came. He sat!  So?", "en")[0] == ["Mr. Holmes came.", "He sat!", "So?"]
    assert split_sentences("我喜欢踢足球。你呢？", "zh") == (["我喜欢踢足球。", "你呢？"], 0)
    for blob in ("x" * (LONGEST * 5), "word " * LONGEST):
        pieces, cuts = split_sentences(blob, "en")
        assert cuts == len(pieces) - 1 >= 4 and max(map(len, pieces)) <= LONGEST
        assert "".join(pieces) == blob.strip()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good\n\ncaf\xe9\n", "a.txt, line 3: not UTF-8 (byte 0xE9 at column 4)"),
        ("a.txt", "good\nend 足".encode()[:-1], "a.txt, line 2: not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": }\n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"text": "a"\n', "a.jsonl, line 1: not JSON (Expecting ',' delimiter: column 13"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1: not JSON (maximum recursion depth"),
        ("a.jsonl", b'{"txt": "a"}\n', 'a.jsonl, line 1: wanted an object with a string field "text"'),
        ("a.jsonl", b'{"text": "half \\ud800"}\n', "a.jsonl, line 1: not Unicode text"),
        ("a.txt.gz", gzip.compress(b"text\n" * 9)[:-4], "a.txt.gz: cannot be read"),
        ("a.txt.bz2", b"no bzip2", "a.txt.bz2: cannot be read"),
        ("a.txt.xz", lzma.compress(b"text")[:-9], "a.txt.xz: cannot be read"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        read(tmp_path / name)
    assert message in str(error.value) and "\n" not in str(error.value)
