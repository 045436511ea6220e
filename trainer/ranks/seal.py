"""A seal on what the ranks leave for one another: proof that a process which knows their secret wrote it, for this key.

Without a secret it proves only that a program of ours wrote it; anybody can read how.
"""

from __future__ import annotations

import hashlib
import hmac

LARGEST = 1 << 20  # bytes of a sealed text
LENGTH = 64  # characters of a seal


def seal(secret: str, key: str, text: str) -> str:
    """``text`` behind its seal, to be left under ``key``."""
    return _mark(secret, key, text) + text


def unseal(secret: str, key: str, found: bytes) -> str | None:
    """The text that was sealed for ``key``; None if it is too long, or no such seal is on it."""
    if len(found) > LARGEST:
        return None
    try:
        mark, text = found[:LENGTH].decode("ascii"), found[LENGTH:].decode()
    except UnicodeDecodeError:
        return None
    return text if hmac.compare_digest(mark, _mark(secret, key, text)) else None


def _mark(secret: str, key: str, text: str) -> str:
    return hmac.new(secret.encode(), f"lambert\0{key}\0{text}".encode(), hashlib.sha256).hexdigest()
