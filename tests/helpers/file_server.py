"""An HTTP server for a data set's files that fails in the ways a test asks for, and a loader for what it serves."""

from __future__ import annotations

import gzip
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import fields
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from torch import Tensor

from data_prep.shards import TAR_BLOCK_BYTES
from trainer.data.cache import CacheConfig, open_cache
from trainer.data.loader import Loader, StepBatch
from trainer.data.order import Order
from trainer.model.batch import MicroBatch

ZEROS = bytes(1 << 16)
BOMB = gzip.compress(bytes(256 << 20), 1)  # about 1 MiB
OK = b"HTTP/1.0 200 OK\r\n"
ENDLESS = {  # how an answer starts, the block that it repeats, and the seconds before each block
    "endless": (OK + b"\r\n", ZEROS, 0),
    "endless error": (b"HTTP/1.0 400 Bad\r\n\r\n", ZEROS, 0),
    "promise": (OK + b"Content-Length: 1000000000000000\r\n\r\n", ZEROS, 0),
    "trickle": (OK + b"Content-Length: SIZE\r\n\r\n", b"?", 0.1),
    "drip": (OK + b"\r\n", bytes(8192), 0.45),
    "trickle of headers": (OK, b"X-More: yes\r\n", 0.1),
    "interim": (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n", 0),
}
WINDOW, BATCH = 1, 24  # of shards, of samples; the data set has five shards of 64 samples, the last one less


class Server(ThreadingHTTPServer):
    """A server for ``folder``. ``faults`` maps a file's name to how the next requests for it fail."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.folder = folder
        self.gets = list[str]()  # names, in the order of the requests
        self.queries = list[str]()  # of the requests; empty if an address has none
        self.faults = dict[str, list[str]]()
        self.sent = 0  # bytes of endless answers and of answers that are not the file
        self.elsewhere = ""  # where redirects go
        self.released = threading.Event()  # ends what hangs
        self.address = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()

    def tars(self) -> Counter[str]:
        """How often each tar was requested."""
        return Counter(name for name in self.gets if name.endswith(".tar"))


class Handler(SimpleHTTPRequestHandler):
    """Answers one request."""

    server: Server

    def do_GET(self) -> None:
        place, _, query = self.path.partition("?")
        name = place.rsplit("/", 1)[-1]
        self.server.gets.append(name)
        self.server.queries.append(query)
        faults = self.server.faults.get(name, [])
        fault = faults.pop(0) if faults else "none"
        path = Path(self.translate_path(self.path))
        content = path.read_bytes() if fault != "none" and path.is_file() else b""
        match fault:
            case "busy":
                self.send_error(503)
            case "forbidden":
                self.send_error(403)
            case "cut" | "hang":
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2])
                if fault == "hang":
                    self.server.released.wait(600)
            case "none":
                super().do_GET()
            case _:
                with suppress(ConnectionError):
                    self.misbehave(fault, content)

    def misbehave(self, fault: str, content: bytes) -> None:
        """Answer with the fault that the test planted."""
        if fault in ENDLESS:
            start, block, pause = ENDLESS[fault]
            self.wfile.write(start.replace(b"SIZE", b"%d" % len(content)))
            self.repeat(block, pause)
        elif fault == "redirect":
            self.send_response(302)
            self.send_header("Location", self.server.elsewhere or self.path)
            self.end_headers()
        elif fault == "slow":
            self.send_response(200)
            self.end_headers()
            piece = len(content) // 16
            for place in range(0, len(content), piece):
                time.sleep(0.25)
                self.wfile.write(content[place : place + piece])
        else:
            coding, body = {
                "bomb": ("gzip", BOMB),
                "bombs": ("gzip, gzip", gzip.compress(BOMB)),
                "compressed": ("gzip", gzip.compress(content)),
                "more": ("identity", content + b"?"),
                "less": ("identity", content[:-1]),
            }[fault]
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Encoding", coding)
            self.end_headers()
            self.wfile.write(body)

    def repeat(self, block: bytes, pause: float) -> None:
        while not self.server.released.wait(pause):
            self.wfile.write(block)
            self.server.sent += len(block)

    def do_HEAD(self) -> None:
        name = self.path.partition("?")[0].rsplit("/", 1)[-1]
        if self.server.faults.get(name, []):
            self.do_GET()
        else:
            super().do_HEAD()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def loader_of(server: Server, cache: Path, rank: int = 0, size: int = 1, gigabytes: float = 0) -> Loader:
    opened = open_cache(server.address, CacheConfig(str(cache), gigabytes), 30, rank)
    return Loader(opened.folder, opened.manifest, rank, size, None, opened)


def order_of(loader: Loader) -> Order:
    return Order(tuple(shard.samples for shard in loader.manifest.shards), 4, WINDOW)


def read(loader: Loader, position: int, steps: int, each: Callable[[], object] = lambda: None) -> list[StepBatch]:
    out = []
    with closing(loader.steps(order_of(loader), position, BATCH, 2)) as batches:
        for _ in range(steps):
            out.append(next(batches))
            each()
    return out


def values(batch: MicroBatch) -> list[object]:
    found = [getattr(batch, field.name) for field in fields(batch)]
    return [(str(value.dtype), value.tolist()) if isinstance(value, Tensor) else value for value in found]


def content(steps: list[StepBatch]) -> list[object]:
    return [(s.position, s.counts, [values(batch) for batch in s.micro_batches]) for s in steps]


def whole_tars(cache: Path) -> set[str]:
    return {path.name for path in cache.glob("*/*.tar")}


def damage(folder: Path, kind: str) -> None:
    """Damage shard 1, or its index, in the way that ``kind`` names."""
    path = folder / ("shard-00001.idx.npy" if kind.startswith("index") else "shard-00001.tar")
    data = path.read_bytes()
    match kind.split()[-1]:
        case "flipped":  # in the ids of sample 17, whose member takes two blocks, as all do
            place = min(17 * 2 * TAR_BLOCK_BYTES + TAR_BLOCK_BYTES + 140, len(data) - 1)
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        case "cut":
            path.write_bytes(data[:-700])
        case "member":  # the tar ends between two members, as a valid one may
            path.write_bytes(data[: 10 * 2 * TAR_BLOCK_BYTES])
        case "empty":
            path.write_bytes(b"")
        case "gone":
            path.unlink()
        case "foreign":
            shutil.copy(str(path).replace("00001", "00000"), path)
