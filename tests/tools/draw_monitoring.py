"""Draws docs/monitoring.png from a six-minute run; it needs the shards of ``make demo``.

    python -m tests.tools.draw_monitoring docs/monitoring.png

The demo's model trains on two nodes. One rank is slow for a while, then hangs; the run is killed, restarts with its
ranks on each other's node, and is stopped. Alerts are scaled: a minute becomes a second.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from pathlib import Path

import yaml

from deploy.monitoring import pictures
from tests.helpers import ranks
from tests.helpers.watched_run import RUN, Site, slowed, watched

CONFIG, SHARDS = ranks.ROOT / "deploy/configs/demo.yaml", ranks.ROOT / "runs/demo/shards/train-32"
STEPS = 2500
WELL, LONGER = 100, 8  # seconds without faults; seconds that a fault lasts after its alert


def main() -> None:
    with tempfile.TemporaryDirectory() as name, watched(Path(name), SHARDS) as site:
        configure(site)
        site.running = site.start(RUN, site.pair)
        site.wait_until("it trains", lambda: site.step() > 0)
        let(site, WELL)
        with slowed(site.running[1]):
            fault(site, "LambertStraggler")
        let(site, WELL)
        site.running[1].send_signal(signal.SIGSTOP)
        fault(site, "LambertStalled")
        end(site, signal.SIGKILL)
        fault(site, "LambertAbsent")
        site.running = site.start(RUN, site.pair[::-1])
        site.wait_until("it trains", lambda: site.step() > 0)
        let(site, WELL)
        end(site, signal.SIGTERM)
        sys.exit(pictures.main([site.prometheus.url, RUN, sys.argv[1], "--scrape", "3", "--hours", "1"]))


def configure(site: Site) -> None:
    """Write the configuration: the demo's first phase, with frequent checkpoints and evaluations."""
    tree = yaml.safe_load(CONFIG.read_text("utf-8"))
    tree["run"] |= {"name": RUN, "folder": str(site.folder / RUN)}
    tree["phases"] = [tree["phases"][0] | {"steps": STEPS}]
    tree["checkpoint"] = {"every_steps": 100}
    tree["evaluation"] = {"every_steps": 200}
    tree["metrics"]["log_every_steps"] = 2
    (site.folder / f"{RUN}.yaml").write_text(yaml.safe_dump(tree))


def let(site: Site, seconds: float) -> None:
    """Let that much time pass."""
    until = time.monotonic() + seconds
    site.wait_until("time passes", lambda: time.monotonic() > until, timeout=2 * seconds)


def fault(site: Site, alert: str) -> None:
    """Wait for the alert about the fault that was just planted, and a little longer."""
    planted = time.time()
    reached = site.reaches(alert, RUN, planted)
    print(f"{alert}: {reached.at - planted:.1f} s", flush=True)
    let(site, LONGER)


def end(site: Site, number: int) -> None:
    """Send all ranks a signal, and wait until they are gone."""
    for rank in site.running:
        rank.send_signal(number)
    ranks.finish(site.running)
    site.running = []


if __name__ == "__main__":
    main()
