"""The shard format: stock readers take it, a round trip keeps it, damage shows."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from corpora import write_corpus

from data_prep.build import build
from data_prep.errors import DataError
from data_prep.settings import make_settings
from data_prep.shards import Sample, decode_sample, encode_sample, read_index, read_shard, write_shard


def sample(n: int = 128, m: int = 19, largest: int = 60_000) -> Sample:
    draw = np.random.default_rng(n)
    ids, replacements = draw.integers(largest, size=n), draw.integers(largest, size=m)
    positions = np.sort(draw.choice(n, m, replace=False))
    return Sample(ids.astype(np.int32), n // 3, 1, positions.astype(np.int32), replacements.astype(np.int32))


@pytest.mark.parametrize(("dtype", "largest"), [("<u2", 65_535), ("<u4", 250_000)])
@pytest.mark.parametrize(("n", "m"), [(5, 1), (128, 19), (512, 76)])
def test_round_trip(dtype: str, largest: int, n: int, m: int) -> None:
    before = sample(n, m, largest)
    after = decode_sample(memoryview(encode_sample(before, dtype)))
    assert (after.split, after.is_next) == (before.split, before.is_next)
    for name in ("ids", "positions", "replacements"):
        array = getattr(after, name)
        assert array.dtype == np.int32 and array.tolist() == getattr(before, name).tolist()


def test_members_are_plain_npy_in_a_plain_tar(tmp_path: Path) -> None:
    samples = [sample(n) for n in (30, 64, 128)]
    write_shard(tmp_path, "shard-00000", 7, samples, "<u2")
    index = read_index(tmp_path / "shard-00000.idx.npy")
    with tarfile.open(tmp_path / "shard-00000.tar") as tar:
        members = tar.getmembers()
        assert [m.name for m in members] == [f"{number:012d}.npy" for number in (7, 8, 9)]
        assert [m.offset_data for m in members] == index[:, 0].tolist()
        assert {(m.mtime, m.uid, m.gid, m.mode, m.uname) for m in members} == {(0, 0, 0, 0o644, "")}
        file = tar.extractfile(members[2])
        assert file is not None
        array = np.load(io.BytesIO(file.read()), allow_pickle=False)
    assert array[:4].tolist() == [128, 42, 1, 19] and array[4:132].tolist() == samples[2].ids.tolist()
    assert index[:, 2].tolist() == [30, 64, 128]
    # The target: 1 kB of tar for a sample of 128 tokens.
    assert (tmp_path / "shard-00000.tar").stat().st_size == 1024 * 3 + 1024


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
def test_what_is_no_sample_is_refused(cut: int) -> None:
    with pytest.raises(DataError, match="no sample"):
        decode_sample(encode_sample(sample(), "<u2")[:cut])


def test_a_flipped_bit_anywhere_in_a_sample_is_found(tmp_path: Path) -> None:
    write_shard(tmp_path, "shard-00000", 0, [sample()], "<u2")
    path = tmp_path / "shard-00000.tar"
    whole = path.read_bytes()
    for position in range(512, 512 + 468, 9):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(DataError, match="shard-00000.tar: sample 0 is damaged"):
            read_shard(tmp_path, "shard-00000")


def test_nothing_half_written_has_a_final_name(tmp_path: Path) -> None:
    def broken() -> object:
        yield sample()
        raise DataError("broken")

    with pytest.raises(DataError, match="broken"):
        write_shard(tmp_path, "shard-00000", 0, broken(), "<u2")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
