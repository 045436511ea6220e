"""Why a node's ranks ended: an exit code for a Kubernetes ``podFailurePolicy``, and one line for people."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.streams import say_error
from trainer.exits import DONE, FAILED, LOST, REFUSED, STOPPED

ROOM = 4096  # bytes; Kubernetes truncates a longer termination message
HINTS: dict[int, str] = {
    signal.SIGKILL: " (perhaps out of memory: check the kernel log)",
    signal.SIGBUS: " (perhaps /dev/shm is full, or a mapped file shrank or could not be read)",
}


@dataclass(frozen=True)
class End:
    """How one rank ended."""

    rank: int
    code: int  # its exit code; a signal's number, negated
    at: float  # seconds; equal for ends seen together
    ours: bool = False  # it died from a signal that the supervisor sent
    words: str = ""  # the rank's own last line


def judge(ends: Sequence[End], asked: bool) -> tuple[int, End | None]:
    """Return the exit code for all of these ends, and the end that explains it. ``asked``: a stop was requested.

    The first real failure decides; of failures seen together, a refusal, since it may have caused the others. Next come
    ranks that lost another rank. A rank that died from our SIGTERM had no handler yet, so it had nothing to save. A
    rank that had to be killed decides only if no other end does.
    """
    real = [end for end in ends if not end.ours and end.code not in (DONE, LOST, STOPPED)]
    if real:
        code = min(real, key=lambda end: (end.at, end.code != REFUSED, end.rank)).code
        return (code if code > 0 else 128 - code), _speaker([end for end in real if end.code == code])
    for code, found in (
        (STOPPED, [end for end in ends if asked and end.ours and end.code == -signal.SIGTERM]),
        (LOST, [end for end in ends if end.code == LOST]),
        (STOPPED, [end for end in ends if end.code == STOPPED]),
        (FAILED, [end for end in ends if end.ours]),
    ):
        if found:
            return code, _speaker(found)
    return DONE, None


def _speaker(ends: Sequence[End]) -> End:
    """Return the first end with a last line: of ranks with the same problem, often only one reports it."""
    return min(ends, key=lambda end: (not end.words, end.at, end.rank))


def describe(end: End, alone: bool = True) -> str:
    """Return one line: the rank's own, or what its exit code means. ``alone``: there is no other node."""
    if end.words:
        return end.words
    if end.ours and end.code == -signal.SIGTERM:
        return f"lambert: rank {end.rank} was stopped during startup, before there was anything to save"
    if end.ours:
        return f"lambert: rank {end.rank} did not end within its time after SIGTERM and was killed"
    if end.code < 0:
        names: dict[int, str] = {number: number.name for number in signal.Signals}  # real-time signals have none
        name = names.get(-end.code, f"signal {-end.code}")
        return f"lambert: rank {end.rank} was killed by {name}{HINTS.get(-end.code, '')}"
    if end.code == STOPPED:
        return "lambert: stopped at a step boundary and saved: run the same command to continue"
    if end.code == LOST:
        return f"lambert: rank {end.rank} lost contact with another rank: see that rank's own last line"
    # of ranks with the same problem, one may speak for all; here none did, so it may be on another node
    whose = "see its own lines" if alone or end.code != REFUSED else "see its own lines or another node's"
    return f"lambert: rank {end.rank} ended with exit code {end.code}: {whose}"


def leave_message(text: str, path: Path) -> None:
    """Write ``text`` where Kubernetes looks for a container's last message. A failure to write is reported."""
    try:
        path.write_text(text.encode()[:ROOM].decode(errors="ignore"), encoding="utf-8")
    except OSError as error:
        say_error(f"lambert: cannot write the termination log: {error}")
