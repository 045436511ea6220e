"""The selection of documents: no duplicate is used twice, and nothing is on both sides of a held-out share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_prep import selection
from data_prep.__main__ import main
from data_prep.build import build
from data_prep.manifest import load_manifest
from data_prep.settings import make_settings
from tests.helpers.corpora import read_samples, write_tokenizer

PARTS = ("train", "held-out")


def corpus(folder: Path) -> tuple[Path, Path]:
    """60 documents of 3 sentences of private words, and each third one again, farther down."""
    documents = ["\n".join(f"d{d}w{2 * s} d{d}w{2 * s + 1}" for s in range(3)) for d in range(60)]
    text = folder / "corpus.txt"
    text.write_text("\n\n".join([*documents, *documents[::3]]))
    return text, write_tokenizer(folder / "t", [f"d{d}w{w}" for d in range(60) for w in range(6)])


def documents_of(folder: Path) -> set[int]:
    """The documents whose words occur in the samples, including a B from another document."""
    return {int(id - 5) // 6 for sample in read_samples(folder) for id in sample.ids if id >= 5}


def test_the_held_out_part_shares_no_document_with_training(tmp_path: Path) -> None:
    text, tokenizer = corpus(tmp_path)
    found = {}
    for part in PARTS:
        made = make_settings(32, held_out_share=0.3, part=part)
        manifest = build([text], tokenizer, tmp_path / part, made, 1, store=tmp_path / "store")
        found[part] = documents_of(tmp_path / part)
        assert manifest.corpus.documents == 80 and manifest.corpus.duplicates == 0
        assert manifest.corpus.tokens == 6 * (80 - manifest.corpus.other_part)
    assert found["train"] | found["held-out"] == set(range(60)) and not found["train"] & found["held-out"]
    assert 8 <= len(found["held-out"]) <= 28  # 18 expected, deviation 3.5


def test_the_order_of_files_decides_the_samples_but_not_which_documents_are_held_out(tmp_path: Path) -> None:
    text, tokenizer = corpus(tmp_path)
    first = tmp_path / "another.txt"
    first.write_text("d0w1 d1w0\nd2w3\n\nd3w1 d4w2\nd5w5 d6w0\n")
    made = make_settings(32, held_out_share=0.3, part="held-out", pairs="single")
    build([text], tokenizer, tmp_path / "alone", made, 1)
    build([first, text], tokenizer, tmp_path / "longer", made, 1)
    alone, longer = (documents_of(tmp_path / name) for name in ("alone", "longer"))
    assert alone - set(range(7)) == longer - set(range(7)) and alone
    for name, inputs in (("in front", [first, text]), ("at the end", [text, first])):
        build(inputs, tokenizer, tmp_path / name, make_settings(32), 1)
    front, end = ({tuple(s.ids) for s in read_samples(tmp_path / name)} for name in ("in front", "at the end"))
    assert len(front & end) < len(front) / 2


@pytest.mark.parametrize("at_once", [1 << 22, 7])
def test_duplicates_are_dropped(tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "SORTED_AT_ONCE", at_once)
    text, tokenizer = corpus(tmp_path)
    made = make_settings(32, pairs="single", drop_duplicates=True)
    corpus_record = build([text], tokenizer, tmp_path / "out", made, 1).corpus
    assert (corpus_record.documents, corpus_record.duplicates, corpus_record.tokens) == (80, 20, 360)
    ids = np.concatenate([sample.ids for sample in read_samples(tmp_path / "out")])
    assert np.bincount(ids, minlength=365)[5:].tolist() == [1] * 360


def test_white_space_and_case_of_the_file_make_no_other_document(tmp_path: Path) -> None:
    text, tokenizer = corpus(tmp_path)
    twin = tmp_path / "twin.txt"
    twin.write_bytes(text.read_bytes().replace(b" ", b" \t ").replace(b"\n", b"\r\n"))
    manifest = build([text, twin], tokenizer, tmp_path / "out", make_settings(32, drop_duplicates=True), 1)
    assert manifest.corpus.documents == 160 and manifest.corpus.duplicates == 100


def test_builds_share_a_store_and_refuse_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, tokenizer = corpus(tmp_path)
    start = ["build", "--input", str(text), "--tokenizer", str(tokenizer), "--processes", "1"]
    shared = [*start, "--store", str(tmp_path / "store")]
    assert main([*shared, "--out", str(tmp_path / "a"), "--sequence-length", "32"]) == 0
    ids = (tmp_path / "store" / "ids").stat()
    assert "tokenized" in capsys.readouterr().err
    assert main([*shared, "--out", str(tmp_path / "b"), "--sequence-length", "16"]) == 0
    assert (tmp_path / "store" / "ids").stat() == ids
    assert "tokenized" not in capsys.readouterr().err
    assert main([*start, "--out", str(tmp_path / "c"), "--sequence-length", "16"]) == 0
    b, c = load_manifest(tmp_path / "b"), load_manifest(tmp_path / "c")
    assert b == c
    text.write_text(text.read_text() + "\n\nd0w0 d0w1\nd0w2")
    assert main([*shared, "--out", str(tmp_path / "d"), "--sequence-length", "16"]) == 2
    assert "holds the tokens of other text or settings" in capsys.readouterr().err


def test_too_few_documents_left_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "two.txt"
    text.write_text("w0 w1\nw2 w3\n\nw0 w1\nw2 w3")
    tokenizer = write_tokenizer(tmp_path / "t", ["w0", "w1", "w2", "w3"])
    start = ["build", "--input", str(text), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "out")]
    assert main([*start, "--sequence-length", "16", "--drop-duplicates"]) == 2
    assert "1 of 2 documents left: 1 are duplicates" in capsys.readouterr().err
    assert main([*start, "--sequence-length", "16", "--part", "train"]) == 2
    assert "a share above 0 and a part" in capsys.readouterr().err
