"""`verify` finds each kind of damage by name, and everything at once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from data_prep.__main__ import main
from data_prep.build import build
from data_prep.errors import DataError
from data_prep.manifest import load_manifest, manifest_hash
from data_prep.settings import make_settings
from data_prep.tokenizer import Tokenizer, load_tokenizer
from data_prep.verify import verify
from tests.helpers.corpora import write_corpus


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_data_set_from_before_the_tokenizer_held_the_cleaning_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "with_cleaning", lambda self: self)
    text, tokenizer = write_corpus(tmp_path, [20] * 10, 8)
    build([text], tokenizer, tmp_path / "old", make_settings(32), 1)
    monkeypatch.undo()
    assert verify(tmp_path / "old", full=True) == []
    settings = load_tokenizer(tmp_path / "old" / "tokenizer").settings
    assert settings["tokenizer_class"] == "BertTokenizer" and "model_input_names" not in settings


def test_a_whole_data_set_has_no_problems(five_shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(load_manifest(five_shards).shards) >= 5
    assert verify(five_shards) == verify(five_shards, full=True) == []
    assert main(["verify", str(five_shards), "--full"]) == 0
    assert main(["inspect", str(five_shards), "--samples", "2"]) == 0
    output = capsys.readouterr().out
    assert "complete" in output and ">[MASK]}" in output and "[CLS]" in output


def test_every_damage_is_named_at_once(own_five: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own_five / "shard-00000.tar").unlink()
    with (own_five / "shard-00001.tar").open("ab") as file:
        file.truncate(2000)
    flip(own_five / "shard-00002.idx.npy", -1)
    (own_five / "shard-00003.tar").unlink()
    (own_five / "shard-00003.tar").mkdir()
    shutil.copy(own_five / "shard-00004.tar", own_five / "shard-00099.tar")
    shutil.copy(own_five / "shard-00004.tar", own_five / "shard-00004.copy.tar")
    (own_five / "tokenizer" / "tokenizer.json").unlink()
    (own_five / "tokenizer" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nother\n")
    assert main(["verify", str(own_five / "absent"), str(own_five)]) == 2
    problems = capsys.readouterr().err.splitlines()
    expected = [
        "shard-00000.tar missing",
        "shard-00001.tar: 2000 bytes",
        "shard-00002.idx.npy: not the index",
        "shard-00003.tar missing",
        "shard-00004.copy.tar: foreign",
        "shard-00099.tar: foreign",
        "absent holds no manifest.json",
        "tokenizer: tokenizer.json is missing",
    ]
    assert [sum(name in problem for problem in problems) for name in expected] == [1] * len(problems)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("vocab.txt", "d3w7\n", "d3wx\n"),
        ("tokenizer_config.json", '"do_lower_case": true', '"do_lower_case": false'),
        ("tokenizer.json", '"special": true', '"special": false'),
    ],
)
def test_every_file_of_the_tokenizer_is_proved(own_five: Path, name: str, old: str, new: str) -> None:
    path = own_five / "tokenizer" / name
    content = path.read_text()
    path.write_text(content.replace(old, new))
    for full in (False, True):
        (problem,) = verify(own_five, full)
        assert path.read_text() != content and problem.startswith(f"{path}: not as the build wrote it")
    path.unlink()
    assert verify(own_five)


def test_another_version_of_the_library_may_write_its_file_otherwise(own_five: Path) -> None:
    path = own_five / "tokenizer" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert verify(own_five) != []
    manifest = json.loads((own_five / "manifest.json").read_text())
    manifest["settings"]["tokenizers"] = "0.1"
    (own_five / "manifest.json").write_text(json.dumps(manifest))
    assert verify(own_five) == []


@pytest.mark.parametrize(
    ("name", "position", "problem"),
    [
        ("shard-00000.tar", 512 + 200, "shard-00000.tar: sample 0 is damaged; "),
        ("shard-00001.idx.npy", -40, "shard-00001.idx.npy: not the index in the manifest (its sha256 differs); "),
        ("tokenizer/tokenizer.json", None, "tokenizer is not the manifest's tokenizer (its sha256 differs): "),
    ],
)
def test_a_damaged_sample_is_not_shown(
    own_five: Path, capsys: pytest.CaptureFixture[str], name: str, position: int | None, problem: str
) -> None:
    if position is None:
        (own_five / name).write_text((own_five / name).read_text().replace('"d3w7"', '"other"'))
    else:
        flip(own_five / name, position)
    assert main(["inspect", str(own_five), "--samples", "30"]) == 2
    remedy = f"run verify --full {own_five}, which lists everything to rebuild"
    assert capsys.readouterr().err == f"data_prep: error: {own_five}/{problem}{remedy}\n"


@pytest.mark.parametrize("position", [3, 600, -1500, -1])
def test_full_finds_a_flipped_bit(own_five: Path, position: int) -> None:
    flip(own_five / "shard-00002.tar", position)
    assert verify(own_five) == []
    (problem,) = verify(own_five, full=True)
    assert "shard-00002.tar" in problem


def test_a_shard_of_another_build_is_found(own_five: Path) -> None:
    for suffix in ("tar", "idx.npy"):
        shutil.copy(own_five / f"shard-00001.{suffix}", own_five / f"shard-00002.{suffix}")
    assert any("shard-00002" in problem for problem in verify(own_five))


def test_counts_are_checked(own_five: Path) -> None:
    manifest = json.loads((own_five / "manifest.json").read_text())
    manifest["counts"]["masked"] += 1
    (own_five / "manifest.json").write_text(json.dumps(manifest))
    (problem,) = verify(own_five)
    assert "masked" in problem


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no manifest.json"),
        ("{", "not JSON"),
        ('{"a": ' * 100_000, "not JSON (nested more than 64 levels deep)"),
        ('{"format": ' + "9" * 5000 + "}", "not JSON"),
        ('{"format": "' + "x" * 10_000 + '"}', "wanted format lambert-shards version 2, found ('xxxx"),
        ("[]", "wanted format lambert-shards version 2"),
        ('{"format": "lambert-shards", "version": 1}', "found ('lambert-shards', 1)"),
        ('{"format": "lambert-shards", "version": 2}', "wanted the fields"),
    ],
)
def test_a_manifest_that_is_none(own_five: Path, content: str | None, message: str) -> None:
    (own_five / "manifest.json").unlink()
    if content is not None:
        (own_five / "manifest.json").write_text(content)
    with pytest.raises(DataError) as error:
        load_manifest(own_five)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("shards.0.samples", 0, "shards[0]: samples 0: wanted 1 to 1048576"),
        ("shards.0.samples", -5, "shards[0]: samples: wanted 0 to 2^63 - 1, found -5"),
        ("shards.0.samples", 10**30, f"shards[0]: samples: wanted 0 to 2^63 - 1, found {10**30}"),
        ("shards.0.samples", 10**400, "shards[0]: samples: wanted 0 to 2^63 - 1, found about 2^1328"),
        ("shards.0.samples", 2**40, f"shards[0]: samples {2**40}: wanted 1 to 1048576"),
        ("shards.0.samples", True, "shards[0]: samples: wanted int, found True"),
        ("shards.0.name", "../../etc/passwd", "shards[0]: name '../../etc/passwd': wanted shard-00000"),
        ("shards.0.name", "a\0b", "shards[0]: name 'a\\x00b': wanted shard-00000"),
        ("shards.0.name", "\ud800", "shards[0]: name '\\ud800': wanted shard-00000"),
        ("shards", [], "it has no samples"),
        ("counts.samples", 0, "it has no samples"),
        ("corpus.tokens", 0, "corpus: tokens 0: wanted 1 or more"),
        ("settings.sequence_length", 4, "settings: --sequence-length 4: wanted 5 to 65535"),
        ("settings.masked_share", float("nan"), "masked_share: wanted 0 to 2^63 - 1, found nan"),
        ("settings.held_out_share", 10**400, "held_out_share: wanted 0 to 2^63 - 1, found about 2^1328"),
        ("settings.pairs", "x" * 10_000, "settings: --pairs xxxx"),
        ("tokenizer.vocab_size", 2**31, "tokenizer: vocab_size 2147483648: wanted 2097152 at most"),
        ("tokenizer.specials.mask", 2**31, "below vocab_size"),
        ("tokenizer.specials.mask", 0, "wanted ids that differ"),
        ("token_counts.file", "../x.npy", "token_counts: file '../x.npy': wanted token_counts.npy"),
    ],
)
def test_a_manifest_of_what_cannot_be(own_five: Path, place: str, value: object, message: str) -> None:
    manifest = json.loads((own_five / "manifest.json").read_text())
    *parents, last = place.split(".")
    at = manifest
    for part in parents:
        at = at[int(part) if part.isdigit() else part]
    at[last] = value
    (own_five / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError) as error:
        load_manifest(own_five)
    said = str(error.value)
    assert (
        said.startswith(f"{own_five / 'manifest.json'}: ") and message in said and "\n" not in said and len(said) < 500
    )


def test_all_that_a_manifest_cannot_hold_is_said_at_once(own_five: Path) -> None:
    manifest = json.loads((own_five / "manifest.json").read_text())
    manifest["shards"][0]["samples"] = manifest["corpus"]["tokens"] = 0
    manifest["settings"]["duplicates"] = 0
    (own_five / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError) as error:
        load_manifest(own_five)
    for said in ("--duplicates 0: wanted", "corpus: tokens 0: wanted", "shards[0]: samples 0: wanted"):
        assert said in str(error.value)


def test_manifest_hash_stands_for_the_data(five_shards: Path, own_five: Path) -> None:
    assert manifest_hash(five_shards) == manifest_hash(own_five)
    flip(own_five / "manifest.json", 100)
    assert manifest_hash(five_shards) != manifest_hash(own_five)
