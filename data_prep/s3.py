"""What `s3fs` speaks HTTP with, bounded: no redirects, and nothing endless in memory."""

from __future__ import annotations

import re
from typing import Any

import aiohttp
from aiobotocore.httpsession import AIOHTTPSession

from data_prep.manifest import SMALL
from data_prep.servers import RefusedError

BLOCK = 8 << 20  # bytes of an object that are asked for at once, and kept in memory
SECONDS = 3600  # for one request, which may send a large part over a slow line


class BoundedSession(AIOHTTPSession):  # type: ignore[misc]  # aiobotocore has no types
    """The session of `aiobotocore`, which would follow redirects to any host and keep answers of any size."""

    async def send(self, request: Any) -> Any:
        """The answer to a request. Raises RefusedError if its body is larger than it may be.

        Botocore handles what S3 itself means by a redirect: another region of its own.
        """
        streamed, request.stream_output = request.stream_output, True  # nothing is read inside
        answer = await super().send(request)
        if not streamed or answer.status_code >= 300:
            answer._content = await _read(answer.raw, SMALL)
        elif asked := re.fullmatch(r"bytes=(\d+)-(\d+)", _text(request.headers.get("Range", ""))):
            _require_length(answer.raw, int(asked[2]) + 1 - int(asked[1]))  # s3fs keeps all of it in memory
        return answer

    async def _get_session(self, proxy_url: str | None) -> _NoRedirects:
        return _NoRedirects(await super()._get_session(proxy_url))


class _NoRedirects:
    """As much of `aiohttp.ClientSession` as `AIOHTTPSession.send` uses."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def request(self, method: str, **options: Any) -> aiohttp.ClientResponse:
        timeout = options.pop("timeout", self.session.timeout)
        within = aiohttp.ClientTimeout(SECONDS, sock_connect=timeout.sock_connect, sock_read=timeout.sock_read)
        return await self.session.request(method, allow_redirects=False, timeout=within, **options)


async def _read(answer: aiohttp.ClientResponse, limit: int) -> bytes:
    """The whole body, if it has at most ``limit`` bytes."""
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
        raise RefusedError(f"asked for {size:,} bytes, the server sends {answer.content_length or 'any number of'}")


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
