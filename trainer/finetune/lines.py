"""Lines of a task's file, and the JSON objects on them, each with where it stands for whoever has to mend it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.encoding import flaw
from data_prep.json_text import parse_json
from trainer.errors import TrainerError, shortage

_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of a character beyond U+FFFF, which JSON writes as two


def read_text(path: Path) -> str:
    """A file's text. Raises TrainerError where there is none, or where it is not UTF-8."""
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
    return data.decode("utf-8-sig")  # what is flawed as a whole may be lines of NULs alone beside others


def read_lines(path: Path) -> list[str]:
    """A file's lines, parted by line feeds alone: texts may hold Unicode's other line ends."""
    return [line.removesuffix("\r") for line in read_text(path).split("\n")]


def json_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The object on each line of JSON lines, with the line's number. Empty lines are passed over."""
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            yield number, json_object(line, f"{path}, line {number}")


def loads(text: str) -> Any:
    """JSON's value. ValueError also for half a character (a lone surrogate), which no tokenizer takes."""
    value = parse_json(text)
    if _HALF.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"half a character, \\u{ord(error.object[error.start]):04x}") from None
    return value


def json_object(text: str, where: str) -> dict[str, Any]:
    """Raises TrainerError where ``text`` is no JSON object."""
    try:
        value = loads(text)
    except ValueError as error:
        raise TrainerError(f"{where}: not JSON ({error}); write one object a line") from None
    if not isinstance(value, dict):
        raise TrainerError(f"{where}: no JSON object but {type(value).__name__}; write one object a line")
    return value
