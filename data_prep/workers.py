"""Worker processes, of one machine or of MPI: results in the order of the work, and death is an error.

    python -m data_prep build …                              processes of this machine; for one, this process itself
    mpirun -n K python -m mpi4py -m data_prep build …        rank 0 coordinates, K - 1 ranks work

The ranks may be on any number of nodes that share the output folder; only rank 0 reads the input. A rank that is
killed makes ``mpirun`` end the others, and ``-m mpi4py`` does so for a rank that fails outside of its tasks. When a
whole node is lost, ``mpirun`` may return 0 all the same: what counts is the manifest. Idle ranks sleep between two
looks for work, so there may be as many working ranks as cores, and rank 0 beside them (``--oversubscribe``).
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
from data_prep.streams import flush, say_error

if TYPE_CHECKING:  # nothing of MPI or of other processes is loaded without need
    from concurrent.futures import Executor, Future

    from mpi4py.MPI import Intracomm

Task = TypeVar("Task")
Result = TypeVar("Result")

THREADS = "TOKENIZERS_PARALLELISM"  # the tokenizer reads it before it starts threads; the processes are the parallelism
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")  # in which launchers of MPI tell the ranks' number
RUNNER = "mpi4py.run"  # loaded by -m mpi4py
BAD_LAUNCH = 2  # exit code
SERVE = -1  # from rank 0: serve a pool; any other number is the exit code to end with
LOOK_SECONDS = 0.01  # between two looks of an idle rank for a message
LEAVE_SECONDS = 2.0  # that a rank has for its last task when the command has failed
SIGNAL_SECONDS = 1.0  # between a worker's SIGTERM and ours when the whole group gets one
TERMINAL_SECONDS, LOG_SECONDS = 0.2, 5.0  # between two progress lines, on a terminal and in a file
RATE_SECONDS = 2.0  # a stage shorter than that has no rate worth telling
WINDOW_SECONDS = 60.0  # the rate while a stage goes on is that of so long a time


class Stopped(KeyboardInterrupt):
    """A SIGTERM came. Raised in the main thread, as Ctrl-C is; the exit code for it is 143."""


@dataclass(frozen=True)
class Workers:
    """Processes that wait for work, on this machine or on others."""

    pool: Executor | None = None  # None: this process does the work
    ahead: int = 0  # tasks given out before their turn: bounds what waits in memory

    def map(self, work: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """``work`` of each task, in order. Raises what ``work`` raises, and KilledError if a worker dies.

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
            time.sleep(SIGNAL_SECONDS)  # told to stop with the workers, this process says that: `Stopped` comes here
            raise KilledError(
                "a worker process was killed, often for lack of memory; run the same command again to go on, "
                "with fewer --processes if need be"
            ) from None


@contextmanager
def start_workers(processes: int) -> Iterator[Workers]:
    """Workers for the length of a ``with`` block: ``processes`` new ones, or the other ranks where MPI has some.

    In place of one new process this one works: that saves its start, and the way of all data there and back.
    Waits for running tasks when the block ends, also when it raises an Exception; not after Ctrl-C and `Stopped`.
    Under MPI only rank 0 may get here, which `on_ranks` sees to.
    """
    world = _world()
    if world is not None:
        started = _call_ranks(world)
    else:
        started = _start_processes(processes) if processes > 1 else _work_here()
    with started as workers:
        yield workers


def on_ranks(command: Callable[[], int]) -> int:
    """Runs ``command`` on rank 0, or on the only process there is, and returns its exit code on every rank.

    To be called once, around the whole command line, before anything is read: ``sys.exit(on_ranks(main))``.
    The other ranks serve each `start_workers` of rank 0 meanwhile.
    """
    if RUNNER not in sys.modules or "mpi4py.futures" in sys.modules:  # the latter has a way of its own
        return _refuse_ranks() or command()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.rank != 0:
        code = _serve(world)
    else:
        try:
            code = command()
        except SystemExit as end:  # of the argument parser
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        _dismiss(world, code)
    MPI.Finalize()  # together, or a non-zero exit code would count as a crash
    return code


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Within the ``with`` block the first SIGTERM raises `Stopped`; from then on SIGTERM is ignored.

    The block should hold what handles `Stopped`, too. Process 1 of a container needs it most: the kernel has no
    default action for it.
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
    """Passes the items on, and says on stderr how many ``unit`` (``amount`` of each item) of ``total`` have gone by.

    Rate and time to go are those of the last minute, since a rerun passes what is there faster than it makes the
    rest; the last line has the rate of the whole stage.
    """
    terminal = sys.stderr.isatty()
    start = shown = time.monotonic()
    marks = deque([(start, 0.0)])  # (time, amount), a minute's
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
            say_error("")  # the error gets a line of its own
        raise
    seconds = time.monotonic() - start
    _show(_parts(stage, unit, done, seconds, done / max(seconds, 1e-9), None), "\n")


