"""Text files: formats, document boundaries, bounded memory, and one clear line for each kind of damage."""

from __future__ import annotations

import bz2
import datetime
import gzip
import json
import lzma
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import pyarrow
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from data_prep import formats, lines
from data_prep.cleaning import clean
from data_prep.corpus import read_chunks, read_paragraphs
from data_prep.errors import DataError
from data_prep.formats import LONGEST_PARAGRAPH, Reading
from data_prep.lines import read_blocks
from data_prep.sources import Source, Where, find_sources, parse_where
from tests.helpers.ranks import ROOT

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}
REPLACE = Reading(bad_bytes="replace")


def read(path: Path, where: Where = None) -> list[tuple[bool, str]]:
    paragraphs = read_paragraphs(Source(path, path.name), Reading(where))
    return [(first, text) for first, text, *_ in paragraphs]


def texts(path: Path, reading: Reading | None = None) -> list[str]:
    return [paragraph.text for paragraph in read_paragraphs(Source(path, path.name), reading or Reading())]


def write_rows(path: Path, **columns: list[object]) -> Path:
    parquet.write_table(pyarrow.table(columns), path)
    return path


# ---- formats -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", PACK)
def test_both_formats_plain_and_compressed(tmp_path: Path, suffix: str) -> None:
    text, records = tmp_path / f"a.txt{suffix}", tmp_path / f"b.jsonl{suffix}"
    text.write_bytes(PACK[suffix]("\ufeff\r\nOne.\r\nTwo.\n\n\n \nThree é.".encode()))
    lines = [{"text": "One.\nTwo.\r\n\r\n\nThree é.", "split": "a"}, {"text": " \n"}, {"text": "No."}]
    records.write_bytes(PACK[suffix](b"\xef\xbb\xbf" + "\r\n".join(map(json.dumps, lines)).encode()))
    assert read(text) == [(True, "One."), (False, "Two."), (True, "Three é.")]
    assert read(records, ("split", "a")) == [(True, "One. Two."), (False, "Three é.")]


@pytest.mark.parametrize("suffix", [suffix for suffix in PACK if suffix])
def test_compressed_files_of_several_parts(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACK[suffix](b"one\nt") + PACK[suffix](b"") + PACK[suffix]("wo\n\nthrée".encode()))
    assert read(path) == [(True, "one"), (False, "two"), (True, "thrée")]


def test_zstd_frames_to_be_skipped_and_unpacked_sizes_of_all_kinds(tmp_path: Path) -> None:
    """The frames that `pzstd` writes; a kilobyte that unpacks to megabytes; and one that does not pack at all."""
    path = tmp_path / "a.txt.zst"
    noise = "".join(f"{i * 7919 % 65521:x} " for i in range(100_000)).encode()
    content = noise + b"\n" + b"word " * 200_000 + b"\n"
    skipped = struct.pack("<II", 0x184D2A50, 5) + b"hello"
    path.write_bytes(skipped + zstandard.compress(content) + skipped + zstandard.compress(b"end"))
    assert "\n".join(texts(path)).encode() == content.replace(b" \n", b"\n") + b"end"


def test_a_column_of_strings_is_read_as_text(tmp_path: Path) -> None:
    documents = ["One.\nTwo.\n\nThree é.", "", "Four."] * 300
    plain = tmp_path / "a.jsonl"
    plain.write_text("\n".join(json.dumps({"body": text}) for text in documents))
    wanted = texts(plain, Reading(text_field="body"))
    assert len(wanted) == 900
    kinds = [pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), pyarrow.binary()]
    columns = [pyarrow.array(documents).cast(kind) for kind in kinds] + [pyarrow.array(documents).dictionary_encode()]
    for column in columns:
        table = pyarrow.table({"id": range(len(documents)), "body": column})
        parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100)
        assert texts(tmp_path / "a.parquet", Reading(text_field="body")) == wanted


