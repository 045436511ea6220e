"""Mistakes on the command line: one line each, before anything is read or written."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep import bench
from data_prep.__main__ import main
from data_prep.atomic import replacing

VOCAB = ["vocab", "--input", "absent", "--out", "new"]
BUILD = ["build", "--input", "absent", "--tokenizer", "absent", "--out", "new", "--sequence-length", "32"]
INSPECT = ["inspect", "absent"]
BENCH = ["--input", "absent", "--tokenizer", "absent"]
NOWHERE = "no file can be created in the folder nowhere (No such file or directory); name another"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*VOCAB, "--size", "9" * 20], f"--size {'9' * 20}: wanted 1 to 1000000"),
        ([*VOCAB, "--size", "100", "--multiple-of", "1000000000"], "--multiple-of 1000000000: wanted 1 to 65536"),
        ([*VOCAB, "--size", "100", "--multiple-of", "0"], "--multiple-of 0: wanted 1 to 65536"),
        ([*VOCAB, "--size", "100", "--character-coverage", "1.5"], "--character-coverage 1.5: wanted 0 to 1"),
        ([*VOCAB, "--size", "100", "--character-coverage", "nan"], "--character-coverage nan: wanted 0 to 1"),
        ([*BUILD, "--masked-share", "nan"], "--masked-share nan: wanted 0.001 to 1"),
        ([*BUILD, "--max-predictions", "0"], "--max-predictions 0: wanted 1 to 65535"),
        ([*BUILD, "--processes", "1000000"], "--processes 1000000: wanted 1 to 4096"),
        ([*BUILD, "--seed", "9" * 100], "--seed about 2^332: wanted 0 to 9223372036854775807"),
        ([*BUILD, "--language", "e" * 10_000], f"--language {'e' * 80}: wanted a code such as en, de or zh"),
        ([*BUILD, "--max-predictions", "-1"], "--max-predictions -1: wanted 1 to 65535"),
        ([*INSPECT, "--samples", "-1"], "--samples -1: wanted 0 or more"),
        ([*INSPECT, "--picture", "text.jsonl"], "--picture text.jsonl: wanted a file whose name ends in .png"),
        ([*INSPECT, "--picture", "nowhere/a.png"], f"--picture nowhere/a.png: {NOWHERE}"),
    ],
)
def test_what_can_not_be_meant_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"data_prep: error: {message}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "--repeats 0: wanted 1 or more"),
        (["--megabytes", "-1"], "--megabytes -1.0: wanted 0.001 to 1000000"),
        (["--json", "text.jsonl"], "--json text.jsonl: wanted a file whose name ends in .json"),
        (["--json", "nowhere/a.json"], f"--json nowhere/a.json: {NOWHERE}"),
        (["--json", "tokenizer.json"], "--json tokenizer.json already exists: name another, or remove it"),
    ],
)
def test_what_can_not_be_measured_or_written_is_refused_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tokenizer.json").write_text("precious")
    assert bench.main([*BENCH, *arguments]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"data_prep.bench: error: {message}\n")
    assert Path("tokenizer.json").read_text() == "precious"


def test_options_are_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A shortened option is refused, and no error prints the usage."""
    for command, arguments in ((main, [*INSPECT, "--sample", "1"]), (bench.main, [*BENCH, "--repeat", "1"])):
        with pytest.raises(SystemExit) as stop:
            command(arguments)
        (line,) = capsys.readouterr().err.splitlines()
        assert stop.value.code == 2 and f"error: unrecognized arguments: {arguments[-2]} 1; see python -m " in line
        assert line.startswith("data_prep.bench: " if command is bench.main else "data_prep: ")


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error, replacing(tmp_path / "absent" / "file"):
        pass
    assert error.value.filename == str(tmp_path / "absent" / "file")
