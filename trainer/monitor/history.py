"""A run's history, read from its metrics log: every step once, as it finally counted, and the events around them."""

from __future__ import annotations

import os
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.json_text import shown
from trainer.bounds import MOST_STEPS
from trainer.errors import TrainerError
from trainer.monitor.metrics_log import (
    LONGEST_LINE,
    LOSS_TASKS,
    METRICS_LOG,
    STEP_PARTS,
    Record,
    lines,
    parsed,
    skimmed,
)

StepColumns = dict[str, NDArray[np.float64]]

_METRICS = tuple(f"{task}_{metric}" for metric in ("loss", "accuracy") for task in LOSS_TASKS)
_STEP = (
    *("step", "phase", "samples", "tokens", "flops", "seconds", *_METRICS),
    *("learning_rate", "gradient_norm", "clipped", "loss_scale", "trust_min", "trust_mean", "trust_max"),
    *("unigram_loss", "token_variance", "left_out"),
)
_RANKS = ("step", *STEP_PARTS, "compute_min", "compute_mean", "compute_max", "slowest", "memory_peak_bytes")
_CHECKPOINT = ("step", "time", "seconds", "stall_seconds", "bytes")
_PLATEAU = ("step", "on", "mlm_loss", "unigram_loss", "token_variance")
MOST_SECONDS = 1e12  # a time that a journal may contain; today's Unix time is below 2e9
_CLOCK = ("step", "seconds", "rank_seconds")


def _clocked(value: Any) -> float:
    """A time from a record, in seconds. Raises ValueError if it is not finite, or too large for any clock."""
    if not abs(seconds := float(value)) <= MOST_SECONDS:
        raise ValueError(f"{shown(value)} seconds")
    return seconds


class StepTable:
    """Rows of numbers in order of step, NaN if a record lacks one. Compact enough for a million steps."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self.keys = keys  # the first is "step"
        self._numbers = array("d")

    def add(self, record: Record) -> None:
        """Append the record's row, replacing any rows of the same and later steps."""
        self.cut(record["step"] - 1)
        values = (record.get(key) for key in self.keys)
        # a list first: if a value is not a number, no part of the row is added
        self._numbers.extend([float("nan") if value is None else float(value) for value in values])

    def cut(self, step: int) -> None:
        """Forget the rows after ``step``."""
        while self._numbers and self._numbers[-len(self.keys)] > step:
            del self._numbers[-len(self.keys) :]

    def columns(self) -> StepColumns:
        """A mapping from each key to its numbers, (rows,)."""
        rows = np.array(self._numbers).reshape(-1, len(self.keys))
        return dict(zip(self.keys, rows.T, strict=True))


@dataclass(frozen=True)
class History:
    """A run over all its attempts. Columns are empty or NaN if the metrics log is from a version that lacked them."""

    steps: StepColumns  # the steps taken; if one was repeated after a restart, its last repetition
    skipped: list[int]  # for each skipped step, the number of steps taken before it
    heldout: StepColumns
    ranks: StepColumns  # since the row before, per step: mean seconds of the parts, and extremes over the ranks
    checkpoints: StepColumns
    failed: StepColumns  # checkpoints that could not be saved
    plateaus: StepColumns  # steps at which the run was found on the unigram plateau (on 1) or had left it (on 0)
    restarts: list[int]  # steps from which the run resumed
    guard: list[tuple[int, str, str]]  # what the guard did: step, sign, action
    facts: dict[str, str]  # the start record of the last attempt
    end: str  # how the run ended, and why if it failed; empty if it is running or was killed
    spent: dict[str, float] = field(default_factory=dict)  # seconds of all attempts, by what they were spent on
    wall: float | None = None  # seconds from the run's start to its last line
    seen: float | None = None  # Unix time of its last line
    rank_seconds: float = 0.0  # seconds of all attempts, each times its number of ranks
    clock: StepColumns = field(default_factory=dict)  # at some steps: `spent` in all, and `rank_seconds`, until then

    @property
    def down(self) -> float:
        """Seconds of wall time outside all attempts, such as between a kill and the next start."""
        return max(0.0, (self.wall or 0.0) - sum(self.spent.values()))

    @property
    def goodput(self) -> float | None:
        """The productive share of the wall time; None for a metrics log without times."""
        return self.spent["productive"] / self.wall if self.wall and "productive" in self.spent else None


