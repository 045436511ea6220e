"""Builders: runs of one build on several machines that share its folder, and together make one data set.

    python -m data_prep build … --builder 0/3        also 1/3 and 2/3, at the same time or one after another

A stage consists of units that depend on nothing but the stage before. Each builder makes its own units first, then
those that are still missing, so the work of a builder that was killed or never started is done by the others. Two
builders may make the same unit: both write the same bytes, each under a temporary name. A step that cannot be divided
is done by the builder that comes first. The others wait, print for whom, and do the step themselves if its files stop
growing. So no file that builders write to coordinate can make a data set wrong, or keep one from being finished.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from data_prep.atomic import TEMPORARY, hold
from data_prep.errors import DataError
from data_prep.streams import say_error, warn

MOST_BUILDERS = 10_000
LOOK_SECONDS = 0.2  # between two checks of a builder that waits
SAY_SECONDS = 30.0  # between two lines of a builder that waits
STALLED_SECONDS = 60.0  # a step whose files do not change for this long is done again
CLAIM = ".claim"  # suffix of the link that names the builder of a step
MARKS = "builders"  # folder with an empty file for each builder that uses the working files


class OvertakenError(Exception):
    """Another builder has finished what this one was making."""


@dataclass(frozen=True)
class Builder:
    """Builder ``number`` of ``count``; numbers begin at 0."""

    number: int
    count: int


def parse_builder(text: str) -> Builder:
    """Reads ``K/N``. Raises DataError for anything else."""
    match = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text, re.ASCII)
    if match and int(match[1]) < int(match[2]) <= MOST_BUILDERS:
        return Builder(int(match[1]), int(match[2]))
    raise DataError(
        f"--builder {text[:80]}: wanted K/N, builder K of N: N from 1 to {MOST_BUILDERS:,}, and K from 0 to N - 1"
    )


def own_first(builder: Builder, units: int) -> Iterator[int]:
    """All units in this builder's order: every N-th one is its own; then the others, mixed.

    The mix differs from builder to builder, so that two which help do not make the same unit.
    """
    yield from range(builder.number, units, builder.count)
    others = [unit for unit in range(units) if unit % builder.count != builder.number]
    random.Random(builder.number).shuffle(others)
    yield from others


def owners(start: int, end: int, total: int, count: int) -> range:
    """The builders that share bytes ``start`` to ``end`` of a corpus of ``total``; each owns an equal part of it."""
    first = min(start * count // max(total, 1), count - 1)
    return range(first, max(first + 1, -(-end * count // max(total, 1))))


def make_once(builder: Builder | None, step: str, file: Path, make: Callable[[], None]) -> None:
    """Calls ``make`` unless ``file``, which it writes last, exists. Of several builders, one calls it.

    Args:
        builder: this builder; None if there is only one.
        step: what ``make`` makes, in words.
    """
    if builder is None:
        if not file.exists():
            make()
        return
    claim = file.with_name(f"{file.name}{CLAIM}")
    while not file.exists():
        if not _take(claim, builder):
            _wait(claim, step, file)
            continue
        try:
            with unless(file.exists):
                make()
        finally:
            claim.unlink(missing_ok=True)


@contextmanager
def unless(done: Callable[[], bool]) -> Iterator[None]:
    """A block whose errors are ignored if ``done()``: another builder finished its work, and removed its files."""
    try:
        yield
    except (OSError, OvertakenError):
        if not done():
            raise


@contextmanager
def used_by(builder: Builder | None, work: Path) -> Iterator[None]:
    """Marks the working files as in use by this builder during a ``with`` block. The mark of one killed stays."""
    if builder is None:
        yield
        return
    (work / MARKS).mkdir(exist_ok=True)
    (work / MARKS / str(builder.number)).touch()
    try:
        yield
    finally:
        leave(work, builder)


def leave(work: Path, builder: Builder) -> list[str]:
    """Removes this builder's mark, and returns the `users` that are left."""
    (work / MARKS / str(builder.number)).unlink(missing_ok=True)
    return users(work, builder)


def users(work: Path, builder: Builder | None) -> list[str]:
    """The numbers of the other builders that use the working files, or were killed."""
    with suppress(FileNotFoundError):
        if builder is not None:
            return sorted(path.name for path in (work / MARKS).iterdir() if path.name != str(builder.number))
    return []


def _take(claim: Path, builder: Builder) -> bool:
    """Whether the claim is this builder's: a new one, or one from before it was killed."""
    with suppress(FileNotFoundError):  # its holder is done
        return hold(claim, str(builder.number)) == str(builder.number)
    return False


def _holder(claim: Path) -> str | None:
    """The number of the builder that holds a claim; None if nobody does."""
    with suppress(FileNotFoundError):
        return os.readlink(claim)
    return None


def _wait(claim: Path, step: str, file: Path) -> None:
    """Returns when ``file`` exists, or when the claim on it is gone; removes the claim if the step has stalled."""
    holder, seen = _holder(claim), _sizes(file.parent)
    changed, said = time.monotonic(), -SAY_SECONDS
    while holder is not None and not file.exists() and _holder(claim) == holder:
        now, sizes = time.monotonic(), _sizes(file.parent)
        if sizes != seen:
            seen, changed = sizes, now
        if now - changed >= STALLED_SECONDS:
            warn(f"builder {holder} has written nothing for {now - changed:.0f} s: making {step} again without it")
            claim.unlink(missing_ok=True)
            return
        if now - said >= SAY_SECONDS:
            said = now
            say_error(f"data_prep: waiting for builder {holder} to make {step}; {sum(sizes.values()):,} bytes so far")
        time.sleep(LOOK_SECONDS)


def _sizes(folder: Path) -> dict[str, int]:
    """The sizes of the temporary files in a folder, by name."""
    sizes = {}
    for path in folder.glob(f"*{TEMPORARY}"):
        with suppress(FileNotFoundError):  # just renamed
            sizes[path.name] = path.stat().st_size
    return sizes
