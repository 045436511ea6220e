"""Worker processes: a pool whose results come in the order of the work, and whose death is an error."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

from data_prep.errors import KilledError

Task = TypeVar("Task")
Result = TypeVar("Result")


class Workers:
    """Spawned processes: a fork would copy the tokenizer's locks in whatever state they are."""

    def __init__(self, pool: ProcessPoolExecutor, processes: int) -> None:
        self._pool = pool
        self._ahead = 2 * processes  # bounds what waits in memory

    def map(self, work: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """``work`` of each task, in order. Raises what ``work`` raises, and KilledError if a worker dies."""
        pending: deque[Future[Result]] = deque()
        try:
            for task in tasks:
                pending.append(self._pool.submit(work, task))
                if len(pending) > self._ahead:
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
        yield Workers(pool, processes)
    finally:
        pool.shutdown(cancel_futures=True)


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
