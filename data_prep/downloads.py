"""Downloads one file of a remote server to disk, within a limit on its bytes and on how slow it may be.

This module is imported only when an address is opened, as `data_prep/servers.py` is.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from data_prep.servers import Bound

POLL_SECONDS = 0.05  # between two checks of a download
SLOWEST = 20_000  # bytes per second: a slower download has stalled


def download(fs: Any, name: str, path: Path, limit: int, stall: float, ended: threading.Event) -> None:
    """Makes one attempt. Aborts a file that grows too large or too slowly, whatever the driver's limits.

    Args:
        fs: a file system from `servers.open_fs`.
        limit: bytes of the file at most.
        stall: seconds after which an attempt fails if it is slower than SLOWEST bytes per second.
        ended: when set, the attempt fails.

    Raises RefusedError for a file over the limit, TimeoutError for a stalled one, and the driver's own errors.
    """
    bound = Bound(limit)
    task = _begin(fs, name, path, bound)
    size, since = 0, time.monotonic()
    while not wait([task], POLL_SECONDS).done:
        length, written = _lengths(path)
        now = max(bound.value, written)
        if now - size >= stall * SLOWEST:
            size, since = now, time.monotonic()
        failure: Exception | None = None
        if length > limit:  # from a driver that does not report progress
            failure = bound.refusal()
        elif time.monotonic() - since > stall:
            failure = TimeoutError(f"{now - size:,} bytes in {stall:g} s, after {size:,}")
        elif ended.is_set():
            failure = TimeoutError("the run is ending")
        if failure:
            bound.limit = -1  # a task that cannot be cancelled ends at its next block
            task.add_done_callback(lambda _: path.unlink(missing_ok=True))  # it may create the file only now
            task.cancel()
            raise failure
    task.result()


def _begin(fs: Any, name: str, path: Path, bound: Bound) -> Future[None]:
    if fs.async_impl:
        return asyncio.run_coroutine_threadsafe(_receive(fs, name, path, bound), fs.loop)
    from fsspec import AbstractFileSystem

    pool = ThreadPoolExecutor(1, thread_name_prefix="download")
    task = pool.submit(AbstractFileSystem.get_file, fs, name, str(path), bound)  # in blocks, each counted
    pool.shutdown(wait=False)
    return task


def _lengths(path: Path) -> tuple[int, int]:
    """A file's length and its bytes on disk, which are fewer if a driver allocated its full length first."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_size, found.st_blocks * 512


async def _receive(fs: Any, name: str, path: Path, bound: Bound) -> None:
    try:
        await fs._get_file(name, str(path), callback=bound)
    except BaseException:
        path.unlink(missing_ok=True)  # also when cancelled: nobody else waits for it then
        raise
