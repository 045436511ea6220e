"""A run on two nodes that Prometheus watches, and the faults it meets: for tests, and for the picture in docs."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from data_prep.build import build
from data_prep.manifest import load_manifest
from data_prep.metrics import BuildMetrics, serve, write_textfile
from data_prep.settings import make_settings
from deploy.monitoring.gpus import DCGM
from tests.helpers.file_server import Server
from tests.helpers.live_monitoring import (
    ALERT_PATIENCE_SECONDS,
    Alert,
    Found,
    Prometheus,
    page,
    serving,
    wait_until,
    watching,
)
from tests.helpers.nodes import Node, cluster
from tests.helpers.programs import program
from tests.helpers.ranks import Forked, fork, free_port
from trainer.monitor.metrics_log import read_lines

RUN, SICK = "live", "sick"  # the run, and one that diverges in its second phase
PORTS = {RUN: 9464, SICK: 9465}
FIRST = {RUN: 10, SICK: 60}  # steps of the first phase, after which there is a checkpoint, and an evaluation
DATASET = "live"


@dataclass
class Site:
    """Two nodes, the programs that watch them, and the run's ranks."""

    folder: Path
    shards: Path
    pair: list[Node]
    prometheus: Prometheus
    running: list[Forked] = field(default_factory=list)
    reached: dict[str, tuple[float, Alert]] = field(default_factory=dict)  # by name: (time of the fault, alert)

    def start(self, name: str, where: list[Node], *overrides: str) -> list[Forked]:
        """Start a rank on each of these nodes, with the configuration of this name."""
        namespaces, changes = ",".join(node.namespace for node in where), [("--set", each) for each in overrides]
        words = [namespaces, where[0].address, "--config", str(self.folder / f"{name}.yaml")]
        return fork(len(where), "tests/helpers/rank_on_node.py", *words, *(word for each in changes for word in each))

    def wait_until(self, what: str, found: Callable[[], Found], timeout: float = ALERT_PATIENCE_SECONDS) -> Found:
        """Wait as ``wait_until`` does; fails if one of the run's ranks ends."""

        def found_or_dead() -> Found:
            for rank in self.running:
                assert rank.returncode is None, f"{what}: {rank.log.read_text()}"
            return found()

        return wait_until(what, found_or_dead, timeout)

    def reaches(self, name: str, run: str, planted: float) -> Alert:
        """Wait for an alert at the webhook, and note it."""
        alert = wait_until(f"{name} of {run} came", lambda: self.prometheus.receiver.first(name, run, planted))
        assert alert is not None
        self.reached[name] = planted, alert
        return alert

    def step(self) -> float:
        """The run's step, as Prometheus has it now; NaN if it has none."""
        return self.prometheus.value(f'max by (run) (lambert_step{{run="{RUN}"}})')

    def lines(self, event: str) -> list[dict[str, Any]]:
        """The run's JSON lines of one kind so far."""
        return [record for record in read_lines(self.folder / RUN / "metrics.jsonl") if record["event"] == event]


@contextlib.contextmanager
def watched(folder: Path, shards: Path) -> Iterator[Site]:
    """Start two nodes without a run, the exporters of a real site or stand-ins, and a Prometheus that scrapes them."""
    exporter = f"127.0.0.1:{free_port()}"
    for name in ("targets", "textfiles", "gpus"):
        (folder / name).mkdir()
    write_config(folder, shards, RUN, 1_000_000, 0.01)
    write_config(folder, shards, SICK, 1_000, 100.0)
    write_gpus(folder, xid=0)
    command = [program("prometheus-node-exporter"), "--collector.disable-defaults", "--collector.textfile"]
    command += [f"--collector.textfile.directory={folder}/textfiles", f"--web.listen-address={exporter}"]
    with contextlib.ExitStack() as stack:
        pair = stack.enter_context(cluster(2))
        prometheus = stack.enter_context(watching(folder))
        stack.enter_context(serving(command, folder / "node.log", f"http://{exporter}/metrics"))
        gpus = Server(folder / "gpus")
        stack.callback(gpus.stop)
        aim(folder, "trainer", *(f"{node.address}:{PORTS[RUN]}" for node in pair), f"{pair[0].address}:{PORTS[SICK]}")
        aim(folder, "data_prep_file", exporter)
        aim(folder, "dcgm", gpus.address.removeprefix("http://"))
        yield Site(folder, shards, pair, prometheus)


