"""Worker processes, on one machine or under MPI: results arrive in task order, and a dead worker is an error.

    python -m data_prep build …                              processes on this machine; --processes 1 starts none
    mpirun -n K python -m mpi4py -m data_prep build …        rank 0 coordinates, K - 1 ranks work

The ranks may be on any number of nodes that share the output folder; only rank 0 reads the input. If a rank is killed,
``mpirun`` ends the others; if a rank fails outside its tasks, ``-m mpi4py`` does. If a whole node is lost, ``mpirun``
may still return 0, so check for the manifest. Idle ranks sleep between checks for work, so one working rank per core
plus rank 0 is fine (``--oversubscribe``).
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from data_prep.errors import KilledError
from data_prep.streams import complain, flush, say_error

if TYPE_CHECKING:  # MPI and multiprocessing are only loaded when needed
    from concurrent.futures import Executor, Future

    from mpi4py.MPI import Intracomm

Task = TypeVar("Task")
Result = TypeVar("Result")

THREADS = "TOKENIZERS_PARALLELISM"  # turns off the tokenizer's threads: the processes are the parallelism
# Where MPI launchers put the number of ranks.
RANK_COUNT_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
RUNNER = "mpi4py.run"  # module loaded by -m mpi4py
BAD_LAUNCH = 2  # exit code
SERVE = -1  # message from rank 0: serve a pool; any other number is the exit code to end with
LOOK_SECONDS = 0.01  # between two checks of an idle rank for a message
LEAVE_SECONDS = 2.0  # time for a rank's last task after the command has failed
SIGNAL_SECONDS = 1.0  # delay between a worker's SIGTERM and ours if the whole group gets one
TERMINAL_SECONDS, LOG_SECONDS = 0.2, 5.0  # between two progress lines, on a terminal and in a file
RATE_SECONDS = 2.0  # a shorter stage has no meaningful rate
WINDOW_SECONDS = 60.0  # the rate of a running stage is averaged over this time


class Stopped(KeyboardInterrupt):
    """SIGTERM arrived. Raised in the main thread, like Ctrl-C; its exit code is 143."""


@dataclass(frozen=True)
class Workers:
    """A pool of processes that wait for work, on this machine or on others."""

    pool: Executor | None = None  # None: this process does the work
    ahead: int = 0  # tasks submitted ahead of their turn: bounds the results that wait in memory

    def map(self, work: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """The result of ``work`` for each task, in order. Raises errors of ``work``, and KilledError if a worker dies.

        ``work`` is a function of a module, or a ``partial`` of one; tasks, results and errors travel pickled.
        """
        if self.pool is None:
            yield from map(work, tasks)
            return
        from concurrent.futures import BrokenExecutor

        pending: deque[Future[Result]] = deque()
        try:
            for task in tasks:
                with _interrupts_held():
                    pending.append(self.pool.submit(work, task))  # may start a process
                if len(pending) > self.ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenExecutor:
            time.sleep(SIGNAL_SECONDS)  # if SIGTERM went to this process too, `Stopped` is raised here
            raise KilledError(
                "a worker process was killed, often for lack of memory; to resume, run the same command again, "
                "with fewer --processes if necessary"
            ) from None


@contextmanager
def start_workers(processes: int) -> Iterator[Workers]:
    """Workers for the duration of a ``with`` block: ``processes`` new ones, or the other ranks under MPI.

    With one process, this process does the work: that saves starting another and sending it the data.
    Waits for running tasks when the block ends, even after an Exception, but not after Ctrl-C or `Stopped`.
    Under MPI only rank 0 may call this; `on_ranks` makes sure of it.
    """
    world = _world()
    if world is not None:
        started = _call_ranks(world)
    else:
        started = _start_processes(processes) if processes > 1 else _work_here()
    with started as workers:
        yield workers


def on_ranks(command: Callable[[], int]) -> int:
    """Runs ``command`` on rank 0, or in the only process, and returns its exit code on every rank.

    Call it once, around the whole command line, before anything is read: ``sys.exit(on_ranks(main))``.
    Meanwhile the other ranks serve each `start_workers` of rank 0.
    """
    if RUNNER not in sys.modules or "mpi4py.futures" in sys.modules:  # mpi4py.futures handles ranks in its own way
        return _refuse_ranks() or command()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.rank != 0:
        code = _serve(world)
    else:
        try:
            code = command()
        except SystemExit as end:  # raised by the argument parser
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        _dismiss(world, code)
    MPI.Finalize()  # all ranks together, or a non-zero exit code would count as a crash
    return code


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Makes the first SIGTERM within the ``with`` block raise `Stopped`; later ones are ignored.

    The code that handles `Stopped` should be inside the block. Process 1 of a container needs this most: the kernel
    has no default action for its SIGTERM.
    """

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is stop:
            signal.signal(signal.SIGTERM, before)


# ---- progress ------------------------------------------------------------------------------------------------


def show_progress(
    items: Iterable[Result], stage: str, unit: str, amount: Callable[[Result], float], total: float | None = None
) -> Iterator[Result]:
    """Passes the items on, and prints to stderr how many ``unit`` (``amount`` per item) of ``total`` are done.

    The rate and the time to go are based on the last minute, since a rerun skips existing shards faster than it makes
    new ones. The last line has the rate of the whole stage.
    """
    terminal = sys.stderr.isatty()
    start = shown = time.monotonic()
    marks = deque([(start, 0.0)])  # (time, amount) over the last minute
    done = 0.0
    try:
        for item in items:
            done += amount(item)
            now = time.monotonic()
            if now - shown >= (TERMINAL_SECONDS if terminal else LOG_SECONDS):
                shown = now
                while len(marks) > 1 and marks[1][0] <= now - WINDOW_SECONDS:
                    marks.popleft()
                rate = (done - marks[0][1]) / (now - marks[0][0])
                marks.append((now, done))
                _show(_parts(stage, unit, done, now - start, rate, total), "\r" if terminal else "\n")
            yield item
    except BaseException:
        if terminal and shown > start:
            say_error("")  # starts a new line for the error
        raise
    seconds = time.monotonic() - start
    _show(_parts(stage, unit, done, seconds, done / max(seconds, 1e-9), None), "\n")