@pytest.mark.parametrize(
    ("condition", "taken"),
    [("keep=true", [0]), ("keep=True", [1]), ("keep=1", [2]), ("keep=null", [3]), ("keep=None", []), ("x=null", [])],
)
def test_where_compares_as_json_spells(tmp_path: Path, condition: str, taken: list[int]) -> None:
    values = [True, "True", 1, None]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": str(i), "keep": v}) for i, v in enumerate(values)))
    assert [int(text) for _, text in read(tmp_path / "a.jsonl", parse_where(condition))] == taken
    for i, value in enumerate(values):
        rows = write_rows(tmp_path / "a.parquet", text=["yes"], keep=[value])
        assert texts(rows, Reading(parse_where(condition))) == ["yes"] * (i in taken)


def test_where_on_columns_that_json_can_not_spell(tmp_path: Path) -> None:
    days = [datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)]
    path = write_rows(tmp_path / "a.parquet", text=["one", "two"], day=[*days])
    assert texts(path, Reading(("day", "2020-01-02"))) == ["two"]
    assert texts(path, Reading(("text", "one"))) == ["one"]


# ---- which files ---------------------------------------------------------------------------------------------


def test_sources_are_sorted_and_named_without_the_machine(tmp_path: Path) -> None:
    names = ("in/b.txt", "in/a/wiki.en.v1.1.jsonl.gz", "in/a/x.txt", "in/README.md", "c.txt", "linked/d.txt")
    more = ("in/.hidden.txt", "in/.git/e.txt", "in/f.parquet", "in/f.parquet.gz", "in/g.jsonl.zst", "in/h.zst")
    for name in names + more:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "linked")
    found = [source.name for source in find_sources([tmp_path / "in", tmp_path / "c.txt"])]
    inside = ["a/wiki.en.v1.1.jsonl.gz", "a/x.txt", "b.txt", "f.parquet", "g.jsonl.zst", "link/d.txt"]
    assert found == [*inside, "c.txt"]


def test_inputs_that_would_spoil_the_data_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.md").write_text("text")
    (tmp_path / "empty").mkdir()
    kinds = "wanted .txt, .text, .jsonl, .ndjson, .json, .tar, plain or with .gz, .bz2, .xz, .zst, .zstd, or .parquet; "
    for inputs, where, message in (
        ([tmp_path, tmp_path / "a.txt"], None, "is given twice"),
        ([tmp_path], ("split", "train"), "selects on a field"),
        ([tmp_path / "b.txt"], None, "does not exist"),
        ([tmp_path / "a.md"], None, kinds),
        ([tmp_path / "empty"], None, kinds),
    ):
        with pytest.raises(DataError, match=message):
            find_sources(inputs, where)
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).touch()
    with pytest.raises(DataError, match="its name is not UTF-8"):
        find_sources([tmp_path])


# ---- lines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", ["\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x1f", "\x85", "\u2028", "\u2029"])
def test_no_other_separator_ends_a_line(tmp_path: Path, separator: str) -> None:
    text = f"a{separator}b{separator}{separator}c\n{separator}\n{separator}d"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "a.jsonl").write_bytes(json.dumps({"text": text}, ensure_ascii=False).encode())
    write_rows(tmp_path / "a.parquet", text=[text])
    for name in ("a.txt", "a.jsonl", "a.parquet"):
        assert [clean(text)[0] for text in texts(tmp_path / name)] == ["a b c", "d"], name
    assert [first for first, _ in read(tmp_path / "a.txt")] == [True, True]


def test_blank_lines_between_all_sentences_make_documents_of_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(f"Sentence {i}." for i in range(10)))
    [chunk] = read_chunks([Source(tmp_path / "a.txt", "a")], Reading())
    assert [document for document, _ in chunk.paragraphs] == list(range(1, 11))


@given(st.lists(st.sampled_from([b"\n", b"\r\n", b" ", b"a", "é".encode(), "足".encode(), b"\xff"])), st.integers(4, 9))
def test_blocks_hold_every_byte_of_every_line(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], longest: int
) -> None:
    content = b"".join(parts)
    path = tmp_path_factory.mktemp("blocks") / "a.txt"
    path.write_bytes(content)
    found: dict[int, bytes] = {}
    with pytest.MonkeyPatch.context() as patch, FileIO(path) as disk:
        patch.setattr(lines, "BLOCK_BYTES", 4)
        patch.setattr(lines, "NEAR", 3)
        for block in read_blocks(disk, path, longest):
            rows = block.data.split(b"\n")
            assert block.ends or len(rows) == 1
            for number, row in enumerate(rows, block.number):
                start = block.column if number == block.number else 0
                assert len(row) <= longest and len(found.get(number, b"")) == start
                found[number] = found.get(number, b"") + row
                if b"\xff" not in content:
                    row.decode()
    assert list(found) == list(range(1, len(found) + 1))
    assert b"\n".join(found.values()) == content.removesuffix(b"\n")


