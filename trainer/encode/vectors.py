"""Write vectors of texts to a file: a NumPy array, or a Parquet table that also contains the texts.

They are written one part at a time, so the file may be larger than memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO

import numpy as np
from numpy.typing import NDArray

from trainer.errors import TrainerError
from trainer.finetune.task import Example


@dataclass(frozen=True)
class Text:
    """A text, or a pair, as it was given."""

    where: str  # for messages
    first: str
    second: str | None = None
    id: str | None = None


@dataclass(frozen=True)
class EncodedPart:
    """Consecutive texts with their examples and vectors."""

    start: int  # number of the first text
    texts: list[Text]
    examples: list[Example]
    vectors: list[NDArray[np.float32]]  # (1, width) each, or (places, width) for single tokens


def write_npy(file: IO[bytes], parts: Iterable[EncodedPart], pieces: Sequence[str] | None = None) -> None:
    """Write one fp32 array (texts, width) part by part; its header is completed last."""
    rows, width = 0, 0
    file.write(_npy_header(0, 0))
    for part in parts:
        block = np.concatenate(part.vectors)
        file.write(np.ascontiguousarray(block, "<f4").tobytes())
        rows, width = rows + len(block), block.shape[1]
    file.seek(0)
    file.write(_npy_header(rows, width))


def _npy_header(rows: int, width: int) -> bytes:
    """Return a header in NumPy's format 1.0, always 128 bytes long."""
    text = repr({"descr": "<f4", "fortran_order": False, "shape": (rows, width)})
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + text.encode().ljust(117) + b"\n"


def write_parquet(file: IO[bytes], parts: Iterable[EncodedPart], pieces: Sequence[str] | None = None) -> None:
    """Write one row per text: its number, its id if it has one, the text or pair, and the vector.

    With ``pieces`` (the vocabulary), write one row per token, with its position (0 is [CLS]) and its name.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise TrainerError(f"a .parquet file needs pyarrow ({error}): install it, or write a .npy file") from None
    writer = None
    try:
        for part in parts:
            rows = [each for each, vectors in enumerate(part.vectors) for _ in vectors]  # in this part, by text
            block = np.concatenate(part.vectors)  # (rows, width)
            columns = {
                "number": pa.array([part.start + row for row in rows], pa.int64()),
                "id": pa.array([part.texts[row].id for row in rows], pa.string()),
                "text": pa.array([part.texts[row].first for row in rows], pa.string()),
                "pair": pa.array([part.texts[row].second for row in rows], pa.string()),
            }
            if pieces is not None:
                names = [pieces[example.tokens[place]] for example in part.examples for place in example.places]
                columns["position"] = pa.array([p for example in part.examples for p in example.places], pa.int32())
                columns["token"] = pa.array(names, pa.string())
            columns["vector"] = pa.FixedSizeListArray.from_arrays(pa.array(block.reshape(-1)), block.shape[1])
            table = pa.table(columns)
            writer = writer or pq.ParquetWriter(file, table.schema)
            writer.write_table(table)
    finally:  # close it while the file is open, or it fails later
        if writer:
            writer.close()
