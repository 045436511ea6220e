"""Why a node's ranks ended: one exit code for a Kubernetes ``podFailurePolicy``, and one line for people."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.streams import say_error
from trainer.exits import DONE, FAILED, LOST, REFUSED, STOPPED

ROOM = 4096  # bytes of a termination message that Kubernetes keeps
HINTS: dict[int, str] = {
    signal.SIGKILL: " (out of memory, perhaps: the kernel's log would say so)",
    signal.SIGBUS: " (/dev/shm is full, perhaps, or a file shrank or failed while it was mapped)",
}


@dataclass(frozen=True)
class End:
    """How one rank ended."""

    rank: int
    code: int  # its exit code; for a signal, minus its number
    at: float  # seconds; the same for ends that were seen together
    ours: bool = False  # it died of a signal that its supervisor had sent
    words: str = ""  # its own last line


def judge(ends: Sequence[End], asked: bool) -> tuple[int, End | None]:
    """The exit code for all of these ends, and the end that says why; ``asked``: they were told to stop.

    The first real failure speaks, and of failures seen together a refusal: the other ones may follow from it. Ranks
    that merely lost another rank come next. A rank that died of the supervisor's own SIGTERM had not made a handler
    yet, so it had nothing to save. One that had to be killed speaks only if nobody else does.
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
    """The first that said something; of ranks that find the same, often one alone does."""
    return min(ends, key=lambda end: (not end.words, end.at, end.rank))


def describe(end: End, alone: bool = True) -> str:
    """One line: the rank's own last words, or what its exit code tells; ``alone``: there is no other node."""
    if end.words:
        return end.words
    if end.ours and end.code == -signal.SIGTERM:
        return f"lambert: rank {end.rank} was stopped while it started, before there was anything to save"
    if end.ours:
        return f"lambert: rank {end.rank} did not end at SIGTERM in the time that it had, and was killed"
    if end.code < 0:
        names: dict[int, str] = {number: number.name for number in signal.Signals}  # those of real time have none
        name = names.get(-end.code, f"signal {-end.code}")
        return f"lambert: rank {end.rank} was killed by {name}{HINTS.get(-end.code, '')}"
    if end.code == STOPPED:
        return "lambert: stopped at a step's border and saved: the same command goes on"
    if end.code == LOST:
        return f"lambert: rank {end.rank} lost contact with another rank, whose own end says why"
    # of ranks that find the same, one alone may say it; were it here, it would have been the one that speaks
    whose = "its own lines say why" if alone or end.code != REFUSED else "its own lines, or another node's, say why"
    return f"lambert: rank {end.rank} ended with exit code {end.code}: {whose}"


def leave_message(text: str, path: Path) -> None:
    """Write ``text`` where Kubernetes looks for a container's last message; what cannot be written is said."""
    try:
        path.write_text(text.encode()[:ROOM].decode(errors="ignore"), encoding="utf-8")
    except OSError as error:
        say_error(f"lambert: cannot write the termination log: {error}")
