"""Starts a run with ``deploy.launch --nnodes 2:4`` on four hosts, injects faults, and prints how it recovers.

    python -m tests.tools.elastic_table [--keep FOLDER]

Prints Markdown. Needs root. Exits with an error if a sample is lost or read twice, or if an end is not as expected.
FOLDER gets the run's output and journal.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_prep.build import build
from data_prep.settings import make_settings
from tests.helpers import nodes
from tests.helpers.corpora import write_corpus
from tests.helpers.launches import BIN, PORT, PYTHON, SETTINGS
from tests.helpers.ranks import ROOT
from tests.helpers.runs import kept_steps, write_config
from tests.helpers.sshd import Host, hosts, inside, wait_for
from trainer.monitor.metrics_log import read_lines

PATIENCE = 300.0  # seconds
COUNT, EVERY, AFTER = 4, 10, 15  # nodes; steps between checkpoints, and in each attempt before the next fault
HEAD = ("what happens", "seconds until steps go on", "ranks", "steps taken again")


class Cluster:
    """Four hosts, the launcher on each, and the journal of their run."""

    def __init__(self, machines: list[Host], config: Path, log: Path) -> None:
        self.machines, self.config, self.log, self.since = machines, config, log, time.time()
        self.launchers: dict[int, subprocess.Popen[str]] = {}

    def start(self, number: int) -> None:
        """Start the launcher of a node, after plugging its network in."""
        machine = self.machines[number]
        subprocess.run(["ip", "-n", machine.node.namespace, "link", "set", nodes.INTERFACE, "up"], check=True)
        options = ["--nnodes", "2:4", "--node-rank", str(number), "--nproc-per-node", "1"]
        meet = ["--master-addr", "node-0", "--master-port", PORT]
        words = [PYTHON, "-m", "deploy.launch", *options, *meet, "--config", str(self.config)]
        command = machine.command(words, ROOT, {"PATH": f"{BIN}:/usr/bin:/bin", "LAMBERT_SECRET": "x"} | SETTINGS)
        with self.log.open("a") as log:
            self.launchers[number] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)

    def start_all(self) -> None:
        """Start the launchers of all nodes."""
        for number in range(COUNT):
            self.start(number)

    def kill(self, number: int) -> None:
        """Kill all processes of a node."""
        for pid in self.machines[number].pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launchers[number].wait()

    def lose_power(self, number: int) -> None:
        """Kill all processes of a node, whose network sends no sign of that."""
        self.machines[number].cut()
        self.kill(number)

    def kill_rank(self, number: int) -> None:
        """Kill the rank of a node, but not its launcher."""
        os.kill(self.machines[number].pids("-m trainer")[-1], signal.SIGKILL)

    def stop(self, number: int) -> int:
        """Send SIGTERM to the launcher of a node, and return its exit code."""
        os.kill(inside(self.launchers[number]), signal.SIGTERM)
        return self.launchers[number].wait(PATIENCE)

    def events(self, event: str) -> list[dict[str, Any]]:
        """The journal's lines of one kind since the last fault."""
        path = self.config.parent / "run" / "metrics.jsonl"
        found = read_lines(path) if path.exists() else []
        return [line for line in found if line["event"] == event and line["time"] > self.since]

    def hit(self, name: str, fault: Callable[[], object], ranks: int) -> None:
        """Inject a fault, wait until the run goes on, and print its row."""
        self.since = time.time()
        fault()

        def goes_on() -> bool:
            starts = self.events("start")
            if not starts or starts[-1]["ranks"] != str(ranks):
                return False
            return len([line for line in self.events("step") if line["time"] > starts[-1]["time"]]) >= AFTER

        require(wait_for(goes_on, PATIENCE), self)
        start = self.events("start")[-1]
        first = next(line["time"] for line in self.events("step") if line["time"] > start["time"])
        print_row((name, f"{first - self.since:.0f}", str(ranks), str(start["rolled_back"])))


def main() -> None:
    parser = argparse.ArgumentParser(description="Execute the table of lost and returning nodes.")
    parser.add_argument("--keep", type=Path, help="a folder for the run's output and journal")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="elastic-") as name:
        folder = Path(name)
        text, tokenizer = write_corpus(folder, [18] * 36, 8, different=100)
        with contextlib.redirect_stdout(None):
            build([text], tokenizer, folder / "shards", make_settings(32, samples_per_shard=64), processes=1)
        sections: dict[str, Any] = {"run": {"device": "cpu"}, "checkpoint": {"every_steps": EVERY}}
        config = write_config(folder, folder / "shards", 1_000_000, **sections, metrics={"log_every_steps": 1})
        try:
            with hosts(COUNT, folder / "site") as machines:
                execute(Cluster(machines, config, folder / "log"))
        finally:
            if options.keep:
                options.keep.mkdir(parents=True, exist_ok=True)
                for path in (folder / "log", folder / "run" / "metrics.jsonl"):
                    shutil.copy(path, options.keep)
        compare(folder, config)


def execute(cluster: Cluster) -> None:
    """Inject the faults one after another."""
    print_row(HEAD)
    print_row(["---"] * len(HEAD))
    cluster.hit("four nodes start", cluster.start_all, 4)
    cluster.hit("node 2 loses power", lambda: cluster.lose_power(2), 3)
    cluster.hit("node 2 returns", lambda: cluster.start(2), 4)
    cluster.hit("all processes of node 3 are killed", lambda: cluster.kill(3), 3)
    cluster.hit("node 3 returns", lambda: cluster.start(3), 4)
    cluster.hit("a rank is killed", lambda: cluster.kill_rank(1), 4)
    cluster.hit("SIGTERM to node 3", lambda: require(cluster.stop(3) == 75, cluster), 3)
    cluster.hit("node 3 returns", lambda: cluster.start(3), 4)
    cluster.hit("node 0 loses power, and returns 30 s later", lambda: restart_first(cluster), 4)
    require(cluster.stop(0) == 75, cluster)
    require([each.wait(PATIENCE) for each in cluster.launchers.values()] == [75] * COUNT, cluster)
    print_row(("SIGTERM to node 0: all save and end with 75", "", "", ""))


def restart_first(cluster: Cluster) -> None:
    cluster.lose_power(0)
    time.sleep(30)
    cluster.start(0)


def compare(folder: Path, config: Path) -> None:
    """Compare the samples of each step that counts with those of an undisturbed run of one process."""
    kept = kept_steps(folder / "run")
    words = ["--config", str(config), "--set", f"run.folder={folder}/straight", "--set", f"phases.0.steps={len(kept)}"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([PYTHON, "-m", "trainer", *words], check=True, env=environ, stdout=subprocess.DEVNULL)
    columns = ("step", "position", "batch", "tokens", "targets")
    undisturbed = kept_steps(folder / "straight")
    found, expected = ([[line[key] for key in columns] for line in steps] for steps in (kept, undisturbed))
    if found != expected:
        sys.exit("the samples of the steps DIFFER from those of an undisturbed run")
    print(f"\nThe samples of all {len(kept):,} steps are those of an undisturbed run.")


def print_row(cells: Any) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def require(holds: bool, cluster: Cluster) -> None:
    if not holds:
        sys.exit(f"not as expected\n{cluster.log.read_text()}")


if __name__ == "__main__":
    main()
