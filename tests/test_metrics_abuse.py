"""Hostile clients of the metrics port: each costs the program only a bounded amount."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge, make_wsgi_app

from data_prep import endpoint
from data_prep.endpoint import CONNECTIONS, REQUEST_BYTES, Endpoint
from data_prep.metrics import BuildMetrics, serve
from tests.helpers import ranks
from tests.helpers.ranks import free_port
from tests.helpers.runs import lines, wait_for, write_config
from trainer.exits import STOPPED

pytestmark = pytest.mark.slow

GET = b"GET /metrics HTTP/1.1\r\nHost: here\r\n"
DESCRIPTORS = 200  # of the run: its own, and less than what the clients below would take


def ask(port: int) -> str:
    """A good client's scrape."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        return str(page.read().decode())


def connect(port: int) -> socket.socket:
    """A connection under way: the system completes it when there is room."""
    client = socket.socket()
    client.setblocking(False)
    client.connect_ex(("127.0.0.1", port))
    return client


# ---- what clients do, a moment of it at a time -----------------------------------------------------------------


def say_nothing(port: int, held: list[socket.socket]) -> None:
    """Open connections and hold them."""
    for _ in range(40):
        held.append(connect(port))


def trickle(port: int, held: list[socket.socket]) -> None:
    """Slow loris: a header that grows by a byte, on every connection."""
    if len(held) < 400:
        for _ in range(20):
            held.append(connect(port))
    for client in held:
        with contextlib.suppress(OSError):
            client.send(b"x" if client in held[:-20] else GET)


def send_headers_without_end(port: int, held: list[socket.socket]) -> None:
    for _ in range(20):
        held.append(connect(port))
    for client in held[-20:]:
        with contextlib.suppress(OSError):
            client.send(GET + 2000 * b"X-More: and more\r\n")


def never_read(port: int, held: list[socket.socket]) -> None:
    """Ask, and leave the answer where it is."""
    for _ in range(20):
        client = connect(port)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        held.append(client)
        with contextlib.suppress(OSError):
            client.send(GET + b"\r\n")


def open_and_leave(port: int, held: list[socket.socket]) -> None:
    """Connect and leave, as port scanners do; every other connection ends with a reset."""
    for number in range(40):
        with connect(port) as client:
            if number % 2:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


CLIENTS = [say_nothing, trickle, send_headers_without_end, never_read, open_and_leave]


