"""The shard format, version 2: the contract between data preparation and training.

A shard is a tar with one member per sample, and an index file next to it:

    shard-00000.tar       {sample number:012d}.npy, ...
    shard-00000.idx.npy   int64[samples, 5], the columns of `Column`

A member is a one-dimensional .npy array of uint16 (uint32 for a vocabulary above 65,536):

    n, split, is_next, m, ids[n], positions[m], replacements[m], continues[ceil(n / 16)]

where bit i % 16 of word i // 16 of ``continues`` says whether token i continues the word of the token before
it; a word has 16 bits in both types. So stock `webdataset` reads a shard with its own decoders, and with an index
entry a sample can be read and verified in O(1).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from data_prep.atomic import replacing
from data_prep.errors import DataError, shortage
from data_prep.npy import HEADER_BYTES, npy_header, read_integers

SHARD_PREFIX = "shard-"
NO_PAIR = 2  # is_next of a single-segment sample: it has no second task
TAR_BLOCK_BYTES = 512  # bytes of a tar block: a header is one block, and data are padded to whole blocks
ARCHIVE_END = 2 * TAR_BLOCK_BYTES  # zeros
DESCR = slice(21, 24)  # position in the header
DTYPES: dict[bytes, np.dtype[Any]] = {b"<u2": np.dtype("<u2"), b"<u4": np.dtype("<u4")}
NUMBERS = 4  # n, split, is_next, m
WORD, WORD_DTYPE = 16, np.dtype("<u2")  # bits of ``continues`` per number
ENCODED_AT_ONCE = 512  # samples
NAME, SIZE, CHECKSUM = slice(0, 12), slice(124, 135), slice(148, 154)  # digits in a tar header
# A ustar header (POSIX.1-1988) without these digits: mode 0644, owner 0, time 0. The checksum counts its own field as
# spaces.
TAR_HEADER = np.frombuffer(
    (bytes(12) + b".npy" + bytes(84) + b"0000644\0" + 2 * b"0000000\0" + bytes(11) + b"\0" + 11 * b"0" + b"\0")
    + (8 * b" " + b"0" + bytes(100) + b"ustar\00000" + bytes(TAR_BLOCK_BYTES - 265)),
    np.uint8,
)


class Column(IntEnum):
    """The columns of an index: offset and size of a member's data in the tar, in bytes; its number of tokens,
    control tokens included; its number of masked positions; and the zlib.crc32 of the data."""

    OFFSET = 0
    BYTES = 1
    TOKENS = 2
    MASKED = 3
    CRC32 = 4


@dataclass(frozen=True)
class Sample:
    """A pair, or one segment, with its static mask. The labels are ``ids[positions]``."""

    ids: NDArray[np.int32]  # [n] unmasked: [CLS] A [SEP] B [SEP], or [CLS] A [SEP]
    split: int  # length of [CLS] A [SEP]
    is_next: int  # 1: B follows A; 0: B is from another document, or swapped with A; NO_PAIR: there is no B
    positions: NDArray[np.int32]  # [m] ascending
    replacements: NDArray[np.int32]  # [m] ids at these positions in the masked input
    continues: NDArray[np.bool_]  # [n] whether a token continues the word of the one before it


@dataclass(frozen=True)
class Samples:
    """B samples as columns, T tokens and P masked positions in all. Iteration yields each as a `Sample`."""

    lengths: NDArray[np.int64]  # [B] tokens
    counts: NDArray[np.int64]  # [B] masked positions
    splits: NDArray[np.int64]  # [B]
    is_next: NDArray[np.int64]  # [B]
    ids: NDArray[np.int32]  # [T]
    positions: NDArray[np.int32]  # [P] from the start of the sample
    replacements: NDArray[np.int32]  # [P]
    continues: NDArray[np.bool_]  # [T]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: slice) -> Samples:
        """Consecutive samples, without copying them."""
        start, end, _ = rows.indices(len(self))
        n, m = (slice(sizes[:start].sum(), sizes[:end].sum()) for sizes in (self.lengths, self.counts))
        return Samples(
            self.lengths[rows],
            self.counts[rows],
            self.splits[rows],
            self.is_next[rows],
            self.ids[n],
            self.positions[m],
            self.replacements[m],
            self.continues[n],
        )

    def __iter__(self) -> Iterator[Sample]:
        token = mask = 0
        columns = (column.tolist() for column in (self.lengths, self.counts, self.splits, self.is_next))
        for length, count, split, is_next in zip(*columns, strict=True):
            n, m = slice(token, token + length), slice(mask, mask + count)
            yield Sample(self.ids[n], split, is_next, self.positions[m], self.replacements[m], self.continues[n])
            token, mask = n.stop, m.stop


def join(samples: Sequence[Sample]) -> Samples:
    """One or more samples as columns."""
    numbers = np.array([(len(s.ids), len(s.positions), s.split, s.is_next) for s in samples]).T.copy()
    arrays = zip(*((s.ids, s.positions, s.replacements, s.continues) for s in samples), strict=True)
    return Samples(*numbers, *map(np.concatenate, arrays))


class NoSample(DataError):
    """A member that is not a sample: the one at ``place`` among those decoded together."""

    def __init__(self, problem: str, place: int = 0) -> None:
        super().__init__(problem)  # its only argument, so that it can be sent between processes
        self.place = place


def shard_name(number: int) -> str:
    """The name of a shard, without suffix."""
    return f"{SHARD_PREFIX}{number:05d}"


def tar_path(folder: Path, name: str) -> Path:
    """The path of the tar of shard ``name``."""
    return folder / f"{name}.tar"


def index_path(folder: Path, name: str) -> Path:
    """The path of the index of shard ``name``."""
    return folder / f"{name}.idx.npy"


def index_limit(size: int) -> int:
    """The maximum bytes of the index of a tar of ``size`` bytes: a sample takes at least two blocks in the tar."""
    return HEADER_BYTES + size // (2 * TAR_BLOCK_BYTES) * 8 * len(Column)


def decode_samples(members: Sequence[bytes]) -> Samples:
    """Decodes members of one type. Raises NoSample if one is not a sample; the CRC32s in the index verify the rest."""
    dtype = _dtype_of(members[0]) if members else WORD_DTYPE
    for place, member in enumerate(members):
        size, rest = divmod(len(member) - HEADER_BYTES, dtype.itemsize)
        if rest or not member.startswith(npy_header(dtype.str, size)):
            _dtype_of(member, place)  # raises if it has none
            raise NoSample(f"no sample: {len(member)} bytes do not fit its .npy header", place)
    numbers = np.frombuffer(b"".join([member[HEADER_BYTES:] for member in members]), dtype)
    sizes = np.array([len(member) for member in members], np.int64) - HEADER_BYTES
    return _unpack(numbers, sizes // dtype.itemsize)


def samples_of(arrays: Sequence[NDArray[Any]]) -> Samples:
    """The samples in the arrays of one or more members. Raises NoSample if one of the arrays is none."""
    for place, array in enumerate(arrays):
        if array.ndim != 1 or array.dtype not in DTYPES.values():
            raise NoSample(f"no sample: an array of {array.dtype.str} and shape {array.shape}", place)
    return _unpack(np.concatenate(arrays), np.array([len(array) for array in arrays]))


def _unpack(numbers: NDArray[Any], sizes: NDArray[np.int64]) -> Samples:
    """The samples whose arrays, of ``sizes`` numbers, [B], lie end to end."""
    if len(short := np.flatnonzero(sizes < NUMBERS)):
        place = int(short[0])
        raise NoSample(f"no sample: an array of {numbers.dtype.str} and shape ({sizes[place]},)", place)
    first = np.cumsum(sizes) - sizes
    n, split, is_next, m = numbers[first + np.arange(NUMBERS)[:, None]].astype(np.int64)  # (B,) each
    words = -(-n // WORD)
    if len(wrong := np.flatnonzero((sizes != NUMBERS + n + 2 * m + words) | ~_paired(n, split, is_next))):
        place = int(wrong[0])
        raise NoSample(
            f"no sample: {sizes[place]} numbers for {n[place]} tokens and {m[place]} masked positions", place
        )
    field = _fields(NUMBERS, n, m, m, words)
    ids, positions, replacements = (numbers[field == i].astype(np.int32) for i in (1, 2, 3))
    bits = np.unpackbits(numbers[field == 4].astype(WORD_DTYPE).view(np.uint8), bitorder="little")
    continues = bits[_fields(n, -n % WORD) == 0].view(np.bool_)
    return Samples(n, m, split, is_next, ids, positions, replacements, continues)


def decode_sample(member: bytes | memoryview) -> Sample:
    """Decodes one member, as `decode_samples` does."""
    [sample] = decode_samples([bytes(member)])
    return sample


def write_shard(folder: Path, name: str, first: int, samples: Iterable[Sample], dtype: DTypeLike) -> None:
    """Writes the samples, numbered from ``first``, then renames the index and finally the tar to their final names.

    ``dtype`` is <u2 or <u4; there is at least one sample.
    """
    rest, number, offset, rows = iter(samples), first, 0, []
    with replacing(tar_path(folder, name)) as tar:
        while block := list(islice(rest, ENCODED_AT_ONCE)):
            data, index = _encode(join(block), number, np.dtype(dtype))
            index[:, Column.OFFSET] += offset
            tar.write(data)
            rows.append(index)
            number, offset = number + len(block), offset + len(data)
        tar.write(bytes(ARCHIVE_END))
        with replacing(index_path(folder, name)) as file:
            np.save(file, np.concatenate(rows), allow_pickle=False)


def read_shard(folder: Path, name: str, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]:
    """Reads a whole shard and verifies every byte of its tar.

    Args:
        start: the number of its first sample.
    Returns:
        The index; is_next, int64[samples]; and the ids of all samples, concatenated.
    Raises:
        DataError, with the shard's name, for a file that is missing, truncated or damaged.
    """
    index = read_index(index_path(folder, name))
    path = tar_path(folder, name)
    offset, size, tokens, masked, _ = index.T
    room = TAR_BLOCK_BYTES + size + -size % TAR_BLOCK_BYTES  # (samples,) bytes of each member with its header
    if not np.array_equal(offset, np.cumsum(room) - room + TAR_BLOCK_BYTES):
        raise DataError(f"{path}: its index does not describe a shard")
    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        if shortage(error):
            raise
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) != room.sum() + ARCHIVE_END:
        raise DataError(f"{path}: {len(data)} bytes, its index describes {room.sum() + ARCHIVE_END}")
    for row, (place, length, _, _, crc) in enumerate(index.tolist()):
        if zlib.crc32(data[place : place + length]) != crc:
            raise DataError(f"{path}: sample {row} is damaged")
    numbers = np.frombuffer(data, _dtype_of(data[TAR_BLOCK_BYTES : TAR_BLOCK_BYTES + HEADER_BYTES]))
    first = (offset + HEADER_BYTES) // numbers.itemsize  # (samples,) index of each sample's first number
    n, split, is_next, m = numbers[first[:, None] + np.arange(NUMBERS)].astype(np.int64).T
    words = -(-n // WORD)
    fits = (n == tokens) & (m == masked) & (size == HEADER_BYTES + (NUMBERS + n + 2 * m + words) * numbers.itemsize)
    wrong = np.flatnonzero(~(fits & _paired(n, split, is_next)))
    if len(wrong):
        raise DataError(f"{path}: sample {wrong[0]} is not the one in the index")
    last = numbers[first + NUMBERS + n + 2 * m + words - 1].astype(np.int64)  # last word of ``continues``
    wrong = np.flatnonzero(last >> (n - WORD * (words - 1)))
    if len(wrong):
        raise DataError(f"{path}: sample {wrong[0]} marks tokens that it does not have")
    _require_packed(data, index, start, path)
    before = (TAR_BLOCK_BYTES + HEADER_BYTES) // numbers.itemsize + NUMBERS
    field = _fields(before, n, room // numbers.itemsize - before - n)
    return index, is_next, numbers[: len(field)][field == 1]


def read_index(path: Path, sha256: str | None = None) -> NDArray[np.int64]:
    """The index of a shard, int64[samples, 5]. ``sha256``: the one in the manifest, if there is a manifest yet.

    Raises DataError if the file is missing, has another sha256, or is not an index.
    """
    index = read_integers(path, len(Column), sha256=sha256, what="index")
    if not len(index):
        raise DataError(f"{path}: no index: it is empty")
    return index


def _require_packed(data: memoryview, index: NDArray[np.int64], start: int, path: Path) -> None:
    """Raises DataError if what is around the samples, numbered from ``start``, is not as `write_shard` writes it."""
    blocks = np.frombuffer(data, np.uint8).reshape(-1, TAR_BLOCK_BYTES)
    for row in range(0, len(index), ENCODED_AT_ONCE):
        offset, size = index[row : row + ENCODED_AT_ONCE, [Column.OFFSET, Column.BYTES]].T
        headers = _tar_headers(start + row + np.arange(len(size)), size)
        padding = np.arange(TAR_BLOCK_BYTES) > (size[:, None] - 1) % TAR_BLOCK_BYTES
        strange = blocks[offset // TAR_BLOCK_BYTES - 1] != headers
        strange |= padding & (blocks[(offset + size - 1) // TAR_BLOCK_BYTES] != 0)
        wrong = row + np.flatnonzero(strange.any(axis=1))
        if len(wrong):
            raise DataError(f"{path}: the tar header of sample {wrong[0]}, or what follows the sample, is damaged")
    if any(data[-ARCHIVE_END:]):
        raise DataError(f"{path}: the end of the tar is damaged")


def _encode(samples: Samples, number: int, dtype: np.dtype[Any]) -> tuple[memoryview, NDArray[np.int64]]:
    """The members of the samples numbered from ``number``, as laid out in a tar, and their index."""
    n, m = samples.lengths, samples.counts
    words = -(-n // WORD)
    count = NUMBERS + n + 2 * m + words  # (B,) count of numbers in each sample
    size = HEADER_BYTES + count * dtype.itemsize
    room = TAR_BLOCK_BYTES + size + -size % TAR_BLOCK_BYTES
    offset = np.cumsum(room) - room + TAR_BLOCK_BYTES

    data = np.zeros(room.sum(), np.uint8)
    blocks = data.reshape(-1, TAR_BLOCK_BYTES)
    blocks[offset // TAR_BLOCK_BYTES - 1] = _tar_headers(number + np.arange(len(samples)), size)
    counts, which = np.unique(count, return_inverse=True)
    headers = np.frombuffer(b"".join(npy_header(dtype.str, c) for c in counts.tolist()), np.uint8)
    blocks[offset // TAR_BLOCK_BYTES, :HEADER_BYTES] = headers.reshape(-1, HEADER_BYTES)[which]

    bits = np.zeros(WORD * words.sum(), np.bool_)
    bits[_fields(n, -n % WORD) == 0] = samples.continues
    before = (TAR_BLOCK_BYTES + HEADER_BYTES) // dtype.itemsize
    fields = (
        np.stack([n, samples.splits, samples.is_next, m], axis=1).ravel(),
        samples.ids,
        samples.positions,
        samples.replacements,
        np.packbits(bits, bitorder="little").view(WORD_DTYPE),
    )
    numbers = data.view(dtype)
    field = _fields(before, NUMBERS, n, m, m, words, room // dtype.itemsize - before - count)
    for i, values in enumerate(fields, 1):
        numbers[field == i] = values

    view = data.data
    crc = [zlib.crc32(view[a:b]) for a, b in zip(offset.tolist(), (offset + size).tolist(), strict=True)]
    return view, np.stack([offset, size, n, m, np.array(crc)], axis=1)


def _paired(n: NDArray[np.int64], split: NDArray[np.int64], is_next: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether the length, split and label of each sample go together, bool[B]."""
    single = is_next == NO_PAIR
    paired: NDArray[np.bool_] = (split > 0) & (split <= n) & (is_next <= NO_PAIR) & ((split == n) == single)
    return paired