def _parts(stage: str, unit: str, done: float, seconds: float, rate: float, total: float | None) -> list[str]:
    """The parts of a progress line; the last but one is dropped first if the line is too long."""
    share = f" ({int(100 * min(done / total, 1))} %)" if total else ""
    speed = f", {rate:,.0f} a second" if seconds >= RATE_SECONDS else ""
    left = f", {_span((total - done) / rate, 0)} to go" if total and speed and rate > 0 and done < total else ""
    return [f"data_prep: {stage} {done:,.0f} {unit}{share} in {_span(seconds, 1)}", speed, left]


def _show(parts: list[str], end: str) -> None:
    line = "".join(parts)
    with suppress(OSError):  # the reader is gone
        if sys.stderr.isatty():
            width = (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1
            if len(line) > width:  # a line that wraps can't be rewritten
                line = f"{parts[0]}{parts[2]}"[:width]
            line = line.ljust(width)
        print(line, end=end, file=sys.stderr, flush=True)


def _span(seconds: float, digits: int) -> str:
    """A time in its two largest units; a time in seconds only has ``digits`` decimals."""
    whole = math.ceil(seconds)
    if whole < 60:
        return f"{seconds:.{digits}f} s" if digits else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"


# ---- processes of this machine -------------------------------------------------------------------------------


@contextmanager
def _work_here() -> Iterator[Workers]:
    before = {name: value for name, value in os.environ.items() if name == THREADS}
    os.environ[THREADS] = "false"
    try:
        yield Workers()
    finally:
        del os.environ[THREADS]
        os.environ.update(before)


@contextmanager
def _start_processes(processes: int) -> Iterator[Workers]:
    """Workers in spawned processes: a fork would copy the tokenizer's locks in an unknown state."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _prepare_process)
    try:
        yield Workers(pool, 2 * processes)
    except BaseException as error:
        if not isinstance(error, Exception):
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Defers Ctrl-C until after the block; a process started in the block never sees one."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _prepare() -> None:
    os.environ[THREADS] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever handler was inherited


def _prepare_process() -> None:
    _prepare()
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    """Ends the worker when its parent ends, even if the parent is killed."""
    import multiprocessing

    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


# ---- ranks of MPI --------------------------------------------------------------------------------------------


def _refuse_ranks() -> int:
    """The exit code for ranks started without ``-m mpi4py``; the first rank prints the error. 0 for a single rank."""
    for name in RANK_COUNT_VARIABLES:
        if int(os.environ.get(name, 1)) > 1:
            if os.environ.get(name.replace("SIZE", "RANK"), "0") == "0":
                line = "mpirun -n K python -m mpi4py -m data_prep ..."
                complain(f"one of {os.environ[name]} ranks; run it as {line}")
            else:
                time.sleep(LEAVE_SECONDS)  # the first rank to end ends all, perhaps before the line is printed
            return BAD_LAUNCH
    return 0


def _world() -> Intracomm | None:
    """The communicator of all ranks; None if this is the only rank, or if MPI is not in use."""
    if RUNNER not in sys.modules:
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD if MPI.COMM_WORLD.size > 1 else None


@contextmanager
def _call_ranks(world: Intracomm) -> Iterator[Workers]:
    """Make the other ranks serve a pool until the block ends; called on rank 0."""
    from mpi4py.futures import MPICommExecutor

    assert world.rank == 0, "only rank 0 starts workers: call on_ranks first"
    for rank in range(1, world.size):
        world.send(SERVE, rank)
    with ExitStack() as stack:
        pool: Any = stack.enter_context(MPICommExecutor(world, root=0))  # an MPIPoolExecutor
        try:
            yield Workers(pool, 2 * (world.size - 1))
        except BaseException as error:
            pool.shutdown(wait=isinstance(error, Exception), cancel_futures=True)
            if not isinstance(error, Exception):
                stack.pop_all()  # avoids waiting for running tasks; `_dismiss` ends them
            raise


def _serve(world: Intracomm) -> int:
    """Work for rank 0 until it sends an exit code, and return that code; called on the other ranks."""
    from mpi4py.futures import MPICommExecutor

    _prepare()
    while True:
        while not world.iprobe(0):
            time.sleep(LOOK_SECONDS)
        code = int(world.recv(source=0))
        if code != SERVE:
            return code
        with MPICommExecutor(world, root=0):
            pass  # until rank 0 shuts the pool down


def _dismiss(world: Intracomm, code: int) -> None:
    """End the other ranks; called on rank 0. After a failure, all are killed if any is busy after LEAVE_SECONDS."""
    requests = [world.issend(code, rank) for rank in range(1, world.size)]
    deadline = time.monotonic() + LEAVE_SECONDS
    while requests:
        requests = [request for request in requests if not request.test()[0]]
        if requests and code != 0 and time.monotonic() > deadline:
            flush()
            world.Abort(code)
        time.sleep(LOOK_SECONDS)
