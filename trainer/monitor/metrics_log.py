"""The run's JSONL log, written before any exporter sees a record, and complete without Prometheus."""

from __future__ import annotations

import json
import math
import os
import re
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from data_prep.json_text import parse_json
from trainer.console import say

Record = dict[str, Any]
METRICS_LOG = "metrics.jsonl"  # in the run's folder
# Where an attempt's time goes, and where a step's time on a rank goes.
TIME_STATES = ("start", "productive", "rework", "skipped", "data", "checkpoint", "evaluation")
STEP_PARTS = ("data", "forward", "backward", "reduce", "optimizer")
LOSS_TASKS = ("mlm", "nsp")
_STEP = re.compile(rb'"step": (\d{1,15})(?!\d)')
LONGEST_LINE = 1 << 20  # bytes of a line; ours have a few hundred
_ATTEMPT, _START, _ROLLBACK, _STEP_EVENT, _PLATEAU = (
    f'{{"event": "{event}"'.encode() for event in ("attempt", "start", "rollback", "step", "plateau")
)
_FREQUENT = {_STEP_EVENT, b'{"event": "ranks"', b'{"event": "time"'}


class MetricsLog:
    """Appends to one JSONL file. The file may come from an earlier attempt that was killed while writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._whole = False  # whether the last line is known to be complete
        self._losing = False

    def write(self, records: list[Record]) -> None:
        """Append the records. If the disk is full, lines are lost and one warning is printed, but the run continues."""
        text = "".join(json.dumps(plain(record), allow_nan=False) + "\n" for record in records)
        try:
            with self.path.open("ab+") as file:
                if not self._whole:
                    _end_last_line(file)
                self._whole = False
                file.write(text.encode())
            self._whole, self._losing = True, False
        except OSError as error:
            if not self._losing:
                say(f"{self.path}: losing lines until it can be written again: {error}")
            self._losing = True


def read_lines(path: Path) -> list[Record]:
    """All records of a metrics log; see `lines`."""
    return list(lines(path))


def lines(path: Path) -> Iterator[Record]:
    """Yield the JSON object on each line of a file. Other lines are skipped: a kill may have truncated one.

    Raises OSError if the file cannot be read.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in iter(partial(file.readline, LONGEST_LINE), ""):  # a longer line is not ours and arrives in pieces
            if (record := parsed(line)) is not None:
                yield record


def skimmed(path: Path, newest: int) -> Iterator[Record]:
    """Yield the records that say where a run stands, in order: nearly all of a log's lines are left out unparsed.

    Left out are most records of steps, ranks and times: of each kind, the first and the last are kept before every
    other record and before a step that is repeated, and at the end the ``newest`` steps. Raises OSError like `lines`.
    """
    kept: dict[int, bytes] = {}  # by line number
    steps = deque[tuple[int, bytes]](maxlen=newest)
    last: dict[bytes, tuple[int, bytes]] = {}  # of each kind, since the last other record or repetition
    before = 0
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, LONGEST_LINE), b"")):
            if not line.startswith(b'{"event": "'):
                continue
            kind = line[: line.find(b",")]
            step = _step_of(line) if kind in _FREQUENT and line.endswith(b"}\n") else 0  # a kill truncates a line
            if not step or (kind == _STEP_EVENT and step < before):
                kept.update(last.values())
                last = {}
            if kind not in last:
                kept[number] = line
            if step:
                last[kind] = number, line
            if step and kind == _STEP_EVENT:
                before = step
                steps.append((number, line))
    kept.update([*last.values(), *steps])
    for number in sorted(kept):
        if (record := parsed(kept[number].decode(errors="replace"))) is not None:
            yield record


def parsed(line: str) -> Record | None:
    """The JSON object on a line, or None if there is none."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _step_of(line: bytes) -> int:
    found = _STEP.search(line)
    return int(found[1]) if found else 0


def newest_steps(path: Path, count: int, last: int) -> list[Record]:
    """Up to ``count`` records of the steps that led to step ``last``, the newest ones; empty without a metrics log.

    Steps that were taken again after a restart or a rollback are not among them.
    """
    kept = deque[bytes](maxlen=count)
    if path.exists():
        with path.open("rb") as file:
            for line in iter(partial(file.readline, LONGEST_LINE), b""):
                if line.startswith(_STEP_EVENT) and _step_of(line) <= last:
                    kept.append(line)
                while line.startswith((_START, _ROLLBACK)) and kept and _step_of(kept[-1]) > _step_of(line):
                    kept.pop()
    return [record for line in kept if (record := parsed(line.decode(errors="replace"))) is not None]


def past(path: Path) -> tuple[int, int, bool]:
    """The highest step in a metrics log, including steps that were rolled back; the attempts; whether a plateau lasts.

    All are 0 without a metrics log. The lines are searched rather than parsed, so a million steps take only seconds.
    """
    highest, attempts, plateau = 0, 0, False
    if path.exists():
        with path.open("rb") as file:
            for line in iter(partial(file.readline, LONGEST_LINE), b""):
                attempts += line.startswith(_ATTEMPT)
                highest = max(highest, _step_of(line))
                if line.startswith(_PLATEAU):
                    plateau = b'"on": true' in line
    return highest, attempts, plateau


def tokens_per_second(record: Record) -> float | None:
    """A step's valid tokens per second; None if the clock measured no time."""
    return record["tokens"] / record["seconds"] if record["seconds"] else None


def _end_last_line(file: BinaryIO) -> None:
    """End a last line that a kill truncated, so that the next record starts on its own line."""
    if file.seek(0, os.SEEK_END) > 0:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def plain(value: Any) -> Any:
    """Return the value with null, at any depth, for numbers that are not finite, which JSON cannot express."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [plain(inner) for inner in value]
    return value
