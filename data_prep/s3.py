"""The HTTP session for `s3fs`, with limits: no redirects, and a bounded amount of data in memory."""

from __future__ import annotations

import re
from typing import Any

import aiohttp
from aiobotocore.httpsession import AIOHTTPSession

from data_prep.manifest import SMALL_FILE_BYTES
from data_prep.servers import RefusedError

S3_BLOCK_BYTES = 8 << 20  # bytes of an object that are requested at once and kept in memory
S3_REQUEST_SECONDS = 3600  # timeout for one request, which may send a large part over a slow connection


class BoundedSession(AIOHTTPSession):  # type: ignore[misc]  # aiobotocore has no types
    """An `aiobotocore` session that follows no redirects and limits answers; the original does neither."""

    async def send(self, request: Any) -> Any:
        """The answer to a request. Raises RefusedError if its body is over the limit.

        Botocore itself handles S3's own redirects, to another region of S3.
        """
        streamed, request.stream_output = request.stream_output, True  # keeps the original from reading the body
        answer = await super().send(request)
        if not streamed or answer.status_code >= 300:
            answer._content = await _read(answer.raw, SMALL_FILE_BYTES)
        elif asked := re.fullmatch(r"bytes=(\d+)-(\d+)", _text(request.headers.get("Range", ""))):
            _require_length(answer.raw, int(asked[2]) + 1 - int(asked[1]))  # s3fs holds the whole answer in memory
        return answer

    async def _get_session(self, proxy_url: str | None) -> _NoRedirects:
        return _NoRedirects(await super()._get_session(proxy_url))


class _NoRedirects:
    """The part of `aiohttp.ClientSession` that `AIOHTTPSession.send` uses, without redirects."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def request(self, method: str, **options: Any) -> aiohttp.ClientResponse:
        timeout = options.pop("timeout", self.session.timeout)
        within = aiohttp.ClientTimeout(
            S3_REQUEST_SECONDS, sock_connect=timeout.sock_connect, sock_read=timeout.sock_read
        )
        return await self.session.request(method, allow_redirects=False, timeout=within, **options)


async def _read(answer: aiohttp.ClientResponse, limit: int) -> bytes:
    """The whole body. Raises RefusedError if it has more than ``limit`` bytes."""
    found = bytearray()
    async for part in answer.content.iter_any():
        found += part
        if len(found) > limit:
            answer.close()
            raise RefusedError(f"the server's answer has more than {limit:,} bytes")
    answer.release()
    return bytes(found)


def _require_length(answer: aiohttp.ClientResponse, size: int) -> None:
    if answer.content_length is None or answer.content_length > size:
        answer.close()
        raise RefusedError(f"asked for {size:,} bytes, the server sends {answer.content_length or 'an unknown number'}")


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
