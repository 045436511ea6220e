"""Copies a published data set, one shard at a time, from an address into a folder, to verify it there.

Addresses are those of data_prep/publish.py, and https://host/folder, which needs aiohttp.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_prep.errors import CopyError, DataError, shortage
from data_prep.manifest import LENGTH_COUNTS, MANIFEST, SMALL_FILE_BYTES, TOKEN_COUNTS, TOKENIZER_FOLDER, ShardRecord
from data_prep.retries import is_hopeless, patiently, shown
from data_prep.shards import index_limit, index_path, tar_path
from data_prep.tokenizer import TOKENIZER_FILES

WAITS = (1, 2, 4, 8)  # seconds between two attempts
STALL = 60.0  # seconds without an answer after which an attempt fails
SLOWEST = 20_000  # bytes per second: a slower copy fails


class Published:
    """A data set at ``address``. ``folder`` gets its small files at once, and a shard while it is needed.

    Raises DataError if the address cannot be opened or lacks a file.
    """

    def __init__(self, address: str, folder: Path) -> None:
        from data_prep.servers import open_fs

        self.address, self.folder = address, folder
        self.fs, self.root = open_fs(address, STALL)
        (folder / TOKENIZER_FOLDER).mkdir()
        tokenizer = [f"{TOKENIZER_FOLDER}/{name}" for name in TOKENIZER_FILES]
        for key in (MANIFEST, TOKEN_COUNTS, LENGTH_COUNTS, *tokenizer):
            self._copy(folder / key, SMALL_FILE_BYTES)

    @contextmanager
    def shard(self, record: ShardRecord) -> Iterator[None]:
        """Holds a shard and its index in the folder. Raises DataError, with its address, if one cannot be copied."""
        tar, index = tar_path(self.folder, record.name), index_path(self.folder, record.name)
        try:
            self._copy(index, index_limit(record.bytes))
            self._copy(tar, record.bytes)
            yield
        finally:
            index.unlink(missing_ok=True)
            tar.unlink(missing_ok=True)

    def _copy(self, target: Path, limit: int) -> None:
        """Copies a file of at most ``limit`` bytes."""
        from data_prep.servers import Bound, ask

        key = target.relative_to(self.folder).as_posix()
        names, seconds = (f"{self.root}/{key}", str(target)), STALL + limit / SLOWEST

        def copy() -> None:
            ask(self.fs, seconds, "get_file", *names, callback=Bound(limit))

        try:
            patiently(copy, WAITS)
        except Exception as error:  # each driver has its own classes, which can't be named without importing it
            where, reason = f"{self.address}/{key}", shown(error)
            if lacks := shortage(error):
                place = f"it is copied to {self.folder.parent}; TMPDIR sets another folder"
                raise CopyError(f"{where}: {reason} ({lacks}); {place}") from None
            if isinstance(error, FileNotFoundError):
                raise DataError(f"{where}: missing") from None
            if is_hopeless(error):
                raise DataError(f"{where}: {reason}") from None
            times = len(WAITS) + 1
            raise CopyError(f"{where}: failed {times} times, last with {reason}; check the network") from None
