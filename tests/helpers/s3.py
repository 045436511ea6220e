"""A local S3 server (moto), and the settings with which users reach theirs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from moto.backends import get_backend
from moto.server import ThreadedMotoServer


@contextmanager
def serving() -> Iterator[str]:
    """The address of an empty server that runs during a ``with`` block."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    get_backend("s3").reset()  # servers of one process share their buckets
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


def sign_in(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables with which boto3, s3fs and Lambert find the server."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", address)
