"""Text files to paragraphs, as a stream in bounded memory.

``.txt`` holds one paragraph or sentence a line and a blank line between documents. ``.jsonl`` holds one document a
line, in a field of an object, with a blank line between paragraphs; ``.parquet`` holds one a row, in a column. The
first two may be compressed with gzip, bzip2, xz or zstd. Memory holds a line of .jsonl, and a page of .parquet, as
a whole; a line of .txt is cut instead.

A line ends at LF or CRLF and nowhere else: a lone CR, VT, FF, NEL, U+2028 and their like are white space within it.
Text is UTF-8. What is not is an error with its place ("strict"), or becomes U+FFFD and is counted ("replace").
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.encoding import flaw, read_utf8
from data_prep.errors import DataError
from data_prep.lines import COMPRESSED, NEAR, Block, read_blocks

ENDINGS = (*(text + packed for text in (".txt", ".jsonl") for packed in ("", *COMPRESSED)), ".parquet")
WANTED = "wanted .txt or .jsonl, plain or with .gz, .bz2, .xz or .zst, or .parquet"
CHUNK_CHARACTERS = 1 << 18  # what a worker gets at once
LONGEST_PARAGRAPH = 1 << 20  # bytes of a line of .txt, characters of any other paragraph; a longer one is cut
LONGEST_RECORD = 1 << 27  # bytes of a line of .jsonl: it has to be parsed in one piece
BATCH_BYTES, BATCH_ROWS = 1 << 22, 256  # of .parquet read at once: about so many bytes, at most so many rows
REPLACEMENT = "\ufffd"
HALF_PAIR = re.compile("[\ud800-\udfff]")  # JSON can spell half of a surrogate pair, UTF-8 can't
Where = tuple[str, str] | None  # (field, value) of the records to take


@dataclass(frozen=True)
class Source:
    """A text file. The name is what the manifest says: the path below the given input, not the machine's."""

    path: Path
    name: str


@dataclass(frozen=True)
class Reading:
    """How files are read."""

    where: Where = None  # the records of .jsonl and .parquet to take: all, or those with this field
    text_field: str = "text"  # of a record
    bad_bytes: str = "strict"  # or "replace"


class Paragraph(NamedTuple):
    """Text that is not blank, without the white space around it."""

    first: bool  # does a document start here
    text: str
    replaced: int  # U+FFFD put in for what is no UTF-8; those of a whole record stand at its first paragraph
    cut: int  # 1 if it is the continuation of a paragraph that was too long, else 0


@dataclass(frozen=True)
class Chunk:
    """Paragraphs of one file; only the last chunk of a corpus may have none."""

    source: int
    paragraphs: list[tuple[int, str]]  # number of the document in the corpus, counted from 1, and text
    read: int  # bytes on disk since the chunk before, of files without text between them too: all sum to the sizes
    replaced: int  # sum of the paragraphs'
    cut: int  # sum of the paragraphs'


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
        elif given.name.endswith(ENDINGS):
            sources.append(Source(given, given.name))
        else:
            raise DataError(f"input {given} is no text: {WANTED}")
    if not sources:
        raise DataError(f"no text files in {', '.join(map(str, inputs))}: {WANTED}")
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


def read_chunks(sources: list[Source], reading: Reading) -> Iterator[Chunk]:
    """The corpus in order, cut between paragraphs into chunks that do not depend on who will work on them."""
    document = untold = 0  # untold: bytes that no chunk has told of
    for number, source in enumerate(sources):
        with source.path.open("rb", buffering=0) as disk:
            size, told = os.fstat(disk.fileno()).st_size, 0
            paragraphs: list[tuple[int, str]] = []
            characters = replaced = cut = 0
            for first, text, replacements, cuts in _read(disk, source.path, reading):
                document += first
                paragraphs.append((document, text))
                characters += len(text)
                replaced += replacements
                cut += cuts
                if characters >= CHUNK_CHARACTERS:
                    untold, told = untold + disk.tell() - told, disk.tell()
                    yield Chunk(number, paragraphs, untold, replaced, cut)
                    paragraphs, untold, characters, replaced, cut = [], 0, 0, 0, 0
            untold += size - told
            if paragraphs:
                yield Chunk(number, paragraphs, untold, replaced, cut)
                untold = 0
    if untold:
        yield Chunk(len(sources) - 1, [], untold, 0, 0)


