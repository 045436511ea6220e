"""The tokenized corpus: one flat array of ids on disk, memory-mapped, with sentence and document boundaries.

Raw files: ``ids`` (uint16, or uint32 for a large vocabulary), ``continues`` (uint8, 1 where a token continues a
word), ``sentences`` (int64, where each sentence starts in ids, and the end), ``documents`` (int64, where each
document starts in sentences, and the end), ``digests`` (16 bytes per document, a hash of its text); and
``counts.npy``, written last: int64[text files, 14], the columns of `Counted`.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.atomic import replacing
from data_prep.cleaning import clean
from data_prep.corpus import Chunk
from data_prep.errors import DataError
from data_prep.sentences import split_sentences
from data_prep.tokenizer import load_once
from data_prep.words import Ids, WordCache

COUNTS_FILE = "counts.npy"
DIGEST = 16  # bytes
READ_AT_ONCE = 1 << 20  # documents
REMEDY = "remove the store, and build again"


class Counted(IntEnum):
    """Counts for a text file: what was read from it, and what was changed."""

    TOKENS = 0
    UNKNOWN = 1  # tokens that are [UNK]
    EMPTY = 2  # sentences without visible text, left out
    CUT = 3  # cuts in lines and sentences that were too long
    REPLACED = 4  # bytes that were not UTF-8, replaced
    CLEANED = 5  # characters that cleaning changed, except whitespace
    BLANK = 6  # documents without visible text, left out
    UNWANTED = 7  # records left out by --where
    TITLES = 8  # titles of articles, left out
    MARKUP = 9  # lines of markup that were read as text
    STRIPPED = 10  # combining marks that the tokenizer strips
    STRIPPED_OTHER = 11  # marks of scripts other than Latin, Greek and Cyrillic
    MEMBERS = 12  # members of a tar that are not text, left out
    METADATA = 13  # members of a tar that hold the metadata of a text


@dataclass(frozen=True)
class Store:
    """Sentence s: ``ids[sentences[s]:sentences[s + 1]]``; document d: the sentences ``range(*documents[d])``."""

    ids: Ids  # [tokens]
    continues: NDArray[np.uint8]  # [tokens]
    sentences: NDArray[np.int64]  # [sentences + 1]
    documents: NDArray[np.int64]  # [documents, 2] first sentence and end of the selected documents

    def gather(
        self, column: NDArray[Any], starts: NDArray[np.int64], lengths: NDArray[np.integer[Any]]
    ) -> NDArray[Any]:
        """``column[start:start + length]`` for each row, concatenated; column is ids or continues."""
        if isinstance(column, np.memmap):
            return _read(column, starts, lengths)
        ends = np.cumsum(lengths)
        shift = np.repeat(starts - (ends - lengths), lengths)
        return column[shift + np.arange(len(shift))]


@dataclass(frozen=True)
class TokenizedChunk:
    """The result of tokenizing a Chunk."""

    source: int
    read: int  # bytes of the file
    ids: Ids  # [tokens]
    continues: NDArray[np.uint8]  # [tokens]
    lengths: NDArray[np.int64]  # [sentences] tokens
    documents: NDArray[np.int64]  # [sentences] number of the document; may start again in each file
    digests: Mapping[int, bytes | bytearray]  # of the paragraphs of each document, concatenated
    counted: NDArray[np.int64]  # [14]; until `write_store`, BLANK counts all documents that begin here


def id_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The smaller of uint16 and uint32, little-endian, that fits every id."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def tokenize_chunk(chunk: Chunk, tokenizer: Path, sha256: str, language: str, given_words: bool) -> TokenizedChunk:
    """Sentences and ids of a chunk; sentences without a token are left out. ``sha256`` is the tokenizer's."""
    words, unknown = _words_of(tokenizer, sha256, given_words)
    sentences: list[str] = []
    counts: list[int] = []  # sentences of each paragraph
    digests: defaultdict[int, bytearray] = defaultdict(bytearray)
    cut, cleaned = chunk.cut, 0
    for document, paragraph in chunk.paragraphs:
        text, changed = clean(paragraph)
        pieces, cuts = split_sentences(text, language)
        sentences += pieces
        counts.append(len(pieces))
        digests[document] += hashlib.blake2b(text.encode(), digest_size=DIGEST).digest()
        cut, cleaned = cut + cuts, cleaned + changed
    numbers = np.array([document for document, _ in chunk.paragraphs], np.int64)
    documents = np.repeat(numbers, np.array(counts, np.int64))  # (sentences,)
    ids, continues, lengths, marks = words.encode(sentences)
    seen = lengths > 0
    counted = [len(ids), np.count_nonzero(ids == unknown), np.count_nonzero(~seen), cut, chunk.replaced, cleaned]
    blank, *others = (chunk.left.get(name, 0) for name in ("blank", "unwanted", "titles", "markup"))
    counted += [chunk.documents + blank, *others]
    of_tar = [chunk.left.get(name, 0) for name in ("members", "metadata")]
    return TokenizedChunk(
        source=chunk.source,
        read=chunk.read,
        ids=ids,
        continues=continues,
        lengths=lengths[seen],
        documents=documents[seen],
        digests=digests,
        counted=np.array([*counted, *marks, *of_tar], np.int64),
    )


