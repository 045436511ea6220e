"""The shard format: the contract between data preparation and training.

A shard is a tar of samples, one member each, with an index beside it:

    shard-00000.tar       {sample number:012d}.npy, ...
    shard-00000.idx.npy   int64[samples, 5], the columns of `Column`

A member is a one-dimensional .npy array of uint16 (uint32 for a vocabulary above 65,536):

    n, split, is_next, m, ids[n], positions[m], replacements[m]

so stock `webdataset` reads it with its own decoders, and an index entry reads it in O(1) and proves it.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from data_prep.atomic import replacing
from data_prep.errors import DataError

PREFIX = "shard-"
BLOCK = 512  # of a tar: a header is one, data are padded to a multiple
ARCHIVE_END = 2 * BLOCK  # zeros
HEADER = 128  # bytes of .npy header before a sample's numbers
DESCR = slice(21, 24)  # of the header
DTYPES: dict[bytes, np.dtype[Any]] = {b"<u2": np.dtype("<u2"), b"<u4": np.dtype("<u4")}
NUMBERS = 4  # n, split, is_next, m
TAR_PARTS = (  # of a header: between name and size, between size and checksum, after that
    bytes(100 - 16) + b"0000644\0" + 2 * b"0000000\0",
    b"\0" + b"%011o\0" % 0,
    b"0" + bytes(100) + b"ustar\00000" + bytes(BLOCK - 265),
)
CHECKSUM = sum(map(sum, TAR_PARTS)) + 8 * ord(" ")  # a header's checksum counts itself as spaces


class Column(IntEnum):
    """Of an index: offset and size of a member's data in the tar, in bytes; its tokens, control tokens
    included; its masked positions; and the zlib.crc32 of the data."""

    OFFSET = 0
    BYTES = 1
    TOKENS = 2
    MASKED = 3
    CRC32 = 4


@dataclass(frozen=True)
class Sample:
    """A pair with its static mask. The labels are ``ids[positions]``."""

    ids: NDArray[np.int32]  # [n] unmasked: [CLS] A [SEP] B [SEP]
    split: int  # length of [CLS] A [SEP]
    is_next: int  # 1: B follows A; 0: B is from another document
    positions: NDArray[np.int32]  # [m] ascending
    replacements: NDArray[np.int32]  # [m] what stands there in the masked input


def shard_name(number: int) -> str:
    """Without suffix."""
    return f"{PREFIX}{number:05d}"


def tar_path(folder: Path, name: str) -> Path:
    """Of the shard called ``name``."""
    return folder / f"{name}.tar"


def index_path(folder: Path, name: str) -> Path:
    """Of the index beside it."""
    return folder / f"{name}.idx.npy"


def encode_sample(sample: Sample, dtype: DTypeLike) -> bytes:
    """The member of a sample; ``dtype`` is <u2 or <u4."""
    n, m = len(sample.ids), len(sample.positions)
    numbers = np.empty(NUMBERS + n + 2 * m, dtype)
    numbers[:NUMBERS] = n, sample.split, sample.is_next, m
    numbers[NUMBERS : NUMBERS + n] = sample.ids
    numbers[NUMBERS + n : NUMBERS + n + m] = sample.positions
    numbers[NUMBERS + n + m :] = sample.replacements
    return _npy_header(numbers.dtype.str, len(numbers)) + numbers.tobytes()


def decode_sample(buffer: bytes | memoryview) -> Sample:
    """The sample of a member. Raises DataError if it is none; the index's CRC32 proves the rest."""
    header = bytes(buffer[:HEADER])
    dtype = _dtype_of(header)
    size, rest = divmod(len(buffer) - HEADER, dtype.itemsize)
    if rest or size < NUMBERS or header != _npy_header(dtype.str, size):
        raise DataError(f"no sample: {len(buffer)} bytes do not fit its .npy header")
    numbers = np.frombuffer(buffer, dtype, offset=HEADER).astype(np.int32)
    n, split, is_next, m = numbers[:NUMBERS].tolist()
    if size != NUMBERS + n + 2 * m or not 0 < split < n or is_next > 1:
        raise DataError(f"no sample: {size} numbers for {n} tokens and {m} masked positions")
    a, b = NUMBERS + n, NUMBERS + n + m
    return Sample(numbers[NUMBERS:a], split, is_next, numbers[a:b], numbers[b:])


