"""Reads int64 arrays from .npy files, verified first and without NumPy's parser.

NumPy evaluates a header as Python text. A damaged header can raise many Python errors, request any amount of memory, or
pass for another kind of file. Here a header is compared with the only one that `np.save` writes for a file of this
size.
"""

from __future__ import annotations

import hashlib
import io
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataError, shortage

HEADER_BYTES = 128  # bytes of header, for arrays of one or two dimensions
INTEGER = np.dtype("<i8")


@lru_cache(maxsize=4096)
def npy_header(dtype: str, *shape: int) -> bytes:
    """The HEADER_BYTES that `np.save` writes before an array of this shape."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()


def read_integers(path: Path, *columns: int, sha256: str | None = None, what: str = "array") -> NDArray[np.int64]:
    """The array of a .npy file: int64[rows], or int64[rows, columns].

    ``sha256``: the recorded hash of the file, compared before anything else; None if there is no record. ``what``: name
    of the array in errors. Raises DataError if the file is missing, has another hash, or is not an array of this kind.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        if shortage(error):
            raise
        raise DataError(f"{path}: no {what} can be read ({error.strerror})") from None
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise DataError(f"{path}: not the {what} in the manifest (its sha256 differs)")
    rows, rest = divmod(len(content) - HEADER_BYTES, INTEGER.itemsize * int(np.prod(columns, dtype=np.int64)))
    if rows < 0 or rest or content[:HEADER_BYTES] != npy_header(INTEGER.str, rows, *columns):
        raise DataError(f"{path}: no {what}: its .npy header does not fit its {len(content)} bytes")
    return np.frombuffer(content, INTEGER, offset=HEADER_BYTES).reshape(rows, *columns).astype(np.int64)
