"""A run's JSON lines: what is written there was said first, and survives without Prometheus."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from data_prep.json_text import parse_json

Record = dict[str, Any]
JOURNAL = "metrics.jsonl"  # in the run's folder
SPENT = ("start", "productive", "rework", "skipped", "data", "checkpoint", "evaluation")  # an attempt's whole time
PARTS = ("data", "forward", "backward", "reduce", "optimizer")  # a step's time on a rank
TASKS = ("mlm", "nsp")
_STEP = re.compile(rb'"step": (\d{1,15})(?!\d)')
_LONGEST = 1 << 20  # bytes of a line; ours have some hundred
_ATTEMPT = b'{"event": "attempt"'


class Journal:
    """Appends to one file of JSON lines; the file may be another attempt's, which was killed while it wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._whole = False  # whether the last line is known to have its end
        self._losing = False

    def write(self, records: list[Record]) -> None:
        """Append the records. A disk that is full costs lines, and one printed line that says so, but no run."""
        text = "".join(json.dumps(_plain(record), allow_nan=False) + "\n" for record in records)
        try:
            with self.path.open("ab+") as file:
                if not self._whole:
                    _end_last_line(file)
                self._whole = False
                file.write(text.encode())
            self._whole, self._losing = True, False
        except OSError as error:
            if not self._losing:
                say(f"{self.path} loses lines until it can be written again: {error}")
            self._losing = True


def say(text: str) -> None:
    """Print a line. Where the log is on a disk that is full, the line is lost, and no run."""
    with suppress(OSError):
        print(f"lambert: {text}", flush=True)


def read_lines(path: Path) -> list[Record]:
    """All lines of a journal; see `lines`."""
    return list(lines(path))


def lines(path: Path) -> Iterator[Record]:
    """The JSON objects on a file's lines, one by one. Lines that hold none are passed over: a kill may have cut one.

    Raises OSError when the file cannot be read.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in iter(partial(file.readline, _LONGEST), ""):  # a longer one comes in pieces, and is none of ours
            try:
                record = parse_json(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def past(path: Path) -> tuple[int, int]:
    """The highest step that a journal knows of, also of attempts that were rolled back, and the number of attempts.

    Without a journal both are 0. Looks for these alone: a run of a million steps is searched in seconds, not parsed.
    """
    highest = attempts = 0
    if path.exists():
        with path.open("rb") as file:
            for line in iter(partial(file.readline, _LONGEST), b""):
                attempts += line.startswith(_ATTEMPT)
                found = _STEP.search(line)
                highest = max(highest, int(found[1]) if found else 0)
    return highest, attempts


def tokens_per_second(record: Record) -> float | None:
    """Of a step, valid tokens; None where its clock saw no time pass."""
    return record["tokens"] / record["seconds"] if record["seconds"] else None


def _end_last_line(file: BinaryIO) -> None:
    """A kill may have cut the last line short; the next one must not grow out of it."""
    if file.seek(0, os.SEEK_END) > 0:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def _plain(value: Any) -> Any:
    """The value with null, at any depth, for what is not finite: JSON cannot say it."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
    return value
