"""Reads one text file as a stream of paragraphs, in bounded memory: each format in a function.

Plain text has one paragraph or sentence per line and a blank line between documents. JSON lines have one document
per line, in a field of an object, with a blank line between paragraphs; ``.parquet`` has one per row, in a column.
wikiextractor's output is either its articles, from <doc …> to </doc>, or JSON lines. All formats except .parquet may
be compressed with gzip, bzip2, xz or zstd. A line of JSON or a page of .parquet is held in memory as a whole; a long
line of plain text is cut instead.

A line ends at LF or CRLF and nowhere else: a lone CR, VT, FF, NEL or U+2028 is whitespace within the line. Text is
UTF-8. Other bytes are an error with their position ("strict"), or are replaced by U+FFFD and counted ("replace").
Records without text and records that are not wanted are left out and counted.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from itertools import repeat
from pathlib import Path, PurePath
from typing import IO, Any, NamedTuple

from data_prep.encoding import flaw, read_utf8
from data_prep.errors import DataError, shortage
from data_prep.json_text import parse_json
from data_prep.lines import NEAR, LineBlock, read_blocks, read_whole
from data_prep.sources import Where

LONGEST_PARAGRAPH = 1 << 20  # bytes of a line of .txt, characters of any other paragraph; a longer one is cut
LONGEST_RECORD = 1 << 27  # bytes of a line of .jsonl: it has to be parsed in one piece
BATCH_BYTES, BATCH_ROWS = 1 << 22, 256  # of .parquet read at once: about this many bytes, at most this many rows
ONE_LINE = "write one record per line"
ONE_RECORD = "in a tar, a .json is one record; name JSON lines .jsonl"
REPLACEMENT = "\ufffd"
HALF_PAIR = re.compile("[\ud800-\udfff]")  # JSON can encode half of a surrogate pair; UTF-8 can't
MARKUP = ("<doc ", "</doc>", "<DOC>", "<!DOCTYPE", "<html", "<mediawiki", "WARC/1.", '{"')  # starts of markup
MARKUP_STARTS = frozenset(mark[0] for mark in MARKUP)  # tested first: few lines have one
ARTICLE = re.compile(r'<doc(?: .*?(?:title="(?P<title>.*)")?)?>')
ENTITIES = {"&lt;": "<", "&gt;": ">", "&amp;": "&"}  # how wikiextractor escapes these characters
ENTITY = re.compile("|".join(ENTITIES))


@dataclass(frozen=True)
class Reading:
    """Options for reading the files."""

    where: Where = None  # which .jsonl and .parquet records to take: all, or those with this field
    text_field: str = "text"  # field of a record with the text
    bad_bytes: str = "strict"  # or "replace"
    format: str = "auto"  # for files whose extension does not determine it: one of `sources.FORMATS`


class Paragraph(NamedTuple):
    """Non-blank text, stripped of surrounding whitespace."""

    first: bool  # whether a document starts here
    text: str
    replaced: int  # U+FFFD put in for bytes that are not UTF-8; a record's total is on its first paragraph
    cut: int  # 1 if it is the continuation of a paragraph that was too long, else 0


def read_text(
    disk: IO[bytes], path: PurePath, reading: Reading, left: Counter[str], whole: bool = False
) -> Iterator[Paragraph]:
    """Plain text; see `corpus.read_paragraphs` for ``left`` and the errors. ``whole``: it is one document."""
    first, written = True, False  # does a document start; did the line that continues into this block have any text
    for block in read_blocks(disk, path, LONGEST_PARAGRAPH):
        for line, replaced in _decode_lines(block, path, reading):
            text = line.strip()
            if text:
                if text[0] in MARKUP_STARTS and text.startswith(MARKUP):
                    left["markup"] += 1
                yield Paragraph(first, text, replaced, int(written))
                first, written = False, not block.ends
            elif block.ends:
                first, written = first or not (written or whole), False
    if whole and first:
        left["blank"] += 1


def read_articles(disk: IO[bytes], path: PurePath, reading: Reading, left: Counter[str]) -> Iterator[Paragraph]:
    """wikiextractor's text: an article from <doc …> to </doc>, one paragraph per line; the first line is the title.

    An article is a document; its title is left out, as it is not a sentence. Text outside articles is read as in .txt.
    """
    first, written = True, False  # as in `read_text`
    opened, title = 0, None  # line number of <doc …>, 0 outside; the title, until the article's first line
    for block in read_blocks(disk, path, LONGEST_PARAGRAPH):
        for number, (line, replaced) in enumerate(_decode_lines(block, path, reading), block.number):
            text = line.strip()
            article = None if written else ARTICLE.fullmatch(text)
            if article or (text == "</doc>" and not written):
                if bool(article) is bool(opened):
                    raise DataError(f"{path}, line {number}: {_unpaired(opened)}")
                if opened and first:
                    left["blank"] += 1
                first, opened = True, number if article else 0
                title = _unescape(article["title"] or "") if article else None
            elif text and title == _unescape(text):
                left["titles"] += 1
                title = None
            elif text:
                yield Paragraph(first, _unescape(text) if opened else text, replaced, int(written))
                first, written, title = False, not block.ends, None
            elif block.ends:
                first, written = first or not (written or opened), False
    if opened:
        raise DataError(f"{path}: {_unpaired(opened)}")


def _unpaired(opened: int) -> str:
    missing = f"the <doc …> of line {opened} has no </doc>" if opened else "</doc> without <doc …>"
    return f"{missing}: the file was cut; extract it again, or split it between articles"


def _unescape(text: str) -> str:
    return ENTITY.sub(lambda entity: ENTITIES[entity[0]], text)


def article_of(text: str) -> str:
    """Converts the text of wikiextractor's JSON, one paragraph per line, to the form that `_document` expects."""
    return _unescape(text).replace("\n", "\n\n")


