"""Decides whether bytes are UTF-8 text, the same way for every command that reads text."""

from __future__ import annotations

INVISIBLE = b"\0 \t\r\n\v\f"
ZERO_WIDTH_SPACE = "\u200b".encode()


def read_utf8(data: bytes) -> str | None:
    """The text of ``data``, or None if it is not UTF-8 text; `flaw` gives the reason.

    A NUL next to visible characters is a flaw: UTF-16 without a byte order mark is valid UTF-8 with a NUL in every
    other byte. NULs alone are not a flaw: a crashed file system leaves them, and they contain no text.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return None if b"\0" in data and data.replace(ZERO_WIDTH_SPACE, b"").strip(INVISIBLE) else text


def flaw(data: bytes, column: int = 0) -> str:
    """The reason why ``data`` is not UTF-8 text; "" if it is.

    Args:
        column: number of bytes on the line before ``data``.
    """
    if read_utf8(data) is not None:
        return ""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte 0x{data[error.start]:02X} at column {column + error.start + 1})"
    nul = data.index(0)
    return f"not UTF-8 text but UTF-16 or binary data (a NUL at column {column + nul + 1})"
