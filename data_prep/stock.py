"""Reads shards as others do, with stock `webdataset`: its tar iterators and its decoders.

Lambert opens the files; the library's own openers start a shell command for an address. The library imports torch if
that is installed, so it is imported only where it is used. Only members named ``.npy`` are decoded: the stock decoders
of other names unpickle.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataError, shortage
from data_prep.manifest import ShardRecord
from data_prep.retries import printable
from data_prep.shards import Column, NoSample, Samples, decode_samples, index_path, read_index, samples_of, tar_path

DECODED = ["npy"]
COMPARED_AT_ONCE = 256  # samples


def import_webdataset() -> Any:
    """The package `webdataset`. Raises DataError if it is not installed."""
    try:
        import webdataset
    except ImportError as error:
        raise DataError(f'webdataset is not installed ({error}): pip install "webdataset>=1.0.2"') from None
    return webdataset


def stock_members(folder: Path, record: ShardRecord, first: int) -> Iterator[dict[str, Any]]:
    """The members of a shard, as the library's tar iterators read them: ``__key__``, and the file's bytes as ``npy``.

    Args:
        first: the number of its first sample in the data set.

    Raises DataError, with the shard and the sample's number, for the first member that is not the one in the index, and
    for a member after the last one.
    """
    tar, index = tar_path(folder, record.name), read_index(index_path(folder, record.name), record.index_sha256)
    with tar.open("rb") as stream:
        if (size := os.fstat(stream.fileno()).st_size) != record.bytes:
            raise DataError(f"{tar}: {size} bytes, the manifest says {record.bytes}")
        members = _group({"url": str(tar), "stream": stream})
        for number, crc in enumerate(index[:, Column.CRC32].tolist(), first):
            key = _key(number)
            member = _next(members, f"{tar}: webdataset cannot read sample {key}")
            if member is None:
                raise DataError(f"{tar}: webdataset sees the end of the tar before sample {key}")
            if member["__key__"] != key or zlib.crc32(member.get("npy", b"")) != crc:
                raise DataError(f"{tar}: sample {key} is damaged: webdataset reads {_described(member)}")
            yield member
        if (extra := _next(members, f"{tar}: webdataset cannot read past the last sample")) is not None:
            raise DataError(f"{tar}: webdataset reads a sample that is not in the index: {_described(extra)}")


def compare(folder: Path, record: ShardRecord, first: int) -> None:
    """Reads each sample of a shard twice, with stock `webdataset` and with our own reader, and compares the two.

    Args:
        first: the number of its first sample in the data set.

    Raises DataError, with the shard and the sample's number, for the first difference.
    """
    webdataset = import_webdataset()
    tar, index = tar_path(folder, record.name), read_index(index_path(folder, record.name), record.index_sha256)
    members = partial(stock_members, folder, record, first)
    decoded = iter(webdataset.DataPipeline(members, webdataset.decode(only=DECODED)))
    with tar.open("rb") as file:
        for start in range(0, len(index), COMPARED_AT_ONCE):
            rows, theirs = index[start : start + COMPARED_AT_ONCE], list[Any]()
            for number in range(first + start, first + start + len(rows)):
                try:
                    theirs.append(next(decoded)["npy"])
                except webdataset.DecodingError as error:
                    said = f"{tar}: webdataset cannot decode sample {_key(number)} ({_reason(error)})"
                    raise DataError(said) from None
            place, difference = _difference(theirs, _read(file, rows))
            if difference:
                key = _key(first + start + place)
                raise DataError(f"{tar}: sample {key} is not the same for webdataset: {difference}")
        next(decoded, None)  # raises DataError if there is one more


def _key(number: int) -> str:
    """The name of a sample's member, without suffix."""
    return f"{number:012d}"


def _read(file: IO[bytes], rows: NDArray[np.int64]) -> Samples:
    """The samples at index rows, read by their offsets."""
    members = []
    for offset, size, crc in rows[:, [Column.OFFSET, Column.BYTES, Column.CRC32]].tolist():
        members.append(os.pread(file.fileno(), size, offset))
        if zlib.crc32(members[-1]) != crc:
            raise DataError(f"{file.name}: no sample at offset {offset}, where its index has one")
    try:
        return decode_samples(members)
    except NoSample as error:
        raise DataError(f"{file.name}: {error}, at offset {rows[error.place, Column.OFFSET]}") from None


def _group(opened: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The members of an open tar, grouped by the library as it groups those of any tar."""
    import_webdataset()
    from webdataset.tariterators import group_by_keys, tar_file_expander

    grouped: Iterator[dict[str, Any]] = group_by_keys(tar_file_expander([opened]))
    return grouped


def _next(members: Iterator[dict[str, Any]], failure: str) -> dict[str, Any] | None:
    """The next member; None at the end of the tar. Raises DataError, with ``failure``, if it cannot be read."""
    try:
        return next(members, None)
    except Exception as error:  # the library's, tarfile's or the disk's
        if shortage(error):
            raise
        raise DataError(f"{failure} ({_reason(error)})") from None


def _difference(theirs: list[Any], ours: Samples) -> tuple[int, str]:
    """The place of the first of the library's arrays that differs from our sample, and how; empty if none does."""
    try:
        pairs = zip(samples_of([np.asarray(array) for array in theirs]), ours, strict=True)
    except NoSample as error:
        return error.place, str(error)
    for number, pair in enumerate(pairs):
        for name in vars(pair[0]):
            a, b = (np.asarray(getattr(sample, name)) for sample in pair)
            if a.shape != b.shape:
                return number, f"{a.size} {name} instead of {b.size}"
            if len(places := np.argwhere(a != b)):
                place = tuple(places[0].tolist())
                at = f"[{place[0]}]" if place else ""
                return number, f"{name}{at} is {a[place]} instead of {b[place]}"
    return 0, ""


def _described(member: dict[str, Any]) -> str:
    """The key of a sample and its files with their sizes, for an error line."""
    files = ", ".join(f"{name} of {len(data)} bytes" for name, data in member.items() if not name.startswith("__"))
    return printable(f"{member['__key__']}: {files}")


def _reason(error: Exception) -> str:
    """An error of the library in one line; it adds objects and addresses to the arguments of the first error."""
    cause = error.__cause__ or error
    said = str(cause.args[0] if cause.args else "").partition(" @ ")[0]
    return printable(f"{type(cause).__name__}: {said}")
