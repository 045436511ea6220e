"""Reads what a tracker does not have yet from a run's journal, without the steps that the run has taken back since."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import IO

from data_prep.json_text import shown
from trainer.errors import TrainerError
from trainer.monitor.metrics_log import LONGEST_LINE, Record, parsed
from trainer.track.points import Point, points

MOST_POINTS = 50  # in a batch; a point has some twenty values, and MLflow takes 1,000 in a request
TAIL_BYTES = 4096  # some lines, with the times of their steps
_BACK = (b'{"event": "start"', b'{"event": "rollback"')  # the run goes on from the step in this record


@dataclass(frozen=True)
class Standing:
    """The part of a run that a tracker has."""

    offset: int = 0  # bytes of the journal
    highest: int = 0  # the last step, of those that count
    repeats: tuple[tuple[int, int], ...] = ()  # steps of which it has values from before the run went back, too
    time: float = 0.0  # Unix time of the last record, in seconds
    end: str = ""  # how the run ended; empty before that
    reason: str = ""  # why it ended
    closed: str = ""  # the final state that the tracker was last given
    tail: str = ""  # see `tail`; empty unless noted

    @property
    def taken(self) -> int:
        """The steps that it has, counting repeated ones each time. It never falls."""
        return self.highest + sum(last - first + 1 for first, last in self.repeats)


@dataclass(frozen=True)
class Batch:
    """Some records of a journal, in order."""

    standing: Standing  # of a tracker that has this batch
    points: list[Point] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)  # what runs, if the run started or resumed here
    back: int | None = None  # the tracker has values of steps after this one, which the points here replace


def tail(path: Path, offset: int) -> str:
    """A hash of what is before ``offset`` in the journal. It tells whether this is still the journal that was sent.

    A run at an address that is killed resumes with the journal at the address, which may lack the last lines.
    Raises TrainerError if the journal cannot be read.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, offset - TAIL_BYTES))
            return hashlib.sha256(file.read(min(offset, TAIL_BYTES))).hexdigest()[:16]
    except OSError as error:
        raise TrainerError(f"{path} cannot be read: {error.strerror}") from None


def batches(path: Path, standing: Standing) -> Iterator[Batch]:
    """Yield what a tracker with this ``standing`` lacks of the journal at ``path``.

    A line that is being written comes next time. Steps that the run takes again later in the journal are left out.
    Raises TrainerError if the journal cannot be read, is shorter than it was, or was not written by the trainer.
    """
    try:
        if path.stat().st_size < standing.offset:
            raise TrainerError(f"{path} is shorter than when it was last sent: it is not the same run's, or is damaged")
        batch = Batch(standing)
        for record, offset, kept in _records(path, standing.offset):
            back = _back(record, batch.standing.highest)
            if back is not None or len(batch.points) >= MOST_POINTS:
                yield batch
                batch = Batch(batch.standing, back=back)
            batch = _with(batch, record, offset, kept)
        if batch.standing != standing:
            yield batch
    except OSError as error:
        raise TrainerError(f"{path} cannot be read: {error.strerror}") from None
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise TrainerError(f"{path} contains an invalid record ({shown(error)}): name the folder of a run") from None


def _back(record: Record, highest: int) -> int | None:
    """The step from which the run goes on, if the tracker has later ones; else None."""
    back = record.get("event") in ("start", "rollback") and record.get("step", highest) < highest
    return int(record["step"]) if back else None


def _with(batch: Batch, record: Record, offset: int, kept: float) -> Batch:
    """The batch with one more record. ``kept``: the highest step here that is not taken again later."""
    event, standing = record.get("event"), replace(batch.standing, offset=offset)
    standing = replace(standing, time=float(record.get("time", standing.time)))
    if (back := _back(record, standing.highest)) is not None:
        standing = replace(standing, highest=back, repeats=(*standing.repeats, (back + 1, standing.highest)))
    match event:
        case "attempt":
            standing = replace(standing, end="", reason="")
        case "start":
            facts = {key: value for key, value in record.items() if isinstance(value, str) and key != "event"}
            return replace(batch, standing=standing, facts=facts)
        case "end":
            standing = replace(standing, end=str(record["how"]), reason=str(record.get("reason") or ""))
        case "step" | "heldout" | "checkpoint" | "ranks" if record["step"] <= kept:
            batch.points.extend(found := points(record))
            if found:
                standing = replace(standing, highest=max(standing.highest, record["step"]))
    return replace(batch, standing=standing)


def _records(path: Path, offset: int) -> Iterator[tuple[Record, int, float]]:
    """Yield each record after ``offset``, the offset behind it, and the highest step that counts there."""
    with path.open("rb") as file:
        turns = list(_turns(file, offset))
        kept = list(accumulate((step for _, step in reversed(turns)), min, initial=math.inf))[::-1]
        passed = 0  # of the turns
        for line, behind in _lines(file, offset):
            passed += passed < len(turns) and turns[passed][0] <= behind
            if (record := parsed(line.decode(errors="replace"))) is not None:
                yield record, behind, kept[passed]


def _turns(file: IO[bytes], offset: int) -> Iterator[tuple[int, int]]:
    """Yield each record with which the run starts or goes back: the offset behind it, and its step."""
    for line, behind in _lines(file, offset):
        record = parsed(line.decode(errors="replace")) if line.startswith(_BACK) else None
        if record is not None and "step" in record:
            yield behind, int(record["step"])


def _lines(file: IO[bytes], offset: int) -> Iterator[tuple[bytes, int]]:
    """Yield each line after ``offset``, and the offset behind it. A line that is being written ends them."""
    file.seek(offset)
    for line in iter(partial(file.readline, LONGEST_LINE), b""):
        if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
            return
        offset += len(line)
        yield line, offset