def _fields(*counts: ArrayLike) -> NDArray[np.uint8]:
    """The field of each number in rows of several fields, laid end to end; ``counts``, [B], are the numbers of each."""
    table = np.stack(np.broadcast_arrays(*counts), axis=1)  # (B, fields)
    row = np.arange(len(counts), dtype=np.uint8)
    return np.repeat(np.tile(row, len(table)), table.ravel())


def _dtype_of(member: bytes | memoryview, place: int = 0) -> np.dtype[Any]:
    dtype = DTYPES.get(bytes(member[DESCR]))
    if dtype is None:
        raise NoSample("no sample: it does not start with the .npy header of one", place)
    return dtype


def _tar_headers(numbers: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The tar headers of the samples ``numbers``, uint8[B, TAR_BLOCK_BYTES]."""
    headers = np.tile(TAR_HEADER, (len(numbers), 1))
    checksums = np.full(len(numbers), TAR_HEADER.sum(dtype=np.int64))
    for place, values, base in ((NAME, numbers, 10), (SIZE, sizes, 8)):
        digits = _digits(values, base, place.stop - place.start)
        headers[:, place] = digits
        checksums += digits.sum(axis=1)
    headers[:, CHECKSUM] = _digits(checksums, 8, CHECKSUM.stop - CHECKSUM.start)
    headers[:, CHECKSUM.stop] = 0
    return headers


def _digits(values: NDArray[np.int64], base: int, width: int) -> NDArray[np.int64]:
    """The digits of each value as ASCII, [B, width]."""
    digits: NDArray[np.int64] = values[:, None] // base ** np.arange(width)[::-1] % base + ord("0")
    return digits