def write_shard(folder: Path, name: str, first: int, samples: Iterable[Sample], dtype: DTypeLike) -> None:
    """Writes the samples numbered from ``first``, then renames the index and at last the tar to its name."""
    rows = []
    with replacing(tar_path(folder, name)) as tar:
        offset = 0
        for number, sample in enumerate(samples, start=first):
            data = encode_sample(sample, dtype)
            offset += BLOCK
            rows.append((offset, len(data), len(sample.ids), len(sample.positions), zlib.crc32(data)))
            padding = -len(data) % BLOCK
            tar.write(_tar_header(number, len(data)) + data + bytes(padding))
            offset += len(data) + padding
        tar.write(bytes(ARCHIVE_END))
        with replacing(index_path(folder, name)) as index:
            np.save(index, np.array(rows, np.int64), allow_pickle=False)


def read_shard(folder: Path, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]:
    """Reads a whole shard and proves every sample of it.

    Returns:
        The index; is_next, int64[samples]; and the ids of all samples, one after the other.
    Raises:
        DataError, with the shard's name, for a file that is missing, truncated or damaged.
    """
    index = read_index(index_path(folder, name))
    path = tar_path(folder, name)
    offset, size, tokens, masked, _ = index.T
    room = BLOCK + size + -size % BLOCK  # (samples,) of each member with its header
    if not np.array_equal(offset, np.cumsum(room) - room + BLOCK):
        raise DataError(f"{path}: its index does not describe a shard")
    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) != room.sum() + ARCHIVE_END:
        raise DataError(f"{path}: {len(data)} bytes, its index describes {room.sum() + ARCHIVE_END}")
    for row, (start, length, _, _, crc) in enumerate(index.tolist()):
        if zlib.crc32(data[start : start + length]) != crc:
            raise DataError(f"{path}: sample {row} is damaged")
    numbers = np.frombuffer(data, _dtype_of(data[BLOCK : BLOCK + HEADER]))
    first = (offset + HEADER) // numbers.itemsize  # (samples,) of each sample's numbers
    n, split, is_next, m = numbers[first[:, None] + np.arange(NUMBERS)].astype(np.int64).T
    fits = (n == tokens) & (m == masked) & (size == HEADER + (NUMBERS + n + 2 * m) * numbers.itemsize)
    wrong = np.flatnonzero(~fits | (split < 1) | (split >= n) | (is_next > 1))
    if len(wrong):
        raise DataError(f"{path}: sample {wrong[0]} is not the one in the index")
    begins, ends = (first + NUMBERS).tolist(), (first + NUMBERS + n).tolist()
    return index, is_next, np.concatenate([numbers[a:b] for a, b in zip(begins, ends, strict=True)])


def read_index(path: Path) -> NDArray[np.int64]:
    """int64[samples, 5]. Raises DataError if the file is missing or no index."""
    try:
        index: NDArray[np.int64] = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: no index can be read ({error})") from None
    if index.dtype != np.int64 or index.ndim != 2 or index.shape[1] != len(Column) or not len(index):
        raise DataError(f"{path}: no index, but {index.dtype} of shape {index.shape}")
    return index


def _dtype_of(header: bytes | memoryview) -> np.dtype[Any]:
    dtype = DTYPES.get(bytes(header[DESCR]))
    if dtype is None:
        raise DataError("no sample: it does not start with the .npy header of one")
    return dtype


@lru_cache(maxsize=4096)
def _npy_header(dtype: str, size: int) -> bytes:
    """The HEADER bytes that np.save writes before ``size`` numbers."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": (size,)})
    return file.getvalue()


def _tar_header(number: int, size: int) -> bytes:
    """A ustar header (POSIX.1-1988) of the file of sample ``number``: mode 0644, owner 0, time 0."""
    name, octal = b"%012d.npy" % number, b"%011o" % size
    checksum = b"%06o\0 " % (CHECKSUM + sum(name) + sum(octal))
    return b"".join((name, TAR_PARTS[0], octal, TAR_PARTS[1], checksum, TAR_PARTS[2]))
