"""The shard format: stock readers take it, a round trip keeps it, damage shows."""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep import shards
from data_prep.build import build
from data_prep.errors import DataError
from data_prep.npy import npy_header
from data_prep.settings import make_settings
from data_prep.shards import (
    NO_PAIR,
    Column,
    NoSample,
    Sample,
    decode_sample,
    decode_samples,
    join,
    read_index,
    read_shard,
    write_shard,
)
from tests.helpers.corpora import write_corpus

NAME = "shard-00000"


def sample(n: int = 128, m: int = 19, largest: int = 60_000, single: bool = False, seed: int = 0) -> Sample:
    draw = np.random.default_rng((n, seed))
    ids, replacements = draw.integers(largest, size=(2, n), dtype=np.int32)
    positions = np.sort(draw.choice(n, m, replace=False)).astype(np.int32)
    split, is_next = (n, NO_PAIR) if single else (n // 3, 1)
    return Sample(ids, split, is_next, positions, replacements[:m], draw.random(n) < 0.3)


def members(folder: Path, samples: list[Sample], dtype: str = "<u2") -> list[bytes]:
    """The bytes of each sample in their shard, cut out of it by its index."""
    write_shard(folder, NAME, 0, samples, dtype)
    data, index = (folder / f"{NAME}.tar").read_bytes(), read_index(folder / f"{NAME}.idx.npy")
    return [data[offset : offset + size] for offset, size in index[:, [Column.OFFSET, Column.BYTES]].tolist()]


def assert_equal(after: Sample, before: Sample) -> None:
    assert (after.split, after.is_next) == (before.split, before.is_next)
    for name, dtype in (
        ("ids", np.int32),
        ("positions", np.int32),
        ("replacements", np.int32),
        ("continues", np.bool_),
    ):
        array = getattr(after, name)
        assert array.dtype == dtype and array.tolist() == getattr(before, name).tolist(), name


@pytest.mark.parametrize(("dtype", "largest"), [("<u2", 65_535), ("<u4", 250_000)])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(("n", "m"), [(3, 1), (16, 2), (17, 0), (128, 19), (512, 76)])
def test_round_trip(tmp_path: Path, dtype: str, largest: int, n: int, m: int, single: bool) -> None:
    before = sample(n, m, largest, single)
    [data] = members(tmp_path, [before], dtype)
    assert_equal(decode_sample(memoryview(data)), before)


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_many_samples_of_all_lengths_lie_where_the_index_says(tmp_path: Path, dtype: str) -> None:
    lengths = 3 + np.random.default_rng(1).integers(300, size=2 * shards.ENCODED_AT_ONCE + 7)
    samples = [sample(int(n), int(n) // 7, single=bool(n % 2), seed=i) for i, n in enumerate(lengths)]
    for data, before in zip(members(tmp_path, samples, dtype), samples, strict=True):
        assert_equal(decode_sample(data), before)
    index, is_next, ids = read_shard(tmp_path, NAME, 0)
    assert index[:, Column.TOKENS].tolist() == lengths.tolist()
    assert index[:, Column.MASKED].tolist() == (lengths // 7).tolist()
    assert is_next.tolist() == [NO_PAIR if n % 2 else 1 for n in lengths]
    assert np.array_equal(ids, np.concatenate([sample.ids for sample in samples]))


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_samples_decoded_together_are_those_decoded_alone(tmp_path: Path, dtype: str) -> None:
    samples = [sample(n, n // 7, single=bool(n % 2)) for n in (3, 16, 17, 128, 512, 40)]
    for columns in (decode_samples(members(tmp_path, samples, dtype)), join(samples)):
        assert len(columns) == 6
        for some in (slice(0, 0), slice(None, 2), slice(2, 5), slice(-2, None), slice(6, 9)):
            for after, before in zip(columns[some], samples[some], strict=True):
                assert_equal(after, before)
    assert list(decode_samples([])) == []


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (lambda data: data[:-1], "no sample: 483 bytes do not fit its .npy header"),
        (lambda data: b"?" * 484, "no sample: it does not start with the .npy header of one"),
        (lambda data: npy_header("<u2", 3) + bytes(6), "no sample: an array of <u2 and shape (3,)"),
        (lambda data: data[:128] + b"\x7f" + data[129:], "no sample: 178 numbers for 127 tokens and 19 masked "),
    ],
)
def test_a_member_that_is_no_sample_is_named_by_its_place(
    tmp_path: Path, damaged: Callable[[bytes], bytes], said: str
) -> None:
    read = members(tmp_path, [sample(seed=n) for n in range(5)])
    with pytest.raises(NoSample) as error:
        decode_samples([*read[:3], damaged(read[3]), damaged(read[4])])
    for sent in (error.value, copy(error.value)):  # a copy takes the way that an error takes between processes
        assert sent.place == 3 and str(sent).startswith(said)


def test_the_samples_encoded_together_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [sample(10 + n, 2) for n in range(20)]
    whole = members(tmp_path, samples), (tmp_path / f"{NAME}.tar").read_bytes()
    for count in (1, 7, 20):
        monkeypatch.setattr(shards, "ENCODED_AT_ONCE", count)
        assert (members(tmp_path, samples), (tmp_path / f"{NAME}.tar").read_bytes()) == whole


def test_members_are_plain_npy_in_a_plain_tar(tmp_path: Path) -> None:
    samples = [sample(n) for n in (30, 64)] + [sample(128, single=True)]
    write_shard(tmp_path, NAME, 7, samples, "<u2")
    index = read_index(tmp_path / f"{NAME}.idx.npy")
    with tarfile.open(tmp_path / f"{NAME}.tar") as tar:
        entries = tar.getmembers()
        assert [entry.name for entry in entries] == [f"{number:012d}.npy" for number in (7, 8, 9)]
        assert [entry.offset_data for entry in entries] == index[:, 0].tolist()
        assert {(e.mtime, e.uid, e.gid, e.mode, e.uname, e.type) for e in entries} == {(0, 0, 0, 0o644, "", b"0")}
        files = [tar.extractfile(entry) for entry in entries]
        arrays = [np.load(io.BytesIO(file.read()), allow_pickle=False) for file in files if file is not None]
    assert [array[:4].tolist() for array in arrays] == [[30, 10, 1, 19], [64, 21, 1, 19], [128, 128, 2, 19]]
    for array, written in zip(arrays, samples, strict=True):
        n = len(written.ids)
        assert array[4 : 4 + n].tolist() == written.ids.tolist()
        assert array[4 + n : 4 + n + 19].tolist() == written.positions.tolist()
        words = array[4 + n + 38 :].tolist()
        assert len(words) == -(-n // 16)
        assert [bool(words[i // 16] >> i % 16 & 1) for i in range(16 * len(words))][:n] == written.continues.tolist()


@pytest.mark.parametrize("number", [0, 7, 999_999_999_990])
def test_tar_headers_are_tarfiles_own(tmp_path: Path, number: int) -> None:
    write_shard(tmp_path, NAME, number, [sample(n) for n in (30, 128)], "<u4")
    whole = (tmp_path / f"{NAME}.tar").read_bytes()
    for row, (offset, size, *_) in enumerate(read_index(tmp_path / f"{NAME}.idx.npy").tolist()):
        entry = tarfile.TarInfo(f"{number + row:012d}.npy")
        entry.size = size
        assert whole[offset - 512 : offset] == entry.tobuf(tarfile.USTAR_FORMAT)
    assert whole[-1024:] == bytes(1024)


@pytest.mark.parametrize("single", [False, True])
def test_a_sample_of_128_tokens_takes_a_kilobyte_of_tar(tmp_path: Path, single: bool) -> None:
    members(tmp_path, [sample(128, 19, single=single)] * 50)
    assert set(read_index(tmp_path / f"{NAME}.idx.npy")[:, Column.BYTES].tolist()) == {484}  # of 512
    assert (tmp_path / f"{NAME}.tar").stat().st_size == 50 * 1024 + 1024


def test_stock_webdataset_reads_every_sample(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    text, tokenizer = write_corpus(tmp_path, [20] * 10, 7)
    text = text.rename(tmp_path / "wiki.en.v1.0.txt")
    manifest = build([text], tokenizer, tmp_path / "out", make_settings(32, samples_per_shard=32), 1)
    urls = [str(tmp_path / "out" / f"{shard.name}.tar") for shard in manifest.shards]
    read = list(webdataset.WebDataset(urls, shardshuffle=False).decode())
    assert len(urls) > 1 and len(read) == manifest.counts.samples
    assert [item["__key__"] for item in read] == [f"{number:012d}" for number in range(len(read))]
    arrays = [item["npy"] for item in read]
    assert {array.dtype.str for array in arrays} == {"<u2"}
    assert sum(int(array[0]) for array in arrays) == manifest.counts.tokens
    assert sum(int(array[3]) for array in arrays) == manifest.counts.masked
    assert b"pickle" not in b"".join(path.read_bytes() for path in (tmp_path / "out").glob("shard-*"))


@pytest.mark.parametrize("cut", [0, 20, 128, 135, -2, -1])
def test_what_is_no_sample_is_refused(tmp_path: Path, cut: int) -> None:
    [data] = members(tmp_path, [sample()])
    with pytest.raises(DataError, match="no sample"):
        decode_sample(data[:cut])


@pytest.mark.parametrize(
    ("split", "is_next"), [(0, 1), (128, 1), (128, 0), (129, 1), (129, NO_PAIR), (42, NO_PAIR), (42, 3)]
)
def test_a_split_and_a_label_that_do_not_go_together_are_refused(tmp_path: Path, split: int, is_next: int) -> None:
    [_, data] = members(tmp_path, [sample(), replace(sample(), split=split, is_next=is_next)])
    with pytest.raises(DataError, match="no sample"):
        decode_sample(data)
    with pytest.raises(DataError, match=f"{NAME}.tar: sample 1 is not the one in the index"):
        read_shard(tmp_path, NAME, 0)


@pytest.mark.parametrize(("dtype", "n", "bit"), [("<u2", 30, 30), ("<u2", 17, 31), ("<u4", 30, 30), ("<u4", 32, 32)])
def test_a_mark_behind_the_last_token_is_found(tmp_path: Path, dtype: str, n: int, bit: int) -> None:
    [data] = members(tmp_path, [sample(n, 2)], dtype)
    tar, beside = tmp_path / f"{NAME}.tar", tmp_path / f"{NAME}.idx.npy"
    index, numbers = read_index(beside), np.frombuffer(data, dtype, offset=128).copy()
    numbers[4 + n + 4 + 1] |= 1 << bit - 16
    changed = data[:128] + numbers.tobytes()
    tar.write_bytes(tar.read_bytes().replace(data, changed))
    index[0, Column.CRC32] = zlib.crc32(changed)
    np.save(beside, index)
    with pytest.raises(DataError, match=f"{NAME}.tar: sample 0 marks tokens that it does not have"):
        read_shard(tmp_path, NAME, 0)


def test_a_flipped_bit_anywhere_in_a_sample_is_found(tmp_path: Path) -> None:
    write_shard(tmp_path, NAME, 0, [sample()], "<u2")
    path = tmp_path / f"{NAME}.tar"
    whole = path.read_bytes()
    for position in [*range(512, 512 + 484, 9), 512 + 483]:
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(DataError, match=f"{NAME}.tar: sample 0 is damaged"):
            read_shard(tmp_path, NAME, 0)


@pytest.mark.parametrize(
    ("position", "said"),
    [
        (3, "the tar header of sample 0, or"),  # a digit of its name
        (1024 + 150, "the tar header of sample 1, or"),  # its checksum
        (512 + 484, "the tar header of sample 0, or"),  # the first byte after its data
        (2047, "the tar header of sample 1, or"),  # the last byte before the end
        (2048, "the end of the tar is damaged"),
        (-1, "the end of the tar is damaged"),
    ],
)
def test_a_flipped_bit_between_samples_is_found(tmp_path: Path, position: int, said: str) -> None:
    """Others read a tar by its headers, and the sha256 of the file is yet to be taken from it."""
    write_shard(tmp_path, NAME, 0, [sample(seed=0), sample(seed=1)], "<u2")
    path = tmp_path / f"{NAME}.tar"
    content = bytearray(path.read_bytes())
    assert len(content) == 2048 + 1024
    read_shard(tmp_path, NAME, 0)
    content[position] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{NAME}.tar: {said}"):
        read_shard(tmp_path, NAME, 0)


def test_a_shard_of_other_samples_is_found(tmp_path: Path) -> None:
    write_shard(tmp_path, NAME, 7, [sample()], "<u2")
    read_shard(tmp_path, NAME, 7)
    with pytest.raises(DataError, match="the tar header of sample 0, or"):
        read_shard(tmp_path, NAME, 0)


def test_nothing_half_written_has_a_final_name(tmp_path: Path) -> None:
    def broken() -> Iterator[Sample]:
        yield from [sample()] * (shards.ENCODED_AT_ONCE + 1)
        raise DataError("broken")

    with pytest.raises(DataError, match="broken"):
        write_shard(tmp_path, NAME, 0, broken(), "<u2")
    assert not list(tmp_path.iterdir())