def aim(folder: Path, job: str, *targets: str) -> None:
    """Tell Prometheus the targets of a job."""
    replace(folder / f"targets/{job}.yml", yaml.safe_dump([{"targets": list(targets)}]))


def write_config(folder: Path, shards: Path, name: str, steps: int, rate: float) -> None:
    """Write a run of two phases: a short one at a good learning rate, and one at ``rate``."""
    phase = {"train": str(shards), "heldout": str(shards), "sequence_length": 32, "global_batch": 30, "micro_batch": 8}
    vocab_size = load_manifest(shards).tokenizer.vocab_size
    tree = {
        "run": {"name": name, "folder": str(folder / name), "seed": 5, "device": "cpu"},
        "model": {
            **{"layers": 1, "hidden": 16, "heads": 2, "intermediate": 32, "max_positions": 32},
            "vocab_size": vocab_size,
        },
        "phases": [
            {**phase, "name": "first", "steps": FIRST[name], "learning_rate": 0.01},
            {**phase, "name": "second", "steps": steps, "learning_rate": rate},
        ],
        "checkpoint": {"every_steps": 50, "keep": 2},
        "evaluation": {"micro_batch": 64},
        "metrics": {"port": PORTS[name], "log_every_steps": 2, "device_teraflops": 0.01},
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree))


def write_gpus(folder: Path, xid: int) -> None:
    """Write what dcgm-exporter would report for the two ranks' GPUs; the last XID error is the second one's."""
    text = ""
    for name, (kind, about) in DCGM.items():
        text += f"# HELP {name} {about}\n# TYPE {name} {kind}\n"
        for gpu in (0, 1):
            value = xid * gpu if name == "DCGM_FI_DEV_XID_ERRORS" else int("_FB_" in name)  # a share needs a memory
            text += f'{name}{{gpu="{gpu}",UUID="GPU-{gpu}"}} {value}\n'
    replace(folder / "gpus/metrics", text)


def replace(path: Path, text: str) -> None:
    """Write a file that somebody may be reading."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def prepare(site: Site) -> None:
    """Build a data set while Prometheus watches: it scrapes before the work and after it, and keeps reading a file."""
    metrics, text = BuildMetrics(DATASET), site.shards.parent
    seen = 'max(lambert_prep_progress_ratio{stage="write"})'
    with serve(metrics, 0, "127.0.0.1") as port:
        aim(site.folder, "data_prep", f"127.0.0.1:{port}")
        site.wait_until("the build is seen", lambda: site.prometheus.value(seen) == 0)
        made = make_settings(32, samples_per_shard=64)
        build([text / "corpus.txt"], text / "tokenizer", site.folder / "shards", made, 1, None, metrics)
        site.wait_until("the build was seen to be done", lambda: site.prometheus.value(seen) == 1)
    write_textfile(metrics, site.folder / "textfiles/live.prom")


def said(site: Site, step: float = -1, name: str = "lambert_run_info") -> list[str]:
    """The exporters' series of this name once the run has reached this step; [] until then."""
    pages = [page(f"http://{node.address}:{PORTS[RUN]}/metrics") or "" for node in site.pair]
    text = "\n".join(pages)
    return pages if all(pages) and f"\n{name}{{" in text and step_of(text) >= step else []


def step_of(text: str) -> float:
    found = re.search(r"^lambert_step\{.*\} (.+)$", text, re.MULTILINE)
    return float(found[1]) if found else -1.0


@contextlib.contextmanager
def slowed(rank: Forked) -> Iterator[None]:
    """Slow the rank down: it is paused four fifths of the time."""
    over = threading.Event()

    def hold() -> None:
        while not over.wait(0.02):
            rank.send_signal(signal.SIGSTOP)
            over.wait(0.08)
            rank.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