def _decode_lines(block: LineBlock, path: PurePath, reading: Reading) -> Iterable[tuple[str, int]]:
    text = read_utf8(block.data)
    if text is not None:
        return zip(text.split("\n"), repeat(0))
    return [
        _decode(line, f"{path}, line {number}", reading, 0 if number > block.number else block.column)
        for number, line in enumerate(block.data.split(b"\n"), block.number)
    ]


def read_records(
    disk: IO[bytes], path: PurePath, reading: Reading, left: Counter[str], edit: Callable[[str], str] = str
) -> Iterator[Paragraph]:
    """JSON lines. ``edit`` is applied to the text of each record."""
    for block in read_blocks(disk, path, LONGEST_RECORD):
        for number, line in enumerate(block.data.split(b"\n"), block.number):
            place = f"{path}, line {number}"
            if not block.ends:
                raise DataError(f"{place}: longer than {LONGEST_RECORD:,} bytes; write one document per line")
            data, replaced = _decode(line, place, reading)
            if not data.strip():
                continue
            text = _text_of(data.strip(), place, reading)
            if text is None:
                left["unwanted"] += 1
            else:
                yield from _document(edit(text), replaced, place, reading, left)


def read_record(disk: IO[bytes], path: PurePath, reading: Reading, left: Counter[str]) -> Iterator[Paragraph]:
    """A file of JSON that is one record, on one line or more."""
    data, replaced = _decode(read_whole(disk, path, LONGEST_RECORD), str(path), reading)
    text = _text_of(data, str(path), reading, ONE_RECORD)
    if text is None:
        left["unwanted"] += 1
    else:
        yield from _document(text, replaced, str(path), reading, left)


def is_wanted(disk: IO[bytes], path: PurePath, reading: Reading) -> bool:
    """Whether a file of JSON is one record that ``reading.where`` selects."""
    data, _ = _decode(read_whole(disk, path, LONGEST_RECORD), str(path), reading)
    record = _parse(data, str(path), ONE_RECORD)
    return isinstance(record, dict) and _matches(record, reading.where)


def _text_of(data: str, place: str, reading: Reading, remedy: str = ONE_LINE) -> str | None:
    """The text of a record in JSON; None if the record is not wanted."""
    record, field = _parse(data, place, remedy), reading.text_field
    if isinstance(record, dict) and not _matches(record, reading.where):
        return None
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{place}: wanted an object with a string field "{field}"')
    return text


