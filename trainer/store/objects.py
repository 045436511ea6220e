"""Whole files at an address of an object store: put, got, listed and deleted.

s3://bucket/runs/first    needs s3fs; keys and AWS_ENDPOINT_URL_S3 as in `data_prep/publish.py`
gs://bucket/runs/first    needs gcsfs; az://container/runs/first needs adlfs

A file appears there whole or not at all, but cannot be appended to or renamed. Every request has a time limit, and is
tried again if its failure may pass. What a request reads is bounded.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from data_prep.addresses import OBJECT_STORES, without_query
from data_prep.atomic import TEMPORARY, sync
from data_prep.errors import DataError
from data_prep.manifest import file_sha256
from data_prep.retries import is_hopeless, patiently, shown
from trainer.errors import PassingError, TrainerError

Result = TypeVar("Result")
WAITS = (1, 2, 4, 8)  # seconds between two attempts
STALL = 30.0  # seconds for an answer; a download fails after as many without progress
LOCAL = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # no driver uses them for a server's
SLOWEST = 500_000  # bytes per second: an upload that is slower fails
LARGEST = 1 << 40  # bytes of any file that is fetched
CHUNK = 16 << 20  # bytes of a file that are sent at once; S3 allows 10,000 of them
CHUNKS_AT_ONCE = 4  # so that other requests of the same client find a connection free
NO_BUCKET = "specified bucket does not exist"  # how S3 and Google Cloud say it
WANTED = "name a folder such as s3://bucket/runs/first, gs://… or az://…"


class WrongFileError(TrainerError, ValueError):
    """A file at an address is missing, or not the one that was put there. It is a ValueError: a retry is hopeless."""


def require_address(address: str) -> None:
    """Raise TrainerError unless files can be kept at ``address``."""
    kind, _, place = address.partition("://")
    bucket = place.split("/")[0]
    if ":" in bucket and "@" in bucket:
        raise TrainerError(f"an address that begins with {kind}:// contains a password: leave it out; {WANTED}")
    if kind not in OBJECT_STORES:
        raise TrainerError(f"{without_query(address)}: no run can be kept there; {WANTED}")
    if "/" not in place.rstrip("/") or not _is_plain(place.rstrip("/")) or "?" in place:
        raise TrainerError(f"{without_query(address)}: not a folder of an object store; {WANTED}")


class Objects:
    """The files below an address. Its keys are their names there, such as ``step-00000010/checkpoint.json``.

    Raises TrainerError with the address, and PassingError if the server may only be down.
    """

    def __init__(self, address: str) -> None:
        from data_prep.servers import open_fs  # imports fsspec, which takes a tenth of a second

        require_address(address)
        self.address = address.rstrip("/")
        try:
            self.fs, self.root = open_fs(self.address, STALL)
        except DataError as error:
            raise TrainerError(str(error)) from None

    def list(self, below: str = "") -> dict[str, int]:
        """The size in bytes of each file, or of each below a folder."""
        found = {name.removeprefix(f"{self.root}/"): entry for name, entry in self._found(below, "find").items()}
        return {name: entry["size"] for name, entry in found.items() if _is_plain(name)}

    def names(self) -> dict[str, int | None]:
        """The files and folders directly below the address: their sizes, None for a folder."""
        found = self._found("", "ls")
        sizes = {entry["name"].rstrip("/"): entry["size"] if entry["type"] == "file" else None for entry in found}
        return {name.removeprefix(f"{self.root}/"): size for name, size in sizes.items() if name != self.root}

    def _found(self, below: str, method: str) -> Any:
        def ask() -> Any:
            try:
                return self._ask(STALL, method, f"{self.root}/{below}".rstrip("/"), detail=True)
            except FileNotFoundError as error:
                if NO_BUCKET in str(error):
                    raise
                return {}

        return self._patiently(below, ask)

    def put(self, path: Path, key: str) -> None:
        """Send a file. Raises OSError if it cannot be read."""
        size = path.stat().st_size
        options = {"chunksize": CHUNK, "max_concurrency": CHUNKS_AT_ONCE} if self._is_s3 else {}

        def put() -> None:
            self._ask(STALL + size / SLOWEST, "put_file", str(path), f"{self.root}/{key}", **options)
            there = self._ask(STALL, "info", f"{self.root}/{key}")["size"]
            if there != size:
                raise OSError(errno.EIO, f"{there} bytes arrived instead of {size}")

        self._patiently(key, put)

    def get(self, key: str, target: Path, limit: int, sha256: str | None = None, size: int | None = None) -> None:
        """Fetch a file of at most ``limit`` bytes to ``target``, whole. Raises WrongFileError if it is not the one."""

        def get() -> None:
            from data_prep.downloads import download

            temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}{TEMPORARY}")
            try:
                download(self.fs, f"{self.root}/{key}", temporary, limit, STALL, Event())
                if size not in (None, found := temporary.stat().st_size):
                    raise WrongFileError(f"{self.address}/{key} has {found} bytes instead of {size}")
                if sha256 not in (None, file_sha256(temporary)):
                    raise WrongFileError(f"the sha256 of {self.address}/{key} differs")
                sync(temporary)
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)

        self._patiently(key, get)

    def read(self, key: str, limit: int = 1 << 20) -> bytes:
        """The content of a small file. Raises WrongFileError if it is missing or has more than ``limit`` bytes."""

        def read() -> bytes:
            name = f"{self.root}/{key}"
            if (size := self._ask(STALL, "info", name)["size"]) > limit:
                raise WrongFileError(f"{self.address}/{key} has {size:,} bytes: it may have {limit:,}")
            return bytes(self._ask(STALL, "cat_file", name)) if size else b""

        return self._patiently(key, read)

    def write(self, key: str, data: bytes) -> None:
        """Put a small file, in place of one that is there."""
        self._patiently(key, partial(self._ask, STALL, "pipe_file", f"{self.root}/{key}", data))

    def create(self, key: str, data: bytes) -> bool:
        """Put a small file unless there is one; whether it is ``data`` that is there now.

        Exclusive where the store has conditional puts. Otherwise the last of two that create it at once wins.
        """

        def create() -> None:
            try:
                self._ask(STALL, "pipe_file", f"{self.root}/{key}", data, mode="create")
            except FileExistsError:
                pass
            except OSError as error:  # how s3fs reports it
                if not any(sign in str(error) for sign in ("PreconditionFailed", "pre-condition", "At least one of")):
                    raise

        self._patiently(key, create)
        return self.read(key) == data

    def delete(self, *keys: str) -> None:
        """Remove files; one that is not there is no error."""

        def delete(key: str) -> None:
            try:
                self._ask(STALL, "rm_file", f"{self.root}/{key}")
            except FileNotFoundError:
                pass

        for key in keys:
            self._patiently(key, partial(delete, key))

    def clear_uploads(self, kept: Callable[[str], bool]) -> None:
        """Abort what killed processes have begun to send, except the files that are ``kept``: it takes up space unseen.

        Only S3 leaves such remains.
        """
        if not self._is_s3:
            return
        bucket, _, prefix = self.root.partition("/")
        place = {"Bucket": bucket}

        def clear() -> None:
            found = self._ask(STALL, "call_s3", "list_multipart_uploads", **place, Prefix=f"{prefix}/")
            for each in found.get("Uploads", []):
                if not kept(each["Key"].removeprefix(f"{prefix}/")):
                    upload = {"Key": each["Key"], "UploadId": each["UploadId"]}
                    self._ask(STALL, "call_s3", "abort_multipart_upload", **place, **upload)

        self._patiently("", clear)

    @property
    def _is_s3(self) -> bool:
        return "s3" in self.fs.protocol

    def _ask(self, seconds: float, method: str, *arguments: Any, **options: Any) -> Any:
        from data_prep.servers import ask

        return ask(self.fs, seconds, method, *arguments, **options)

    def _patiently(self, key: str, work: Callable[[], Result]) -> Result:
        try:
            return patiently(work, WAITS)
        except Exception as error:  # each driver has its own error classes
            if isinstance(error, TrainerError) or self._is_local(error):
                raise
            failure = self._spelled(f"{self.address}/{key}".rstrip("/"), error)
        raise failure  # outside the handler: s3fs calls a server's errors EIO, as if this machine's disk had failed

    def _is_local(self, error: Exception) -> bool:
        """Whether it is an error of this machine: it is out of memory or disk space, or cannot read a file."""
        name = getattr(error, "filename", None)
        if name is not None and not str(name).startswith(self.root):
            return True
        return isinstance(error, MemoryError) or getattr(error, "errno", None) in LOCAL

    def _spelled(self, where: str, error: Exception) -> TrainerError:
        if isinstance(error, FileNotFoundError):
            if NO_BUCKET in str(error):
                return TrainerError(f"{where}: there is no such bucket: check the address")
            return WrongFileError(f"{where} is missing")
        hopeless = is_hopeless(error)
        tried = "" if hopeless else f" ({len(WAITS) + 1} attempts)"
        advice = "check the address, your access rights, the space there and the network"
        return (TrainerError if hopeless else PassingError)(f"{where}: {shown(error)}{tried}; {advice}")


def _is_plain(name: str) -> bool:
    """Whether a file may have this name: not a/../b, nor a/, which some tools put for an empty folder."""
    return not {"", ".", ".."} & set(name.split("/"))