def _parts(stage: str, unit: str, done: float, seconds: float, rate: float, total: float | None) -> list[str]:
    """What a progress line says, the part that is missed least last but one."""
    share = f" ({int(100 * min(done / total, 1))} %)" if total else ""
    told = f", {rate:,.0f} a second" if seconds >= RATE_SECONDS else ""
    left = f", {_span((total - done) / rate, 0)} to go" if total and told and rate > 0 and done < total else ""
    return [f"data_prep: {stage} {done:,.0f} {unit}{share} in {_span(seconds, 1)}", told, left]


def _show(parts: list[str], end: str) -> None:
    line = "".join(parts)
    with suppress(OSError):  # whoever read it has left
        if sys.stderr.isatty():
            width = (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1
            if len(line) > width:  # a line that wraps can't be rewritten
                line = f"{parts[0]}{parts[2]}"[:width]
            line = line.ljust(width)
        print(line, end=end, file=sys.stderr, flush=True)


def _span(seconds: float, digits: int) -> str:
    """A time in its two largest units; seconds alone with so many ``digits``."""
    whole = math.ceil(seconds)
    if whole < 60:
        return f"{seconds:.{digits}f} s" if digits else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"


# ---- processes of this machine -------------------------------------------------------------------------------


@contextmanager
def _work_here() -> Iterator[Workers]:
    told = {name: value for name, value in os.environ.items() if name == THREADS}
    os.environ[THREADS] = "false"
    try:
        yield Workers()
    finally:
        del os.environ[THREADS]
        os.environ.update(told)


@contextmanager
def _start_processes(processes: int) -> Iterator[Workers]:
    """Spawned processes: a fork would copy the tokenizer's locks in whatever state they are."""
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
    """Keeps Ctrl-C for after the block; a process that is started in it never sees one."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _prepare() -> None:
    os.environ[THREADS] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's business
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever was inherited


def _prepare_process() -> None:
    _prepare()
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    """Ends the worker with its parent, also when that is killed and can't say so."""
    import multiprocessing

    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


# ---- ranks of MPI --------------------------------------------------------------------------------------------


def _refuse_ranks() -> int:
    """The exit code for a rank that does not know of the others, said by the first; 0 when there are no others."""
    for name in SIZES:
        if int(os.environ.get(name, 1)) > 1:
            if os.environ.get(name.replace("SIZE", "RANK"), "0") == "0":
                line = "mpirun -n K python -m mpi4py -m data_prep ..."
                say_error(f"data_prep: error: one of {os.environ[name]} ranks; run it as {line}")
            else:
                time.sleep(LEAVE_SECONDS)  # whoever ends first ends all, perhaps before the line is out
            return BAD_LAUNCH
    return 0


def _world() -> Intracomm | None:
    """All ranks; None when this is the only one, or when nobody speaks of MPI."""
    if RUNNER not in sys.modules:
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD if MPI.COMM_WORLD.size > 1 else None


@contextmanager
def _call_ranks(world: Intracomm) -> Iterator[Workers]:
    """Rank 0: has the others serve a pool for the length of the block."""
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
                stack.pop_all()  # would wait for what still runs; `_dismiss` ends that
            raise


def _serve(world: Intracomm) -> int:
    """Any other rank: works for rank 0 until that sends an exit code, which it returns."""
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
    """Rank 0: ends the others. After a failure, those that still work after LEAVE_SECONDS are killed, this rank too."""
    requests = [world.issend(code, rank) for rank in range(1, world.size)]
    deadline = time.monotonic() + LEAVE_SECONDS
    while requests:
        requests = [request for request in requests if not request.test()[0]]
        if requests and code != 0 and time.monotonic() > deadline:
            flush()
            world.Abort(code)
        time.sleep(LOOK_SECONDS)
