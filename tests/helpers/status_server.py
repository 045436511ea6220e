"""A server like Kubeflow Trainer's own: HTTPS with the certificate of a new CA, a token, and the TrainJob's schema.

It answers as pkg/statusserver of Trainer v2.3.0 does. The limits are those of trainer.kubeflow.org_trainjobs.yaml.
"""

from __future__ import annotations

import ipaddress
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from kubeflow_trainer_api import models  # type: ignore[import-untyped]

from trainer.ranks.world import StatusServer

PLACE = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ml/trainjobs/bert/status"
MOST_BODY = 1 << 16
TOKEN = "eyJhbGciOiJSUzI1NiJ9.first.signature"
INT32 = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
TEXT = {"type": "string", "minLength": 1, "maxLength": 64}
METRIC = {"type": "object", "properties": {"name": TEXT, "value": TEXT}, "required": ["name", "value"]}
SCHEMA = {
    "type": "object",
    "properties": {
        "progressPercentage": INT32 | {"maximum": 100},
        "estimatedRemainingSeconds": INT32,
        "metrics": {"type": "array", "maxItems": 256, "items": METRIC | {"additionalProperties": False}},
        "lastUpdatedTime": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"},
    },
    "required": ["lastUpdatedTime"],
    "additionalProperties": False,
}


def problem(body: dict[str, Any]) -> str:
    """The first fault that Trainer's API finds in the body of a post; empty if it takes the body."""
    try:
        kept = models.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(body).to_dict()
        jsonschema.validate(body["trainerStatus"], SCHEMA)
    except (KeyError, ValueError, jsonschema.ValidationError) as error:
        return str(error)
    return "" if kept.keys() == body.keys() else f"unknown keys in {sorted(body)}"


@dataclass
class Received:
    """The posts that the server got, and its answers."""

    address: StatusServer
    posts: list[dict[str, Any]] = field(default_factory=list)  # each trainerStatus that was taken
    times: list[float] = field(default_factory=list)  # of each request, by time.monotonic
    tokens: list[str] = field(default_factory=list)  # of each request
    problems: list[str] = field(default_factory=list)

    def wait(self, holds: Callable[[Received], bool], seconds: float = 20.0) -> None:
        """Wait until ``holds``; fails if it does not in time."""
        until = time.monotonic() + seconds
        while not holds(self):
            assert time.monotonic() < until, self
            time.sleep(0.01)


def metrics_of(post: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in post["metrics"]}


@contextmanager
def status_server(folder: Path, delay: float = 0.0, refuses: int = 0) -> Iterator[Received]:
    """Serve until the block ends. ``delay``: seconds before each answer; ``refuses``: this code is every answer."""
    write_certificates(folder)
    token = folder / "token"
    token.write_text(TOKEN)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.times.append(time.monotonic())
            received.tokens.append(self.headers.get("Authorization", ""))
            time.sleep(delay)
            self.answer(*self.judged())

        def judged(self) -> tuple[int, str]:
            size = int(self.headers["Content-Length"])
            if self.path != PLACE:
                return 404, "Not found"
            if size > MOST_BODY:
                return 413, "Payload too large"
            body = json.loads(self.rfile.read(size))
            if self.headers["Authorization"] != f"Bearer {token.read_text()}" or refuses == 403:
                return 403, "Forbidden"
            if found := problem(body):
                received.problems.append(found)
                return 422, found
            if not refuses:
                received.posts.append(body["trainerStatus"])
            return refuses or 200, "Train job not found"

        def answer(self, code: int, message: str) -> None:
            status = {"metadata": {}, "status": "Failure", "message": message, "code": code}
            self.send_response(code)
            self.send_header("Location", f"https://127.0.0.1:{server.server_port}{PLACE}")
            self.end_headers()
            self.wfile.write(json.dumps(status).encode())

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = f"https://127.0.0.1:{server.server_port}{PLACE}"
    received = Received(StatusServer(url, str(folder / "ca.crt"), str(token)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()


def write_certificates(folder: Path) -> None:
    """Write a new CA's certificate, ca.crt, and a server's certificate and key, tls.crt and tls.key."""
    folder.mkdir(parents=True, exist_ok=True)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca, own = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("ca", "status"))
    host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificates = {
        "ca.crt": _certificate(ca, ca, ca_key).add_extension(x509.BasicConstraints(True, None), True),
        "tls.crt": _certificate(own, ca, key).add_extension(host, False),
    }
    for name, certificate in certificates.items():
        signed = certificate.sign(ca_key, hashes.SHA256())
        (folder / name).write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "tls.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    return made.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(hours=1))
