"""Lines of a task's file, and the JSON objects on them, each with its location for error messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.encoding import flaw
from data_prep.json_text import parse_json
from trainer.errors import TrainerError, shortage

_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of a character beyond U+FFFF, which JSON escapes as two halves


def read_text(path: Path) -> str:
    """Read a file's text. Raises TrainerError if it cannot be read or is not UTF-8."""
    try:
        data = path.read_bytes()
    except OSError as error:
        if shortage(error):
            raise
        raise TrainerError(f"{path} cannot be read ({error.strerror})") from None
    if flaw(data):
        for number, line in enumerate(data.split(b"\n"), 1):
            if wrong := flaw(line):
                raise TrainerError(f"{path}, line {number}: {wrong}; save the file as UTF-8")
    return data.decode("utf-8-sig")  # if no single line is at fault, NULs on lines of their own were


def read_lines(path: Path) -> list[str]:
    """A file's lines, split at line feeds only: texts may contain Unicode's other line ends."""
    return [line.removesuffix("\r") for line in read_text(path).split("\n")]


def json_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The object on each line of a JSON-lines file, with its line number. Empty lines are skipped."""
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            yield number, json_object(line, f"{path}, line {number}")


def loads(text: str) -> Any:
    """Parse JSON. ValueError also for half a character (a lone surrogate), which no tokenizer accepts."""
    value = parse_json(text)
    if _HALF.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"half a character, \\u{ord(error.object[error.start]):04x}") from None
    return value


def json_object(text: str, where: str) -> dict[str, Any]:
    """Parse a JSON object. Raises TrainerError if ``text`` is not one."""
    try:
        value = loads(text)
    except ValueError as error:
        raise TrainerError(f"{where}: not JSON ({error}); write one object per line") from None
    if not isinstance(value, dict):
        raise TrainerError(f"{where}: expected a JSON object, got {type(value).__name__}; write one object per line")
    return value