@lru_cache(1)
def _words_of(tokenizer: Path, sha256: str, given_words: bool) -> tuple[WordCache, int]:
    """The word cache of this process, shared by all of its chunks."""
    loaded = load_once(tokenizer, sha256)
    return WordCache(loaded, id_dtype(loaded.vocab_size), given_words), loaded.specials.unk


def write_store(folder: Path, chunks: Iterable[TokenizedChunk], sources: int) -> None:
    """Writes the chunks, in order, as a store of ``sources`` text files."""
    counts = np.zeros((sources, len(Counted)), np.int64)
    tokens = sentences = last = source = 0
    with ExitStack() as stack:
        names = ("ids", "continues", "sentences", "documents", "digests")
        files = {name: stack.enter_context(replacing(folder / name)) for name in names}
        digester = Digester()
        for chunk in chunks:
            if chunk.source != source:
                source, last = chunk.source, 0
            starts = np.flatnonzero(np.diff(chunk.documents, prepend=last))
            files["documents"].write((sentences + starts).tobytes())
            files["sentences"].write((tokens + np.cumsum(chunk.lengths) - chunk.lengths).tobytes())
            files["ids"].write(chunk.ids.tobytes())
            files["continues"].write(chunk.continues.tobytes())
            files["digests"].write(digester.add(chunk))
            counts[chunk.source] += chunk.counted
            counts[chunk.source, Counted.BLANK] -= len(starts)  # documents with text; no document spans two files
            if len(chunk.documents):
                last = int(chunk.documents[-1])
            tokens += len(chunk.ids)
            sentences += len(chunk.lengths)
        files["documents"].write(np.int64(sentences).tobytes())
        files["sentences"].write(np.int64(tokens).tobytes())
        files["digests"].write(digester.end())
    with replacing(folder / COUNTS_FILE) as file:
        np.save(file, counts, allow_pickle=False)


class Digester:
    """Hashes documents that may begin in one chunk and end in another. Documents without a sentence are skipped."""

    def __init__(self) -> None:
        self._document: tuple[int, int] = (0, 0)  # text file, and number in it
        self._has_text, self._hash = False, hashlib.blake2b(digest_size=DIGEST)

    def add(self, chunk: TokenizedChunk) -> bytes:
        """The digests of the documents that ended with this chunk."""
        ended = []
        with_text = set(np.unique(chunk.documents).tolist())
        for document, paragraphs in chunk.digests.items():
            if (chunk.source, document) != self._document:
                ended.append(self.end())
                self._document = (chunk.source, document)
                self._has_text, self._hash = False, hashlib.blake2b(digest_size=DIGEST)
            self._has_text |= document in with_text
            self._hash.update(paragraphs)
        return b"".join(ended)

    def end(self) -> bytes:
        """The digest of the last document."""
        return self._hash.digest() if self._has_text else b""


def _read(column: np.memmap[Any, Any], starts: NDArray[np.int64], lengths: NDArray[np.integer[Any]]) -> NDArray[Any]:
    """`Store.gather` by system calls: a page read through the memory map would count as this process's memory."""
    size = column.itemsize
    assert column.filename is not None
    with open(column.filename, "rb", buffering=0) as file:
        rows = map(os.pread, repeat(file.fileno()), (lengths * size).tolist(), (starts * size).tolist())
        data = b"".join(rows)
    return np.frombuffer(data, column.dtype)


def require_whole(folder: Path, counts: NDArray[np.int64], sources: int, vocab_size: int) -> None:
    """Raises DataError if ``counts`` does not cover ``sources`` files, or does not match the files of the store."""
    if len(counts) != sources or (counts < 0).any():
        raise DataError(f"{folder / COUNTS_FILE} holds no counts of {sources} text files; {REMEDY}")
    tokens = int(counts[:, Counted.TOKENS].sum())
    sentences, documents = (_last(folder / name) for name in ("sentences", "documents"))
    wanted = {
        "ids": tokens * id_dtype(vocab_size).itemsize,
        "continues": tokens,
        "sentences": 8 * (documents + 1) if sentences == tokens else None,
        "digests": (folder / "documents").stat().st_size // 8 * DIGEST - DIGEST,
    }
    for name, size in wanted.items():
        if (folder / name).stat().st_size != size:
            raise DataError(f"{folder / name} does not match {COUNTS_FILE}; {REMEDY}")


def _last(path: Path) -> int:
    """The last number of a file of int64; -1 if it is not a file of int64."""
    size = path.stat().st_size
    return int(np.memmap(path, np.int64, "r")[-1]) if size and size % 8 == 0 else -1


def open_store(folder: Path, selection: Path, vocab_size: int) -> Store:
    """Memory-maps a store of at least one token, with the documents of ``selection`` (int64 pairs)."""
    return Store(
        np.memmap(folder / "ids", id_dtype(vocab_size), "r"),
        np.memmap(folder / "continues", np.uint8, "r"),
        np.memmap(folder / "sentences", np.int64, "r"),
        np.memmap(selection, np.int64, "r").reshape(-1, 2),
    )
