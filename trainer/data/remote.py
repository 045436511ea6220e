"""The address of a published data set: its files are fetched whole, and proved, from any place that `fsspec` opens.

https://host/folder   needs aiohttp
s3://bucket/folder    needs s3fs; keys and AWS_ENDPOINT_URL_S3 as in `data_prep/publish.py`
gs://bucket/folder    needs gcsfs; az://container/folder needs adlfs
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.atomic import TEMPORARY
from data_prep.manifest import file_sha256
from data_prep.publish import is_hopeless, shown
from trainer.errors import TrainerError

if TYPE_CHECKING:
    from data_prep.servers import Bound

WAITS = (1, 2, 4, 8)  # seconds between two attempts
POLL = 0.05  # seconds between two looks at a download
ASKERS = 16  # files whose sizes are asked for at once
SLOWEST = 20_000  # bytes a second: a download that falls below it has stalled
LISTED = 1000  # names that a server lists in the time of one stall


def is_remote(place: str) -> bool:
    """Whether it is an address, not a local folder."""
    return "://" in place


class Remote:
    """The address of a published data set, opened.

    ``stall``: seconds in which an attempt must go on, by SLOWEST bytes each. ``redirects``: origins that the server may
    redirect to, besides its own.
    """

    def __init__(self, address: str, stall: float, redirects: Sequence[str] = ()) -> None:
        self.address, self.stall = address.rstrip("/"), stall
        self.fs, self.root = _open(self.address, stall, redirects)
        self.ended = threading.Event()  # when set, nothing is waited for any longer

    def fetch(self, key: str, target: Path, sha256: str | None, limit: int, size: int | None = None) -> None:
        """The file ``key`` as ``target``, whole and proved; what may pass is tried again after each of WAITS.

        No more than ``limit`` bytes of it are taken. Raises TrainerError with the file's address.
        """
        waits = iter(WAITS)
        while True:
            temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}{TEMPORARY}")
            try:
                self._download(key, temporary, limit)
                _prove(temporary, sha256, size)
                temporary.replace(target)
                return
            except Exception as error:  # each driver has classes of its own
                seconds = next(waits, None)
                if seconds is None or is_hopeless(error) or self.ended.wait(seconds):
                    tried = "" if seconds is not None else f" ({len(WAITS) + 1} attempts)"
                    raise TrainerError(f"{self.address}/{key}: {_reason(error)}{tried}; {_remedy(error)}") from None
            finally:
                temporary.unlink(missing_ok=True)

    def sizes(self, keys: Sequence[str]) -> dict[str, int | None]:
        """Bytes of those files that are there, None where the place does not say; asked for once, not proved.

        HTTP has no listings: there it takes a request for each of them. Raises TrainerError with the address.
        """
        from data_prep.servers import ask

        try:
            if "http" not in self.fs.protocol:
                listed = ask(self.fs, self.stall * (1 + len(keys) / LISTED), "ls", self.root, detail=True)
                return {entry["name"].rsplit("/", 1)[-1]: entry["size"] for entry in listed if entry["type"] == "file"}
            with ThreadPoolExecutor(ASKERS) as pool:
                found = zip(keys, pool.map(self._ask, keys), strict=True)
                return {key: size for key, (there, size) in found if there}
        except Exception as error:  # each driver has classes of its own
            raise TrainerError(f"{self.address}: {_reason(error)}; {_remedy(error)}") from None

    def _ask(self, key: str) -> tuple[bool, int | None]:
        from data_prep.servers import ask

        try:
            return True, ask(self.fs, self.stall, "info", f"{self.root}/{key}")["size"]
        except FileNotFoundError as error:  # any answer but a good one; only 404 says that nothing is there
            return getattr(error.__cause__, "status", None) != 404, None

    def _download(self, key: str, path: Path, limit: int) -> None:
        """One attempt. No driver's own limits are relied on: what grows too far, or too slowly, is broken off."""
        from data_prep.servers import Bound

        bound = Bound(limit)
        task = self._begin(f"{self.root}/{key}", path, bound)
        size, since = 0, time.monotonic()
        while not wait([task], POLL).done:
            length, written = _lengths(path)
            now = max(bound.value, written)
            if now - size >= self.stall * SLOWEST:
                size, since = now, time.monotonic()
            failure: Exception | None = None
            if length > limit:  # by a driver that does not count
                failure = bound.refusal()
            elif time.monotonic() - since > self.stall:
                failure = TimeoutError(f"{now - size:,} bytes in {self.stall:g} s, after {size:,}")
            elif self.ended.is_set():
                failure = TimeoutError("the run ends")
            if failure:
                bound.limit = -1  # ends what cannot be cancelled at its next block
                task.add_done_callback(lambda _: path.unlink(missing_ok=True))  # it may make the file only now
                task.cancel()
                raise failure
        task.result()

    def _begin(self, name: str, path: Path, bound: Bound) -> Future[None]:
        if self.fs.async_impl:
            return asyncio.run_coroutine_threadsafe(_receive(self.fs, name, path, bound), self.fs.loop)
        from fsspec import AbstractFileSystem

        pool = ThreadPoolExecutor(1, thread_name_prefix="download")
        task = pool.submit(AbstractFileSystem.get_file, self.fs, name, str(path), bound)  # in blocks, each counted
        pool.shutdown(wait=False)
        return task


def _lengths(path: Path) -> tuple[int, int]:
    """A file's bytes, and those on disk, which are fewer where a driver made it as long as it will be."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_size, found.st_blocks * 512


async def _receive(fs: Any, name: str, path: Path, bound: Bound) -> None:
    try:
        await fs._get_file(name, str(path), callback=bound)
    except BaseException:
        path.unlink(missing_ok=True)  # also when it is cancelled, which is over for everybody else by now
        raise


def _open(address: str, stall: float, redirects: Sequence[str]) -> tuple[Any, str]:
    """The file system of ``fsspec`` and the root in it."""
    if "::" in address:
        raise TrainerError(f"{address}: chained addresses are not taken; name one such as s3://bucket/folder")
    from data_prep.servers import open_fs

    try:
        return open_fs(address, stall, redirects)
    except ImportError as error:
        package = getattr(error.__cause__ or error, "name", None) or "the package it names"
        raise TrainerError(f"{address}: its driver is not installed; pip install {package} ({error})") from None
    except ValueError as error:
        raise TrainerError(f"{address}: no such place ({error}); name one such as s3://bucket/folder") from None


def _prove(path: Path, sha256: str | None, size: int | None) -> None:
    """Raises OSError if it is not the file, and sees to it that it is on disk."""
    found = path.stat().st_size
    if size not in (None, found):
        raise OSError(f"{found} bytes instead of the manifest's {size}")
    if sha256 not in (None, file_sha256(path)):
        raise OSError("it is not the manifest's file (its sha256 differs)")
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    return shown(error)


def _remedy(error: Exception) -> str:
    if getattr(error, "errno", None) == errno.ENOSPC:
        return "free some of the disk that cache.folder is on, or name another"
    return "check the address, your rights there and the network, or publish the data set again"
