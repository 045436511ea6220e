"""Serves the page of runs over HTTP: the list, the data of some runs, and with a token a request to stop one.

No request names a file: runs are named by identifiers that the list gives out. The bounds on connections, bytes and
time are those of :mod:`data_prep.endpoint`, which answers one request after another.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import re
import socket
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import parse_qs, urlsplit

from data_prep.endpoint import Endpoint
from data_prep.json_text import read_text
from trainer.errors import TrainerError
from trainer.options import path_or_address
from trainer.runs.addresses import Copies
from trainer.runs.comparison import labeled
from trainer.runs.document import document
from trainer.runs.journals import Journals
from trainer.runs.page_data import curves_tree, list_tree, runs_tree
from trainer.runs.status import RunStatus, find_runs, in_order
from trainer.runs.stopping import ask_to_stop

LIST_SECONDS = 1.0  # an answer is this old at most
MOST_RUNS = 50  # in one request
SHORTEST_TOKEN = 16  # characters
LARGEST_TOKEN_FILE = 4096  # bytes
Start = Callable[[str, list[tuple[str, str]]], Any]
Listing = list[tuple[str, RunStatus]]


class Refused(Exception):
    """A request that is not granted: its HTTP status, and a reason for the person who sent it."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class Runs:
    """The application: what each request is answered with. Its name for a run is a hash of the run's folder."""

    folders: Sequence[Path]  # where runs are looked for
    copies: Copies | None = None  # of runs at addresses
    price: float | None = None  # of a GPU-hour
    token: str | None = None  # None: no run can be stopped
    names: Collection[str] = ("localhost",)  # host names by which browsers may ask, besides any address
    _journals: Journals = field(default_factory=Journals)
    _listing: Listing = field(default_factory=list)
    _listed: float = 0.0  # time.monotonic() of the listing
    _local: dict[str, Path] = field(default_factory=dict)  # the copies by address

    def __call__(self, environ: dict[str, str], start: Start) -> Iterable[bytes]:
        """Answer one request: the form is WSGI's."""
        try:
            status, kind, body, policy = self._answer(environ)
        except Refused as refused:
            status, kind, body, policy = refused.status, "text/plain", str(refused), ""
        except TrainerError as error:
            status, kind, body, policy = "409 Conflict", "text/plain", str(error), ""
        data, fields = body.encode("utf-8", "backslashreplace"), _fields(kind, policy)
        if "gzip" in environ.get("HTTP_ACCEPT_ENCODING", ""):
            packer = zlib.compressobj(1, zlib.DEFLATED, 31)  # fast, and in gzip's form
            data = packer.compress(data) + packer.flush()
            fields.append(("Content-Encoding", "gzip"))
        start(status, fields)
        return [data]

    def _answer(self, environ: dict[str, str]) -> tuple[str, str, str, str]:
        """The status, the content type, the body, and a page's Content-Security-Policy."""
        check_host(environ.get("HTTP_HOST", ""), self.names)
        try:
            query = parse_qs(environ["QUERY_STRING"], max_num_fields=MOST_RUNS + 2)
        except ValueError:
            raise Refused("400 Bad Request", "too many fields") from None
        match environ["REQUEST_METHOD"], environ["PATH_INFO"]:
            case "GET", "/":
                page, policy = document()
                return "200 OK", "text/html", page, policy
            case "GET", "/list":
                return _json(self._list())
            case "GET", "/runs":
                return _json(self._runs(query))
            case "POST", "/stop":
                self._check_token(environ)
                return "200 OK", "text/plain", self._stop(query), ""
            case (("GET" | "POST"), ("/" | "/list" | "/runs" | "/stop")):
                raise Refused("405 Method Not Allowed", "only /stop takes a POST")
            case "GET" | "POST", _:
                raise Refused("404 Not Found", "there is no such page")
        raise Refused("405 Method Not Allowed", "only GET and POST are answered")

    def _renew(self) -> float:
        """Renew the listing, at most once a second. Return which share of the runs' journals has been read for it."""
        if self._listing and time.monotonic() - self._listed < LIST_SECONDS:
            return 1.0
        remote = {} if self.copies is None else self.copies.runs
        share, found = self._journals.renew([*find_runs(self.folders), *remote], self.price)
        if share == 1:
            placed = [replace(run, folder=remote.get(Path(run.folder), run.folder)) for run in found]
            self._listing = [(identifier(run.folder), run) for run in in_order(placed)]
            self._local = {address: folder for folder, address in remote.items()}
            self._listed = time.monotonic()
        return share

    def _list(self) -> dict[str, Any]:
        share = self._renew()
        if share < 1:
            return {"reading": share}
        return list_tree(self._listing, time.time()) | {"can_stop": self.token is not None}

    def _chosen(self, query: dict[str, list[str]]) -> dict[str, RunStatus]:
        """The runs that a request asks for, by identifier."""
        self._renew()
        wanted, known = query.get("run", []), dict(self._listing)
        if not 0 < len(wanted) <= MOST_RUNS:
            raise Refused("400 Bad Request", f"ask for 1 to {MOST_RUNS} runs")
        if not known.keys() >= set(wanted):
            raise Refused("404 Not Found", "no such run: it was moved or removed")
        return {name: known[name] for name in wanted}

    def _runs(self, query: dict[str, list[str]]) -> dict[str, Any]:
        """The data of some runs, or how much of their journals has been read so far."""
        chosen, now = self._chosen(query), time.time()
        folders = {name: self._local.get(run.folder, Path(run.folder)) for name, run in chosen.items()}
        share, histories = self._journals.read(list(folders.values()))
        if share < 1:
            return {"reading": share}
        begun = {name: histories[folder] for name, folder in folders.items() if folder in histories}
        if "from" in query and "to" in query:
            return {"curves": dict(zip(begun, curves_tree(list(begun.values()), _range(query)), strict=True))}
        runs = labeled([(folders[name], history, chosen[name]) for name, history in begun.items()])
        waiting = [(name, run) for name, run in chosen.items() if name not in begun]
        tree = runs_tree(list(zip(begun, runs, strict=True)), now, self.price)
        return tree | {"waiting": list_tree(waiting, now)["runs"]}

    def _check_token(self, environ: dict[str, str]) -> None:
        """A page of another origin has neither the token nor our origin."""
        if self.token is None:
            raise Refused("403 Forbidden", "this server is read-only: start it with --token-file")
        own = {f"{scheme}://{environ.get('HTTP_HOST')}" for scheme in ("http", "https")}  # a proxy may speak TLS
        if environ.get("HTTP_ORIGIN") not in own:
            raise Refused("403 Forbidden", "a stop must come from the page itself")
        given = environ.get("HTTP_AUTHORIZATION", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            raise Refused("403 Forbidden", "this is not the token that the server was started with")

    def _stop(self, query: dict[str, list[str]]) -> str:
        if len(query.get("run", [])) != 1:
            raise Refused("400 Bad Request", "ask for 1 run")
        [run] = self._chosen(query).values()
        self._listed = 0.0
        return ask_to_stop(path_or_address(run.folder), time.time())


def identifier(folder: str) -> str:
    """The name of a run in requests, which says nothing and fits into any address."""
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]


