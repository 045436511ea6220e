"""Rows of different lengths that lie in one flat array."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def gather(flat: NDArray[Any], starts: NDArray[np.int64], lengths: NDArray[np.integer[Any]]) -> NDArray[Any]:
    """``flat[start:start + length]`` of each row, one after the other, in the dtype of ``flat``."""
    ends = np.cumsum(lengths)
    shift = np.repeat(starts - (ends - lengths), lengths)
    return flat[shift + np.arange(len(shift))]
