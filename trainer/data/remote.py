"""Fetch the files of a published data set, whole and verified, from any address that `fsspec` opens.

https://host/folder   needs aiohttp
s3://bucket/folder    needs s3fs; keys and AWS_ENDPOINT_URL_S3 as in `data_prep/publish.py`
gs://bucket/folder    needs gcsfs; az://container/folder needs adlfs
"""

from __future__ import annotations

import errno
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from data_prep.atomic import TEMPORARY, sync
from data_prep.errors import DataError
from data_prep.manifest import file_sha256
from data_prep.retries import is_hopeless, patiently, shown
from trainer.errors import PassingError, TrainerError

WAITS = (1, 2, 4, 8)  # seconds between two attempts
ASKERS = 16  # concurrent requests for file sizes
LISTED = 1000  # names that a server should list within one stall time


class WrongFileError(OSError):
    """A downloaded file is not the manifest's: it arrived damaged, or the server has another one."""


def is_remote(place: str) -> bool:
    """Whether ``place`` is an address rather than a local folder."""
    return "://" in place


class Remote:
    """An opened address of a published data set.

    ``stall``: seconds after which an attempt fails if it is slower than `downloads.SLOWEST`. ``redirects``:
    origins, besides its own, that the server may redirect to.
    """

    def __init__(self, address: str, stall: float, redirects: Sequence[str] = ()) -> None:
        from data_prep.servers import open_fs

        self.address, self.stall = address.rstrip("/"), stall
        try:
            self.fs, self.root = open_fs(self.address, stall, redirects)
        except DataError as error:
            raise TrainerError(str(error)) from None
        self.ended = threading.Event()  # when set, all waiting stops

    def fetch(self, key: str, target: Path, sha256: str | None, limit: int, size: int | None = None) -> None:
        """Fetch the file ``key`` to ``target``, whole and verified; retry temporary failures after each of WAITS.

        Accepts at most ``limit`` bytes. Raises TrainerError with the file's address; PassingError if the server may
        only be down.
        """
        try:
            patiently(partial(self._fetch, key, target, sha256, limit, size), WAITS, self.ended.wait)
        except Exception as error:  # each driver has its own error classes
            tried = "" if is_hopeless(error) or self.ended.is_set() else f" ({len(WAITS) + 1} attempts)"
            raise _failure(f"{self.address}/{key}", error, tried) from None

    def _fetch(self, key: str, target: Path, sha256: str | None, limit: int, size: int | None) -> None:
        from data_prep.downloads import download

        temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}{TEMPORARY}")
        try:
            download(self.fs, f"{self.root}/{key}", temporary, limit, self.stall, self.ended)
            _prove(temporary, sha256, size)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    def sizes(self, keys: Sequence[str]) -> dict[str, int | None]:
        """Return the sizes of the files that exist, None if the server does not say. Neither retried nor verified.

        HTTP has no listings, so it takes one request per file. Raises TrainerError with the address;
        PassingError if the server may only be down.
        """
        from data_prep.servers import ask

        try:
            if "http" not in self.fs.protocol:
                listed = ask(self.fs, self.stall * (1 + len(keys) / LISTED), "ls", self.root, detail=True)
                return {entry["name"].rsplit("/", 1)[-1]: entry["size"] for entry in listed if entry["type"] == "file"}
            with ThreadPoolExecutor(ASKERS) as pool:
                found = zip(keys, pool.map(self._ask, keys), strict=True)
                return {key: size for key, (there, size) in found if there}
        except Exception as error:  # each driver has its own error classes
            raise _failure(self.address, error) from None

    def _ask(self, key: str) -> tuple[bool, int | None]:
        from data_prep.servers import ask

        try:
            return True, ask(self.fs, self.stall, "info", f"{self.root}/{key}")["size"]
        except FileNotFoundError as error:  # raised for any error status; only 404 means that the file is absent
            return getattr(error.__cause__, "status", None) != 404, None


def _prove(path: Path, sha256: str | None, size: int | None) -> None:
    """Flush the file to disk. Raises WrongFileError if its size or sha256 is wrong."""
    found = path.stat().st_size
    if size not in (None, found):
        raise WrongFileError(f"{found} bytes instead of the manifest's {size}")
    if sha256 not in (None, file_sha256(path)):
        raise WrongFileError("it is not the manifest's file (its sha256 differs)")
    sync(path)


def _failure(place: str, error: Exception, tried: str = "") -> TrainerError:
    """Return the error to raise: PassingError unless the same command would fail in the same way."""
    kind = TrainerError if is_hopeless(error) or isinstance(error, WrongFileError) else PassingError
    return kind(f"{place}: {_reason(error)}{tried}; {_remedy(error)}")


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    return shown(error)


def _remedy(error: Exception) -> str:
    if getattr(error, "errno", None) == errno.ENOSPC:
        return "free space on the disk of cache.folder, or name another folder"
    return "check the address, your access rights and the network, or publish the data set again"
