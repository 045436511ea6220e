"""WebDataset tars as input: the texts that the stock library finds, in its order, and one clear line for damage."""

from __future__ import annotations

import gzip
import json
import random
import tarfile
from collections import Counter
from io import BytesIO
from pathlib import Path

import pytest
import webdataset
import zstandard

from data_prep import corpus, tars
from data_prep.__main__ import main
from data_prep.corpus import read_paragraphs
from data_prep.errors import DataError
from data_prep.formats import Reading
from data_prep.manifest import load_manifest
from data_prep.sources import Source, Where
from tests.helpers.corpora import contents, write_tokenizer
from tests.test_data_prep_corpus import measure

Members = list[tuple[str, bytes]]
MIXED: Members = [
    ("000001.json", b'{"lang": "en",\n "url": "x"}'),
    ("000001.jpg", b"\xff\xd8" * 3000),
    ("000001.txt", b"a b.\n\nc d.\n"),
    ("000002.txt", b"e f."),
    ("000002.json", b'{"lang": "de"}'),
    ("000003.json", b'{"lang": "en", "text": "g.\\n\\nh."}'),
    ("000004.cls", b"7"),
    ("./sub/000005.TXT.GZ", gzip.compress(b"i.")),
    ("./sub/000005.json.zst", zstandard.compress(b'{"lang": "en"}')),
    ("000006.jsonl", b'{"lang": "en", "text": "j."}\n{"lang": "de", "text": "k."}\n'),
]


