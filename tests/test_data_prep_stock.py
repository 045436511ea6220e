"""`verify --stock`: what stock webdataset reads is what we read, and the first difference of each shard is named."""

from __future__ import annotations

import errno
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from webdataset import autodecode

from data_prep import published
from data_prep.__main__ import BAD_INPUT, FAILED, main
from data_prep.errors import CopyError, DataError
from data_prep.manifest import ShardRecord, file_sha256, load_manifest
from data_prep.shards import NO_PAIR, Column, Sample, index_path, tar_path, write_shard
from data_prep.stock import compare
from data_prep.verify import measure_shard, verify, verify_published
from tests.helpers.file_server import Server

ROOM = 1024  # bytes of a sample in these tars: its header and its data take a block each
NAME, TYPE, DATA = 0, 156, 512 + 140  # in a sample's bytes
SECOND = "shard-00001"


@pytest.fixture
def remote(own_five: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """``own_five`` over HTTP; retries do not wait."""
    monkeypatch.setattr(published, "WAITS", (0, 0))
    running = Server(own_five)
    yield running
    running.stop()


def overwrite(folder: Path, place: int, content: bytes) -> None:
    """Overwrite a part of the second shard's tar."""
    path = tar_path(folder, SECOND)
    data = bytearray(path.read_bytes())
    data[place : place + len(content)] = content
    path.write_bytes(data)


def rename(folder: Path, row: int, name: bytes) -> None:
    """Rename a member of the second shard, with the right checksum."""
    header = bytearray(tar_path(folder, SECOND).read_bytes()[ROOM * row : ROOM * row + 512])
    header[NAME : NAME + 100] = name.ljust(100, b"\0")
    header[148:156] = 8 * b" "
    header[148:156] = b"%06o\0 " % sum(header)
    overwrite(folder, ROOM * row, bytes(header))


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_whole_data_set_is_the_same_for_webdataset(
    five_shards: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ranks: str
) -> None:
    """The variables of a launcher do not matter, although the library reads them."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", ranks)
    samples = load_manifest(five_shards).counts.samples
    assert main(["verify", "--stock", str(five_shards)]) == 0
    said = capfd.readouterr()
    assert f"complete, {samples} samples, the same for webdataset 1." in said.out
    assert said.err.startswith(f"data_prep: compared {samples} samples in ")


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("single", [False, True])
def test_every_kind_of_sample_is_the_same(tmp_path: Path, dtype: str, single: bool) -> None:
    draw = np.random.default_rng(1)
    samples = []
    for n in (3, 16, 17, 128, 512):
        ids, replacements = draw.integers(2000, size=(2, n), dtype=np.int32)
        split, is_next = (n, NO_PAIR) if single else (n // 2, n % 2)
        positions = np.arange(0, n, 7, dtype=np.int32)
        samples.append(Sample(ids, split, is_next, positions, replacements[: len(positions)], draw.random(n) < 0.3))
    write_shard(tmp_path, SECOND, 70, samples, dtype)
    record = measure_shard(tmp_path, SECOND, 70, 2000).record
    compare(tmp_path, record, 70)
    with pytest.raises(DataError, match=f"{SECOND}.tar: sample 000000000071 is damaged: webdataset reads 000000000070"):
        compare(tmp_path, record, 71)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda data: overwrite(data, 3 * ROOM + NAME, b"9"),
            "webdataset sees the end of the tar before sample 000000000017",
        ),
        (lambda data: overwrite(data, 0, bytes(512)), "webdataset sees the end of the tar before sample 000000000014"),
        (lambda data: overwrite(data, 0, b"9"), "webdataset cannot read sample 000000000014 (ReadError: "),
        (
            lambda data: rename(data, 2, b"000000000016.pkl"),
            "sample 000000000016 is damaged: webdataset reads 000000000016: pkl of ",
        ),
        (lambda data: rename(data, 2, b"000000000015.npy"), "webdataset cannot read sample 000000000015 (ValueError: "),
        (
            lambda data: rename(data, 2, b"000000000099.npy"),
            "sample 000000000016 is damaged: webdataset reads 000000000099: npy of ",
        ),
        (
            lambda data: overwrite(data, 5 * ROOM + DATA, b"\xff"),
            "sample 000000000019 is damaged: webdataset reads 000000000019: npy of ",
        ),
    ],
)
def test_a_shard_that_others_cannot_read_is_named_with_its_sample(
    own_five: Path, damage: Callable[[Path], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Our own reader does not look at tar headers, except with --full. The other shards are compared as well."""
    damage(own_five)
    tar_path(own_five, "shard-00003").unlink()
    assert len(verify(own_five)) == 1
    first, second = verify(own_five, stock=True)
    assert first.startswith(f"{tar_path(own_five, SECOND)}: {said}")
    assert "shard-00003.tar missing" in second and "\n" not in first
    assert main(["verify", "--stock", str(own_five)]) == 2
    assert f"data_prep: error: {first}\n" in capsys.readouterr().err


def test_a_sample_after_the_last_one_is_named(own_five: Path) -> None:
    """Others would train on it: it replaces the end of the tar, so the size is the same."""
    size = tar_path(own_five, SECOND).stat().st_size
    member = tar_path(own_five, SECOND).read_bytes()[:ROOM]
    overwrite(own_five, size - ROOM, member)
    rename(own_five, size // ROOM - 1, b"000000000099.npy")
    [problem] = verify(own_five, stock=True)
    said = "webdataset reads a sample that is not in the index: 000000000099: npy of "
    assert problem.startswith(f"{tar_path(own_five, SECOND)}: {said}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda array: array + (np.arange(len(array)) == 4 + 20).astype("<u2"), "ids[20] is "),
        (lambda array: array + (np.arange(len(array)) == 2).astype("<u2"), "no sample: "),
        (lambda array: array.astype(">u2"), "no sample: an array of >u2"),
        (lambda array: array[None], "no sample: an array of <u2 and shape (1, "),
        (lambda array: b"bytes", "no sample: an array of |S5"),
    ],
)
def test_a_difference_is_named_with_its_field(
    five_shards: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any], said: str
) -> None:
    """The stock decoder is made to err at one sample of the second shard."""
    decode, count = autodecode.decoders["npy"], iter(range(10**6))
    monkeypatch.setitem(autodecode.decoders, "npy", lambda data: (change if next(count) == 16 else id_)(decode(data)))
    [problem] = verify(five_shards, stock=True)
    place = f"{tar_path(five_shards, SECOND)}: sample 000000000016 is not the same for webdataset: "
    assert problem.startswith(place + said) and "\n" not in problem


