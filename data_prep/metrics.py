"""Prometheus metrics of a build: over HTTP while it runs, and at its end through a file or a Pushgateway.

`BuildMetrics` are plain counters that every build updates. Only `serve`, `write_textfile` and `push` need
``prometheus_client``, and they import it when called. Each series has the label ``dataset``: one node_exporter may read
the files of two data sets, and it would drop the second of two equal series.
"""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from data_prep.endpoint import Endpoint
from data_prep.errors import DataError
from data_prep.options import check_place
from data_prep.streams import warn

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

METRIC_PREFIX = "lambert_prep_"
JOB = "lambert_prep"  # job name of the Pushgateway groups
GATEWAY = re.compile(r"https?://([\w.-]+|\[[\da-f:.]+])(:(?P<port>\d+))?(/[\w.~/-]*)?", re.ASCII | re.IGNORECASE)
PUSH_SECONDS = 10  # timeout for the Pushgateway's answer
STAGES = ("tokenize", "select", "plan", "write")  # stages of a build, in order; values of the label "stage"

# Field of Figures: help text. Exposed as lambert_prep_<field>_total. The unit is the first word of each name.
COUNTERS = {
    "bytes_read": "Bytes read from the input files, as stored on disk.",
    "bytes_replaced": "Bytes that were not UTF-8 and were replaced by U+FFFD.",
    "characters_cleaned": "Characters that cleaning removed or changed, not counting whitespace.",
    "documents": "Documents with text in the input.",
    "documents_duplicate": "Documents left out because an earlier one has the same text.",
    "documents_held_out": "Documents left out because they belong to the other part of the split.",
    "sentences": "Sentences of the documents.",
    "sentences_empty": "Sentences left out because they have no token.",
    "sentences_cut": "Cuts made in lines that were too long to be one sentence.",
    "tokens": "Tokens of the documents.",
    "tokens_left_over": "Tokens of sentences that start no pair, over all passes over the text.",
    "tokens_truncated": "Tokens cut off pairs that were longer than a sample, over all passes over the text.",
    "pairs_unmaskable": "Pairs left out because they have no token that can be predicted.",
    "samples": "Samples written.",
    "shards": "Finished shards.",
    "bytes_written": "Bytes of the finished shards, without their indexes.",
}


class Stage(NamedTuple):
    """Timing of a stage. Replaced as a whole, since a scrape can come at any time and a counter must never decrease."""

    seconds: float  # run time before ``begun``
    begun: float | None  # monotonic seconds; None while the stage is not running
    done: float
    total: float


NOT_BEGUN = Stage(0.0, None, 0.0, 0.0)


@dataclass
class BuildMetrics:
    """Progress of a build: add to the counts, and call `begin` and `advance` in each stage."""

    dataset: str = ""  # name of the output folder, a label of every series
    versions: dict[str, str] = field(default_factory=dict)  # labels of lambert_prep_build_info: few and fixed
    bytes_read: int = 0
    bytes_replaced: int = 0
    characters_cleaned: int = 0
    documents: int = 0
    documents_duplicate: int = 0
    documents_held_out: int = 0
    sentences: int = 0
    sentences_empty: int = 0
    sentences_cut: int = 0
    tokens: int = 0
    tokens_left_over: int = 0
    tokens_truncated: int = 0
    pairs_unmaskable: int = 0
    samples: int = 0
    shards: int = 0
    bytes_written: int = 0
    succeeded: float | None = None  # Unix time at which the data set was complete
    stages: dict[str, Stage] = field(default_factory=dict)

    def begin(self, stage: str, total: float) -> None:
        """Ends the running stage, if any, and begins another of STAGES with ``total`` units of work.

        Also call it for a stage whose result exists from an earlier run: the stage counts as done when it ends.
        """
        self.end()
        self.stages[stage] = Stage(self.seconds(stage), time.monotonic(), 0.0, total)

    def advance(self, amount: float) -> None:
        """Marks ``amount`` more of the running stage's total as done."""
        for name, stage in self.stages.items():
            if stage.begun is not None:
                self.stages[name] = stage._replace(done=stage.done + amount)

    def end(self) -> None:
        """Marks the running stage, if any, as completely done."""
        for name, stage in self.stages.items():
            if stage.begun is not None:
                self.stages[name] = Stage(self.seconds(name), None, 1.0, 1.0)

    def succeed(self) -> None:
        """Marks the data set as complete."""
        self.end()
        self.succeeded = time.time()

    def seconds(self, name: str) -> float:
        """How long a stage took, or has taken so far."""
        stage = self.stages.get(name, NOT_BEGUN)
        return stage.seconds + (0.0 if stage.begun is None else time.monotonic() - stage.begun)

    def progress(self, name: str) -> float:
        """The finished share of a stage, from 0 to 1."""
        stage = self.stages.get(name, NOT_BEGUN)
        return min(stage.done / stage.total, 1.0) if stage.total > 0 else 0.0


