"""Starts this node's ranks, waits for them and reports how they ended. Can run as process 1 of a container.

    python -m deploy.launch [--nproc-per-node N|auto] [--nnodes N|MIN:MAX --node-rank K --master-addr HOST]
                            [-m MODULE] ARGS…

A rank is ``python -m trainer ARGS…``. SIGTERM, SIGINT (Ctrl-C) and SIGHUP are forwarded once, as SIGTERM: the ranks
stop at a step boundary and save. If a rank fails, the others get a limited time to end. No process is left behind. The
exit code is the most informative one of :mod:`trainer.exits`, or 128 plus a signal number. With a range of nodes, the
ranks are started again when a node is lost or returns (:mod:`deploy.elastic`).

Signals stay blocked and are read from the queue between other work, so none interrupts it and none is lost. Linux only.
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
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from data_prep.streams import end_process, say_error, write_whole_lines
from deploy.elastic import Member, Outcome, take_part
from deploy.node import NODE_OPTIONS, LaunchError, Node, read_node
from deploy.reasons import End, describe, judge, leave_message
from trainer.exits import DONE, FAILED, REFUSED, STOPPED
from trainer.ranks.seal import SECRET

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TERMINATION_LOG = Path("/dev/termination-log")  # where Kubernetes looks for a container's last message
NOTICE = 15.0  # seconds for ranks to notice a lost rank themselves, before we send SIGTERM
REFUSAL = 1.0  # the same after a rank was refused: the others report the same problem only after 3 s
LAST = 30.0  # seconds from that SIGTERM to SIGKILL
ORPHANS = 2.0  # seconds for processes that ranks left behind, such as shared-memory trackers, to finish
SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36  # from prctl.h
LIBC = ctypes.CDLL(None)


def main() -> NoReturn:
    """Run the command line."""
    write_whole_lines()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, children's exit codes would be lost
    # signals ignored on entry (nohup, a shell's background job) stay ignored
    stops = {number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops | {signal.SIGCHLD})
    LIBC.prctl(SET_CHILD_SUBREAPER, 1)  # orphans of ranks become our children, as for process 1
    own, words = split(sys.argv[1:])
    options = LaunchParser().parse_args(own)
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
    """Start the ranks and wait for them. ``folder`` holds this launch's temporary files. Raises LaunchError."""
    given = {option: vars(options)[option.strip("-").replace("-", "_")] for option in NODE_OPTIONS}
    node = read_node(given, os.environ, partial(count_gpus, folder / "gpus", stops))
    if node.least is None:
        return attempt(options, words, stops, folder, Alone(), node)
    with closing(Member(node, os.environ.get(SECRET, ""))) as member:
        return take_part(member, partial(attempt, options, words, stops, folder, member), partial(pause, stops))


