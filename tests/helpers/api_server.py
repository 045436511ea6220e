"""The part of a Kubernetes API server that Helm needs to install and remove a release.

A real one is not to be had for the tests. This one keeps objects and answers in the API's form, but checks and starts
nothing: it says what the real Helm and we do with such answers, and nothing about the chart.
"""

from __future__ import annotations

import json
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

Json = dict[str, Any]
MAGIC = b"k8s\0"  # before each message of protobuf
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
CORE = {"configmaps": "ConfigMap", "services": "Service", "persistentvolumeclaims": "PersistentVolumeClaim"}
KINDS = {  # of each group and version: a kind's name in paths, and the kind
    "v1": {"secrets": "Secret", **CORE},
    "batch/v1": {"jobs": "Job"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
}


@dataclass
class Api:
    """The server's address, in a file for clients; what it keeps, and what it refuses."""

    kubeconfig: Path
    objects: dict[str, Json] = field(default_factory=dict)  # by path: /api/v1/namespaces/default/services/bert
    refused: set[str] = field(default_factory=set)  # kinds that cannot be created

    def kinds(self) -> list[str]:
        """The kinds of what it keeps, without the Secrets in which Helm keeps its releases."""
        return sorted(each["kind"] for each in self.objects.values() if each["kind"] != "Secret")

    def list(self, path: str, query: str) -> Json | None:
        """The collection at a path, of the objects with the labels of a query; None if there is no such collection."""
        [selector] = parse_qs(query).get("labelSelector", [""])
        labels = dict(each.split("=") for each in selector.split(",") if each)
        own = [each for where, each in self.objects.items() if where.rsplit("/", 1)[0] == path]
        items = [each for each in own if labels.items() <= each["metadata"].get("labels", {}).items()]
        for version, kinds in KINDS.items():
            if (kind := kinds.get(path.rsplit("/", 1)[1])) is not None:
                return {"kind": f"{kind}List", "apiVersion": version, "metadata": {}, "items": items}
        return None


@contextmanager
def api_server(folder: Path) -> Iterator[Api]:
    """Serve on loopback until the block ends, for everybody who has the kubeconfig."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    cluster = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
    context = {"name": "here", "context": {"cluster": "here", "user": "here"}}
    tree = {"apiVersion": "v1", "kind": "Config", "current-context": "here", "clusters": [cluster]}
    api = Api(folder / "kubeconfig")
    api.kubeconfig.write_text(yaml.safe_dump(tree | {"contexts": [context], "users": [{"name": "here", "user": {}}]}))
    server.api = api  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    @property
    def api(self) -> Api:
        return self.server.api  # type: ignore[attr-defined, no-any-return]

    @property
    def place(self) -> str:
        return urlsplit(self.path).path.rstrip("/")

    def do_GET(self) -> None:
        if self.place == "/openapi/v2":  # an empty message of protobuf: no schemas, so Helm checks nothing
            return self.send(200, b"")
        found = discovery(self.place) or self.api.objects.get(self.place)
        found = found or self.api.list(self.place, urlsplit(self.path).query)
        return self.refuse(404, "NotFound", "not found") if found is None else self.answer(200, found)

    def do_POST(self) -> None:
        body = self.body()
        self.keep(f"{self.place}/{body['metadata']['name']}", body, new=True)

    def do_PATCH(self) -> None:
        self.keep(self.place, self.body())

    do_PUT = do_PATCH

    def do_DELETE(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.api.objects.pop(self.place, None) is None:
            return self.refuse(404, "NotFound", "not found")
        return self.answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def keep(self, path: str, body: Json, new: bool = False) -> None:
        if body["kind"] in self.api.refused:
            return self.refuse(403, "Forbidden", f"{body['kind']} is forbidden: exceeded quota")
        if new and path in self.api.objects:
            return self.refuse(409, "AlreadyExists", f"{path} already exists")
        namespace = path.split("/namespaces/")[1].split("/")[0]
        body["metadata"] |= {"uid": path, "resourceVersion": "1", "namespace": namespace}
        self.api.objects[path] = body
        return self.answer(201 if new else 200, body)

    def body(self) -> Json:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return secret(data) if data.startswith(MAGIC) else yaml.safe_load(data.decode()) or {}

    def refuse(self, code: int, reason: str, message: str) -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
        self.answer(code, status | {"reason": reason, "message": message, "code": code})

    def answer(self, code: int, body: Json) -> None:
        self.send(code, json.dumps(body).encode())

    def send(self, code: int, data: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: object) -> None:
        pass


def discovery(path: str) -> Json | None:
    """The answer to a question about the server itself; None for any other path."""
    rows = [{"groupVersion": name, "version": name.split("/")[1]} for name in KINDS if "/" in name]
    groups = [{"name": row["groupVersion"].split("/")[0], "versions": [row], "preferredVersion": row} for row in rows]
    found: dict[str, Json] = {
        "/version": {"major": "1", "minor": "35", "gitVersion": "v1.35.2"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
        "/openapi/v3": {"paths": {}},
    }
    for name, kinds in KINDS.items():
        listed = [{"name": each, "namespaced": True, "kind": kind, "verbs": VERBS} for each, kind in kinds.items()]
        about = {"kind": "APIResourceList", "groupVersion": name, "resources": listed}
        found[f"/api{'s' * ('/' in name)}/{name}"] = about
    return found.get(path)


def secret(data: bytes) -> Json:
    """A Secret from protobuf, in which Helm's client sends it; the numbers are those of generated.proto."""
    whole = parts(parts(data.removeprefix(MAGIC))[2][0])
    about = parts(whole[1][0])
    labels = {key.decode(): value.decode() for key, value in map(entry, about.get(11, []))}
    content = {key.decode(): b64encode(value).decode() for key, value in map(entry, whole.get(2, []))}
    kind = {"apiVersion": "v1", "kind": "Secret", "type": whole[3][0].decode()}
    return kind | {"metadata": {"name": about[1][0].decode(), "labels": labels}, "data": content}


def entry(data: bytes) -> tuple[bytes, bytes]:
    """The key and the value of a map's entry."""
    found = parts(data)
    return found[1][0], found[2][0]


def parts(data: bytes) -> dict[int, list[bytes]]:
    """The fields of a protobuf message that have a length, by number."""
    found: dict[int, list[bytes]] = {}
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        size, at = varint(data, at)
        if tag & 7 == 2:  # else the second number is the field's value
            found.setdefault(tag >> 3, []).append(data[at : at + size])
            at += size
    return found


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place after it."""
    value = shift = 0
    while True:
        byte = data[at]
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, at
