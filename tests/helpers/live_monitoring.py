"""Runs a real Prometheus, a real Alertmanager and a webhook for the length of a test.

Nothing here sleeps for a fixed time: every wait polls for its condition, with a long time-out.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from deploy.monitoring.pictures import ask
from tests.helpers.programs import program
from tests.helpers.ranks import ROOT, free_port

MONITORING = ROOT / "deploy/monitoring"
ALERT_PATIENCE_SECONDS = 180.0  # seconds; a busy machine takes many times as long as an idle one
FASTER = 60  # a minute is a second
SECONDS = {"s": 1, "m": 60, "h": 3600}
Found = TypeVar("Found")
Labels = dict[str, str]


class Alert(NamedTuple):
    """An alert that a webhook received."""

    at: float  # Unix time of its arrival
    began: str  # when Prometheus began to fire it, in UTC
    status: str  # "firing" or "resolved"
    labels: Labels
    annotations: Labels


def wait_until(what: str, found: Callable[[], Found], timeout: float = ALERT_PATIENCE_SECONDS) -> Found:
    """The first result of ``found()`` that is not empty; fails with ``what`` if there is none in time."""
    deadline = time.monotonic() + timeout
    while not (answer := found()):
        assert time.monotonic() < deadline, f"waited {timeout:.0f} s in vain until {what}"
        time.sleep(0.1)
    return answer


def scaled(text: str) -> str:
    """Scale a file of rules, alerts or routes: every minute becomes a second, in windows, waits and a stall's 600 s.

    Only names change besides, so that one Prometheus can hold both files: recorded names begin with ``fast_``, and
    alerts have a label ``pace``.
    """

    def shorter(match: re.Match[str]) -> str:
        return f"{int(match[1]) * SECONDS[match[2]] * 1000 // FASTER}ms"

    text = re.sub(r"\b(\d+)([smh])\b", shorter, text)
    text = re.sub(r"\b600\b", f"{600 // FASTER}", text)
    text = re.sub(r"\b(run|prep):lambert_", r"fast_\1:lambert_", text)
    return text.replace("labels: {severity: ", "labels: {pace: fast, severity: ")


class Receiver(ThreadingHTTPServer):
    """A webhook that keeps the alerts it receives."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Webhook)
        self.alerts: list[Alert] = []
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def first(self, name: str, run: str, after: float) -> Alert | None:
        """The first scaled alert of this name and run that began after this Unix time."""
        for alert in self.alerts:
            named = alert.labels["alertname"], alert.labels.get("run"), alert.labels.get("pace")
            if named == (name, run, "fast") and alert.status == "firing" and unix_time(alert.began) >= after:
                return alert
        return None


class _Webhook(BaseHTTPRequestHandler):
    """Receives one notification."""

    server: Receiver

    def do_POST(self) -> None:
        posted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for alert in posted["alerts"]:
            what = alert["startsAt"], alert["status"], alert["labels"], alert["annotations"]
            self.server.alerts.append(Alert(time.time(), *what))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus, and its API."""

    url: str
    receiver: Receiver

    def ask(self, path: str, **parameters: object) -> Any:
        """The data of an API answer. Fails with the API's own reason."""
        return ask(self.url, path, **parameters)

    def vector(self, expression: str, at: float | None = None) -> list[tuple[Labels, float]]:
        """(labels, value) of each series, now or at a Unix time."""
        when = {} if at is None else {"time": at}
        result = self.ask("query", query=expression, **when)["result"]
        return [(each["metric"], float(each["value"][1])) for each in result]

    def matrix(self, expression: str, start: float, end: float) -> list[tuple[Labels, list[tuple[float, float]]]]:
        """(labels, points) of each series, one point per second."""
        result = self.ask("query_range", query=expression, start=start, end=end, step=1)["result"]
        return [(each["metric"], [(t, float(value)) for t, value in each["values"]]) for each in result]

    def value(self, expression: str, at: float | None = None) -> float:
        """The value of the only series; NaN if there is none."""
        found = self.vector(expression, at)
        assert len(found) <= 1, found
        return found[0][1] if found else float("nan")

    def alerts(self, run: str) -> list[tuple[str, str, str]]:
        """(name, state, pace) of each alert of a run that is pending or firing."""
        active = [alert for alert in self.ask("alerts")["alerts"] if alert["labels"].get("run") == run]
        return [(each["labels"]["alertname"], each["state"], each["labels"].get("pace", "")) for each in active]

    def evaluated(self) -> float:
        """Unix time of the oldest among the last evaluations of all groups of rules."""
        return min(unix_time(group["lastEvaluation"]) for group in self.ask("rules")["groups"])