def read_history(folder: Path) -> History:
    """Read a run's ``metrics.jsonl``. A line truncated by a kill is skipped.

    Raises TrainerError if the file is missing, cannot be read, or contains no step.
    """
    history = _read(folder, lines)
    if not len(history.steps["step"]):
        raise TrainerError(f"{folder / METRICS_LOG} contains no step yet: try again after the first steps")
    return history


def skim_history(folder: Path, newest: int) -> History:
    """The history without most steps, of which there may be none; it takes a seventh of the time.

    Of the skipped steps and of the rows of steps, ranks and the clock, only some are in it, among them the ``newest``
    steps and the last row of ranks. Until the first step after a rollback, its last step may be one before the
    rollback's. All else is exact. Raises TrainerError as `read_history` does.
    """
    return _read(folder, partial(skimmed, newest=newest))


def _read(folder: Path, records: Callable[[Path], Iterator[Record]]) -> History:
    reader = _Reader()
    with _explained(folder) as path:
        for record in records(path):
            reader.read(record)
        return reader.history()


@contextmanager
def _explained(folder: Path) -> Iterator[Path]:
    """Lend a run's metrics log; what goes wrong with it becomes a TrainerError."""
    path = folder / METRICS_LOG
    if not path.is_file():
        raise TrainerError(f"no {METRICS_LOG} in {folder}: name the folder of a run")
    try:
        yield path
    except OSError as error:
        raise TrainerError(f"{path} cannot be read: {error.strerror}") from None
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise TrainerError(f"{path} contains an invalid record ({shown(error)}): name the folder of a run") from None