def read_paragraphs(source: Source, reading: Reading) -> Iterator[Paragraph]:
    """The paragraphs of a file, in order, none longer than LONGEST_PARAGRAPH.

    Raises DataError with file and line (or row) for what is no UTF-8 if ``reading`` is strict, no JSON, or without
    the text field; with the file for one that is damaged or cut off.
    """
    with source.path.open("rb", buffering=0) as disk:
        yield from _read(disk, source.path, reading)


def _read(disk: FileIO, path: Path, reading: Reading) -> Iterator[Paragraph]:
    """Moves ``disk``: its position says how much of the file has been read."""
    match _format(path):
        case ".parquet":
            return _read_rows(disk, path, reading)
        case ".jsonl":
            return _read_records(disk, path, reading)
    return _read_text(disk, path, reading)


def _read_text(disk: FileIO, path: Path, reading: Reading) -> Iterator[Paragraph]:
    first, written = True, False  # does a document start; had the line that a block goes on with any text
    for block in read_blocks(disk, path, LONGEST_PARAGRAPH):
        for line, replaced in _decode_lines(block, path, reading):
            text = line.strip()
            if text:
                yield Paragraph(first, text, replaced, int(written))
                first, written = False, not block.ends
            elif block.ends:
                first, written = first or not written, False


def _decode_lines(block: Block, path: Path, reading: Reading) -> Iterable[tuple[str, int]]:
    text = read_utf8(block.data)
    if text is not None:
        return zip(text.split("\n"), repeat(0))
    return [
        _decode(line, f"{path}, line {number}", reading, 0 if number > block.number else block.column)
        for number, line in enumerate(block.data.split(b"\n"), block.number)
    ]


def _read_records(disk: FileIO, path: Path, reading: Reading) -> Iterator[Paragraph]:
    for block in read_blocks(disk, path, LONGEST_RECORD):
        for number, line in enumerate(block.data.split(b"\n"), block.number):
            place = f"{path}, line {number}"
            if not block.ends:
                raise DataError(f"{place}: longer than {LONGEST_RECORD:,} bytes; a .jsonl holds one document a line")
            text, replaced = _text_of(line, place, reading)
            yield from _document(text, replaced, place, reading)


def _text_of(data: bytes, place: str, reading: Reading) -> tuple[str, int]:
    """Text and replacements of a line of JSON; no text if it is blank or not wanted."""
    line, replaced = _decode(data, place, reading)
    line = line.strip()
    if not line:
        return "", 0
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON ({str(error).replace('line 1 ', '')})") from None
    field = reading.text_field
    if isinstance(record, dict) and not _matches(record, reading.where):
        return "", 0
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        raise DataError(f'{place}: wanted an object with a string field "{field}"')
    return record[field], replaced


