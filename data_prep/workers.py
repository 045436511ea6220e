"""Worker processes: results in the order of the work, a line that says how far, and death is an error."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from data_prep.errors import KilledError

Task = TypeVar("Task")
Result = TypeVar("Result")

TERMINAL_SECONDS, LOG_SECONDS = 0.2, 5.0  # between two progress lines, on a terminal and in a file
RATE_SECONDS = 2.0  # a stage shorter than that has no rate worth telling


@dataclass(frozen=True)
class Workers:
    """Spawned processes: a fork would copy the tokenizer's locks in whatever state they are."""

    pool: ProcessPoolExecutor
    ahead: int  # tasks given out before their turn: bounds what waits in memory

    def map(self, work: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """``work`` of each task, in order. Raises what ``work`` raises, and KilledError if a worker dies."""
        pending: deque[Future[Result]] = deque()
        try:
            for task in tasks:
                pending.append(self.pool.submit(work, task))
                if len(pending) > self.ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise KilledError(
                "a worker process was killed, often for lack of memory; run the same command again to go on, "
                "with fewer --processes if need be"
            ) from None


@contextmanager
def start_workers(processes: int) -> Iterator[Workers]:
    """Workers for the length of a ``with`` block."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_prepare)
    try:
        yield Workers(pool, 2 * processes)
    finally:
        pool.shutdown(cancel_futures=True)


def show_progress(items: Iterable[Result], stage: str, unit: str, amount: Callable[[Result], int]) -> Iterator[Result]:
    """Passes the items on, and says on stderr how many ``unit`` (``amount`` of each item) have gone by."""
    terminal = sys.stderr.isatty()
    start = shown = time.monotonic()
    done = 0

    def show(end: str) -> None:
        seconds = time.monotonic() - start
        rate = f", {done / seconds:,.0f} a second" if seconds >= RATE_SECONDS else ""
        line = f"data_prep: {stage} {done:,} {unit} in {seconds:,.1f} s{rate}"
        print(line.ljust(79 if terminal else 0), end=end, file=sys.stderr, flush=True)

    try:
        for item in items:
            done += amount(item)
            if time.monotonic() - shown >= (TERMINAL_SECONDS if terminal else LOG_SECONDS):
                shown = time.monotonic()
                show("\r" if terminal else "\n")
            yield item
    except BaseException:
        if terminal and shown > start:
            print(file=sys.stderr)  # the error gets a line of its own
        raise
    show("\n")


def _prepare() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    """Ends the worker with its parent, also when that is killed and can't say so."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