class Follower:
    """The history of a run that may go on: each call of `read` takes in only the lines that were added."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place, self.size = 0, 0  # bytes of the metrics log that were read, and that it has
        self._reader, self._file = _Reader(), 0

    def read(self, until: float) -> bool:
        """Read until ``time.monotonic()`` is ``until``. Return whether all whole lines have been read.

        A metrics log that was replaced is read from its start. Raises TrainerError, as will the next call, if the file
        is missing, cannot be read, or contains an invalid record.
        """
        with _explained(self.folder) as path, path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._file or status.st_size < self.place:
                self._reader, self.place, self._file = _Reader(), 0, status.st_ino
            self.size = status.st_size
            file.seek(self.place)
            while True:  # at least one line, or on a slow disk the last of many files would never be read
                line = file.readline(LONGEST_LINE)
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE:  # the end, or a line that is being written
                    return True
                if (record := parsed(line.decode(errors="replace"))) is not None:
                    self._reader.read(record)
                self.place += len(line)
                if time.monotonic() >= until:
                    return False

    def history(self) -> History:
        """The history of what was read so far; it may contain no step. Raises TrainerError as `read` does."""
        with _explained(self.folder):
            return self._reader.history()


class _Reader:
    """Builds a history from a metrics log's records, taken in order."""

    def __init__(self) -> None:
        self.steps, self._heldout, self._ranks = StepTable(_STEP), StepTable(("step", *_METRICS)), StepTable(_RANKS)
        self._checkpoints, self._failed = StepTable(_CHECKPOINT), StepTable(_CHECKPOINT)
        self._plateaus, self._clock = StepTable(_PLATEAU), StepTable(_CLOCK)
        self._plain = {"heldout": self._heldout, "checkpoint": self._checkpoints, "checkpoint_failed": self._failed}
        self._plain["plateau"] = self._plateaus
        self._skipped: list[int] = []
        self._restarts: list[int] = []
        self._guard: list[tuple[int, str, str]] = []
        self._attempts: list[dict[str, float]] = []  # the time spent by each, from its last record
        self._sizes: list[int] = []  # the number of ranks of each
        self._before = 0.0, 0.0  # seconds, and seconds times ranks, of all attempts but the last
        self._facts: dict[str, str] = {}
        self._end = ""
        self._times: list[float] = []  # of the first and the last record
        self._seen, self._last = 0, 0
        self._begun, self._again = False, False  # whether a step was read, and an attempt began since the last step

    def read(self, record: Record) -> None:
        """Take the next record. Raises KeyError, TypeError or ValueError if it is not from a trainer."""
        if not 0 <= record.get("step", 0) <= MOST_STEPS:
            raise ValueError(f"step {shown(record['step'])}")
        if "time" in record:
            self._times = [*self._times[:1], _clocked(record["time"])]
        if "spent" in record:
            self._attempts[-1:] = [{on: _clocked(spent) for on, spent in record["spent"].items()}]
            self._tick(record.get("step"))
        match record.get("event"):
            case "step":
                self._step(record)
            case "heldout" | "checkpoint" | "checkpoint_failed" | "plateau" as event:
                self._plain[event].add(record)
            case "ranks":
                compute = zip(("compute_min", "compute_mean", "compute_max"), record["compute"], strict=True)
                self._ranks.add({**record, **record["parts"], **dict(compute)})
            case _:
                self._turn(record)

    def _tick(self, step: int | None) -> None:
        """Note the time that was spent until a step, if it is known."""
        if step is not None:
            seconds, ranks = sum(self._attempts[-1].values()), self._sizes[-1] if self._sizes else 0
            total = {"seconds": self._before[0] + seconds, "rank_seconds": self._before[1] + ranks * seconds}
            self._clock.add({"step": step, **total})

    def _turn(self, record: Record) -> None:
        """Take a record about how the run began, ended, or was guarded."""
        match record.get("event"):
            case "attempt":
                self._before = self._seconds()
                self._attempts.append({})
                self._sizes.append(self._sizes[-1] if self._sizes else 1)
                self._end, self._again = "", self._begun
            case "start":
                self._facts = {key: value for key, value in record.items() if isinstance(value, str) and key != "event"}
                self._sizes[-1:] = [int(self._facts.get("ranks", 1))]
            case "end":
                reason = str(record.get("reason") or "").partition("\n")[0]
                self._end = record["how"] + (f": {reason}" if reason else "")
            case "rollback":
                self._cut(record["step"])
                self._checkpoints.cut(record["step"])  # the run removed them
            case "guard":
                self._guard.append((record["step"], str(record["sign"]), str(record["action"])))

    def _step(self, record: Record) -> None:
        before = record["step"] - bool(record["applied"])  # steps taken before this one
        if self._again or record["restarts"] > self._seen or before < self._last:
            self._seen, self._again = record["restarts"], False
            self._restarts.append(before)
            self._cut(before)
        self._last, self._begun = record["step"], True
        if record["applied"]:
            self.steps.add(record)
        else:
            self._skipped.append(before)

    def _cut(self, step: int) -> None:
        """Forget the steps after ``step``: the run takes them again."""
        self._last = step
        for table in (self.steps, self._heldout, self._ranks, self._clock):
            table.cut(step)
        del self._skipped[bisect_left(self._skipped, step) :]

    def _seconds(self) -> tuple[float, float]:
        """Seconds of all attempts, and the same times their ranks; old logs know neither."""
        totals = [sum(attempt.values()) for attempt in self._attempts]
        return sum(totals), sum(size * total for size, total in zip(self._sizes, totals, strict=False))

    def history(self) -> History:
        """The history of all records taken so far."""
        spent: dict[str, float] = {}
        for attempt in self._attempts:
            for on, seconds in attempt.items():
                spent[on] = spent.get(on, 0.0) + seconds
        begun = self._attempts[0].get("start", 0.0) if self._attempts else 0.0  # known only once it has started
        return History(
            steps=self.steps.columns(),
            skipped=self._skipped,
            heldout=self._heldout.columns(),
            ranks=self._ranks.columns(),
            checkpoints=self._checkpoints.columns(),
            failed=self._failed.columns(),
            plateaus=self._plateaus.columns(),
            restarts=self._restarts,
            guard=self._guard,
            facts=self._facts,
            end=self._end,
            spent=spent,
            wall=self._times[-1] - self._times[0] + begun if len(self._times) > 1 else None,
            seen=self._times[-1] if self._times else None,
            rank_seconds=self._seconds()[1],
            clock=self._clock.columns(),
        )