@contextlib.contextmanager
def watching(folder: Path) -> Iterator[Prometheus]:
    """The project's Prometheus and Alertmanager, on free ports, at one scrape and evaluation a second.

    It loads its rules and alerts twice: as they are, and scaled. Targets are read from ``folder``/targets, as
    prometheus.yml says. Skips the test if the programs cannot be found or downloaded.
    """
    prometheus, alertmanager = program("prometheus"), program("prometheus-alertmanager")
    receiver, manager, url = Receiver(), f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text("utf-8"))
    for name in list(config["rule_files"]):
        text = (MONITORING / name).read_text("utf-8")
        (folder / name).write_text(text, "utf-8")
        (folder / f"fast-{name}").write_text(scaled(text), "utf-8")
        config["rule_files"].append(f"fast-{name}")
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [manager]}]}]}
    for job in config["scrape_configs"]:
        job.pop("static_configs", None)  # examples
        if job["job_name"] == "trainer":  # ranks without GPUs get made-up ones, by rank
            name = {"source_labels": ["__name__", "rank"], "regex": "lambert_rank_info;(.+)"}
            job["metric_relabel_configs"] = [{**name, "target_label": "gpu_uuid", "replacement": "GPU-$1"}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    routes = yaml.safe_load(scaled((MONITORING / "alertmanager.yml").read_text("utf-8")))
    for each in routes["receivers"]:
        each["webhook_configs"] = [{"url": f"http://127.0.0.1:{receiver.server_port}/", "send_resolved": True}]
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(routes))
    commands = {
        manager: [alertmanager, f"--storage.path={folder}/alertmanager", "--cluster.listen-address="],
        url: [prometheus, f"--storage.tsdb.path={folder}/prometheus"],
    }
    with contextlib.ExitStack() as stack:
        stack.callback(receiver.server_close)
        stack.callback(receiver.shutdown)
        for address, command in commands.items():
            name = Path(command[0]).name.removeprefix("prometheus-")
            command += [f"--config.file={folder}/{name}.yml", f"--web.listen-address={address}", "--log.level=warn"]
            command = _at_home(command)
            stack.enter_context(serving(command, folder / f"{name}.log", f"http://{address}/-/ready"))
        yield Prometheus(f"http://{url}", receiver)


def _at_home(command: list[str]) -> list[str]:
    """The command that runs a Debian program with its own files at /usr/share, even if it is only unpacked."""
    share = Path(command[0]).parent.with_name("share")
    if share == Path("/usr/share"):
        return command
    return ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /usr/share && exec "$@"', str(share), *command]


@contextlib.contextmanager
def serving(command: list[str], log: Path, ready: str) -> Iterator[None]:
    """Run a server until the block ends; the block starts when it answers at the address ``ready``."""
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:

        def answers() -> bool:
            assert process.poll() is None, f"{command[0]} ended: {log.read_text()}"
            return page(ready) is not None

        wait_until(f"{command[0]} answers", answers)
        yield
    finally:
        process.kill()
        process.wait()


def page(address: str) -> str | None:
    """The page at an address; None if nothing answers."""
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            text: str = answer.read().decode()
            return text
    except OSError:  # URLError and time-outs among them
        return None


def unix_time(text: str) -> float:
    """Convert a time as Go writes it, with up to nine digits after the seconds."""
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", text)).timestamp()
