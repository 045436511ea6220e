"""Starts this node's ranks, watches them, and ends when they have; made to be process 1 of a container.

    python -m deploy.launch [--nproc-per-node N|auto] [--nnodes N --node-rank K --master-addr HOST] [-m MODULE] ARGS…

A rank is ``python -m trainer ARGS…``. A SIGTERM, a Ctrl-C or a hang-up is passed on once, as SIGTERM: the ranks stop at
a step's border and save. When a rank fails, the others get a bounded time to end. Nothing is left behind, and the exit
code is the one of :mod:`trainer.exits` that tells most, or 128 and the number of a signal.

Signals are blocked, and taken from the queue when all else is done: none comes at a wrong time, or is lost. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from data_prep.streams import end_process, say_error, write_whole_lines
from deploy.node import SETTINGS, LaunchError, read_node
from deploy.reasons import End, describe, judge, leave_message
from trainer.exits import DONE, FAILED, REFUSED, STOPPED

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TERMINATION_LOG = Path("/dev/termination-log")  # where Kubernetes looks for a last message
NOTICE = 15.0  # seconds for ranks to see by themselves that another one is gone, before they get a SIGTERM
REFUSAL = 1.0  # likewise, once a rank was refused: others that find the same say it after 3
LAST = 30.0  # seconds from that SIGTERM to the SIGKILL
ORPHANS = 2.0  # seconds for what ranks left behind: trackers of shared memory have something to do
SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36  # of prctl.h
LIBC = ctypes.CDLL(None)
Outcome = tuple[int, str, bool]  # the exit code, the reason, and whether a rank has said it as the last one


def main() -> NoReturn:
    """Run the command line."""
    write_whole_lines()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would take the children's ends with it
    # what is ignored stays so: under nohup, or as a shell's job in the background
    stops = {number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops | {signal.SIGCHLD})
    LIBC.prctl(SET_CHILD_SUBREAPER, 1)  # what a rank leaves behind comes here, as it does to process 1
    own, words = split(sys.argv[1:])
    options = Parser().parse_args(own)
    try:
        with temporary_folder() as folder:
            code, reason, said = run(options, words, stops, Path(folder))
    except LaunchError as error:
        code, reason, said = error.code, str(error), False
    clear()
    if reason and not said:
        say_error(reason)
    if reason and (options.termination_log or TERMINATION_LOG.exists()):
        leave_message(reason, options.termination_log or TERMINATION_LOG)
    end_process(code)


def run(options: argparse.Namespace, words: list[str], stops: set[signal.Signals], folder: Path) -> Outcome:
    """Start the ranks and wait for them. ``folder`` is for files of this run alone. Raises LaunchError."""
    given = {option: vars(options)[option.strip("-").replace("-", "_")] for option in SETTINGS}
    node = read_node(given, os.environ, partial(count_gpus, folder / "gpus", stops))
    say_error(f"lambert: {node}")
    threads = max(1, len(os.sched_getaffinity(0)) // node.ranks)
    running: dict[int, int] = {}
    for local_rank in range(node.ranks):
        rank = node.first + local_rank
        own = node.environment(local_rank) | {"LAMBERT_LAST_WORDS": str(folder / str(rank))}
        command = [sys.executable, "-m", options.module, *words]
        running[start(command, {"OMP_NUM_THREADS": str(threads)} | os.environ | own)] = rank
    ends, asked = watch(running, stops, options.grace_seconds)
    ends = [replace(end, words=last_words(folder / str(end.rank))) for end in ends]
    code, speaker = judge(ends, asked)
    if speaker is None:
        return code, "", True
    return code, describe(speaker, alone=node.nodes == 1), [end for end in ends if end.words] == [speaker]


def watch(running: dict[int, int], stops: set[signal.Signals], grace: float) -> tuple[list[End], bool]:
    """Wait for the end of the processes in ``running`` (pid: rank), which it empties; and whether a stop was asked for.

    Ranks that are done, or have stopped and saved, are in no hurry for the others; rank 0 may wait for a last scrape.
    """
    ends: list[End] = []
    sent: set[int] = set()
    asked, end_at, kill_at = False, math.inf, math.inf
    while running:
        wait = min(end_at, kill_at) - time.monotonic()
        taken = signal.sigtimedwait(stops | {signal.SIGCHLD}, min(max(wait, 0), 3600))
        now = time.monotonic()
        for pid, code in reap():
            if pid in running:
                ends.append(End(running.pop(pid), code, now, ours=-code in sent))
                if code not in (DONE, STOPPED):
                    end_at = min(end_at, now + (REFUSAL if code == REFUSED else NOTICE))
        if taken and taken.si_signo in stops and not asked:
            asked, kill_at = True, min(kill_at, now + grace)
            say_error(f"lambert: {signal.Signals(taken.si_signo).name}: stopping")
            send(signal.SIGTERM, running, sent)
        if now >= end_at:
            end_at, kill_at = math.inf, min(kill_at, now + LAST)
            send(signal.SIGTERM, running, sent)
        if now >= kill_at:
            kill_at = math.inf
            send(signal.SIGKILL, running, sent)
    # a scheduler may tell the ranks, too, and they may end before this has heard of it
    return [replace(end, ours=end.ours or (asked and end.code == -signal.SIGTERM)) for end in ends], asked


def send(number: signal.Signals, running: Iterable[int], sent: set[int]) -> None:
    """Send all of them a signal that they have not had; none of them has been reaped, so each number is still its."""
    if number not in sent:
        sent.add(number)
        for pid in running:
            os.kill(pid, number)


def reap() -> Iterator[tuple[int, int]]:
    """Processes that have ended, orphans too: (pid, code as in :class:`~deploy.reasons.End`)."""
    with suppress(ChildProcessError):  # there are no more
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found[0], os.waitstatus_to_exitcode(found[1])


def start(command: list[str], environ: dict[str, str]) -> int:
    """Start a process that gets a SIGTERM when this one is gone, and no Ctrl-C of the terminal's; returns its pid."""
    supervisor = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        LIBC.prctl(SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != supervisor:  # gone before that
            os._exit(STOPPED)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what is ignored is inherited
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execve(command[0], command, environ)
    except OSError as error:
        say_error(f"lambert: error: cannot start {command[0]}: {error}")
    finally:
        os._exit(FAILED)


def clear() -> None:
    """End what the ranks left behind: give it a moment, then kill it. Given up only for what even that does not end."""
    kill_at = time.monotonic() + ORPHANS
    while (left := children()) and (now := time.monotonic()) < kill_at + LAST:
        if now >= kill_at:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, 0.1)
        list(reap())


