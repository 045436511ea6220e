"""Nothing is lost silently: each file below the input is read or named, each record is used or counted."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from data_prep import corpus
from data_prep.__main__ import main
from data_prep.manifest import Manifest, SourceRecord, load_manifest, save_manifest
from data_prep.sources import describe_left_out, format_of
from tests.helpers.corpora import contents, write_tokenizer
from tests.helpers.ranks import ROOT

TEXT = "a b c\nd e f\n\ng h i\na b d\n"  # two documents
RECORDS = "".join(json.dumps({"text": text}) + "\n" for text in TEXT.split("\n\n"))
HIDDEN_ONLY = "\u200b\u200b\n\u200b"
ARTICLES = """\
<doc id="12" url="https://en.wikipedia.org/wiki?curid=12" title="A &amp; "B" b">
A & "B" b

a b c.
d e f &lt; g &amp; h.

g h i.

</doc>
<doc id="13" revid="7" url="x" title="Moved">
Moved


</doc>
<doc id="14" url="https://en.wikipedia.org/wiki?curid=14" title="C">
a b c d.

e f g.
</doc>
"""


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer", [*"abcdefghi", *".<>&="])


def build(folder: Path, tokenizer: Path, *more: str, out: str = "out") -> int:
    options = ["--sequence-length", "32", "--processes", "1", *more]
    place = str(folder.parent / out)
    return main(["build", "--input", str(folder), "--tokenizer", str(tokenizer), "--out", place, *options])


def built(folder: Path, tokenizer: Path, *more: str, out: str = "out") -> Manifest:
    assert build(folder, tokenizer, *more, out=out) == 0
    return load_manifest(folder.parent / out)


def vocab(folder: Path, *more: str, out: str = "vocab") -> int:
    return main(["vocab", "--input", str(folder), "--out", str(folder.parent / out), "--size", "100", *more])


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def by_name(manifest: Manifest) -> dict[str, SourceRecord]:
    return {file.name: file for file in manifest.corpus.files}


# ---- files ---------------------------------------------------------------------------------------------------


READ: dict[str, str | bytes] = {
    "B.TXT": TEXT,
    "a.txt": TEXT,
    "c4-train.00000-of-01024.json.gz": gzip.compress(RECORDS.encode()),
    "d.json": RECORDS,
    "f.text": TEXT,
    "g.jsonl.zstd": zstandard.compress(RECORDS.encode()),
    "h.ndjson": RECORDS,
    "i.JSONL.GZ": gzip.compress(RECORDS.encode()),
}


def test_the_endings_that_corpora_have_are_read(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "in", {**READ, "AA/wiki_00": RECORDS})
    manifest = built(folder, tokenizer)
    assert list(by_name(manifest)) == sorted(READ)
    assert {file.tokens for file in manifest.corpus.files} == {12}
    assert manifest.corpus.documents == 2 * len(READ)
    [left] = manifest.corpus.left_out
    assert asdict(left) == {"ending": "", "files": 1, "example": "AA/wiki_00"}
    printed = capsys.readouterr()
    assert "\nfiles left out: 1 without an extension (AA/wiki_00)\n" in printed.out
    first = printed.err.splitlines()[0]  # before the work, not after a night of it
    assert first == "data_prep: files left out: 1 without an extension (AA/wiki_00); to read them, set --format"
    assert vocab(folder) == 0 and first in capsys.readouterr().err


def test_a_format_reads_what_no_ending_names(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "in", {**READ, "AA/wiki_00": RECORDS, "part-00001": RECORDS, "x.log": RECORDS})
    for form in ("jsonl", "wikiextractor"):
        manifest = built(folder, tokenizer, "--format", form, out=form)
        assert manifest.corpus.left_out == () and manifest.settings.format == form
        assert manifest.corpus.documents == 2 * (len(READ) + 3)
        assert "files left out" not in capsys.readouterr().out
    assert (
        built(folder / "x.log", tokenizer, "--format", "text", "--pairs", "single", out="../log").corpus.documents == 1
    )
    assert build(folder / "x.log", tokenizer) == 2
    assert "for files with other names, set --format" in capsys.readouterr().err


def test_whatever_is_left_out_is_counted(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("README.md", "b/LICENSE", "b/notes.MD", "x.warc.gz", "y.parquet.gz", "part.00001", ".git/config", ".a.txt")
    folder = write(tmp_path / "in", {"a.txt": TEXT, "empty.txt": "", **dict.fromkeys(names, "")})
    said = "2 without an extension (b/LICENSE), 2 .md (README.md), 2 hidden (.a.txt), 1 .parquet.gz (y.parquet.gz), "
    manifest = built(folder, tokenizer)
    assert sum(left.files for left in manifest.corpus.left_out) == len(names)
    assert describe_left_out(manifest.corpus.left_out) == said + "1 .warc.gz (x.warc.gz)"
    assert f"files without text: 1 (empty.txt)\nfiles left out: {said}" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "out")]) == 0 and said in capsys.readouterr().out
    (folder / "a.txt").unlink()
    (folder / "empty.txt").unlink()
    assert (
        build(folder, tokenizer, out="none") == 2 and f"no text files in {folder} but {said}" in capsys.readouterr().err
    )


def test_hidden_files_have_their_own_remedy(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "in", {"a.txt": TEXT, "README.md": "", ".a.txt": TEXT, "b/.git/config": ""})
    built(folder, tokenizer)
    assert capsys.readouterr().err.splitlines()[:2] == [
        "data_prep: files left out: 1 .md (README.md); to read them, set --format",
        "data_prep: files left out: 2 hidden (.a.txt); to read them, rename them",
    ]
    assert build(folder, tokenizer, "--format", "text", out="text") == 0
    assert capsys.readouterr().err.splitlines()[0].endswith("2 hidden (.a.txt); to read them, rename them")
    (folder / "a.txt").unlink()
    (folder / "README.md").unlink()
    assert build(folder, tokenizer, out="none") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(f"no text files in {folder} but 2 hidden (.a.txt): to read hidden files, rename them")


@pytest.mark.parametrize("links", [{"b/c": "."}, {"b/to_a": "../a", "a/to_b": "../b"}, {"a/b": "../b"}])
def test_a_folder_that_is_there_again_takes_one_line(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str], links: dict[str, str]
) -> None:
    folder = write(tmp_path / "in", {"a/a.txt": TEXT, "b/b.txt": TEXT})
    for name, target in links.items():
        (folder / name).symlink_to(target)
    assert build(folder, tokenizer) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(rf"input {folder}/\S+ is the folder {folder}/\S+ again, .*: remove the link$", line)
    assert len(line) < 3 * len(str(folder)) + 100


@pytest.mark.slow
def test_folders_that_all_link_to_one_another_are_not_walked_forever(tmp_path: Path, tokenizer: Path) -> None:
    folder = write(tmp_path / "in", {f"{n}/{n}.txt": TEXT for n in range(6)})
    for one in range(6):
        for other in range(6):
            (folder / str(one) / f"to_{other}").symlink_to(f"../{other}")
    command = [sys.executable, "-m", "data_prep", "build", "--input", str(folder), "--tokenizer", str(tokenizer)]
    command += ["--out", str(tmp_path / "out"), "--sequence-length", "32"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.endswith("remove the link\n")


@pytest.mark.parametrize("target", ["nowhere.txt", "link.txt"])
def test_a_link_to_nothing_takes_one_line(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    folder = write(tmp_path / "in", {"a.txt": TEXT})
    (folder / "link.txt").symlink_to(target)
    assert build(folder, tokenizer) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(f"{folder}/link.txt links to no file: remove it, or restore the file")


@pytest.mark.parametrize(
    ("name", "form", "found"),
    [
        ("a.Txt.Bz2", "auto", "text"),
        ("a.parquet", "text", "parquet"),
        ("a.parquet.gz", "auto", None),
        ("a.txt", "jsonl", "text"),
        ("a.text", "wikiextractor", "wikiextractor"),
        ("a.jsonl", "wikiextractor", "jsonl"),
        ("wiki_00.bz2", "wikiextractor", "wikiextractor"),
        ("txt", "auto", None),
    ],
)
def test_which_format_a_name_says(name: str, form: str, found: str | None) -> None:
    assert format_of(name, form) == found


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "z.json",
            json.dumps([{"text": "a b"}, {"text": "c"}], indent=1),
            "one JSON array, wanted one record per line: jq",
        ),
        ("z.json", '[{"text": "' + "a b " * 100_000 + '"}]', "jq -c '.[]' z.json > z.jsonl"),
        ("z.json.gz", gzip.compress(b' [\n{"text": "a"}]', mtime=0), "one JSON array"),
        ("z.JSON", json.dumps({"text": "a b"}, indent=2), "not JSON lines: its first line is not a whole record"),
        ("z.json", '\n{"text": "a",\n"id": 1}', "write one record per line, or move it out of the input"),
    ],
)
def test_json_that_holds_no_lines_is_reported_before_the_work(
    tmp_path: Path, tokenizer: Path, name: str, content: str | bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "in", {"a.txt": TEXT, name: content})
    for command in (build(folder, tokenizer), vocab(folder)):
        assert command == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and errors[0] == errors[1] and str(folder / name) in errors[0] and said in errors[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "tokenizer"]


# ---- records and documents -----------------------------------------------------------------------------------


def test_documents_without_visible_text_are_counted(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six documents, four of which hold zero-width spaces or NULs alone; and the same as records, with blank ones."""
    texts = ["a b c\nd e f", HIDDEN_ONLY, "\0\0\n\0", "\u200b", "g h i\na b d", "\0 \n\u200b"]
    folder = write(tmp_path / "in", {"a.txt": "\n\n".join(texts)})
    records = [*texts, "", " \n\t\n", "\u200b"]
    lines = [json.dumps({"text": text, "split": "x"}) for text in records]
    write(folder, {"b.jsonl": "\n\n".join(lines), "d.txt": "\n \n"})
    parquet.write_table(pyarrow.table({"text": records}), folder / "c.parquet")
    manifest = built(folder, tokenizer)
    assert [(file.name, file.blank) for file in manifest.corpus.files] == [
        ("a.txt", 4),
        ("b.jsonl", 7),
        ("c.parquet", 7),
        ("d.txt", 0),
    ]
    assert manifest.corpus.documents == 3 * 2
    output = capsys.readouterr().out
    assert " 6 documents " in output and ", 18 documents without visible text left out" in output