@contextlib.contextmanager
def many_descriptors() -> Iterator[None]:
    """Allow descriptors for all the clients that this process plays."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, before[1]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def abuse(port: int, seconds: float, *clients: Callable[[int, list[socket.socket]], None]) -> None:
    """Let the clients do it for that long, then leave. Their connections may be refused."""
    held: list[socket.socket] = []
    until = time.monotonic() + seconds
    with many_descriptors():
        while time.monotonic() < until:
            for client in clients:
                with contextlib.suppress(OSError):
                    client(port, held)
            time.sleep(0.02)
        for one in held:
            one.close()


def test_a_run_outlives_every_client_and_is_scraped_again(tiny_shards: Path, tmp_path: Path) -> None:
    def steps() -> int:
        return len(lines(tmp_path / "run", "step"))

    def goes_on(before: int) -> bool:
        return steps() > before + 20

    port = free_port()
    own = {"metrics": {"port": port, "address": "127.0.0.1", "log_every_steps": 1, "linger_seconds": 0}}
    config = write_config(tmp_path, tiny_shards, 100_000, checkpoint={"every_steps": 20, "keep": 2}, **own)
    arguments = ("tests/helpers/limited_rank.py", str(DESCRIPTORS), "trainer/__main__.py", "--config", str(config))
    [rank] = ranks.fork(1, *arguments)
    try:
        wait_for(steps, rank)
        for client in CLIENTS:
            before = steps()
            abuse(port, 2.0, client)
            assert rank.returncode is None, ranks.finish([rank])
            assert len(os.listdir(f"/proc/{rank.pid}/fd")) < DESCRIPTORS - 20
            wait_for(partial(goes_on, before), rank)
        assert 'lambert_step{run="test"}' in ask(port)
        rank.send_signal(signal.SIGTERM)
    finally:
        [(code, said)] = ranks.finish([rank])
    assert code == STOPPED, said
    assert not lines(tmp_path / "run", "checkpoint_failed")
    assert (tmp_path / "run" / "ended.json").is_file() and list((tmp_path / "run").glob("step-*/checkpoint.json"))


# ---- the endpoint itself ---------------------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[Endpoint]:
    registry = CollectorRegistry()
    Gauge("thing", "Of a test.", registry=registry).set(3)
    running = Endpoint(0, "127.0.0.1", make_wsgi_app(registry))
    yield running
    running.close()


def test_the_oldest_connection_makes_room(served: Endpoint) -> None:
    clients = [socket.create_connection(("127.0.0.1", served.port), timeout=10) for _ in range(CONNECTIONS + 3)]
    for client in clients[:3]:
        assert client.recv(1) == b""
    clients[3].sendall(GET + b"\r\n")
    assert clients[3].recv(100).startswith(b"HTTP/1.1 200 OK")
    assert "thing 3.0" in ask(served.port)
    for client in clients:
        client.close()


def test_a_connection_ends_in_time_whatever_it_does(served: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "ANSWER_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as client:
        began = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT011  reset or broken pipe
            while True:
                client.sendall(b"x")  # a byte now and then never makes it idle
                time.sleep(0.05)
        assert 0.4 < time.monotonic() - began < 5


def test_a_request_has_a_bounded_size(served: Endpoint) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as client:
        client.sendall(GET + (REQUEST_BYTES - len(GET) + 1) * b"x")
        assert client.recv(100).startswith(b"HTTP/1.1 431 ")


def test_an_answer_longer_than_the_systems_buffers_arrives_whole(served: Endpoint) -> None:
    body = os.urandom(8 << 20)
    served.application = lambda environ, start: start("200 OK", []) or [body]
    with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/", timeout=10) as page:
        assert page.read() == body


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.0\n\n", "200"),
        (b"\0\xff\xfe \r\n\r\n", "405"),
        (b"\r\n\r\n", "405"),
        (b"DELETE /metrics HTTP/1.1\r\n\r\n", "405"),
        (b"GET /metrics?name[]=thing&name[]=%ff HTTP/1.1\r\n\r\n", "200"),
        (GET + b"Accept: application/openmetrics-text; version=x.y; escaping=\xff\r\n\r\n", ""),
        (GET + b"Accept-Encoding: gzip;q=\xff\r\n\r\n", ""),
    ],
)
def test_strange_requests_get_an_answer_and_the_next_client_its_own(
    served: Endpoint, request_: bytes, status: str
) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as client:
        client.sendall(request_)
        assert client.recv(100).decode("latin-1").startswith(f"HTTP/1.1 {status}")
    assert "thing 3.0" in ask(served.port)


def test_an_application_that_fails_is_reported_to_its_client_alone(served: Endpoint) -> None:
    good, served.application = served.application, lambda environ, start: [][0]
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as client:
        client.sendall(GET + b"\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 500 ")
    served.application = good
    assert "thing 3.0" in ask(served.port)


def test_a_flood_of_ten_thousand_connections_takes_no_descriptors_of_a_build() -> None:
    with serve(BuildMetrics("train"), 0, "127.0.0.1") as port:
        assert port is not None
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(10_000):
            connect(port).close()
        assert len(os.listdir("/proc/self/fd")) <= before + CONNECTIONS
        assert "lambert_prep_tokens_total" in ask(port)
    assert len(os.listdir("/proc/self/fd")) <= before - 2


def test_only_a_client_that_comes_soon_after_another_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PAUSE", 0.4)
    running = Endpoint(0, "127.0.0.1", make_wsgi_app(CollectorRegistry()))
    try:
        began, ends = time.monotonic(), list[float]()
        for _ in range(3):
            ask(running.port)
            ends.append(time.monotonic() - began)
        assert ends[0] < 0.35 and ends[1] >= 0.4 and ends[2] >= 0.8, ends
    finally:
        running.close()