def _read_rows(disk: FileIO, path: Path, reading: Reading) -> Iterator[Paragraph]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"{path}: .parquet is read by pyarrow, which is not installed: pip install pyarrow") from None
    field, number, size = reading.text_field, 0, os.fstat(disk.fileno()).st_size
    try:
        with parquet.ParquetFile(path, buffer_size=BATCH_BYTES // 4, pre_buffer=False) as file:  # not whole columns
            names = file.schema_arrow.names
            if field not in names:
                raise DataError(f'{path}: no column "{field}"; it has {", ".join(names)}')
            others = [name for name in (reading.where or ())[:1] if name in names]
            rows = _rows_at_once(file.metadata)
            for batch in file.iter_batches(rows, columns=sorted({field, *others}), use_threads=False):
                try:
                    texts = batch.column(field).cast(pyarrow.large_binary()).to_pylist()
                except NotImplementedError:
                    kind = batch.schema.field(field).type
                    raise DataError(f'{path}: column "{field}" holds {kind}, wanted strings') from None
                for data, record in zip(texts, batch.select(others).to_pylist(), strict=True):
                    number += 1
                    if _matches(record, reading.where):
                        yield from _row(data, f"{path}, row {number}", reading)
                disk.seek(size * number // file.metadata.num_rows)  # pyarrow reads by a handle of its own
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read after row {number} ({' '.join(str(error).split())})") from None


def _rows_at_once(metadata: Any) -> int:
    size: int = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return max(1, min(BATCH_ROWS, BATCH_BYTES * int(metadata.num_rows) // max(1, size)))


def _row(data: bytes | None, place: str, reading: Reading) -> Iterator[Paragraph]:
    if data is None:
        raise DataError(f'{place}: column "{reading.text_field}" is null, wanted a string')
    text, replaced = _decode(data, place, reading)
    return _document(text, replaced, place, reading)


def _decode(data: bytes, place: str, reading: Reading, column: int = 0) -> tuple[str, int]:
    """Text, and how often U+FFFD stands in for what is no UTF-8 (as Python replaces it)."""
    good = read_utf8(data)
    if good is not None:
        return good, 0
    if reading.bad_bytes == "strict":
        remedy = "convert the file to UTF-8, or take --bad-bytes replace"
        raise DataError(f"{place}: {flaw(data, column)}; {remedy}")
    text = data.decode(errors="replace")
    return text, text.count(REPLACEMENT) - data.count(REPLACEMENT.encode())


def _matches(record: dict[str, Any], where: Where) -> bool:
    """Values are compared as JSON spells them, or else Python (a date); a field that is missing never matches."""
    if where is None:
        return True
    field, wanted = where
    value = record.get(field, ...)
    if value is ...:
        return False
    return (value if isinstance(value, str) else json.dumps(value, default=str).strip('"')) == wanted


def _document(text: str, replaced: int, place: str, reading: Reading) -> Iterator[Paragraph]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if reading.bad_bytes == "strict":
            raise DataError(
                f"{place}: not Unicode text ({error.reason} at character {error.start}); "
                "correct it, or take --bad-bytes replace"
            ) from None
        text, halves = HALF_PAIR.subn(REPLACEMENT, text)
        replaced += halves
    first = True
    for paragraph in _split_paragraphs(text):
        for cut, piece in enumerate(_pieces(paragraph) if len(paragraph) > LONGEST_PARAGRAPH else (paragraph,)):
            yield Paragraph(first, piece, replaced, min(cut, 1))
            first, replaced = False, 0


def _split_paragraphs(text: str) -> Iterator[str]:
    """Runs of lines that are not blank; the lines of a run are one paragraph."""
    run: list[str] = []
    for line in [*text.split("\n"), ""]:
        line = line.strip()
        if line:
            run.append(line)
        elif run:
            yield " ".join(run)
            run = []


def _pieces(paragraph: str) -> Iterator[str]:
    """Of at most LONGEST_PARAGRAPH characters, none blank."""
    while len(paragraph) > LONGEST_PARAGRAPH:
        space = paragraph.rfind(" ", LONGEST_PARAGRAPH - NEAR, LONGEST_PARAGRAPH)
        end = space if space > 0 else LONGEST_PARAGRAPH
        yield paragraph[:end].rstrip()
        paragraph = paragraph[end:].lstrip()
    yield paragraph


def _refuse_misfits(sources: list[Source], where: Where) -> None:
    times = Counter(source.path.resolve() for source in sources)
    for source in sources:
        if times[source.path.resolve()] > 1:
            raise DataError(f"input {source.path} is given twice: its text would be 'not next' to itself")
        if where is not None and _format(source.path) == ".txt":
            raise DataError(f"--where selects on a field of records, and {source.path} is plain text")
        if source.name.encode("utf-8", "replace").decode() != source.name:  # the manifest is UTF-8
            raise DataError(f"input {str(source.path)!a}: its name is not UTF-8; rename it")


def _format(path: Path) -> str:
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix


def _texts_below(folder: Path) -> Iterator[str]:
    for base, folders, files in os.walk(folder, onerror=_raise, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(base, name) for name in files if not name.startswith(".")):
            if path.name.endswith(ENDINGS):
                yield path.relative_to(folder).as_posix()


def _raise(error: OSError) -> None:
    raise error  # a folder that can't be listed would be left out in silence
