"""The tokenized corpus: one flat row of ids on disk, mapped into memory, with sentence and document borders.

Three raw files: ``ids`` (uint16, or uint32 for a large vocabulary), ``sentences`` (int64, where each sentence
starts in ids, and the end) and ``documents`` (int64, where each document starts in sentences, and the end).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.atomic import sync
from data_prep.corpus import Chunk
from data_prep.sentences import split_sentences
from data_prep.tokenizer import Tokenizer, load_tokenizer

Ids = NDArray[np.unsignedinteger[Any]]  # uint16 or uint32
READ_AT_ONCE = 1 << 20  # documents


@dataclass(frozen=True)
class Store:
    """Sentence s: ``ids[sentences[s]:sentences[s + 1]]``; document d begins at sentence ``documents[d]``."""

    ids: Ids  # [tokens]
    sentences: NDArray[np.int64]  # [sentences + 1]
    documents: NDArray[np.int64]  # [documents + 1]

    def lone_sentences(self) -> int:
        """Documents of a single sentence."""
        starts = range(0, len(self.documents) - 1, READ_AT_ONCE)
        parts = (self.documents[start : start + READ_AT_ONCE + 1] for start in starts)
        return sum(int(np.count_nonzero(np.diff(part) == 1)) for part in parts)


@dataclass
class SourceCounts:
    """What one text file gave."""

    tokens: int = 0
    unknown: int = 0  # tokens that are [UNK]
    cut: int = 0  # cuts in sentences that were too long

    def add(self, other: SourceCounts) -> None:
        """Sums up, in place."""
        self.tokens += other.tokens
        self.unknown += other.unknown
        self.cut += other.cut


@dataclass(frozen=True)
class TokenizedChunk:
    """What a worker makes of a Chunk."""

    source: int
    characters: int
    ids: Ids  # [tokens]
    lengths: NDArray[np.int64]  # [sentences] tokens
    documents: NDArray[np.int64]  # [sentences] number of the document
    counts: SourceCounts


def id_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The smallest of uint16 and uint32, little-endian, that holds every id."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def tokenize_chunk(chunk: Chunk, tokenizer: Path, language: str) -> TokenizedChunk:
    """Sentences and ids of a chunk; sentences without a token are left out."""
    loaded = _load_once(tokenizer)
    sentences: list[str] = []
    documents: list[int] = []
    cut = 0
    for document, text in chunk.paragraphs:
        pieces, cuts = split_sentences(text, language)
        sentences += pieces
        documents += [document] * len(pieces)
        cut += cuts
    dtype = id_dtype(loaded.vocab_size)
    encoded = [np.array(ids, dtype) for ids in loaded.encode(sentences)]
    lengths = np.array([len(ids) for ids in encoded], np.int64)
    ids = np.concatenate([np.empty(0, dtype), *encoded])
    counts = SourceCounts(len(ids), int(np.count_nonzero(ids == loaded.specials.unk)), cut)
    characters = sum(len(text) for _, text in chunk.paragraphs)
    seen = lengths > 0
    return TokenizedChunk(chunk.source, characters, ids, lengths[seen], np.array(documents, np.int64)[seen], counts)


@cache
def _load_once(tokenizer: Path) -> Tokenizer:
    return load_tokenizer(tokenizer)


def write_store(folder: Path, chunks: Iterable[TokenizedChunk], sources: int) -> None:
    """Writes the chunks, in their order, as a store for `open_store`; the folder appears when it is whole."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    counts = [SourceCounts() for _ in range(sources)]
    tokens = sentences = last = 0
    with (
        (temporary / "ids").open("wb") as ids_file,
        (temporary / "sentences").open("wb") as sentences_file,
        (temporary / "documents").open("wb") as documents_file,
    ):
        for chunk in chunks:
            starts = np.flatnonzero(np.diff(chunk.documents, prepend=last))
            documents_file.write((sentences + starts).tobytes())
            sentences_file.write((tokens + np.cumsum(chunk.lengths) - chunk.lengths).tobytes())
            ids_file.write(chunk.ids.tobytes())
            counts[chunk.source].add(chunk.counts)
            if len(chunk.lengths):
                last = int(chunk.documents[-1])
            tokens += len(chunk.ids)
            sentences += len(chunk.lengths)
        documents_file.write(np.int64(sentences).tobytes())
        sentences_file.write(np.int64(tokens).tobytes())
        for file in (ids_file, sentences_file, documents_file):
            sync(file)
    (temporary / "sources.json").write_text(json.dumps([asdict(count) for count in counts]))
    temporary.replace(folder)


def open_store(folder: Path, vocab_size: int) -> Store:
    """Maps a store that holds at least one token."""
    return Store(
        np.memmap(folder / "ids", id_dtype(vocab_size), "r"),
        np.memmap(folder / "sentences", np.int64, "r"),
        np.memmap(folder / "documents", np.int64, "r"),
    )


def read_source_counts(folder: Path) -> list[SourceCounts]:
    """What each text file gave, in the order of the sources."""
    return [SourceCounts(**count) for count in json.loads((folder / "sources.json").read_text())]
