"""Reads lines of a file that may be compressed (gzip, bzip2, xz, zstd), in bounded memory for lines of any length."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import IO, Any, BinaryIO, NamedTuple, cast

import zstandard

from data_prep.errors import DataError, shortage

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zstd")
# Errors from reading a damaged file, alone or in a tar.
DAMAGE = (OSError, EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError, tarfile.TarError)
REMEDY = "fetch or compress it again, or move it out of the input"
NEAR = 1 << 12  # bytes before the length limit in which to look for a space to cut at
BLOCK_BYTES = 1 << 18
READ_BYTES = 1 << 16  # read at once from the disk
HEAD_BYTES = 1 << 16
ZSTD_BYTES = 1 << 10  # unpacked at once: they can expand to 11 MB
ZSTD_WINDOW = 1 << 31  # bytes: the window that `zstd --ultra --long=31` needs


class LineBlock(NamedTuple):
    """Whole lines separated by LF, or a piece of a line that is too long, or the rest of that line and whole lines."""

    number: int  # number of the first line, from 1
    column: int  # bytes of the first line before this block
    data: bytes  # without the LF at its end
    ends: bool  # whether the last line ends here


def read_blocks(disk: IO[bytes], path: PurePath, longest: int) -> Iterator[LineBlock]:
    """The lines of the file ``disk`` at ``path``, without a byte order mark, in blocks for speed.

    A line of more than ``longest`` bytes comes in pieces, cut before a nearby space if possible and never within a
    character. Memory is a small multiple of BLOCK_BYTES, or of the longest line if that is larger. The position of
    ``disk`` shows how much of the file has been read.

    Raises DataError for a compressed file that is damaged, or truncated in the middle of a member or frame.
    """
    number, column, rest = 1, 0, b""
    block_bytes = min(BLOCK_BYTES, longest)  # so that only the first line of a block can be too long
    try:
        file = unpack(disk, path.suffix.lower())
        rest = file.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8)
        while more := file.read(max(block_bytes, len(rest))):  # avoids copying a long line for each block
            rest += more
            while len(rest) > longest and rest.find(b"\n", 0, longest + 1) < 0:
                end = _cut_before(rest, longest)
                yield LineBlock(number, column, rest[:end], False)
                column, rest = column + end, rest[end:]
            end = rest.rfind(b"\n")
            if end >= 0:
                yield LineBlock(number, column, rest[:end], True)
                number, column, rest = number + rest.count(b"\n"), 0, rest[end + 1 :]
    except DAMAGE as error:
        if shortage(error):
            raise
        raise DataError(f"{path}: cannot be read after line {number - 1} ({error}); {REMEDY}") from None
    if rest:
        yield LineBlock(number, column, rest.removesuffix(b"\n"), True)  # the whole file may be shorter than a block


def read_whole(disk: IO[bytes], path: PurePath, longest: int) -> bytes:
    """The content of a small file, without a byte order mark.

    Raises DataError if it has more than ``longest`` bytes, or as `read_blocks` does.
    """
    try:
        data = unpack(disk, path.suffix.lower()).read(longest + 1)
    except DAMAGE as error:
        if shortage(error):
            raise
        raise DataError(f"{path}: cannot be read ({error}); {REMEDY}") from None
    if len(data) > longest:
        raise DataError(f"{path}: longer than {longest:,} bytes; split it")
    return data.removeprefix(codecs.BOM_UTF8)


def read_head(path: Path) -> LineBlock | None:
    """The first lines of a file, at most HEAD_BYTES, or a piece of its first line; None if the file is empty."""
    with path.open("rb", buffering=0) as disk:
        return next(read_blocks(disk, path, HEAD_BYTES), None)


def _cut_before(data: bytes, end: int) -> int:
    """The place to cut, at most ``end``: before a space, or else before the first byte of a character."""
    space = data.rfind(b" ", end - NEAR, end)
    if space > 0:
        return space
    starts = (i for i in range(end, max(0, end - 4), -1) if data[i] & 0xC0 != 0x80)
    return next(starts, end)  # if none of four bytes starts a character, it is not UTF-8


def unpack(disk: IO[bytes], suffix: str) -> BinaryIO:
    """The content of a file that was just opened, decompressed as ``suffix`` says."""
    file = io.BufferedReader(cast(io.RawIOBase, disk), READ_BYTES)
    if suffix in (*COMPRESSED, ".tgz") and not file.peek(1):
        raise EOFError("it is empty, which no compressed file is")
    match suffix:
        case ".gz" | ".tgz":
            return cast(BinaryIO, gzip.GzipFile(fileobj=file))
        case ".bz2":
            return cast(BinaryIO, bz2.BZ2File(file))
        case ".xz":
            return cast(BinaryIO, lzma.LZMAFile(file))
        case ".zst" | ".zstd":
            return io.BufferedReader(_ZstdFile(file), READ_BYTES)
    return file


class _ZstdFile(io.RawIOBase):
    """Decompresses zstd frames. The reader of `zstandard` won't do: it accepts a truncated file as complete."""

    def __init__(self, disk: BinaryIO) -> None:
        self._disk = disk
        self._frame: Any = None  # decompressor of the current frame
        self._packed = b""
        self._unpacked = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked:
            self._packed = self._packed or self._disk.read(ZSTD_BYTES)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a zstd frame")
                return 0
            self._unpack()
        count = min(len(buffer), len(self._unpacked))
        buffer[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        return count

    def _unpack(self) -> None:
        if self._frame is None:
            self._frame = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj()
        self._unpacked = memoryview(self._frame.decompress(self._packed))
        self._packed = b""
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data, None
