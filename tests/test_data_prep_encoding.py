"""UTF-16 without a mark, and binary data, are valid UTF-8 with NULs: every command that reads text refuses them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from data_prep.__main__ import main
from data_prep.encoding import flaw, read_utf8
from data_prep.manifest import load_manifest
from tests.helpers.corpora import write_tokenizer
from trainer.encode.__main__ import decoded
from trainer.errors import TrainerError
from trainer.finetune.lines import read_text

TEXT = "a b c\nd e f\n\ng h i\na b d\n"  # two documents
RECORDS = "".join(json.dumps({"text": text}) + "\n" for text in TEXT.split("\n\n"))


def build(tmp_path: Path, *more: str) -> int:
    tokenizer = tmp_path / "tokenizer"
    if not tokenizer.exists():
        write_tokenizer(tokenizer, [*"abcdefghi"])
    names = ["--input", str(tmp_path / "in"), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "out")]
    return main(["build", *names, "--sequence-length", "32", "--processes", "1", *more])


def vocab(tmp_path: Path) -> int:
    return main(["vocab", "--input", str(tmp_path / "in"), "--out", str(tmp_path / "vocab"), "--size", "100"])


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("name", ["b.txt", "b.txt.gz", "b.jsonl", "b.parquet"])
def test_utf_16_without_a_mark_is_refused_by_its_line(
    tmp_path: Path, encoding: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in" / "a.txt", TEXT.encode())
    path = tmp_path / "in" / name
    data = (RECORDS if name == "b.jsonl" else TEXT).encode(encoding)
    if name == "b.parquet":
        parquet.write_table(pyarrow.table({"text": [b"a b", data]}), path)
    else:
        write(path, gzip.compress(data) if name.endswith(".gz") else data)
    assert build(tmp_path) == vocab(tmp_path) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    place = "row 2" if name == "b.parquet" else "line 1"
    assert len(errors) == 2
    for line in errors:
        assert f"{path}, {place}: not UTF-8 text but UTF-16 or binary data (a NUL at column " in line
        assert "use --bad-bytes replace" in line


def test_one_nul_is_refused_or_cleaned_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in" / "a.txt", TEXT.encode() + b"\0\0\0\n\na b\nc\0d\n")
    assert build(tmp_path) == 2
    assert "a.txt, line 9: not UTF-8 text but UTF-16 or binary data (a NUL at column 2)" in capsys.readouterr().err
    assert build(tmp_path, "--bad-bytes", "replace") == 0
    [file] = load_manifest(tmp_path / "out").corpus.files
    assert (file.tokens, file.unknown, file.cleaned, file.replaced) == (16, 0, 4, 0)


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        (b"", ""),
        (b"a b", ""),
        ("\ufeffé 足".encode(), ""),
        (b"\0\0", ""),
        (b" \0\r", ""),
        ("\u200b\0".encode(), ""),
        (b"PK\x03\x04\0", "not UTF-8 text but UTF-16 or binary data (a NUL at column 5)"),
        ("é".encode("utf-16"), "not UTF-8 (byte 0xFF at column 1)"),
        (b"a \xe9", "not UTF-8 (byte 0xE9 at column 3)"),
    ],
)
def test_all_commands_judge_alike(tmp_path: Path, data: bytes, wrong: str) -> None:
    assert flaw(data) == wrong and (read_utf8(data) is None) is bool(wrong)
    path = write(tmp_path / "in" / "a.txt", b"x\n" + data + b"\ny")
    if wrong:
        with pytest.raises(TrainerError, match=r"line 2: not UTF-8"):
            read_text(path)
        with pytest.raises(TrainerError, match=r"line 2: not UTF-8"):
            list(decoded([b"x\n", data], "line"))
    else:
        assert read_text(path) == f"x\n{data.decode()}\ny"
        assert list(decoded([b"x\n", data], "line")) == ["x\n", data.decode()]
