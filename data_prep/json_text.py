"""Reads JSON from untrusted files: limits the size before reading and the depth before parsing."""

from __future__ import annotations

import json
import re
import reprlib
from pathlib import Path
from typing import Any

DEEPEST_JSON = 64  # nested brackets; our own deepest file has six
LARGEST_JSON_BYTES = 1 << 30  # bytes; enough for the manifest of three million text files
MOST_SHOWN = 240  # characters of a value shown in an error line
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)


def parse_json(text: str) -> Any:
    """Parse JSON. Raises ValueError if the text is not JSON, or nested more than DEEPEST_JSON levels deep."""
    if text.count("[") + text.count("{") > DEEPEST_JSON and _depth(text) > DEEPEST_JSON:
        raise ValueError(f"nested more than {DEEPEST_JSON} levels deep")
    return json.loads(text)


def read_json(path: Path, largest: int = LARGEST_JSON_BYTES) -> Any:
    """Parse a file of UTF-8 JSON.

    Raises OSError if it cannot be read, and ValueError as `parse_json` does, or if it has more than ``largest`` bytes.
    """
    return parse_json(read_text(path, largest))


def read_text(path: Path, largest: int = LARGEST_JSON_BYTES) -> str:
    """A file of UTF-8 text. Raises OSError, or ValueError if it is not UTF-8 or has more than ``largest`` bytes."""
    with path.open("rb") as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise ValueError(f"more than {largest:,} bytes")
    return data.decode("utf-8-sig")


def shown(value: Any) -> str:
    """``repr(value)``, shortened for an error line: the value may be a whole file, or a number of 5,000 digits."""
    text = _Short().repr(value)
    return text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "..."


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80
        self.maxlevel = 3

    def repr_int(self, value: int, level: int) -> str:
        """Shortens integers, since Python refuses to print more than 4,300 digits."""
        if value.bit_length() <= 128:
            return repr(value)
        return f"about {'-' if value < 0 else ''}2^{value.bit_length() - 1}"


def _depth(text: str) -> int:
    """The nesting depth of the brackets outside strings."""
    depth = deepest = 0
    for token in _TOKEN.findall(text):
        if token in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif token in "]}":
            depth -= 1
    return deepest
