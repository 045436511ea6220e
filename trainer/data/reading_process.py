"""A process that reads one rank's samples, so that reading never delays the thread that launches kernels.

PyTorch releases Python's global lock (the GIL) around every operation. A thread that reads samples then takes the lock,
and the next kernel is launched only when that thread gives it back, up to five milliseconds later. docs/lab.md has
what this cost.

The process imports no torch. Asked for a position, it answers with that step's arrays; it ends when the rank's end of
the socket closes. Signals that launchers send to all processes of a job never reach it: the rank decides when to stop.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.flat import Flat
from trainer.data.order import Order
from trainer.data.reader import Reader, Step
from trainer.errors import PassingError, TrainerError

_START = (  # the same modules as here
    "import sys; sys.path[:] = sys.argv[1:]; from trainer.data.reading_process import main; main()"
)
BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
END_SECONDS = 5.0  # how long to wait for a killed process


class ReadingProcess:
    """A running process that reads the steps of one phase with ``reader``. Close it after use.

    Raises PassingError if it cannot be started.
    """

    def __init__(self, reader: Reader, order: Order, global_batch: int, micro_batches: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs, blocked(BLOCKED):  # from the start: the process inherits it
            try:
                self._process = subprocess.Popen([sys.executable, "-c", _START, *sys.path], stdin=theirs.fileno())
            except BlockingIOError:
                said = "too many processes: raise ulimit -u, or the container's limit on processes"
                raise PassingError(f"the process that reads the shards cannot be started: {said}") from None
        self._channel = Connection(ours.detach())
        self._tell((reader, order, global_batch, micro_batches))

    def ask(self, position: int | None) -> None:
        """Let it read the step at ``position``; None: let it close all shards instead."""
        self._tell(position)

    def forget(self) -> None:
        """Let it close all shards, as :meth:`Reader.forget` does."""
        self.ask(None)

    def take(self) -> Step:
        """Wait for the oldest step asked for. Raises what reading it raised, or PassingError if the process is gone."""
        try:
            found = self._channel.recv()
            if isinstance(found, Exception):
                raise found
            layouts, *counts = found
            flats = [Flat._make(map(self._field, layout)) for layout in layouts]
            return Step(tuple(flats), *counts)
        except (EOFError, OSError):
            raise self._lost() from None

    def _tell(self, message: Any) -> None:
        try:
            self._channel.send(message)
        except OSError:
            raise self._lost() from None

    def _field(self, layout: tuple[str, int] | int) -> NDArray[Any] | int:
        """Receive one field of a micro-batch: an array of this dtype and length, or the number itself."""
        if isinstance(layout, int):
            return layout
        dtype, length = layout
        array = np.empty(length, dtype)
        self._channel.recv_bytes_into(array.data)
        return array

    def close(self) -> None:
        """End the process at once, whatever it is doing: it keeps nothing that could be lost."""
        self._channel.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # it waits for a disk that does not answer
            self._process.wait(END_SECONDS)

    def _lost(self) -> TrainerError:
        code = self._process.wait()
        if code == -signal.SIGKILL:
            how = "was killed: the machine may have run out of memory"
        elif code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        else:
            how = f"ended with code {code}: see its traceback"
        return PassingError(f"the process that reads the shards {how}")


@contextmanager
def blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Block the signals in this thread; those that arrive meanwhile are handled afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(channel: Connection) -> None:
    """Answer requests. Raises EOFError or ConnectionError when the other end has closed."""
    reader, order, global_batch, micro_batches = channel.recv()
    while True:
        position = channel.recv()
        if position is None:
            reader.forget()
            continue
        try:
            step = reader.step(order, position, global_batch, micro_batches)
        except (TrainerError, MemoryError) as error:  # a thread would raise it in the rank, too
            channel.send(error)
            continue
        _send(channel, step)


def _send(channel: Connection, step: Step) -> None:
    """Send the fields' layout and the counts, then each array by itself, which copies it less often."""
    fields = [field for flat in step.micro_batches for field in flat]
    layouts = [
        [field if isinstance(field, int) else (field.dtype.str, len(field)) for field in flat]
        for flat in step.micro_batches
    ]
    channel.send((layouts, step.targets, step.tokens, step.squares))
    for field in fields:
        if not isinstance(field, int):
            channel.send_bytes(field.data)


def main() -> None:
    """Serve the rank at the other end of standard input."""
    with suppress(EOFError, ConnectionError):  # the rank has ended
        serve(Connection(os.dup(sys.stdin.fileno())))
