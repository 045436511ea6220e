"""A data set's arrays are verified before they are read: any other file in their place is refused by name."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from data_prep.__main__ import main
from data_prep.build import build
from data_prep.errors import DataError
from data_prep.inspection import show_samples
from data_prep.manifest import load_manifest, read_histogram
from data_prep.npy import HEADER_BYTES, npy_header, read_integers
from data_prep.picture import draw
from data_prep.settings import make_settings
from data_prep.shards import read_index, read_shard
from data_prep.verify import verify
from trainer.data.reader import Reader
from trainer.errors import TrainerError

NAME = "shard-00001"


def flipped(content: bytes) -> Iterator[bytes]:
    """The content with each bit of its header turned over: 1,024 of them."""
    for bit in range(8 * HEADER_BYTES):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


def saved(save: Callable[..., None], *arrays: object) -> bytes:
    file = io.BytesIO()
    save(file, *arrays)
    return file.getvalue()


ELSE = {  # what may lie where 64 rows of 5 should
    "an archive": saved(np.savez, np.zeros((64, 5), np.int64)),
    "a lying shape": npy_header("<i8", 10**12, 5) + bytes(64 * 40),
    "too few rows": npy_header("<i8", 64, 5) + bytes(63 * 40),
    "other numbers": saved(np.save, np.zeros((64, 5), np.float64)),
    "columns first": saved(np.save, np.asfortranarray(np.arange(320).reshape(64, 5))),
    "one dimension": saved(np.save, np.zeros(320, np.int64)),
    "no row": saved(np.save, np.zeros((0, 5), np.int64)),
    "a shape that never ends": npy_header("<i8", 64, 5).replace(b"(64, 5)", b"((((((("),
    "a header alone": npy_header("<i8", 64, 5)[:100],
    "nothing": b"",
    "text": b"no array\n" * 300,
}


def test_what_numpy_saves_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    for shape in ((0,), (1,), (120,), (1, 5), (10**5, 5), (3, 6)):
        array = np.arange(np.prod(shape)).reshape(shape) - 7
        np.save(path, array)
        found = read_integers(path, *shape[1:])
        assert np.array_equal(found, array) and found.flags.writeable and found.dtype == np.int64


@pytest.mark.parametrize("kind", ["an index", "a histogram"])
def test_every_bit_of_a_header_counts(own_shards: Path, kind: str) -> None:
    """Checked with the manifest's hash and without it, as a build reads its own shards after a kill."""
    manifest = load_manifest(own_shards)
    record, counts = manifest.shards[1], manifest.token_counts
    name = f"{NAME}.idx.npy" if kind == "an index" else counts.file
    reads: list[Callable[[], object]] = [lambda: read_histogram(own_shards, counts)]
    if kind == "an index":
        tar = own_shards / f"{NAME}.tar"
        reader = Reader(own_shards, manifest, 0, 1, None, None, "restore it")
        reads = [
            lambda: read_index(own_shards / name),
            lambda: read_index(own_shards / name, record.index_sha256),
            lambda: reader.open(1),
        ]
        assert tar.is_file()
    whole = (own_shards / name).read_bytes()
    for content in flipped(whole):
        (own_shards / name).write_bytes(content)
        for read in reads:
            with pytest.raises((DataError, TrainerError)) as error:
                read()
            assert name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ELSE)
def test_what_lies_in_an_indexs_place_is_named_by_all_who_read_it(
    own_shards: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = own_shards / f"{NAME}.idx.npy"
    path.write_bytes(ELSE[kind])
    for read, what in (
        (lambda: read_index(path), "no index"),
        (lambda: read_shard(own_shards, NAME, 64), "no index"),
        (
            lambda: Reader(own_shards, load_manifest(own_shards), 0, 1, None, None, "restore it").open(1),
            "not the index in the manifest",
        ),
        (lambda: list(show_samples(own_shards, 1000)), "not the index in the manifest"),
        (lambda: draw(own_shards, tmp_path / "data.png"), "not the index in the manifest"),
    ):
        with pytest.raises((DataError, TrainerError)) as error:
            read()
        assert f"{path}: {what}" in str(error.value) and "\n" not in str(error.value)
    for full in (False, True):
        assert [line.split(" (")[0] for line in verify(own_shards, full)] == [f"{path}: not the index in the manifest"]
    assert main(["inspect", str(own_shards), "--samples", "1000"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"data_prep: error: {path}: not the index in the manifest (its sha256 differs); ")


def test_a_rerun_makes_a_shard_with_a_damaged_index_again(tiny_shards: Path, tmp_path: Path) -> None:
    """It also names the damage in the counts that it kept."""

    def make() -> None:
        settings = make_settings(32, samples_per_shard=64)
        build(
            [tiny_shards.parent / "corpus.txt"], tiny_shards.parent / "tokenizer", tmp_path / "out", settings, 1, store
        )

    store = tmp_path / "store"
    make()
    shutil.rmtree(tmp_path / "out")
    counts = store / "counts.npy"
    whole = counts.read_bytes()
    counts.write_bytes(whole.replace(b"(", b"\xff"))
    with pytest.raises(DataError, match=f"^{counts}: no counts: its .npy header .* bytes; remove it, and run again$"):
        make()
    counts.write_bytes(whole)
    make()
    assert (tmp_path / "out" / "manifest.json").is_file()