def test_records_that_where_does_not_take_are_counted(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"text": "a b c\n\nd e f", "split": split} for split in ("x", "y", "x", "z")] + [
        {"text": " ", "split": "x"}
    ]
    folder = write(tmp_path / "in", {"a.jsonl": "\n".join(map(json.dumps, [*records, {"text": "a"}]))})
    parquet.write_table(pyarrow.Table.from_pylist(records), folder / "b.parquet")
    manifest = built(folder, tokenizer, "--where", "split=x")
    found = [(file.unwanted, file.blank) for file in manifest.corpus.files]
    assert found == [(3, 1), (2, 1)] and manifest.corpus.documents == 4
    output = capsys.readouterr().out
    assert "2 documents without visible text left out, 5 records without split=x left out" in output


def test_counts_do_not_depend_on_how_the_work_is_cut(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [HIDDEN_ONLY + "\n\u200b", HIDDEN_ONLY + "\na b c\nd e f", "g h i\n" + HIDDEN_ONLY, "\u200b"] * 20
    folder = write(tmp_path / "in", {"a.txt": "\n\n".join(documents), "c.txt": "\u200b\n\n\u200b", "e.txt": TEXT})
    write(folder, {"b.jsonl": '{"text": ""}\n' * 3, "d.jsonl": '{"text": "\\u200b"}\n' * 2, "f.jsonl": '{"text": ""}'})
    first = built(folder, tokenizer, out="first")
    assert [file.blank for file in first.corpus.files] == [40, 3, 2, 2, 0, 1]
    monkeypatch.setattr(corpus, "CHUNK_CHARACTERS", 2)
    assert built(folder, tokenizer, "--processes", "2", out="second") == first
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


def test_a_manifest_from_before_these_counts_is_read(tmp_path: Path, tokenizer: Path) -> None:
    folder = write(tmp_path / "in", {"a.txt": TEXT})
    manifest = built(folder, tokenizer)
    path = tmp_path / "out" / "manifest.json"
    old = json.loads(path.read_bytes())
    del old["settings"]["format"], old["corpus"]["left_out"]
    for name in ("blank", "unwanted", "titles", "markup"):
        del old["corpus"]["files"][0][name]
    path.write_text(json.dumps(old))
    assert load_manifest(tmp_path / "out") == manifest
    assert build(folder, tokenizer) == 0  # is known again: nothing is built
    assert json.loads(path.read_bytes()) == old
    assert build(folder, tokenizer, "--format", "text") == 2
    del old["corpus"]["documents"]
    path.write_text(json.dumps(old))
    assert main(["verify", str(tmp_path / "out")]) == 2
    save_manifest(tmp_path / "out", manifest)
    assert main(["verify", str(tmp_path / "out")]) == 0


# ---- wikiextractor -------------------------------------------------------------------------------------------


def test_articles_are_documents(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Titles and tags are dropped; blank lines separate paragraphs, not documents; what was escaped is as it was."""
    folder = write(tmp_path / "in", {"AA/wiki_00": ARTICLES, "AA/wiki_01.bz2": bz2.compress(ARTICLES.encode())})
    write(folder, {"AB.txt": ARTICLES, "b.txt": TEXT, "CRLF.TXT": ARTICLES.replace("\n", "\r\n")})
    manifest = built(folder, tokenizer, "--format", "wikiextractor")
    files = by_name(manifest)
    plain = files.pop("b.txt")
    assert (plain.tokens, plain.blank, plain.titles) == (12, 0, 0)
    for file in files.values():  # a b c . | d e f < g & h . | g h i . || a b c d . | e f g .
        assert (file.tokens, file.unknown, file.blank, file.titles, file.markup) == (4 + 8 + 4 + 5 + 4, 0, 1, 2, 0)
    assert manifest.corpus.documents == 2 + 2 * len(files) and manifest.corpus.lone_sentences == 0
    printed = capsys.readouterr()
    assert "8 titles of articles left out" in printed.out and "with markup" not in printed.err
    assert vocab(folder, "--format", "wikiextractor") == 0
    assert "title" not in (tmp_path / "vocab" / "vocab.txt").read_text()


def test_its_json_holds_the_same_articles(tmp_path: Path, tokenizer: Path) -> None:
    texts = ["a b c.\nd e f &lt; g &amp; h.\ng h i.", "", "a b c d.\ne f g."]
    lines = "\n".join(json.dumps({"id": "1", "title": "A", "text": text}) for text in texts)
    made = {}
    for name, content in (("text", ARTICLES), ("json", lines)):
        folder = write(tmp_path / name, {"wiki_00": content})
        manifest = built(folder, tokenizer, "--format", "wikiextractor", out=f"out-{name}")
        made[name] = {
            path: data for path, data in contents(tmp_path / f"out-{name}").items() if path != "manifest.json"
        }
        assert (manifest.corpus.documents, manifest.corpus.files[0].blank) == (2, 1)
    assert made["text"] == made["json"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ARTICLES[: ARTICLES.rindex("</doc>")], "wiki_00: the <doc …> of line 15 has no </doc>: the file was cut"),
        (ARTICLES.replace("</doc>\n", "", 1), "wiki_00, line 9: the <doc …> of line 1 has no </doc>"),
        (ARTICLES[ARTICLES.index("\n") :], "wiki_00, line 9: </doc> without <doc …>: the file was cut"),
    ],
)
def test_an_article_that_was_cut_is_named(
    tmp_path: Path, tokenizer: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "in", {"wiki_00": text})
    assert build(folder, tokenizer, "--format", "wikiextractor") == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("wiki.txt", TEXT + "\n" + ARTICLES, 6),
        ("wet.text", "WARC/1.0\nWARC-Type: conversion\n\n" + TEXT, 1),
        ("page.txt", "<!DOCTYPE html>\n<html>\n<p>a b</p>\n\n" + TEXT, 2),
        ("dump.txt", "<mediawiki>\n" + TEXT, 1),
        ("records.txt", RECORDS, 2),
        ("trec.txt", "<DOC>\n<DOCNO> 1 </DOCNO>\na b\n" + TEXT, 1),
        ("crawl.jsonl", json.dumps({"text": "<!DOCTYPE html>\n<html><p>a b"}) + "\n" + RECORDS, 1),
    ],
)
def test_markup_that_is_learnt_is_reported(
    tmp_path: Path, tokenizer: Path, name: str, text: str, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "in", {"a.txt": "a < b\n<3 c\n\n" + TEXT, name: text})
    said = f"1 file with markup that was read as text, most in {name}: {lines} line"
    assert build(folder, tokenizer) == vocab(folder) == 0
    assert by_name(load_manifest(tmp_path / "out"))[name].markup == lines
    warned = [line for line in capsys.readouterr().err.splitlines() if said in line]
    assert len(warned) == 2 and all("use --format wikiextractor" in line for line in warned)


@pytest.mark.parametrize("form", ["auto", "text"])
def test_a_named_pipe_is_not_waited_for(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    (tmp_path / "input").mkdir()
    (tmp_path / "input" / "good.txt").write_text("A first one.\n")
    os.mkfifo(tmp_path / "input" / "pipe.txt")
    given = [*("--input", str(tmp_path / "input"), "--tokenizer", str(tokenizer), "--format", form)]
    assert main(["build", *given, *("--sequence-length", "32", "--out", str(tmp_path / "out"))]) == 2
    assert "pipe.txt is a pipe or a device, not a regular file: move it" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