@contextmanager
def serve(metrics: BuildMetrics, port: int | None, address: str = "0.0.0.0") -> Iterator[int | None]:
    """Serves Prometheus metrics at ``http://address:port/metrics`` during a ``with`` block; port None: no endpoint.

    Listens on every address by default, since Prometheus usually runs on another machine. Yields the port, which the
    system chooses for 0. Raises DataError before the block if the port cannot be opened.
    """
    if port is None:
        yield None
        return
    registry = _registry(metrics, "--metrics-port")
    from prometheus_client import make_wsgi_app

    try:
        endpoint = Endpoint(port, address, make_wsgi_app(registry))
    except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: an invalid host name
        reason = error.strerror if isinstance(error, OSError) else "no such port or host"
        raise DataError(
            f"--metrics-port {port} on {address} cannot be opened ({reason}): choose another, or leave it out"
        ) from None
    try:
        yield endpoint.port
    finally:
        endpoint.close()


def check_textfile(path: Path) -> None:
    """Raises DataError if `write_textfile` could not write ``path``. Call it before hours of work."""
    _require_client("--metrics-file")
    check_place("--metrics-file", path, ".prom")  # node_exporter reads only these


def write_textfile(metrics: BuildMetrics, path: Path) -> None:
    """Atomically replaces ``path`` with the metrics, for node_exporter's textfile collector.

    Call it only after a success. A failed build thus keeps the file of the last good one, and its
    ``lambert_prep_last_success_timestamp_seconds`` gets old: alert on that.
    """
    registry = _registry(metrics, "--metrics-file")
    from prometheus_client import write_to_textfile

    write_to_textfile(str(path), registry)


@contextmanager
def push(metrics: BuildMetrics, gateway: str | None) -> Iterator[None]:
    """Pushes the outcome of a ``with`` block, the build, to a Pushgateway; None: no push.

    The data set has its own group, which contains results only. A success replaces it. A failure adds
    ``lambert_prep_last_failure_timestamp_seconds``, which stays until the next success; a stop by SIGTERM or Ctrl-C is
    not a failure. Nothing is deleted when a build begins: otherwise a killed build would remove the time of the last
    success, and its age is what to alert on.

    Raises DataError before the block if ``gateway`` is not an address. Prints a warning if the gateway does not answer.
    """
    if gateway is None:
        yield
        return
    results = _registry(metrics, "--metrics-push")
    match = GATEWAY.fullmatch(gateway)
    if not match or not 0 < int(match["port"] or 80) < 65536:
        shown = gateway.rpartition("@")[2]  # without a password
        raise DataError(f"--metrics-push {shown}: wanted http://HOST:PORT of a Pushgateway, without a user's name")
    from prometheus_client import CollectorRegistry, Gauge, push_to_gateway, pushadd_to_gateway

    try:
        yield
    except Exception:
        failure = CollectorRegistry()
        text = "Unix time of a failed build that no success has followed."
        Gauge(METRIC_PREFIX + "last_failure_timestamp_seconds", text, registry=failure).set_to_current_time()
        _push(pushadd_to_gateway, gateway, failure, metrics.dataset)
        raise
    _push(push_to_gateway, gateway, results, metrics.dataset)


def _push(send: Callable[..., None], gateway: str, registry: CollectorRegistry, dataset: str) -> None:
    try:
        send(gateway, JOB, registry, {"dataset": dataset}, PUSH_SECONDS)
    except (OSError, HTTPException, ValueError) as error:
        reason = " ".join(str(error).split())
        said = f"--metrics-push {gateway} did not accept the metrics ({reason}); run the same command to push again"
        warn(said)


def _registry(metrics: BuildMetrics, option: str) -> CollectorRegistry:
    """A separate registry per build, so that two builds in one process do not mix."""
    _require_client(option)
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(_Collector(metrics))
    return registry


def _require_client(option: str) -> None:
    if importlib.util.find_spec("prometheus_client") is None:
        raise DataError(f"{option} needs the package prometheus-client: pip install prometheus-client, or leave it out")


@dataclass(frozen=True, eq=False)  # a registry compares collectors by identity
class _Collector:
    """Reads the metrics when Prometheus scrapes. The set of series depends only on success."""

    metrics: BuildMetrics

    def collect(self) -> Iterator[Metric]:
        """Every series with its help text."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        metrics = self.metrics
        of = [metrics.dataset]
        yield InfoMetricFamily(
            METRIC_PREFIX + "build",
            "Versions and settings of the build.",
            {"dataset": metrics.dataset} | metrics.versions,
        )
        for name, text in COUNTERS.items():
            counter = CounterMetricFamily(METRIC_PREFIX + name, text, labels=["dataset"])
            counter.add_metric(of, getattr(metrics, name))
            yield counter
        by = ["dataset", "stage"]
        seconds = CounterMetricFamily(METRIC_PREFIX + "stage_seconds", "Wall time of each stage.", labels=by)
        progress = GaugeMetricFamily(METRIC_PREFIX + "progress_ratio", "Finished share of each stage.", labels=by)
        for stage in STAGES:
            seconds.add_metric([*of, stage], metrics.seconds(stage))
            progress.add_metric([*of, stage], metrics.progress(stage))
        yield from (seconds, progress)
        if metrics.succeeded is not None:
            text = "Unix time at which the data set was complete."
            success = GaugeMetricFamily(METRIC_PREFIX + "last_success_timestamp_seconds", text, labels=["dataset"])
            success.add_metric(of, metrics.succeeded)
            yield success
