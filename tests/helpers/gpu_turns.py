"""Turns on a GPU that several test processes use: large tests have it alone, all others share it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_SH, LOCK_UN, flock
from pathlib import Path


@contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """Have the GPU to which ``folder`` belongs, ``alone`` or together with others. Waits for its turn.

    Whoever waits lets nobody in before it, so a test that needs the GPU alone is not put off until the others run out.
    A process that ends leaves its turn.
    """
    with (folder / "queue").open("w") as queue, (folder / "gpu").open("w") as gpu:
        flock(queue, LOCK_EX)
        flock(gpu, LOCK_EX if alone else LOCK_SH)
        flock(queue, LOCK_UN)
        yield
