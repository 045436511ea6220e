"""The corpus as a stream of chunks, the units of work for the tokenizer."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from data_prep.formats import Paragraph, Reading, article_of, read_articles, read_records, read_rows, read_text
from data_prep.lines import read_head
from data_prep.sources import Source, format_of
from data_prep.tars import read_tar

CHUNK_CHARACTERS = 1 << 18  # given to a worker at once


@dataclass(frozen=True)
class Chunk:
    """Paragraphs of one file. A chunk without paragraphs reports what was left out, or the last bytes of a corpus."""

    source: int
    paragraphs: list[tuple[int, str]]  # number of the document in the corpus, counted from 1, and text
    read: int  # bytes on disk since the previous chunk, textless files included; they add up to the file sizes
    replaced: int  # sum over the paragraphs
    cut: int  # sum over the paragraphs
    documents: int  # non-blank ones that begin here, with or without visible text
    left: Mapping[str, int]  # see `read_paragraphs`


def read_chunks(sources: list[Source], reading: Reading, most: int | None = None) -> Iterator[Chunk]:
    """The corpus in order, split between paragraphs into chunks. The split does not depend on the number of workers.

    ``most``: characters after which a chunk ends; None: CHUNK_CHARACTERS.
    """
    most = CHUNK_CHARACTERS if most is None else most
    document = unreported = 0  # bytes that no chunk has reported yet
    for number, source in enumerate(sources):
        with source.path.open("rb", buffering=0) as disk:
            size, reported = os.fstat(disk.fileno()).st_size, 0
            paragraphs: list[tuple[int, str]] = []
            characters = replaced = cut = 0
            before, left = document, Counter[str]()
            for first, text, replacements, cuts in _read(disk, source.path, reading, left):
                document += first
                paragraphs.append((document, text))
                characters += len(text)
                replaced += replacements
                cut += cuts
                if characters >= most:
                    unreported, reported = unreported + disk.tell() - reported, disk.tell()
                    yield Chunk(number, paragraphs, unreported, replaced, cut, document - before, dict(left))
                    paragraphs, unreported, characters, replaced, cut = [], 0, 0, 0, 0
                    before = document
                    left.clear()
            unreported += size - reported
            if paragraphs or left:
                yield Chunk(number, paragraphs, unreported, replaced, cut, document - before, dict(left))
                unreported = 0
    if unreported:
        yield Chunk(len(sources) - 1, [], unreported, 0, 0, 0, {})


def read_paragraphs(source: Source, reading: Reading, left: Counter[str] | None = None) -> Iterator[Paragraph]:
    """The paragraphs of a file, in order, none longer than LONGEST_PARAGRAPH.

    Args:
        left: counters to increment: "blank" records, "unwanted" records (rejected by ``reading.where``) and "titles" of
            articles, which are left out, lines of "markup" that are read as text, and what `tars.read_tar` counts.

    Raises DataError with file and line (or row) for text that is not UTF-8 if ``reading`` is strict, for invalid JSON
    and for a missing text field, and with the file name for a file that is damaged or truncated.
    """
    with source.path.open("rb", buffering=0) as disk:
        yield from _read(disk, source.path, reading, Counter() if left is None else left)


def _read(disk: FileIO, path: Path, reading: Reading, left: Counter[str]) -> Iterator[Paragraph]:
    """Dispatches on the format. The position of ``disk`` shows how much of the file has been read."""
    match format_of(path.name, reading.format):
        case "parquet":
            return read_rows(disk, path, reading, left)
        case "tar":
            return read_tar(disk, path, reading, left)
        case "jsonl":
            return read_records(disk, path, reading, left)
        case "wikiextractor":
            head = read_head(path)
            if head is not None and head.data.lstrip().startswith(b"{"):
                return read_records(disk, path, reading, left, article_of)
            return read_articles(disk, path, reading, left)
    return read_text(disk, path, reading, left)