def id_(array: Any) -> Any:
    return array


def test_a_decoder_that_fails_is_named(five_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(autodecode.decoders, "npy", raises(ValueError("not mine\nat all")))
    problems = verify(five_shards, stock=True)
    assert len(problems) == 5
    assert problems[1].endswith("webdataset cannot decode sample 000000000014 (ValueError: not mine at all)")


def test_an_index_that_leads_elsewhere_is_named(own_five: Path) -> None:
    record = load_manifest(own_five).shards[1]
    path = index_path(own_five, SECOND)
    index = np.load(path)
    index[3, Column.OFFSET] += ROOM
    np.save(path, index)
    with pytest.raises(DataError, match=r"shard-00001.tar: no sample at offset 4608, where its index has one"):
        compare(own_five, replace(record, index_sha256=file_sha256(path)), 14)


def test_without_the_library_one_line_says_what_to_install(
    five_shards: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "webdataset", None)
    assert main(["verify", "--stock", str(five_shards)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("data_prep: error: webdataset is not installed (")
    assert line.endswith('): pip install "webdataset>=1.0.2"')
    assert main(["verify", str(five_shards)]) == 0


# ---- published data sets -------------------------------------------------------------------------------------


def test_a_published_data_set_is_verified_shard_by_shard(
    five_shards: Path,
    remote: Server,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "copies"))
    (tmp_path / "copies").mkdir()
    most = list[int]()

    def counted(folder: Path, record: ShardRecord, first: int) -> None:
        most.append(len(list(folder.glob("*.tar"))))
        compare(folder, record, first)

    monkeypatch.setattr("data_prep.verify.compare", counted)
    remote.faults["shard-00002.tar"] = ["busy", "cut"]
    assert main(["verify", "--stock", f"{remote.address}/"]) == 0
    samples = load_manifest(five_shards).counts.samples
    assert f"{remote.address}/: complete, {samples} samples, the same" in capsys.readouterr().out
    assert most == [1] * 5 and not list((tmp_path / "copies").iterdir())
    assert verify_published(remote.address) == ([], samples)


def test_damage_at_an_address_is_named(remote: Server, own_five: Path) -> None:
    tar_path(own_five, "shard-00000").write_bytes(tar_path(own_five, "shard-00004").read_bytes())
    rename(own_five, 2, b"000000000099.npy")
    index_path(own_five, "shard-00002").unlink()
    remote.faults["shard-00003.tar"] = ["endless"]
    problems, _ = verify_published(remote.address, stock=True)
    expected = (
        "shard-00000.tar: ",
        "shard-00001.tar: the tar header of sample 2, or what follows the sample, is damaged",
        "shard-00002.idx.npy: missing",
        "shard-00003.tar: RefusedError: the server sends more than",
    )
    assert len(problems) == len(expected)
    for problem, start in zip(problems, expected, strict=True):
        assert problem.startswith(f"{remote.address}/{start}") and "\n" not in problem


def test_a_failure_of_server_or_machine_ends_it(
    remote: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its exit code is that of a failure after which a retry may succeed."""
    remote.faults["shard-00001.tar"] = ["busy"] * 3
    with pytest.raises(CopyError, match=r"/shard-00001.tar: failed 3 times, last with .*503.*; check the network"):
        verify_published(remote.address)
    monkeypatch.setattr("data_prep.servers.ask", full_disk)
    assert main(["verify", remote.address]) == FAILED
    [line] = capsys.readouterr().err.splitlines()
    place = tempfile.gettempdir()
    assert f"error: {remote.address}/manifest.json: OSError: [Errno 28]" in line and f"'{place}/lambert-" in line
    assert line.endswith(f"make room); it is copied to {place}; TMPDIR sets another folder")
    assert main(["verify", remote.address, str(remote.folder / "none")]) == BAD_INPUT


def full_disk(fs: Any, seconds: float, what: str, source: str, target: str, **more: Any) -> None:
    """Fail as a driver does if its file has no room."""
    raise OSError(errno.ENOSPC, "No space left on device", target)


def raises(error: Exception) -> Callable[..., None]:
    """A function that raises the error, whatever its arguments."""

    def fail(*arguments: Any) -> None:
        raise error

    return fail


def test_what_is_no_published_data_set_costs_one_line(
    remote: Server, own_five: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_five / "manifest.json").write_text("{}")
    assert main(["verify", remote.address, f"{remote.address}/none", "nowhere://host/set"]) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert f"error: {remote.address}/manifest.json: wanted format lambert-shards" in first
    assert f"error: {remote.address}/none/manifest.json: missing" in second
    assert "nowhere://host/set: not a valid address" in third