def attempt(
    options: argparse.Namespace,
    words: list[str],
    stops: set[signal.Signals],
    folder: Path,
    leader: Alone | Member,
    node: Node,
) -> Outcome:
    """Start the ranks in this place and wait for them."""
    say_error(f"lambert: {node}")
    threads = max(1, len(os.sched_getaffinity(0)) // node.ranks)
    running: dict[int, int] = {}
    for local_rank in range(node.ranks):
        rank = node.first + local_rank
        (folder / str(rank)).unlink(missing_ok=True)  # an earlier attempt's
        own = node.environment(local_rank) | {"LAMBERT_LAST_WORDS": str(folder / str(rank))}
        command = [sys.executable, "-m", options.module, *words]
        running[start(command, {"OMP_NUM_THREADS": str(threads)} | os.environ | own)] = rank
    ends, asked = watch(running, stops, options.grace_seconds, leader)
    ends = [replace(end, words=last_words(folder / str(end.rank))) for end in ends]
    code, speaker = judge(ends, asked)
    if speaker is None:
        return code, "", True
    return code, describe(speaker, alone=node.nodes == 1), [end for end in ends if end.words] == [speaker]


class Alone:
    """The leader of a launch on fixed nodes, in place of a :class:`~deploy.elastic.Member`: nobody else decides."""

    poll = 3600.0  # seconds

    def fail(self) -> None:
        """A rank has failed."""

    def leave(self) -> None:
        """A stop was requested."""

    def next(self) -> None:
        """No order ever comes."""


def watch(
    running: dict[int, int], stops: set[signal.Signals], grace: float, leader: Alone | Member
) -> tuple[list[End], bool]:
    """Wait for all processes in ``running`` (pid: rank), emptying it. Returns their ends and if a stop was requested.

    A rank that finished, or stopped and saved, sets no deadline for the others: rank 0 may wait for a last scrape.
    """
    ends: list[End] = []
    sent: set[int] = set()
    stopped, asked, end_at, kill_at = False, False, math.inf, math.inf
    while running:
        wait = min(end_at, kill_at) - time.monotonic()
        taken = signal.sigtimedwait(stops | {signal.SIGCHLD}, min(max(wait, 0), leader.poll))
        now = time.monotonic()
        for pid, code in reap():
            if pid in running:
                ends.append(End(running.pop(pid), code, now, ours=-code in sent))
                if code not in (DONE, STOPPED):
                    end_at = min(end_at, now + (REFUSAL if code == REFUSED else NOTICE))
                    leader.fail()
        order = leader.next() or {}
        if taken and taken.si_signo in stops and not stopped:
            stopped = True
            say_error(f"lambert: {signal.Signals(taken.si_signo).name}: stopping")
            leader.leave()
        if not asked and (stopped or "save" in order):
            asked, kill_at = True, min(kill_at, now + grace)
            send(signal.SIGTERM, running, sent)
        kill_at = min(kill_at, now + order.get("kill", math.inf))
        if now >= end_at:
            end_at, kill_at = math.inf, min(kill_at, now + LAST)
            send(signal.SIGTERM, running, sent)
        if now >= kill_at:
            kill_at = math.inf
            send(signal.SIGKILL, running, sent)
    # a scheduler may signal the ranks too, and they may end before we receive our own signal
    return [replace(end, ours=end.ours or (asked and end.code == -signal.SIGTERM)) for end in ends], asked


def pause(stops: set[signal.Signals], seconds: float) -> bool:
    """Wait, or until a child ends or a stop is requested, and return whether one was."""
    taken = signal.sigtimedwait(stops | {signal.SIGCHLD}, seconds)
    list(reap())
    if taken and taken.si_signo in stops:
        say_error(f"lambert: {signal.Signals(taken.si_signo).name}: stopping")
        return True
    return False


def send(number: signal.Signals, running: Iterable[int], sent: set[int]) -> None:
    """Send ``number`` to all processes, once only. None has been reaped yet, so no pid can have been reused."""
    if number not in sent:
        sent.add(number)
        for pid in running:
            os.kill(pid, number)


def reap() -> Iterator[tuple[int, int]]:
    """Yield every ended child, orphans included: (pid, code as in :class:`~deploy.reasons.End`)."""
    with suppress(ChildProcessError):  # no children left
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found[0], os.waitstatus_to_exitcode(found[1])


def start(command: list[str], environ: dict[str, str]) -> int:
    """Start a process and return its pid. It gets SIGTERM if we die, and no Ctrl-C from the terminal."""
    supervisor = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        LIBC.prctl(SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != supervisor:  # it died before prctl
            os._exit(STOPPED)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and children inherit that
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execve(command[0], command, environ)
    except OSError as error:
        say_error(f"lambert: error: cannot start {command[0]}: {error}")
    finally:
        os._exit(FAILED)


def clear() -> None:
    """End the processes that ranks left behind: wait a moment, then SIGKILL. Gives up on any that survive SIGKILL."""
    kill_at = time.monotonic() + ORPHANS
    while (left := children()) and (now := time.monotonic()) < kill_at + LAST:
        if now >= kill_at:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, 0.1)
        list(reap())


def children() -> list[int]:
    """List this process's children, from /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it just ended
            status = path.read_text(errors="replace").rpartition(")")[2]  # the name before it may contain anything
            found += [int(path.parent.name)] if int(status.split()[1]) == os.getpid() else []
    return found


def count_gpus(answer: Path, stops: set[signal.Signals]) -> int:
    """Count the GPUs that PyTorch sees, in a child process that writes ``answer``. Raises LaunchError."""
    code = "import sys, torch; print(torch.cuda.device_count(), file=open(sys.argv[1], 'w'))"
    ends, asked = watch(
        {start([sys.executable, "-c", code, str(answer)], dict(os.environ)): 0}, stops, math.inf, Alone()
    )
    if asked:
        raise LaunchError("stopped before any rank was started", code=STOPPED)
    if ends[0].code != DONE:
        raise LaunchError("error: PyTorch could not count the GPUs (see above): set --nproc-per-node to a number")
    return int(answer.read_text())


def last_words(path: Path) -> str:
    """Return the last line that a rank left in ``path``, or ''."""
    return path.read_text(errors="replace").strip() if path.exists() else ""


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a temporary folder, in TMPDIR if set. Raises LaunchError."""
    try:
        return tempfile.TemporaryDirectory(prefix="lambert-")
    except OSError as error:
        raise LaunchError(f"error: {error.strerror}: set TMPDIR to a writable folder") from None


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the command line into the launcher's own options, which come first, and the ranks' arguments."""
    known, place = {*NODE_OPTIONS, "--grace-seconds", "--termination-log"}, 0
    while place < len(words) and words[place].partition("=")[0] in known:
        place += 1 if "=" in words[place] else 2
    if words[place : place + 1] == ["-m"]:
        place += 2
    elif words[place : place + 1] in (["-h"], ["--help"]):
        place += 1
    return words[:place], words[place:]


class LaunchParser(argparse.ArgumentParser):
    """Parses the launcher's own options. Errors take one line."""

    def __init__(self) -> None:
        usage = "python -m deploy.launch [options] [-m MODULE] ARGS…"
        about = "Start and supervise this node's ranks: python -m MODULE ARGS…"
        super().__init__(usage=usage, description=about, allow_abbrev=False)
        for option, (variable, text) in NODE_OPTIONS.items():
            self.add_argument(option, metavar="X", help=f"{text}; defaults to {variable}")
        # No limit by default: half a checkpoint is worthless, and a pod has terminationGracePeriodSeconds.
        text = "kill ranks still running this long after a stop was requested (default: never)"
        self.add_argument("--grace-seconds", type=seconds, default=math.inf, metavar="X", help=text)
        text = f"file to write the final reason to (default: {TERMINATION_LOG} if it exists)"
        self.add_argument("--termination-log", type=Path, metavar="PATH", help=text)
        self.add_argument("-m", dest="module", default="trainer", help="module that each rank runs (default: trainer)")

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"lambert: error: {message}\n")


def seconds(text: str) -> float:
    """Parse a positive number of seconds."""
    with suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")


if __name__ == "__main__":
    main()
