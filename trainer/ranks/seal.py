"""Seal the ranks' entries in the store: proof that a process with their secret wrote this entry for this key.

Without a secret, a seal proves only that the writer knows this format, which is public.
"""

from __future__ import annotations

import hashlib
import hmac

SECRET = "LAMBERT_SECRET"  # environment variable: seals what ranks and launchers exchange when they meet
LARGEST_TEXT_BYTES = 1 << 20  # bytes of a sealed text
SEAL_CHARACTERS = 64  # characters of a seal


def seal(secret: str, key: str, text: str) -> str:
    """Prefix ``text`` with its seal for ``key``."""
    return _mark(secret, key, text) + text


def unseal(secret: str, key: str, found: bytes) -> str | None:
    """Return the text that was sealed for ``key``; None if it is too long or the seal is wrong."""
    if len(found) > LARGEST_TEXT_BYTES:
        return None
    try:
        mark, text = found[:SEAL_CHARACTERS].decode("ascii"), found[SEAL_CHARACTERS:].decode()
    except UnicodeDecodeError:
        return None
    return text if hmac.compare_digest(mark, _mark(secret, key, text)) else None


def _mark(secret: str, key: str, text: str) -> str:
    return hmac.new(secret.encode(), f"lambert\0{key}\0{text}".encode(), hashlib.sha256).hexdigest()
