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
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from data_prep.errors import DataError

COMPRESSED = (".gz", ".bz2", ".xz")
FORMATS = (".txt", ".jsonl")
CHUNK_CHARACTERS = 1 << 18  # what a worker gets at once
Where = tuple[str, str] | None  # (field, value) of the .jsonl records to take


@dataclass(frozen=True)
class Source:
    """A text file. The name is what the manifest says: the path below the given input, not the machine's."""

    path: Path
    name: str


@dataclass(frozen=True)
class Chunk:
    """Paragraphs of one file: (number of the document in the corpus, text)."""

    source: int
    paragraphs: list[tuple[int, str]]


def find_sources(inputs: Iterable[Path], where: Where = None) -> list[Source]:
    """The text files among and below ``inputs``, in the order given and sorted inside a folder.

    Links are followed; hidden files and folders inside a folder are left out. Raises DataError for a path that
    does not exist, is no text file or holds none, for a file given twice, and for a .txt if there is ``where``.
    """
    sources: list[Source] = []
    for given in inputs:
        if not given.exists():
            raise DataError(f"input {given} does not exist: check --input")
        if given.is_dir():
            sources += [Source(given / name, name) for name in sorted(_texts_below(given))]
        elif _format(given) in FORMATS:
            sources.append(Source(given, given.name))
        else:
            raise DataError(f"input {given} is no text: wanted .txt or .jsonl, also with .gz, .bz2 or .xz")
    if not sources:
        raise DataError(f"no text files in {', '.join(map(str, inputs))}: wanted .txt or .jsonl")
    _refuse_misfits(sources, where)
    return sources


def parse_where(condition: str | None) -> Where:
    """``field=value`` of the command line."""
    if condition is None:
        return None
    field, equals, value = condition.partition("=")
    if not field or not equals:
        raise DataError(f"--where {condition}: wanted field=value, such as split=train")
    return field, value


def read_chunks(sources: list[Source], where: Where) -> Iterator[Chunk]:
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


def read_paragraphs(source: Source, where: Where) -> Iterator[tuple[bool, str]]:
    """(does a document start here, text) for each paragraph that is not blank.

    Raises DataError with file and line for bad UTF-8, bad JSON, or a truncated or damaged compressed file.
    """
    first = True
    if _format(source.path) == ".txt":
        for _, text in _lines(source.path):
            if text:
                yield first, text
            first = not text
        return
    for number, line in _lines(source.path):
        if line:
            record = _record(line, f"{source.path}, line {number}")
            paragraphs = _split_paragraphs(record["text"]) if _matches(record, where) else ()
            for i, paragraph in enumerate(paragraphs):
                yield i == 0, paragraph


def _refuse_misfits(sources: list[Source], where: Where) -> None:
    times = Counter(source.path.resolve() for source in sources)
    for source in sources:
        if times[source.path.resolve()] > 1:
            raise DataError(f"input {source.path} is given twice: its text would be 'not next' to itself")
        if where is not None and _format(source.path) == ".txt":
            raise DataError(f"--where selects on a field of .jsonl records, and {source.path} is plain text")
        if source.name.encode("utf-8", "replace").decode() != source.name:  # the manifest is UTF-8
            raise DataError(f"input {str(source.path)!a}: its name is not UTF-8; rename it")


def _record(line: str, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON ({str(error).replace('line 1 ', '')})") from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise DataError(f'{place}: wanted an object with a string field "text"')
    try:
        record["text"].encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, UTF-8 can't
        raise DataError(f"{place}: not Unicode text ({error.reason} at character {error.start})") from None
    return record


def _matches(record: dict[str, Any], where: Where) -> bool:
    """Numbers, true, false and null are compared as JSON spells them; a field that is missing never matches."""
    if where is None:
        return True
    field, wanted = where
    value = record.get(field, ...)
    return value is not ... and (value if isinstance(value, str) else json.dumps(value)) == wanted


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
    """(number, text without the white space around it) of each line."""
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
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


def _texts_below(folder: Path) -> Iterator[str]:
    for base, folders, files in os.walk(folder, onerror=_raise, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(base, name) for name in files if not name.startswith(".")):
            if _format(path) in FORMATS:
                yield path.relative_to(folder).as_posix()


def _raise(error: OSError) -> None:
    raise error  # a folder that can't be listed would be left out in silence
