"""What a server may do to whoever reads from it: so many bytes, so much time, and no requests to other hosts.

`fsspec`'s drivers believe what they are told. They follow redirects anywhere, unpack what is compressed and write or
keep all that comes, for as long as it comes. Imported only where an address is opened: `fsspec` takes a tenth of a
second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import fsspec


class RefusedError(ValueError):
    """The server does what it may not; to ask it again would not help."""


class Bound(fsspec.Callback):  # type: ignore[misc]  # fsspec has no types
    """Counts the bytes of one download for its driver, and ends it when they are more than ``limit``.

    Raises RefusedError inside the driver: before the first byte where the server says how many will come.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def set_size(self, size: int | None) -> None:
        """The driver heard that ``size`` bytes will come."""
        self.check(size)

    def relative_update(self, inc: int = 1) -> None:
        """``inc`` bytes more have come."""
        self.absolute_update(self.value + inc)

    def absolute_update(self, value: int | None) -> None:
        """``value`` bytes have come in all."""
        self.value = value or 0
        self.check(value)

    def check(self, size: int | None) -> None:
        """Raises RefusedError if that many bytes are too many."""
        if size is not None and size > self.limit:
            raise self.refusal()

    def refusal(self) -> RefusedError:
        """The error to raise."""
        return RefusedError(f"the server sends more than the {self.limit:,} bytes that it may have")


def open_fs(address: str, stall: float, redirects: Sequence[str] = ()) -> tuple[Any, str]:
    """The file system of ``fsspec`` for ``address``, and the root in it.

    Over HTTP it asks the address's own origin only, and those in ``redirects`` ("https://cdn.example.com"). From S3 it
    takes no redirects, and no answer but an object's content of more than SMALL bytes. ``stall``: seconds without a
    byte that end an HTTP request.

    Raises ImportError if the driver is missing, ValueError if there is none.
    """
    kind, options = address.partition("://")[0], dict[str, Any]()
    fsspec.get_filesystem_class(kind)  # first, for its message names the package to install
    if kind in ("http", "https"):
        import aiohttp
        import yarl

        allowed = {yarl.URL(place).origin() for place in (address, *redirects)}
        options["client_kwargs"] = {
            "timeout": aiohttp.ClientTimeout(total=None, sock_read=stall),  # by default it is five minutes in all
            "auto_decompress": False,
            "headers": {"Accept-Encoding": "identity"},
            "middlewares": (_stay_at(allowed),),
        }
    elif kind in ("s3", "s3a"):
        from data_prep.s3 import BLOCK, BoundedSession

        options["default_block_size"] = BLOCK
        options["config_kwargs"] = {"http_session_cls": BoundedSession}
    fs, root = fsspec.core.url_to_fs(address, use_listings_cache=False, skip_instance_cache=True, **options)
    return fs, root.rstrip("/")


def ask(fs: Any, seconds: float, method: str, *arguments: Any, **options: Any) -> Any:
    """``fs.method(...)``, broken off after ``seconds``. Raises TimeoutError then.

    A driver without asynchronous code (of a disk, or of a share that is mounted) cannot be broken off.
    """
    if not fs.async_impl:
        return getattr(fs, method)(*arguments, **options)
    task = asyncio.run_coroutine_threadsafe(getattr(fs, f"_{method}")(*arguments, **options), fs.loop)
    try:
        return task.result(seconds)
    except TimeoutError:
        if task.cancel():
            raise TimeoutError(f"no whole answer in {seconds:g} s") from None
        raise


def _stay_at(allowed: set[Any]) -> Callable[..., Awaitable[Any]]:
    """A middleware of `aiohttp`, which sees each request before it is sent, and so every hop of a redirect."""

    async def stay(request: Any, send: Callable[[Any], Awaitable[Any]]) -> Any:
        if request.url.origin() not in allowed:
            raise RefusedError(
                f"the server redirects to {request.url.origin()}; name that address itself, or add it to "
                "cache.redirects if you trust it"
            )
        answer = await send(request)
        coding = answer.headers.get("Content-Encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            answer.close()
            raise RefusedError(
                f"the server sends it compressed ({coding[:20]!r}), unasked: have it serve the files as they are"
            )
        return answer

    return stay
