"""A local S3 server (moto) whose answers can go wrong, and the settings with which users reach theirs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

import boto3
import pytest
from moto.backends import get_backend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
ERRORS = {
    "error": ("500 Internal Server Error", "InternalError"),
    "busy": ("503 Slow Down", "SlowDown"),
    "full": ("507 Insufficient Storage", "XMinioStorageFull"),  # as MinIO says it
    "forbidden": ("403 Forbidden", "AccessDenied"),
}


@dataclass
class Fault:
    """A fault in the answers to requests of a method whose path contains ``key``, at most ``times`` times."""

    method: str  # PUT, GET, …
    key: str
    what: str  # a key of ERRORS; "hang": no answer; "cut": the connection ends in mid-request; "slow SECONDS"
    times: float = float("inf")
    met: int = 0  # how many requests it has met


@dataclass
class FaultyS3:
    """A running server: its address, and the faults of its answers, which a test may change at any time."""

    address: str = ""
    faults: list[Fault] = field(default_factory=list)
    ended: Event = field(default_factory=Event)

    def empty(self, bucket: str) -> None:
        """Forget all faults and files, and create a bucket. Sign in first."""
        self.faults = []
        get_backend("s3").reset()
        boto3.client("s3").create_bucket(Bucket=bucket)

    def around(self, application: Application) -> Application:
        """The application with these faults."""

        def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            place = f"{environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}"
            for fault in self.faults:
                if fault.method == environ["REQUEST_METHOD"] and fault.key in place and fault.met < fault.times:
                    fault.met += 1
                    if fault.what == "hang":
                        environ["wsgi.input"].read(1)
                        self.ended.wait(60)
                        raise ConnectionAbortedError
                    if fault.what == "cut":
                        environ["wsgi.input"].read(1)
                        raise ConnectionAbortedError
                    if fault.what.startswith("slow"):
                        time.sleep(float(fault.what.removeprefix("slow ")))
                        break
                    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                    status, code = ERRORS[fault.what]
                    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{fault.what}</Message></Error>"
                    start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
                    return [body.encode()]
            return application(environ, start)

        return answer


@contextmanager
def faulty() -> Iterator[FaultyS3]:
    """An empty server that runs during a ``with`` block."""
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    get_backend("s3").reset()  # servers of one process share their buckets
    found = FaultyS3()
    application = found.around(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, True, request_handler=MotoRequestHandler)
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)  # seconds until it sees its end
    thread.start()
    found.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield found
    finally:
        found.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def serving() -> Iterator[str]:
    """The address of an empty server that runs during a ``with`` block."""
    with faulty() as server:
        yield server.address


def sign_in(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables with which boto3, s3fs and Lambert find the server."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", address)
