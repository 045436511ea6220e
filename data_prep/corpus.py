"""Text files to paragraphs, as a stream.

``.txt`` holds one paragraph or sentence a line and a blank line between documents; ``.jsonl`` holds one
document a line, in the field ``text``, with a blank line between paragraphs. Either may be compressed with
gzip, bzip2 or xz. Text is UTF-8 and is never repaired: a bad byte stops the run with its file and line.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from data_prep.errors import DataError

COMPRESSED = (".gz", ".bz2", ".xz")
FORMATS = (".txt", ".jsonl")
CHUNK_CHARACTERS = 1 << 18  # what a worker gets at once


@dataclass(frozen=True)
class Source:
    """A text file. The name is what the manifest says: the path below the given input, not the machine's."""

    path: Path
    name: str

    @property
    def format(self) -> str:
        """``.txt`` or ``.jsonl``."""
        return _format(self.path)


@dataclass(frozen=True)
class Chunk:
    """Paragraphs of one file: (number of the document in the corpus, text)."""

    source: int
    paragraphs: list[tuple[int, str]]


def find_sources(inputs: Iterable[Path]) -> list[Source]:
    """The text files among and below ``inputs``, in the order given and sorted inside a folder.

    Raises DataError for a path that does not exist, is no text file, or holds none.
    """
    sources: list[Source] = []
    for given in inputs:
        if not given.exists():
            raise DataError(f"input {given} does not exist")
        if given.is_dir():
            found = sorted(path.relative_to(given).as_posix() for path in given.rglob("*") if _is_text(path))
            sources += [Source(given / name, name) for name in found]
        elif _is_text(given):
            sources.append(Source(given, given.name))
        else:
            raise DataError(f"input {given} is no text: wanted .txt or .jsonl, also with .gz, .bz2 or .xz")
    if not sources:
        raise DataError(f"no text files in {', '.join(map(str, inputs))}: wanted .txt or .jsonl")
    return sources


def parse_where(condition: str | None) -> tuple[str, str] | None:
    """``field=value`` of the command line."""
    if condition is None:
        return None
    field, equals, value = condition.partition("=")
    if not field or not equals:
        raise DataError(f"--where {condition}: wanted field=value, such as split=train")
    return field, value


def read_chunks(sources: list[Source], where: tuple[str, str] | None) -> Iterator[Chunk]:
    """The corpus in order, cut between paragraphs into chunks that do not depend on who will work on them."""
    document = 0
    for number, source in enumerate(sources):
        paragraphs: list[tuple[int, str]] = []
        characters = 0
        for first, text in read_paragraphs(source, where):
            document += first
            paragraphs.append((document, text))
            characters += len(text)
            if characters >= CHUNK_CHARACTERS:
                yield Chunk(number, paragraphs)
                paragraphs, characters = [], 0
        if paragraphs:
            yield Chunk(number, paragraphs)


def read_paragraphs(source: Source, where: tuple[str, str] | None) -> Iterator[tuple[bool, str]]:
    """(does a document start here, text) for each paragraph that is not blank.

    Raises DataError with file and line for bad UTF-8, bad JSON, or a truncated or damaged compressed file.
    """
    if source.format == ".txt":
        if where is not None:
            raise DataError(f"--where selects on a field of .jsonl records, and {source.path} is plain text")
        return _txt_paragraphs(source.path)
    return _jsonl_paragraphs(source.path, where)


def _txt_paragraphs(path: Path) -> Iterator[tuple[bool, str]]:
    first = True
    for _, line in _lines(path):
        text = line.strip()
        if text:
            yield first, text
        first = not text


def _jsonl_paragraphs(path: Path, where: tuple[str, str] | None) -> Iterator[tuple[bool, str]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        record = _record(line, f"{path}, line {number}")
        if where is not None and str(record.get(where[0])) != where[1]:
            continue
        first = True
        for paragraph in _split_paragraphs(record["text"]):
            yield first, paragraph
            first = False


def _record(line: str, place: str) -> dict[str, str]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise DataError(f'{place}: wanted an object with a string field "text"')
    try:
        record["text"].encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, UTF-8 can't
        raise DataError(f"{place}: not Unicode text ({error.reason} at character {error.start})") from None
    return record


def _split_paragraphs(text: str) -> Iterator[str]:
    """Runs of lines that are not blank; the lines of a run are one paragraph."""
    run: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.strip():
            run.append(line.strip())
        elif run:
            yield " ".join(run)
            run = []


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(
            f"{path}, line {number}: not UTF-8 (byte 0x{byte:02X} at column {error.start + 1}); "
            "convert the file to UTF-8"
        ) from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read after line {number} ({error})") from None


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path))
    if path.suffix == ".bz2":
        return bz2.open(path)
    return lzma.open(path) if path.suffix == ".xz" else path.open("rb")


def _format(path: Path) -> str:
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix


def _is_text(path: Path) -> bool:
    return path.is_file() and _format(path) in FORMATS and not path.name.startswith(".")
