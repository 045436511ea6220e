"""The tokenized corpus: one flat row of ids on disk, mapped into memory, with sentence and document borders.

Raw files: ``ids`` (uint16, or uint32 for a large vocabulary), ``sentences`` (int64, where each sentence starts
in ids, and the end), ``documents`` (int64, where each document starts in sentences, and the end); and
``counts.npy``, written last: int64[text files, 3], the columns tokens, [UNK] tokens, cuts in long sentences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.atomic import replacing
from data_prep.corpus import Chunk
from data_prep.sentences import split_sentences
from data_prep.tokenizer import Tokenizer, load_tokenizer

Ids = NDArray[np.unsignedinteger[Any]]  # uint16 or uint32
COUNTS = "counts.npy"
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

    def gather(self, starts: NDArray[np.int64], lengths: NDArray[np.integer[Any]]) -> Ids:
        """``ids[start:start + length]`` of each row, one after the other."""
        ends = np.cumsum(lengths)
        shift = np.repeat(starts - (ends - lengths), lengths)
        return self.ids[shift + np.arange(len(shift))]


@dataclass(frozen=True)
class TokenizedChunk:
    """What a worker makes of a Chunk."""

    source: int
    characters: int
    ids: Ids  # [tokens]
    lengths: NDArray[np.int64]  # [sentences] tokens
    documents: NDArray[np.int64]  # [sentences] number of the document
    unknown: int
    cut: int


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
    unknown = int(np.count_nonzero(ids == loaded.specials.unk))
    characters = sum(len(text) for _, text in chunk.paragraphs)
    seen = lengths > 0
    return TokenizedChunk(
        chunk.source, characters, ids, lengths[seen], np.array(documents, np.int64)[seen], unknown, cut
    )


@cache
def _load_once(tokenizer: Path) -> Tokenizer:
    return load_tokenizer(tokenizer)


def write_store(folder: Path, chunks: Iterable[TokenizedChunk], sources: int) -> None:
    """Writes the chunks, in their order, as a store of ``sources`` text files."""
    folder.mkdir(exist_ok=True)
    counts = np.zeros((sources, 3), np.int64)
    tokens = sentences = last = 0
    with (
        replacing(folder / "ids") as ids_file,
        replacing(folder / "sentences") as sentences_file,
        replacing(folder / "documents") as documents_file,
    ):
        for chunk in chunks:
            starts = np.flatnonzero(np.diff(chunk.documents, prepend=last))
            documents_file.write((sentences + starts).tobytes())
            sentences_file.write((tokens + np.cumsum(chunk.lengths) - chunk.lengths).tobytes())
            ids_file.write(chunk.ids.tobytes())
            counts[chunk.source] += len(chunk.ids), chunk.unknown, chunk.cut
            if len(chunk.documents):
                last = int(chunk.documents[-1])
            tokens += len(chunk.ids)
            sentences += len(chunk.lengths)
        documents_file.write(np.int64(sentences).tobytes())
        sentences_file.write(np.int64(tokens).tobytes())
    with replacing(folder / COUNTS) as file:
        np.save(file, counts, allow_pickle=False)


def open_store(folder: Path, vocab_size: int) -> Store:
    """Maps a store that holds at least one token."""
    return Store(
        np.memmap(folder / "ids", id_dtype(vocab_size), "r"),
        np.memmap(folder / "sentences", np.int64, "r"),
        np.memmap(folder / "documents", np.int64, "r"),
    )
