"""Reads WebDataset tars as a stream of paragraphs, in the order of the tar. Nothing is extracted.

Members that follow one another and whose names are equal up to the first dot form a sample. In a sample,

- each .txt is a document; blank lines do not end it;
- a .json is one record, with its document in a field; next to a .txt it is metadata, which only --where reads;
- each line of a .jsonl is a record with a document.

Each of them may be compressed. Members of any other kind, hidden members and links are left out and counted.

The stock library iterates tars with `tarfile`, as this module does, and brings torch. Both take a damaged header, or
a missing end, for the end of the tar, so that the members after it are lost silently; here that is an error.
"""

from __future__ import annotations

import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from io import BytesIO, FileIO, RawIOBase
from itertools import groupby
from pathlib import Path, PurePath
from typing import IO, Any, BinaryIO, NamedTuple, cast

from data_prep.errors import DataError, shortage
from data_prep.formats import LONGEST_RECORD, Paragraph, Reading, is_wanted, read_record, read_records, read_text
from data_prep.lines import DAMAGE, unpack
from data_prep.sources import endings, format_of

MOST_NAMES = 10_000  # of a sample, among which two that are equal are found
LONGEST_NAME = 200  # characters of a member's name in an error line
SKIPPED_BYTES = 1 << 16  # read at once after the end
SMALL_BYTES = 1 << 16  # a member of this size at most is read at once, for speed
HOLDING_BYTES = 1 << 10  # memory of a member that is kept, besides its content
LARGEST_HEADER = 1 << 20  # bytes of a pax header or a GNU long name, which are read in one piece
LARGE_HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
REMEDY = "fetch or write it again, or move it out of the input"


class Member(NamedTuple):
    """A regular file in a tar. ``file`` can only be read before the next member is."""

    tar: Path
    name: str  # fit to print
    key: str  # of the sample
    format: str | None  # text, json or jsonl; None if it is not text
    size: int  # bytes
    file: IO[bytes]

    @property
    def place(self) -> PurePath:
        """The tar and the member, for error lines; it ends as the member's name does."""
        return PurePath(f"{self.tar}: member {self.name}")


class Held(NamedTuple):
    """A member that is kept in memory until its sample is complete."""

    place: PurePath
    data: bytes


def read_tar(disk: FileIO, path: Path, reading: Reading, left: Counter[str]) -> Iterator[Paragraph]:
    """The paragraphs of all samples; see `corpus.read_paragraphs`.

    ``left`` also counts "members" that are left out, and .json members that are the "metadata" of a text. Memory is
    bounded by LONGEST_RECORD, as for a line of .jsonl. Raises DataError, with the tar and the member.
    """
    for _, members in groupby(_read_members(disk, path, left), lambda member: member.key):
        yield from _read_sample(members, reading, left)


def _read_sample(members: Iterable[Member], reading: Reading, left: Counter[str]) -> Iterator[Paragraph]:
    texts, records = list[Held](), list[Held]()
    has_text, held = False, 0
    for member in _refuse_twins(members):
        match member.format:
            case "jsonl":
                yield from read_records(member.file, member.place, reading, left)
            case "text" if reading.where is None:
                yield from read_text(member.file, member.place, reading, left, whole=True)
                has_text = True
                if records:  # they came before the text
                    left["metadata"] += len(records)
                    records.clear()
                    held = 0
            case "json" if has_text:
                left["metadata"] += 1
            case "text" | "json":
                held += member.size + HOLDING_BYTES
                (texts if member.format == "text" else records).append(_hold(member, held))
            case _:
                left["members"] += 1
    if texts:
        yield from _read_wanted(texts, records, reading, left)
    else:
        for record in records:
            yield from read_record(BytesIO(record.data), record.place, reading, left)


def _refuse_twins(members: Iterable[Member]) -> Iterator[Member]:
    """The members of a sample. Raises DataError for two of one name: the later one may replace the earlier."""
    names = set[str]()
    for member in members:
        if member.name in names:
            raise DataError(f"{member.place}: its sample has two members of this name; write the tar again")
        if len(names) == MOST_NAMES:
            names.clear()
        names.add(member.name)
        yield member


