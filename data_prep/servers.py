"""Limits on remote servers: how many bytes they send, how long they take, and no requests to other hosts.

The drivers of `fsspec` trust the server. They follow any redirect, decompress answers, and store whatever arrives for
as long as it arrives. This module is imported only when an address is opened: importing `fsspec` takes a tenth of a
second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import fsspec

from data_prep.errors import DataError


class RefusedError(ValueError):
    """The server broke a limit; a retry would not help."""


class Bound(fsspec.Callback):  # type: ignore[misc]  # fsspec has no types
    """Counts the bytes of one download for its driver, and ends it when they exceed ``limit``.

    Raises RefusedError inside the driver: before the first byte if the server announces the size.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def set_size(self, size: int | None) -> None:
        """Called by the driver when the server announces ``size`` bytes."""
        self.check(size)

    def relative_update(self, inc: int = 1) -> None:
        """Called by the driver when ``inc`` more bytes have arrived."""
        self.absolute_update(self.value + inc)

    def absolute_update(self, value: int | None) -> None:
        """Called by the driver when ``value`` bytes have arrived in total."""
        self.value = value or 0
        self.check(value)

    def check(self, size: int | None) -> None:
        """Raises RefusedError if ``size`` is over the limit."""
        if size is not None and size > self.limit:
            raise self.refusal()

    def refusal(self) -> RefusedError:
        """The error for a download over the limit."""
        return RefusedError(f"the server sends more than the {self.limit:,} bytes that it may have")


def open_fs(address: str, stall: float, redirects: Sequence[str] = (), queries: bool = False) -> tuple[Any, str]:
    """The file system of ``fsspec`` for ``address``, and the root in it.

    Over HTTP it contacts only the origin of the address and those in ``redirects`` ("https://cdn.example.com"). From S3
    it follows no redirects, and only the content of an object may be larger than SMALL bytes. ``stall``: an HTTP
    request ends after this many seconds without a byte. ``queries``: names have one, as :class:`Address` describes.

    Raises DataError, one line, if it is not an address, or its driver is not installed.
    """
    if "://" not in address or "::" in address:  # a chain may include a cache; reading that back proves nothing
        raise DataError(f"{address}: wanted one address, such as s3://bucket/folder or file:///mnt/folder")
    try:
        return _open(address, stall, redirects, queries)
    except ImportError as error:
        package = getattr(error.__cause__ or error, "name", None) or "the package it names"
        raise DataError(f"{address}: its driver is not installed; pip install {package} ({error})") from None
    except ValueError as error:
        raise DataError(f"{address}: not a valid address ({error}); name one like s3://bucket/folder") from None


def _open(address: str, stall: float, redirects: Sequence[str], queries: bool) -> tuple[Any, str]:
    kind, options = address.partition("://")[0], dict[str, Any]()
    fsspec.get_filesystem_class(kind)  # first, because its message names the package to install
    if kind in ("http", "https"):
        import aiohttp
        import yarl

        options["encoded"] = queries  # a signature covers the query as it is written
        allowed = {yarl.URL(place).origin() for place in (address, *redirects)}
        options["client_kwargs"] = {
            "timeout": aiohttp.ClientTimeout(total=None, sock_read=stall),  # the default is five minutes in total
            "auto_decompress": False,
            "headers": {"Accept-Encoding": "identity"},
            "middlewares": (_stay_at(allowed),),
        }
    elif kind in ("s3", "s3a"):
        from data_prep.s3 import S3_BLOCK_BYTES, BoundedSession

        options["version_aware"] = queries  # or s3fs would ignore the version
        options["default_block_size"] = S3_BLOCK_BYTES
        options["config_kwargs"] = {"http_session_cls": BoundedSession}
    fs, root = fsspec.core.url_to_fs(address, use_listings_cache=False, skip_instance_cache=True, **options)
    return fs, root.rstrip("/")


def ask(fs: Any, seconds: float, method: str, *arguments: Any, **options: Any) -> Any:
    """Calls ``fs.method(...)`` with a timeout of ``seconds``. Raises TimeoutError when it expires.

    A driver without asynchronous code (for a disk or a mounted share) cannot be interrupted.
    """
    if not fs.async_impl:
        return getattr(fs, method)(*arguments, **options)
    task = asyncio.run_coroutine_threadsafe(getattr(fs, f"_{method}")(*arguments, **options), fs.loop)
    try:
        return task.result(seconds)
    except TimeoutError:
        if task.cancel():
            raise TimeoutError(f"no complete answer in {seconds:g} s") from None
        raise


def _stay_at(allowed: set[Any]) -> Callable[..., Awaitable[Any]]:
    """A middleware for `aiohttp` that sees each request before it is sent, including every hop of a redirect."""

    async def stay(request: Any, send: Callable[[Any], Awaitable[Any]]) -> Any:
        if request.url.origin() not in allowed:
            raise RefusedError(
                f"the server redirects to {request.url.origin()}; name that address itself, or add it to "
                "cache.redirects or --redirects if you trust it"
            )
        answer = await send(request)
        coding = answer.headers.get("Content-Encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            answer.close()
            raise RefusedError(
                f"the server compresses its answer ({coding[:20]!r}) unasked: configure it to serve files unchanged"
            )
        return answer

    return stay
