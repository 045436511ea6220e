"""A run's progress, as Kubeflow Trainer shows it in a TrainJob: how much is done, the time left, and the metrics.

Trainer 2.2 and later, with its feature gate TrainJobStatus, gives the pods an address, a CA's certificate and a token.
The protocol is that of KEP-2779 as v2.3.0 implements it: the variables in ``plugins/trainjobstatus``, the server in
``pkg/statusserver``, the body in ``pkg/apis/trainer/v1alpha1/trainjob_types.go``. A post replaces the whole status.

A thread posts the newest status, so a slow server delays no step. If posts fail, there is one warning.
"""

from __future__ import annotations

import json
import math
import re
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from datetime import UTC, datetime
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

from data_prep.json_text import parse_json, read_text, shown
from trainer.checkpoint.train_state import TrainState
from trainer.console import warn
from trainer.errors import explain
from trainer.monitor.metrics_log import Record, tokens_per_second
from trainer.monitor.progress_line import seconds_left
from trainer.ranks.world import StatusServer

EVERY = 10.0  # seconds between two posts, at least; Trainer asks for no more than one in 5 s
LONGEST_PAUSE = 300.0  # seconds between two posts that fail; the pause doubles up to this
PATIENCE = 5.0  # seconds for the server to answer, and for the last post to end before the process does
MOST_SECONDS = 2**31 - 1  # the time left is an int32
MOST_TOKEN, MOST_ANSWER = 1 << 16, 1 << 12  # bytes that are read
STEP_VALUES = ("step", "phase", "samples", "restarts", "learning_rate", "gradient_norm", "loss_scale")

Remaining = Callable[[TrainState], tuple[int, float]]  # see `trainer.run.phases.remaining`


class TrainJob:
    """The newest values of a run, and the thread that posts them; without a server it does nothing."""

    def __init__(self, server: StatusServer | None, remaining: Remaining) -> None:
        self._remaining = remaining
        self._values: dict[str, float] = {}
        self._share: float | None = None  # of the whole training that is done
        self._left: float | None = None  # seconds
        self._poster = None if server is None else _started(server)

    def write(self, records: list[Record]) -> None:
        """Take the values from records of the metrics log. Posts the start and the end of the run."""
        for record in records if self._poster is not None else ():
            self._values |= values(record)
            match record["event"]:
                case "start":
                    self._values |= {"step": record["step"]}
                    self._share = None if record["step"] else 0.0
                    self._post()
                case "end":
                    if record["how"] == "done":
                        self._share, self._left = 1.0, 0.0
                    self._post()

    def progress(self, state: TrainState, records: list[Record]) -> None:
        """Post how far the run is. ``records``: the steps that led to ``state``."""
        if self._poster is not None:
            whole = seconds_left(records, *self._remaining(TrainState()))
            self._left = seconds_left(records, *self._remaining(state))
            self._share = max(0.0, 1 - self._left / whole) if whole > 0 else None
            self._post()

    def _post(self) -> None:
        if self._poster is not None:
            self._poster.put(status(self._values, self._share, self._left, time.time()))

    def close(self) -> None:
        """Wait a few seconds for the last post, unless the server failed before."""
        if self._poster is not None:
            self._poster.close()


def values(record: Record) -> dict[str, float]:
    """The values of a record of the metrics log that a TrainJob shows, by name; those that are not finite are left out.

    Steps keep their own names; a skipped step has no losses.
    """
    match record["event"]:
        case "step" if record["applied"]:
            named = {key: record.get(key) for key in STEP_VALUES}
            named |= {key: value for key, value in record.items() if key == "loss" or _of_task(key)}
            named["tokens_per_second"] = tokens_per_second(record)
        case "heldout":
            named = {f"heldout_{key}": value for key, value in record.items() if _of_task(key)}
        case "checkpoint":
            named = {"checkpoint_step": record["step"]}
        case _:
            named = {}
    return {key: value for key, value in named.items() if value is not None and math.isfinite(value)}


def _of_task(key: str) -> bool:
    return key in ("mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy")