@pytest.mark.parametrize("name", ["a.txt", "a.txt.zst", "a.jsonl", "a.parquet"])
@pytest.mark.parametrize("unit", ["word ", "x", "足", "é x"])
def test_long_paragraphs_are_cut_and_counted(tmp_path: Path, name: str, unit: str) -> None:
    size = LONGEST_PARAGRAPH if unit in ("word ", "x") else LONGEST_PARAGRAPH // len(unit.encode())
    text = (unit * (5 * size // 2 // len(unit))).strip() if unit == "word " else unit * (size * 5 // 2)
    path = tmp_path / name
    if name == "a.parquet":
        write_rows(path, text=[f"before\n\n{text}\n\nafter"])
    elif name == "a.jsonl":
        path.write_text(json.dumps({"text": f"before\n\n{text}\n\nafter"}))
    else:
        path.write_bytes(PACK[path.suffix if path.suffix in PACK else ""](f"before\n{text}\nafter".encode()))
    found = list(read_paragraphs(Source(path, name), Reading()))
    assert [paragraph.first for paragraph in found] == [True] + [False] * (len(found) - 1)
    assert found[0].text == "before" and found[-1].text == "after"
    assert [paragraph.cut for paragraph in found] == [0, 0] + [1] * (len(found) - 3) + [0]
    pieces = [paragraph.text for paragraph in found[1:-1]]
    assert (" " if " " in unit else "").join(pieces) == text.strip()
    assert max(map(len, pieces)) <= LONGEST_PARAGRAPH
    if name.startswith("a.txt"):
        assert len(pieces) == 3
        assert max(len(piece.encode()) for piece in pieces) <= LONGEST_PARAGRAPH
    assert sum(chunk.cut for chunk in read_chunks([Source(path, name)], Reading())) == len(pieces) - 1


def test_a_long_blank_line_is_still_a_blank_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\n" + b" " * (3 << 20) + b"\nb" + b" " * (3 << 20) + b"\nc")
    assert read(path) == [(True, "a"), (True, "b"), (False, "c")]
    assert sum(paragraph.cut for paragraph in read_paragraphs(Source(path, "a"), Reading())) == 0


MEASURE = """
import re, sys
from pathlib import Path
from data_prep.cleaning import clean
from data_prep.corpus import read_chunks
from data_prep.formats import Reading
from data_prep.sources import Source
from data_prep.sentences import split_sentences
cut = 0
for chunk in read_chunks([Source(Path(sys.argv[1]), "a")], Reading()):
    cut += chunk.cut
    for _, text in chunk.paragraphs:
        cut += split_sentences(clean(text)[0], "en")[1]
print(cut, re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def measure(path: Path) -> tuple[int, int]:
    """The cuts and the peak of resident memory, in KiB, when reading, cleaning and splitting a file.

    (The peak that `resource.getrusage` gives a process starts with its parent's.)
    """
    command = [sys.executable, "-c", MEASURE, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    cut, peak = map(int, done.stdout.split())
    return cut, peak


@pytest.mark.parametrize("unit", [b"word ", b"x"])
def test_memory_does_not_grow_with_the_length_of_a_line(tmp_path: Path, unit: bytes) -> None:
    peaks = []
    for megabytes in (5, 50):
        path = tmp_path / f"{megabytes}.txt"
        path.write_bytes(unit * ((megabytes << 20) // len(unit)))
        cut, peak = measure(path)
        assert cut > megabytes * 100
        peaks.append(peak)
    assert peaks[1] < 1.5 * peaks[0]


def test_memory_does_not_grow_with_a_row_group(tmp_path: Path) -> None:
    peaks = []
    for megabytes in (5, 70):
        rows = [f"{i} " + "word " * 205 for i in range(megabytes << 10)]
        path = tmp_path / f"{megabytes}.parquet"
        parquet.write_table(pyarrow.table({"text": rows}), path, compression="none", use_dictionary=False)
        assert parquet.ParquetFile(path).num_row_groups == 1
        peaks.append(measure(path)[1])
    assert peaks[1] < 1.5 * peaks[0]


# ---- chunks --------------------------------------------------------------------------------------------------


def test_a_document_may_span_chunks(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("word " * 20_000 + "\n" + "word " * 40_000 + "\nlast\n\nnext")
    chunks = list(read_chunks([Source(path, "long.txt")], Reading()))
    assert [[document for document, _ in chunk.paragraphs] for chunk in chunks] == [[1, 1], [1, 2]]


def test_chunks_tell_of_every_byte(tmp_path: Path) -> None:
    text = "\n".join("word " * 100 for _ in range(3000)).encode()
    for suffix, pack in PACK.items():
        (tmp_path / f"a.txt{suffix}").write_bytes(pack(text))
    (tmp_path / "b0.txt").write_bytes(b"")
    (tmp_path / "b1.txt").write_bytes(b"\n \n\n")
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps({"text": "word " * 500}) for _ in range(500)))
    write_rows(tmp_path / "d.parquet", text=["word " * 500] * 500)
    (tmp_path / "e.txt").write_text("end\n")
    sources = find_sources([tmp_path])
    sizes = [source.path.stat().st_size for source in sources]
    chunks = list(read_chunks(sources, Reading()))
    assert all(chunk.read >= 0 and chunk.paragraphs for chunk in chunks)
    assert sum(chunk.read for chunk in chunks) == sum(sizes)
    sums = [sum(chunk.read for chunk in chunks if chunk.source == i) for i in range(len(sources))]
    blank = [source.name for source in sources].index("b0.txt")
    assert sums[:blank] == sizes[:blank] and sums[blank : blank + 2] == [0, 0]  # blank files go with the next one
    assert sums[blank + 2] == sum(sizes[blank : blank + 3]) and sums[blank + 3 :] == sizes[blank + 3 :]
    plain = [chunk.read for chunk in chunks if sources[chunk.source].name == "a.txt"]
    assert len(plain) > 3 and max(plain) < sum(plain) / 2  # on the way, not all at the end
    blank_end = [*sources, Source(tmp_path / "b1.txt", "again")]
    *others, last = read_chunks(blank_end, Reading())
    assert others == chunks and (last.source, last.paragraphs, last.read) == (len(sources), [], 4)
    assert list(read_chunks([Source(tmp_path / "b0.txt", "b0")], Reading())) == []


# ---- encoding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["b.txt", "b.txt.gz", "b.jsonl", "b.parquet"])
def test_bad_bytes_stop_the_run_or_are_replaced_and_counted(tmp_path: Path, name: str) -> None:
    """Latin-1 in the second of three files: the error says where; replacing keeps all of them."""
    for other in ("a.txt", "c.txt"):
        (tmp_path / other).write_text("good \ufffd text\n")  # a U+FFFD that was always there
    data, path = b"caf\xe9 \xef\xbf\xbd \xe8\xb6 \xff\xff", tmp_path / name
    if name == "b.parquet":
        write_rows(path, text=[b"good", data])
    elif name == "b.jsonl":
        path.write_bytes(b'{"text": "good"}\n{"text": "' + data + b'"}')
    else:
        path.write_bytes(PACK[path.suffix if path.suffix in PACK else ""](b"good\n" + data + b"\n"))
    sources = find_sources([tmp_path])
    unit, column = ("row", 4) if name == "b.parquet" else ("line", 14) if name == "b.jsonl" else ("line", 4)
    with pytest.raises(DataError) as error:
        list(read_chunks(sources, Reading()))
    assert f"{name}, {unit} 2: not UTF-8 (byte 0xE9 at column {column}); " in str(error.value)
    chunks = list(read_chunks(sources, REPLACE))
    assert [chunk.replaced for chunk in chunks] == [0, 4, 0]
    assert chunks[1].paragraphs[-1][1] == data.decode(errors="replace") == "caf\ufffd \ufffd \ufffd \ufffd\ufffd"


def test_a_character_that_the_end_of_the_file_cuts(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("good\nend 足".encode()[:-1])
    with pytest.raises(DataError, match="a.txt, line 2: not UTF-8 .byte 0xE8 at column 5"):
        texts(path)
    [good, end] = read_paragraphs(Source(path, "a.txt"), REPLACE)
    assert (good.replaced, end.replaced, end.text) == (0, 1, "end \ufffd")


def test_the_column_of_a_bad_byte_counts_from_the_start_of_a_long_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"first\n" + b"x" * (3 << 20) + b"\xe9\n")
    with pytest.raises(DataError, match=f"line 2: not UTF-8 .byte 0xE9 at column {(3 << 20) + 1}"):
        texts(path)
    assert sum(chunk.replaced for chunk in read_chunks([Source(path, "a")], REPLACE)) == 1


def test_half_a_surrogate_pair_is_replaced_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "half \\ud800, whole \\ud83d\\ude0a, \\udc00\\udfff byte \xff"}\n{"text": "next"}')
    [found, following] = read_paragraphs(Source(path, "a"), REPLACE)
    assert (found.text, found.replaced) == ("half \ufffd, whole 😊, \ufffd\ufffd byte \ufffd", 4)
    assert following.replaced == 0


# ---- damage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [suffix for suffix in PACK if suffix])
def test_a_compressed_file_cut_off_anywhere_is_an_error(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    packed = PACK[suffix](b"some text\n" * 9)
    for start in (b"", packed):
        for length in range(0 if not start else 1, len(packed)):
            path.write_bytes(start + packed[:length])
            with pytest.raises(DataError, match=f"a.txt{suffix}: cannot be read after line "):
                texts(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": }\n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"text": "a"\n', "a.jsonl, line 1: not JSON (Expecting ',' delimiter: column 13"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1: not JSON (nested more than 64 levels deep"),
        ("a.jsonl", b'{"txt": "a"}\n', 'a.jsonl, line 1: wanted an object with a string field "text"'),
        ("a.jsonl", b'\n{"text": null}\n', 'a.jsonl, line 2: wanted an object with a string field "text"'),
        ("a.jsonl", b'["text"]\n', 'a.jsonl, line 1: wanted an object with a string field "text"'),
        ("a.jsonl", b'{"text": "half \\ud800"}\n', "a.jsonl, line 1: not Unicode text"),
        ("a.txt.bz2", b"no bzip2", "a.txt.bz2: cannot be read"),
        ("a.txt.zst", b"no zstandard", "a.txt.zst: cannot be read"),
        ("a.txt.zst", zstandard.compress(b"text") + b"more", "a.txt.zst: cannot be read"),
        ("a.parquet", b"", "a.parquet: cannot be read after row 0"),
        ("a.parquet", b"PAR1 this is none PAR1", "a.parquet: cannot be read after row 0"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        read(tmp_path / name)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_columns_that_hold_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows: list[tuple[dict[str, list[object]], Where, str]] = [
        ({"body": ["a"], "id": [1]}, None, 'a.parquet: no column "text"; it has body, id'),
        ({"text": [1, 2]}, None, 'a.parquet: column "text" holds int64, wanted strings'),
        ({"text": ["a"] * 300 + [None]}, None, 'a.parquet, row 301: column "text" is null, wanted a string'),
        ({"text": [None, None]}, None, 'a.parquet, row 1: column "text" is null'),
        ({"text": ["a", None], "keep": ["no", "yes"]}, ("keep", "yes"), "a.parquet, row 2: "),
    ]
    for columns, where, message in rows:
        write_rows(path, **columns)
        with pytest.raises(DataError) as error:
            read(path, where)
        assert message in str(error.value) and "\n" not in str(error.value)
    assert read(path, ("keep", "no")) == [(True, "a")]  # the row without text is not wanted


def test_a_record_beyond_the_limit_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' + json.dumps({"text": "word " * 1000}))
    assert len(texts(path)) == 2
    monkeypatch.setattr(formats, "LONGEST_RECORD", 2000)
    with pytest.raises(DataError, match=r"a.jsonl, line 2: longer than 2,000 bytes"):
        texts(path)


def test_parquet_needs_its_library_and_nothing_else_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "a.parquet", text=["a"])
    code = "import sys, data_prep.corpus; print('pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="a.parquet: .parquet is read by pyarrow, which is not installed"):
        texts(path)