def check_host(host: str, names: Collection[str]) -> None:
    """Raises Refused if a browser asks for a host by a name that is not ours: any site's name may lead to this port."""
    asked = ""
    with suppress(ValueError):
        asked = urlsplit(f"//{host}").hostname or ""
        ipaddress.ip_address(asked)
        return
    if asked not in names:
        reason = "open this page by the machine's own name or address, or name the host in --serve"
        raise Refused("421 Misdirected Request", reason)


def _range(query: dict[str, list[str]]) -> tuple[float, float]:
    try:
        return float(query["from"][0]), float(query["to"][0])
    except ValueError:
        raise Refused("400 Bad Request", "from and to must be steps") from None


# ---- the command ---------------------------------------------------------------------------------------------


def read_token(path: Path) -> str:
    """The token in a file of one line. Raises TrainerError if the file cannot be read, or the token is too short."""
    try:
        token = read_text(path, LARGEST_TOKEN_FILE).strip()
    except OSError as error:
        raise TrainerError(f"--token-file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise TrainerError(f"--token-file {path}: {error}: name a file with one line of text") from None
    if not re.fullmatch(rf"[!-~]{{{SHORTEST_TOKEN},}}", token):
        raise TrainerError(f"--token-file {path}: must be one word of {SHORTEST_TOKEN} or more ASCII characters")
    return token


def serve(place: tuple[str, int], runs: Runs, tell: Callable[[str], None]) -> NoReturn:
    """Answer requests until Ctrl-C. Raises TrainerError if the place cannot be opened."""
    address, port = place
    name = socket.gethostname().lower()
    runs.names = {"localhost", name, name.partition(".")[0], address.lower()}
    try:
        endpoint = Endpoint(port, address, runs)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no such host"
        raise TrainerError(f"--serve {address}:{port} cannot be opened ({reason}): name another") from None
    shown = f"[{address}]" if ":" in address else address
    may = "read-only: --token-file adds a stop button" if runs.token is None else "runs can be stopped with the token"
    tell(f"http://{shown}:{endpoint.port}/ shows the runs ({may}); Ctrl-C ends")
    if not _is_local(endpoint.address):
        tell(f"{address} is not only this machine's: whoever reaches it can see these runs")
    try:
        while True:
            time.sleep(3600)
    finally:
        endpoint.close()


def _is_local(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _json(tree: Any) -> tuple[str, str, str, str]:
    return "200 OK", "application/json", json.dumps(tree, allow_nan=False, separators=(",", ":")), ""


def _fields(kind: str, policy: str) -> list[tuple[str, str]]:
    return [
        ("Content-Type", f"{kind}; charset=utf-8"),
        ("Content-Security-Policy", policy or "default-src 'none'"),
        ("Cache-Control", "no-store"),
        ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "no-referrer"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
    ]