def status(named: Mapping[str, float], share: float | None, left: float | None, now: float) -> dict[str, Any]:
    """The body of a post. ``share``: of the training that is done, in 0–1; ``left``: seconds; ``now``: Unix time."""
    found: dict[str, Any] = {}
    if share is not None:
        found["progressPercentage"] = int(100 * share + 1e-9)
    if left is not None:
        found["estimatedRemainingSeconds"] = int(min(max(left, 0.0), MOST_SECONDS))
    found["metrics"] = [
        {"name": name, "value": str(value) if isinstance(value, int) else f"{value:.6g}"}
        for name, value in named.items()
    ]
    found["lastUpdatedTime"] = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"trainerStatus": found}


def _started(server: StatusServer) -> Poster | None:
    """The thread, or None with a warning if there can be none."""
    address = re.fullmatch(r"https://[\w.-]+(:\d{1,5})?/[\w./-]*", server.url, re.ASCII)
    if address is None or not (server.certificate and server.token):
        _complain("KUBEFLOW_TRAINER_SERVER_URL, _CA_CERT and _TOKEN must be an https address and two files")
        return None
    try:
        return Poster(server)
    except RuntimeError as error:  # no more threads
        _complain(str(error))
        return None


def _complain(reason: str) -> None:
    warn(f"Kubeflow Trainer does not get this run's progress: {reason}; the run goes on without it")


class Poster:
    """A thread that posts the newest status at a bounded rate. No method waits for it, except ``close``."""

    def __init__(self, server: StatusServer) -> None:
        self._server = server
        self._newest = deque[bytes](maxlen=1)  # what is still to be posted
        self._woken, self._closing = Event(), Event()
        self._pause = EVERY
        self._failing = self._complained = False
        self._thread = Thread(target=self._work, name="train-job", daemon=True)
        self._thread.start()

    def put(self, body: dict[str, Any]) -> None:
        """Let the thread post ``body`` next, in place of what it has not posted yet."""
        self._newest.append(json.dumps(body, allow_nan=False).encode())
        self._woken.set()

    def close(self) -> None:
        """Post what was put last now, and end. Waits up to PATIENCE seconds for that, but not if the server failed."""
        self._closing.set()
        self._woken.set()
        if not self._failing:
            self._thread.join(PATIENCE)

    def _work(self) -> None:
        while self._newest or not self._closing.is_set():
            self._woken.wait()
            self._woken.clear()
            if self._newest:
                self._post(self._newest.pop())
            self._closing.wait(self._pause)

    def _post(self, body: bytes) -> None:
        try:
            failure = post(self._server, body)
        except (OSError, HTTPException, ValueError) as error:  # ValueError: a bad port, or a token that is no text
            failure = explain(error)
        self._failing = bool(failure)
        self._pause = min(2 * self._pause, LONGEST_PAUSE) if failure else EVERY
        if failure and not self._complained:
            self._complained = True
            _complain(failure)


def post(server: StatusServer, body: bytes) -> str:
    """Post a status; return why the server does not take it, or an empty text.

    Certificate and token are read each time, because the cluster replaces both while a run goes on. Only the given CA
    counts, no proxy is used, and no redirection is followed, so nobody else gets the token. Raises OSError,
    HTTPException or ValueError.
    """
    token = read_text(Path(server.token), MOST_TOKEN).strip()
    if not re.fullmatch(r"[!-~]+", token):  # the exception of http.client would print it
        return f"{server.token} is no token"
    address = urlsplit(server.url)
    context = ssl.create_default_context(cafile=server.certificate)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    connection = HTTPSConnection(str(address.hostname), address.port, timeout=PATIENCE, context=context)
    with closing(connection):
        connection.request("POST", address.path, body, headers)
        answer = connection.getresponse()
        if answer.status == 200:
            return ""
        return f"{server.url} answers {answer.status} {_reason(answer.read(MOST_ANSWER))}"


def _reason(body: bytes) -> str:
    """The message in an answer, which is a Status of Kubernetes."""
    text = body.decode(errors="replace")
    with suppress(ValueError, TypeError, KeyError):
        text = str(parse_json(text)["message"])
    return shown(text)