def write_tar(path: Path, members: Members) -> Path:
    """A plain tar, or a compressed one if its name says so."""
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, BytesIO(content))
    if path.suffix in (".gz", ".tgz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    return path


def read(path: Path, where: Where = None, bad_bytes: str = "strict") -> tuple[list[list[str]], Counter[str]]:
    """The paragraphs of each document of a tar, and the counts of what was left out."""
    documents, left = list[list[str]](), Counter[str]()
    for paragraph in read_paragraphs(Source(path, path.name), Reading(where, bad_bytes=bad_bytes), left):
        if paragraph.first:
            documents.append([])
        documents[-1].append(paragraph.text)
    return documents, left


def refusal(path: Path, where: Where = None) -> str:
    with pytest.raises(DataError) as error:
        read(path, where)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer", [*"abcdefghijk", "."])


# ---- samples -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tgz"])
def test_a_text_is_a_document_and_the_json_beside_it_its_metadata(tmp_path: Path, name: str) -> None:
    path = write_tar(tmp_path / name, MIXED)
    documents, left = read(path)
    assert documents == [["a b.", "c d."], ["e f."], ["g.", "h."], ["i."], ["j."], ["k."]]
    assert left == {"members": 2, "metadata": 3}
    documents, left = read(path, ("lang", "en"))
    assert documents == [["a b.", "c d."], ["g.", "h."], ["i."], ["j."]]
    assert left == {"members": 2, "metadata": 3, "unwanted": 2}


def test_the_stock_library_finds_the_same_texts_in_the_same_order(tmp_path: Path) -> None:
    """Keys with folders and dots, capitals, members that belong to no sample, and samples without text."""
    rng, members = random.Random(5), Members()
    for number in range(300):
        key = rng.choice(["{:06d}", "part-1.x/{:06d}", "./b/{:06d}"]).format(number)
        sample = {
            "txt": f"txt {number}\n\nend".encode(),
            "json": json.dumps({"text": f"json {number}"}, indent=number % 3 or None).encode(),
            "jpg": b"\xff" * rng.randrange(2000),
            "TXT": f"TXT {number}".encode(),
            "en.txt": f"en {number}".encode(),
        }
        for ending in rng.sample(sorted(sample), rng.randrange(4)):
            if ending.lower() not in [name.removeprefix(f"{key}.").lower() for name, _ in members[-3:]]:
                members.append((f"{key}.{ending}", sample[ending]))
        members.append((rng.choice(["README", f"sub/._{number}.txt", ".hidden.txt", "__meta__"]), b"no text"))
    path = write_tar(tmp_path / "a.tar", members)
    stock = list[str]()
    for sample in webdataset.WebDataset(str(path), shardshuffle=False):
        found = [content.decode() for ending, content in sample.items() if ending in ("txt", "en.txt")]
        stock += found or ([json.loads(sample["json"])["text"]] if "json" in sample else [])
    documents, _ = read(path)
    assert len(documents) > 250 and any("en" in text for text in stock)
    assert [" ".join(document) for document in documents] == [" ".join(text.split()) for text in stock]


def test_dots_in_names_merge_no_documents(tmp_path: Path) -> None:
    """Field case B08: the stock library takes these four members for one sample."""
    names = ("wiki.en.v1.0", "wiki.en.v1.1")
    texts = write_tar(tmp_path / "a.tar", [(f"{name}.txt", name.encode()) for name in names])
    records = write_tar(tmp_path / "b.tar", [(f"{name}.json", b'{"text": "%s"}' % name.encode()) for name in names])
    assert read(texts)[0] == read(records)[0] == [[name] for name in names]


def test_what_is_no_text_is_left_out_and_counted(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, kind in (("sub", tarfile.DIRTYPE), ("b.txt", tarfile.SYMTYPE), ("c.txt", tarfile.LNKTYPE)):
            header = tarfile.TarInfo(name)
            header.type, header.linkname = kind, "a.txt"
            tar.addfile(header)
        for name in ("noext", ".git/x.txt", "._a.txt", "a.parquet", "a.tar", "..", "d.txt"):
            tar.addfile(tarfile.TarInfo(name))
    assert read(tmp_path / "a.tar") == ([], Counter(members=8, blank=1))  # a folder is no member; d.txt is blank
    assert read(write_tar(tmp_path / "b.tar", [])) == ([], Counter())


def test_a_tar_is_counted_like_any_other_input(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two tars with equal members; the same shards for any number of processes, and after a rerun from the store."""
    text = b"a b c.\nd e f.\n\ng h i."
    members = [(f"{number}.txt", text + b" a" * number) for number in range(8)] + [("8.jpg", b"\xff"), ("9.txt", b" ")]
    for name in ("a.tar", "b.tar"):
        (tmp_path / "in").mkdir(exist_ok=True)
        write_tar(tmp_path / "in" / name, members)
    command = ["build", "--input", str(tmp_path / "in"), "--tokenizer", str(tokenizer), "--sequence-length", "32"]
    command += ["--drop-duplicates", "--store", str(tmp_path / "store")]
    assert main([*command, "--out", str(tmp_path / "one"), "--processes", "1"]) == 0
    said = capsys.readouterr().out
    assert "2 members of tars left out, not text" in said and "2 documents without visible text left out" in said
    manifest = load_manifest(tmp_path / "one")
    assert (manifest.corpus.documents, manifest.corpus.duplicates) == (16, 8)
    assert [(file.name, file.blank, file.members) for file in manifest.corpus.files] == [
        ("a.tar", 1, 1),
        ("b.tar", 1, 1),
    ]
    assert main([*command, "--out", str(tmp_path / "again")]) == 0  # from the store
    monkeypatch.setattr(corpus, "CHUNK_CHARACTERS", 20)
    command[-1] = str(tmp_path / "other")
    assert main([*command, "--out", str(tmp_path / "two"), "--processes", "2"]) == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "again") == contents(tmp_path / "two")


def test_tars_without_text_take_one_line(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.npy", b"x"), ("2.npy", b"x")])
    command = ["build", "--input", str(path), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "out")]
    assert main([*command, "--sequence-length", "32"]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.endswith(f"no text found in {path}; skipped in tars: 2 of other kinds than .txt, .json and .jsonl")


# ---- damage --------------------------------------------------------------------------------------------------


def test_a_tar_cut_off_anywhere_is_an_error(tmp_path: Path) -> None:
    """The stock library takes a tar that ends between two members, or in a header, for a whole one."""
    path = write_tar(tmp_path / "a.tar", MIXED[:4])
    content = path.read_bytes()
    end = content.rindex(b"e f.") + 512 - content.rindex(b"e f.") % 512
    for length in (*range(0, end, 256), end - 1, end):
        path.write_bytes(content[:length])
        assert refusal(path).startswith(f"{path}: ")
        assert "fetch or " in refusal(path)
    path.write_bytes(content[:end])
    assert "a.tar: cannot be read after member 000002.txt (its end is missing: it was truncated)" in refusal(path)
    assert len(list(webdataset.WebDataset(str(path), shardshuffle=False))) == 2
    path.write_bytes(content[: end + 512])  # one block of zeros is an end, as for GNU tar
    assert len(read(path)[0]) == 2


def test_a_damaged_header_is_an_error(tmp_path: Path) -> None:
    """The stock library takes it for the end, and loses the rest of the tar silently."""
    path = write_tar(tmp_path / "a.tar", MIXED)
    content = bytearray(path.read_bytes())
    content[content.index(b"000002.txt") + 130] ^= 1
    path.write_bytes(content)
    assert "a.tar: cannot be read after member 000001.txt (damaged header: bad checksum); fetch" in refusal(path)
    assert len(list(webdataset.WebDataset(str(path), shardshuffle=False))) == 1


def test_any_flipped_byte_is_read_or_refused_with_one_line(tmp_path: Path) -> None:
    rng, path = random.Random(3), tmp_path / "a.tar"
    headers = {"comment": "g" * 900}
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers=headers) as tar:
        for name, data in MIXED[2:]:
            header = tarfile.TarInfo(name)
            header.size, header.pax_headers = len(data), {"comment": "é" * 30, "mtime": "1.5"}
            tar.addfile(header, BytesIO(data))
    content = path.read_bytes()
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        start = rng.randrange(len(content) // 512) * 512
        damaged[start + rng.randrange(512)] = rng.randrange(256)
        if rng.random() < 0.5:  # with a checksum that agrees, so that the fields are believed
            block = damaged[start : start + 148] + b" " * 8 + damaged[start + 156 : start + 512]
            damaged[start + 148 : start + 156] = b"%06o\0 " % sum(block)
        path.write_bytes(damaged)
        try:
            read(path, bad_bytes="replace")
        except DataError as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)
            refused += 1
    assert 50 < refused < 300


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([("1.txt", b"ok\ncaf\xe9")], "a.tar: member 1.txt, line 2: not UTF-8 (byte 0xE9 at column 4); "),
        ([("1.json", b'{"text": }')], "a.tar: member 1.json: not JSON (Expecting value: column 10"),
        ([("1.json", b'{"text": "a"}\n{"text": "b"}')], "Extra data: line 2 column 1 (char 14)); in a tar, a .json is"),
        ([("1.json", b'["a"]')], 'a.tar: member 1.json: wanted an object with a string field "text"'),
        ([("1.jsonl", b'{"text": "a"}\n{"text"')], "a.tar: member 1.jsonl, line 2: not JSON"),
        ([("1.json.gz", gzip.compress(b'{"text": "a"}')[:-3])], "a.tar: member 1.json.gz: cannot be read (Compressed"),
        ([("1.txt.bz2", b"")], "a.tar: member 1.txt.bz2: cannot be read after line 0 (it is empty"),
        ([("1.txt", b"a"), ("1.jpg", b""), ("1.txt", b"b")], "a.tar: member 1.txt: its sample has two members of this"),
        ([("a\nb\x1b\udcff.json", b"")], "a.tar: member a?b??.json: not JSON (Expecting value"),
        ([("x" * 5000 + ".json", b"")], f"a.tar: member {'x' * 195}.json: not JSON"),
    ],
)
def test_a_damaged_member_is_named(tmp_path: Path, members: Members, said: str) -> None:
    assert said in refusal(write_tar(tmp_path / "a.tar", members))


def test_joined_tars_and_lying_headers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "a.tar", MIXED)
    path.write_bytes(2 * path.read_bytes())
    assert "a.tar: cannot be read after member 000006.jsonl (more data follows its end: tars that were" in refusal(path)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "x" * tars.LARGEST_HEADER}):
        pass
    assert "a.tar: cannot be read as a tar (damaged header: 1,048,593 bytes)" in refusal(path)
    monkeypatch.setattr(tars, "LONGEST_RECORD", 2060)
    path = write_tar(tmp_path / "a.tar", [("a.1.json", b"{}     "), ("a.2.json", b"{}     ")])
    assert "a.tar: member a.2.json: its sample needs more than 2,060 bytes of memory; a sample's" in refusal(path)


def test_where_needs_metadata(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.txt", b"a"), ("2.json", b'{"lang": "en"}')])
    assert "a.tar: member 1.txt: --where selects on metadata, and this text has no .json with it" in refusal(
        path, ("lang", "en")
    )


# ---- memory --------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_a_tar(tmp_path: Path) -> None:
    """Seven times the members, and one member of text and one of another kind that are seven times as large."""
    peaks = []
    for megabytes in (4, 30):
        members = [(f"{number}.txt", b"word " * 205) for number in range(megabytes << 9)]
        members += [("a.txt", b"word " * (megabytes << 17)), ("b.jpg", bytes(megabytes << 20))]
        peaks.append(measure(write_tar(tmp_path / f"{megabytes}.tar", members))[1])
    assert peaks[1] < 1.5 * peaks[0]