def _read_wanted(texts: list[Held], records: list[Held], reading: Reading, left: Counter[str]) -> Iterator[Paragraph]:
    """The texts of a sample if its metadata has the field that --where selects on."""
    if not records:
        raise DataError(f"{texts[0].place}: --where selects on metadata, and this text has no .json with it")
    left["metadata"] += len(records)
    if any([is_wanted(BytesIO(record.data), record.place, reading) for record in records]):
        for text in texts:
            yield from read_text(BytesIO(text.data), text.place, reading, left, whole=True)
    else:
        left["unwanted"] += len(texts)


def _hold(member: Member, held: int) -> Held:
    """Reads a member into memory. Raises DataError if its sample, of ``held`` bytes so far, is too large for that."""
    if held > LONGEST_RECORD:
        raise DataError(
            f"{member.place}: its sample needs more than {LONGEST_RECORD:,} bytes of memory; a sample's name ends at "
            "the first dot: give each document its own, or write JSON lines"
        )
    try:
        return Held(member.place, member.file.read())
    except DAMAGE as error:
        if shortage(error):
            raise
        raise DataError(f"{member.place}: cannot be read ({error}); {REMEDY}") from None


def _read_members(disk: FileIO, path: Path, left: Counter[str]) -> Iterator[Member]:
    """The members that belong to a sample. Counts the others in ``left``."""
    before = "as a tar"
    try:
        tar = tarfile.open(fileobj=unpack(disk, path.suffix.lower()), mode="r|", tarinfo=_Header, encoding="utf-8")
        stream = cast(BinaryIO, tar.fileobj)
        while (header := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # or it would keep all headers
            name = _shown(header.name)
            *folders, base = header.name.split("/")
            stem, dot, ending = base.partition(".")
            if stem and dot and header.isreg() and not header.issparse() and not _is_hidden(folders):
                content = _Content(stream, header.size)
                file = cast(IO[bytes], BytesIO(content.read(header.size)) if header.size <= SMALL_BYTES else content)
                yield Member(path, name, "/".join((*folders, stem)), _format(ending), header.size, file)
            elif not header.isdir():
                left["members"] += 1
            before = f"after member {name}"
        while more := stream.read(SKIPPED_BYTES):
            if more.strip(b"\0"):
                raise tarfile.ReadError("more data follows its end: tars that were joined have to be split")
    except (*DAMAGE, RecursionError, ValueError) as error:
        if shortage(error):
            raise
        raise DataError(f"{path}: cannot be read {before} ({error}); {REMEDY}") from None


class _Content(RawIOBase):
    """The content of a member: the next ``size`` bytes of the tar. `tarfile`'s own file needs a tar that can seek."""

    def __init__(self, tar: BinaryIO, size: int) -> None:
        self._tar, self._rest = tar, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._rest)
        data = self._tar.read(size)
        if len(data) < size:
            raise tarfile.ReadError("unexpected end of data")
        buffer[: len(data)] = data
        self._rest -= len(data)
        return len(data)


class _Header(tarfile.TarInfo):
    """The header of a member. One that is damaged or missing is an error; `tarfile` takes it for the end of the tar."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        if not buf:
            raise tarfile.ReadError("its end is missing: it was truncated")
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):
                raise  # the mark of the end
            raise tarfile.ReadError(f"damaged header: {error}") from None
        if header.size < 0 or (header.size > LARGEST_HEADER and header.type in LARGE_HEADERS):
            raise tarfile.ReadError(f"damaged header: {header.size:,} bytes")
        return header


@lru_cache(256)
def _format(ending: str) -> str | None:
    """The format of a member whose name, after its first dot, reads ``ending``."""
    name = f"a.{ending}"
    known = format_of(name)
    if endings(name)[0] == ".json":
        return "json"
    return known if known in ("text", "jsonl") else None


def _is_hidden(folders: list[str]) -> bool:
    return any(name.startswith(".") and name not in (".", "..") for name in folders)


def _shown(name: str) -> str:
    """The end of a member's name, fit to print."""
    end = name[-LONGEST_NAME:]
    return end if end.isprintable() else "".join(c if c.isprintable() else "?" for c in end)
