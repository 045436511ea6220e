"""Files that appear under their final name only once they are complete and on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

TEMPORARY = ".tmp"


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that is renamed to ``path`` at the end of the ``with`` block, or removed on error.

    No two writers share a temporary name, so a process that outlives a killed run can't spoil the next run's file.
    """
    temporary = path.with_name(f"{path.name}.{os.urandom(4).hex()}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.filename is None or Path(error.filename) == temporary:  # a full disk does not name the file
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):  # a leftover file blocks no other writer
            temporary.unlink(missing_ok=True)
    sync(path.parent)  # makes the rename itself durable


def hold(link: Path, holder: str) -> str:
    """Makes a symbolic link that names its holder, unless there is one. Returns the holder that it names.

    A link is there with its content or not at all, so a process that is killed leaves no nameless one. Raises
    FileNotFoundError if the link goes away meanwhile.
    """
    try:
        os.symlink(holder, link)
    except FileExistsError:
        return os.readlink(link)
    return holder


def sync(path: Path) -> None:
    """Flushes a file, or a folder's directory entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
