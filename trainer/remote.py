"""The address of a published data set: its files are fetched whole, and proved, from any place that `fsspec` opens.

https://host/folder   needs aiohttp
s3://bucket/folder    needs s3fs; keys and AWS_ENDPOINT_URL_S3 as in `data_prep/publish.py`
gs://bucket/folder    needs gcsfs; az://container/folder needs adlfs
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from data_prep.atomic import TEMPORARY
from data_prep.manifest import file_sha256
from data_prep.publish import is_hopeless
from trainer.errors import TrainerError

WAITS = (1, 2, 4, 8)  # seconds between two attempts
POLL = 0.05  # seconds between two looks at a download
ASKERS = 16  # files whose sizes are asked for at once
BLOCK = 8 << 20  # bytes of an object that S3 sends at once


def is_remote(place: str) -> bool:
    """Whether it is an address, not a local folder."""
    return "://" in place


class Remote:
    """The address of a published data set, opened. ``stall``: seconds without a byte that end an attempt."""

    def __init__(self, address: str, stall: float) -> None:
        self.address, self.stall = address.rstrip("/"), stall
        self.fs, self.root = _open(self.address, stall)
        self.ended = threading.Event()  # when set, nothing is waited for any longer

    def fetch(self, key: str, target: Path, sha256: str | None, size: int | None = None) -> None:
        """The file ``key`` as ``target``, whole and proved; what may pass is tried again after each of WAITS.

        Raises TrainerError with the file's address.
        """
        waits = iter(WAITS)
        while True:
            temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}{TEMPORARY}")
            try:
                self._download(key, temporary)
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
        try:
            if "http" not in self.fs.protocol:
                listed = self.fs.ls(self.root, detail=True)
                return {entry["name"].rsplit("/", 1)[-1]: entry["size"] for entry in listed if entry["type"] == "file"}
            with ThreadPoolExecutor(ASKERS) as pool:
                found = zip(keys, pool.map(self._ask, keys), strict=True)
                return {key: size for key, (there, size) in found if there}
        except Exception as error:  # each driver has classes of its own
            raise TrainerError(f"{self.address}: {_reason(error)}; {_remedy(error)}") from None

    def _ask(self, key: str) -> tuple[bool, int | None]:
        try:
            return True, self.fs.info(f"{self.root}/{key}")["size"]
        except FileNotFoundError as error:  # any answer but a good one; only 404 says that nothing is there
            return getattr(error.__cause__, "status", None) != 404, None

    def _download(self, key: str, path: Path) -> None:
        """One attempt. No driver's own time limits are relied on: what does not grow is left alone, and fails."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="download")
        task = pool.submit(self.fs.get_file, f"{self.root}/{key}", str(path))
        pool.shutdown(wait=False)
        size, grown = 0, time.monotonic()
        while not wait([task], POLL).done:
            now = path.stat().st_size if path.exists() else 0
            if now != size:
                size, grown = now, time.monotonic()
            stalled = time.monotonic() - grown > self.stall
            if stalled or self.ended.is_set():
                task.add_done_callback(lambda _: path.unlink(missing_ok=True))  # it may make the file only now
                raise TimeoutError(f"not a byte in {self.stall:g} s, after {size}" if stalled else "the run ends")
        task.result()


def _open(address: str, stall: float) -> tuple[Any, str]:
    """The file system of ``fsspec`` and the root in it."""
    if "::" in address:
        raise TrainerError(f"{address}: chained addresses are not taken; name one such as s3://bucket/folder")
    import fsspec  # takes a tenth of a second, and a run on local shards needs none

    kind, options = address.partition("://")[0], dict[str, Any]()
    try:
        if kind in ("http", "https"):  # its default ends any download after five minutes
            import aiohttp

            options["client_kwargs"] = {"timeout": aiohttp.ClientTimeout(total=None, sock_read=stall)}
        elif kind == "s3":
            options["default_block_size"] = BLOCK
        fs, root = fsspec.core.url_to_fs(address, use_listings_cache=False, skip_instance_cache=True, **options)
    except ImportError as error:
        package = getattr(error.__cause__ or error, "name", None) or "the package it names"
        raise TrainerError(f"{address}: its driver is not installed; pip install {package} ({error})") from None
    except ValueError as error:
        raise TrainerError(f"{address}: no such place ({error}); name one such as s3://bucket/folder") from None
    return fs, root.rstrip("/")


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
    return " ".join(f"{type(error).__name__}: {error}".split())


def _remedy(error: Exception) -> str:
    if getattr(error, "errno", None) == errno.ENOSPC:
        return "free some of the disk that cache.folder is on, or name another"
    return "check the address, your rights there and the network, or publish the data set again"
