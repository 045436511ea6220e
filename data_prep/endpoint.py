"""An HTTP endpoint for Prometheus and for the page of runs, bounded so that no client can harm the program behind it.

One thread serves every connection. It limits the number of open connections, the size of a request, the lifetime of a
connection and the number accepted per second. A client that floods the port costs scrapes, but no file descriptors,
memory or CPU time beyond these limits.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

CONNECTIONS = 16  # open at once; a further one closes the oldest
REQUEST_BYTES = 8 << 10
ANSWER_SECONDS = 10.0  # for a request, and again for its answer; also Prometheus's default scrape timeout
PAUSE = 0.05  # seconds between two accepted connections: at most 20 a second
CLOCK_CHECK_SECONDS = 0.2  # seconds between two checks of the clock
# errors that a request may cause in the application; the client gets a 500, and serving continues
PROVOKED = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError),
    *(OSError, RuntimeError, TypeError, ValueError),
)
# the text of an error may contain anything: no browser may take it for a page
PLAIN = [("Content-Type", "text/plain; charset=utf-8"), ("X-Content-Type-Options", "nosniff")]
Application = Callable[[dict[str, str], Callable[[str, list[tuple[str, str]]], Any]], Iterable[bytes]]  # WSGI's


def listen(port: int, address: str) -> socket.socket:
    """A socket that listens on ``port`` of ``address``, an IPv4 or IPv6 one. Port 0: the system chooses.

    Raises OSError, OverflowError or UnicodeError if the port or host does not exist or the port is in use.
    """
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((place[0], port))
        listener.listen(CONNECTIONS)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


@dataclass
class _Connection:
    socket: socket.socket
    until: float  # time.monotonic() at which it is closed
    request: bytearray = field(default_factory=bytearray)
    answer: memoryview | None = None  # what is still to be sent, once the request is complete


class Endpoint:
    """Answers HTTP requests with ``application``, from a separate thread, until it is closed or the process ends.

    Raises the errors of `listen`.
    """

    def __init__(self, port: int, address: str, application: Application) -> None:
        self.application = application
        self._listener = listen(port, address)
        self.address, self.port = self._listener.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._connections: dict[int, _Connection] = {}  # by descriptor, the oldest first
        self._pause_until = 0.0  # time.monotonic() before which none is accepted
        self._ended = Event()
        self._thread = Thread(target=self._serve, name="endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port."""
        self._ended.set()
        self._thread.join()
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._selector.close()
        self._listener.close()

    def _serve(self) -> None:
        while not self._ended.is_set():
            for key, _ in self._selector.select(CLOCK_CHECK_SECONDS):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fd in self._connections:  # otherwise it was closed to make room for a newer one
                    self._advance(self._connections[key.fd])
            now = time.monotonic()
            for connection in [each for each in self._connections.values() if each.until < now]:
                self._drop(connection)

    def _accept(self) -> None:
        time.sleep(max(0.0, self._pause_until - time.monotonic()))
        self._pause_until = time.monotonic() + PAUSE
        try:
            accepted, _ = self._listener.accept()
        except (OSError, MemoryError):  # the client is gone, or no descriptor is left: retry later
            return
        connection = _Connection(accepted, time.monotonic() + ANSWER_SECONDS)
        if len(self._connections) >= CONNECTIONS:
            self._drop(next(iter(self._connections.values())))
        self._connections[accepted.fileno()] = connection
        try:
            accepted.setblocking(False)
            self._selector.register(accepted, selectors.EVENT_READ)
        except (OSError, MemoryError):
            self._drop(connection)

    def _advance(self, connection: _Connection) -> None:
        """Receive or send as much as possible without blocking."""
        try:
            if connection.answer is None:
                self._receive(connection)
            else:
                connection.answer = connection.answer[connection.socket.send(connection.answer) :]
            done = connection.answer is not None and not connection.answer
        except BlockingIOError:  # this event was an earlier connection's with the same descriptor
            return
        except (OSError, MemoryError):
            done = True
        if done:
            self._drop(connection)

    def _receive(self, connection: _Connection) -> None:
        data = connection.socket.recv(REQUEST_BYTES)
        if not data:
            raise ConnectionResetError("closed before the request was complete")
        connection.request += data
        head, end, _ = bytes(connection.request).replace(b"\r\n", b"\n").partition(b"\n\n")
        if len(connection.request) > REQUEST_BYTES:
            answer = _response("431 Request Header Fields Too Large", [], b"")
        elif end:
            answer = respond(head.decode("latin-1"), self.application)
        else:
            return
        connection.answer = memoryview(answer)
        connection.until = time.monotonic() + ANSWER_SECONDS  # the time spent on the answer does not count
        self._selector.modify(connection.socket, selectors.EVENT_WRITE)

    def _drop(self, connection: _Connection) -> None:
        del self._connections[connection.socket.fileno()]
        with suppress(OSError, KeyError):  # it was never registered
            self._selector.unregister(connection.socket)
        connection.socket.close()


def respond(head: str, application: Application) -> bytes:
    """The answer to a request line and headers, separated by LF."""
    first, *lines = head.split("\n")
    method, _, target = first.partition(" ")
    path, _, query = target.partition(" ")[0].partition("?")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query}
    environ |= {
        f"HTTP_{name.upper().replace('-', '_')}": headers[name]
        for name in ("accept", "accept-encoding", "authorization", "host", "origin")
        if name in headers
    }
    started: list[Any] = []
    try:
        body = b"".join(application(environ, lambda *response: started.extend(response)))
        status, fields = started
    except PROVOKED as error:
        status, fields, body = "500 Internal Server Error", PLAIN, f"{error!r}\n".encode("utf-8", "backslashreplace")
    return _response(status, fields, body)


def _response(status: str, fields: list[tuple[str, str]], body: bytes) -> bytes:
    fields = [*fields, ("Content-Length", str(len(body))), ("Connection", "close")]
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in fields), "", ""]
    return "\r\n".join(lines).encode("latin-1") + body