def _parse(data: str, place: str, remedy: str) -> Any:
    try:
        return parse_json(data)
    except ValueError as error:
        reason = str(error).replace("line 1 ", "")
        raise DataError(f"{place}: not JSON ({reason}); {remedy}") from None


def read_rows(disk: FileIO, path: Path, reading: Reading, left: Counter[str]) -> Iterator[Paragraph]:
    """The rows of a Parquet file."""
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
                        yield from _row(data, f"{path}, row {number}", reading, left)
                    else:
                        left["unwanted"] += 1
                disk.seek(size * number // file.metadata.num_rows)  # pyarrow reads through its own handle
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if shortage(error):
            raise
        raise DataError(f"{path}: cannot be read after row {number} ({' '.join(str(error).split())})") from None


def _rows_at_once(metadata: Any) -> int:
    size: int = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return max(1, min(BATCH_ROWS, BATCH_BYTES * int(metadata.num_rows) // max(1, size)))


def _row(data: bytes | None, place: str, reading: Reading, left: Counter[str]) -> Iterator[Paragraph]:
    if data is None:
        raise DataError(f'{place}: column "{reading.text_field}" is null, wanted a string')
    text, replaced = _decode(data, place, reading)
    return _document(text, replaced, place, reading, left)


def _decode(data: bytes, place: str, reading: Reading, column: int = 0) -> tuple[str, int]:
    """The text, and how often U+FFFD replaced bytes that are not UTF-8 (by Python's rules)."""
    good = read_utf8(data)
    if good is not None:
        return good, 0
    if reading.bad_bytes == "strict":
        remedy = "convert the file to UTF-8, or use --bad-bytes replace"
        raise DataError(f"{place}: {flaw(data, column)}; {remedy}")
    text = data.decode(errors="replace")
    return text, text.count(REPLACEMENT) - data.count(REPLACEMENT.encode())


def _matches(record: dict[str, Any], where: Where) -> bool:
    """Compares values as JSON writes them, or else as Python does (a date); a missing field never matches."""
    if where is None:
        return True
    field, wanted = where
    value = record.get(field, ...)
    if value is ...:
        return False
    return (value if isinstance(value, str) else json.dumps(value, default=str).strip('"')) == wanted


def _document(text: str, replaced: int, place: str, reading: Reading, left: Counter[str]) -> Iterator[Paragraph]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if reading.bad_bytes == "strict":
            raise DataError(
                f"{place}: not Unicode text ({error.reason} at character {error.start}); "
                "fix it, or use --bad-bytes replace"
            ) from None
        text, halves = HALF_PAIR.subn(REPLACEMENT, text)
        replaced += halves
    first = True
    for paragraph in _split_paragraphs(text):
        if paragraph.startswith(MARKUP):
            left["markup"] += 1
        for cut, piece in enumerate(_pieces(paragraph) if len(paragraph) > LONGEST_PARAGRAPH else (paragraph,)):
            yield Paragraph(first, piece, replaced, min(cut, 1))
            first, replaced = False, 0
    if first:
        left["blank"] += 1


def _split_paragraphs(text: str) -> Iterator[str]:
    """Splits the text at blank lines; each run of non-blank lines is one paragraph."""
    run: list[str] = []
    for line in [*text.split("\n"), ""]:
        line = line.strip()
        if line:
            run.append(line)
        elif run:
            yield " ".join(run)
            run = []


def _pieces(paragraph: str) -> Iterator[str]:
    """Cuts a paragraph into non-blank pieces of at most LONGEST_PARAGRAPH characters."""
    while len(paragraph) > LONGEST_PARAGRAPH:
        space = paragraph.rfind(" ", LONGEST_PARAGRAPH - NEAR, LONGEST_PARAGRAPH)
        end = space if space > 0 else LONGEST_PARAGRAPH
        yield paragraph[:end].rstrip()
        paragraph = paragraph[end:].lstrip()
    yield paragraph