def children() -> list[int]:
    """This process's children, as /proc lists them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            status = path.read_text(errors="replace").rpartition(")")[2]  # the name before it may hold anything
            found += [int(path.parent.name)] if int(status.split()[1]) == os.getpid() else []
    return found


def count_gpus(answer: Path, stops: set[signal.Signals]) -> int:
    """GPUs as PyTorch sees them, by a process of its own, which writes ``answer``. Raises LaunchError."""
    code = "import sys, torch; print(torch.cuda.device_count(), file=open(sys.argv[1], 'w'))"
    ends, asked = watch({start([sys.executable, "-c", code, str(answer)], dict(os.environ)): 0}, stops, math.inf)
    if asked:
        raise LaunchError("stopped before a rank was started", code=STOPPED)
    if ends[0].code != DONE:
        raise LaunchError("error: PyTorch could not count the GPUs, see above: give --nproc-per-node a number")
    return int(answer.read_text())


def last_words(path: Path) -> str:
    """What a rank wrote there, if anything."""
    return path.read_text(errors="replace").strip() if path.exists() else ""


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Where TMPDIR says. Raises LaunchError."""
    try:
        return tempfile.TemporaryDirectory(prefix="lambert-")
    except OSError as error:
        raise LaunchError(f"error: {error.strerror}: set TMPDIR to a folder that can be written") from None


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """The launcher's own options, which come first, and the words of the ranks' command."""
    known, place = {*SETTINGS, "--grace-seconds", "--termination-log"}, 0
    while place < len(words) and words[place].partition("=")[0] in known:
        place += 1 if "=" in words[place] else 2
    if words[place : place + 1] == ["-m"]:
        place += 2
    elif words[place : place + 1] in (["-h"], ["--help"]):
        place += 1
    return words[:place], words[place:]


class Parser(argparse.ArgumentParser):
    """Of the launcher's own options; what is wrong takes one line."""

    def __init__(self) -> None:
        usage = "python -m deploy.launch [options] [-m MODULE] ARGS…"
        about = "Start and watch this node's ranks: python -m MODULE ARGS…"
        super().__init__(usage=usage, description=about, allow_abbrev=False)
        for option, (variable, text) in SETTINGS.items():
            self.add_argument(option, metavar="X", help=f"{text}; else {variable}")
        # No limit, since half a checkpoint is worth nothing, and a pod has one: its terminationGracePeriodSeconds.
        text = "after a stop was asked for, kill what is left then (default: never)"
        self.add_argument("--grace-seconds", type=seconds, default=math.inf, metavar="X", help=text)
        text = f"a file for the reason of the end (default: {TERMINATION_LOG}, if it exists)"
        self.add_argument("--termination-log", type=Path, metavar="PATH", help=text)
        self.add_argument("-m", dest="module", default="trainer", help="what a rank runs (default: trainer)")

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"lambert: error: {message}\n")


def seconds(text: str) -> float:
    """Of an option: more than 0."""
    with suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")


if __name__ == "__main__":
    main()
