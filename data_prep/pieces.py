"""The files in which builders keep what they made of a stage, until one of them joins it or the build is done.

store/pieces/000012-000003.npz    tokens of piece 3 of text file 12
store/pieces/000012.count         the number of that file's pieces, written by whoever read the file to its end
.work/plan-pieces/000007.npz      some blocks of the plan
.work/made/shard-00012.npz        the counts of a finished shard
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.atomic import replacing
from data_prep.errors import DataError
from data_prep.manifest import ShardRecord
from data_prep.pairs import PAIR_DTYPE, PlanCounts
from data_prep.store import TokenizedChunk
from data_prep.verify import Measured

PIECES = "pieces"


@dataclass(frozen=True)
class FilePieces:
    """The pieces of text file ``number``."""

    folder: Path
    number: int

    def path(self, piece: int) -> Path:
        """The file of a piece."""
        return self.folder / f"{self.number:06d}-{piece:06d}.npz"

    @property
    def count(self) -> int | None:
        """The number of pieces; None until some builder has read the whole file."""
        try:
            text = self._count.read_text()
        except FileNotFoundError:
            return None
        if not text.isdecimal():
            raise DataError(f"{self._count} holds no number of pieces; remove it, and run again")
        return int(text)

    def end(self, count: int) -> None:
        """Records the number of pieces."""
        with replacing(self._count) as file:
            file.write(str(count).encode())

    def first_missing(self, piece: int, wanted: Callable[[int], bool]) -> int | None:
        """The first wanted piece from ``piece`` on that is not there; None if there is none.

        While the number of pieces is unknown, this is ``piece``: the file has to be read to its end.
        """
        count = self.count
        if count is None:
            return piece
        return next((each for each in range(piece, count) if wanted(each) and not self.path(each).exists()), None)

    @property
    def _count(self) -> Path:
        return self.folder / f"{self.number:06d}.count"


def save_tokens(path: Path, chunk: TokenizedChunk) -> None:
    """Writes a piece of the token store."""
    digests = [bytes(digest) for digest in chunk.digests.values()]
    _save(
        path,
        numbers=np.array([chunk.source, chunk.read], np.int64),
        ids=chunk.ids,
        continues=chunk.continues,
        lengths=chunk.lengths,
        documents=chunk.documents,
        digested=np.array(list(chunk.digests), np.int64),
        digest_bytes=np.array([len(digest) for digest in digests], np.int64),
        digests=np.frombuffer(b"".join(digests), np.uint8),
        counted=chunk.counted,
    )


def load_tokens(path: Path) -> TokenizedChunk:
    """Reads a piece of the token store. Raises DataError if it is damaged."""
    made = _load(path)
    ends = np.cumsum(made["digest_bytes"])
    digests = [
        made["digests"][end - size : end].tobytes() for end, size in zip(ends, made["digest_bytes"], strict=True)
    ]
    return TokenizedChunk(
        source=int(made["numbers"][0]),
        read=int(made["numbers"][1]),
        ids=made["ids"],
        continues=made["continues"],
        lengths=made["lengths"],
        documents=made["documents"],
        digests=dict(zip(made["digested"].tolist(), digests, strict=False)),
        counted=made["counted"],
    )


def read_tokens(folder: Path, files: int) -> Iterator[TokenizedChunk]:
    """All pieces of ``files`` text files, in the order of the corpus."""
    for number in range(files):
        file = FilePieces(folder, number)
        for piece in range(file.count or 0):
            yield load_tokens(file.path(piece))


def save_plan(path: Path, pairs: bytes, counts: PlanCounts) -> None:
    """Writes a piece of the plan: raw PAIR_DTYPE records, and counts of where the tokens went."""
    _save(path, pairs=np.frombuffer(pairs, PAIR_DTYPE), counts=np.array(counts, np.int64))


def load_plan(path: Path) -> tuple[bytes, PlanCounts]:
    """Reads a piece of the plan. Raises DataError if it is damaged."""
    made = _load(path)
    return made["pairs"].tobytes(), PlanCounts(*made["counts"].tolist())


def save_measured(path: Path, measured: Measured) -> None:
    """Writes the counts of a shard."""
    record = json.dumps(asdict(measured.record)).encode()
    counts = {"tokens": measured.token_counts, "lengths": measured.length_counts}
    _save(path, record=np.frombuffer(record, np.uint8), **counts)


def load_measured(path: Path) -> Measured:
    """Reads the counts of a shard. Raises DataError if they are damaged."""
    made = _load(path)
    return Measured(_record(made), made["tokens"], made["lengths"])


def load_record(path: Path) -> ShardRecord:
    """Reads the totals of a shard, without its counts of each token. Raises DataError if they are damaged."""
    return _record(_load(path, "record"))


def _record(made: dict[str, NDArray[Any]]) -> ShardRecord:
    return ShardRecord(**json.loads(made["record"].tobytes()))


def _save(path: Path, **arrays: NDArray[Any]) -> None:
    with replacing(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def _load(path: Path, *names: str) -> dict[str, NDArray[Any]]:
    """All arrays of a file, or some of them; their CRC32 is checked."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in names or file.files}
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile):
        raise DataError(f"{path} is damaged; remove it, and run again") from None
