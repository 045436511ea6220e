"""Trains variations of one recipe side by side on one machine, and tabulates what each reached on held-out text.

    python -m tests.tools.ablations PLAN.yaml OUT [--beside 4] [--gpus 2] [--seconds 400] [--set key=value …]

The plan holds ``base``, a configuration, and ``rows``: for each, a name and its changes as ``--set`` takes them:

    base: {run: {...}, model: {...}, phases: [...]}
    rows:
      adam 1e-3: {optimizer.name: adam, phases.0.learning_rate: 1e-3}

Rows start in order, and ``--beside`` of them run at a time, each on the GPU that has the fewest. After ``--seconds`` no
row starts, and those still running are stopped; each saves a checkpoint. ``OUT/table.md`` holds the table,
``OUT/curves.json`` each row's losses.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.ranks import ROOT
from trainer.monitor.metrics_log import read_lines

COLUMNS = ("mlm_loss", "mask_loss", "nsp_accuracy")


class Variation:
    """One variation: its configuration, its process and its metrics log."""

    def __init__(self, name: str, changes: dict[str, Any], base: dict[str, Any], out: Path) -> None:
        self.name, self.changes = name, changes
        plain = name.replace(" ", "-").replace("/", "-")
        self.folder, self.config, self.log = out / plain, out / f"{plain}.yaml", out / f"{plain}.log"
        own = base | {"run": base.get("run", {}) | {"name": name, "folder": str(self.folder)}}
        self.config.write_text(yaml.safe_dump(own))
        self.process: subprocess.Popen[bytes] | None = None
        self.gpu = 0

    def start(self, overrides: list[str], gpu: int) -> None:
        """Start it as one rank on one GPU; its output goes into a file next to its folder."""
        self.gpu = gpu
        command = [sys.executable, "-m", "trainer", "--config", str(self.config)]
        sets = [f"{key}={json.dumps(value)}" for key, value in self.changes.items()]
        if sets or overrides:
            command += [word for each in [*sets, *overrides] for word in ("--set", each)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment)

    def records(self, event: str) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [each for each in read_lines(path) if each["event"] == event] if path.exists() else []

    def summary(self) -> dict[str, Any]:
        """Summarise the run: held-out results by step, training losses every tenth logged step, trust ratios."""
        steps = [each for each in self.records("step") if each["applied"]]
        kept = ("step", "mlm_loss", "nsp_loss", "gradient_norm", "trust_min", "trust_mean", "trust_max")
        return {
            "name": self.name,
            "changes": self.changes,
            "code": None if self.process is None else self.process.poll(),
            "heldout": [{k: each.get(k) for k in ("step", "seconds", *COLUMNS)} for each in self.records("heldout")],
            "steps": [{k: round(each[k], 5) for k in kept if each.get(k) is not None} for each in steps[::10]],
            "skipped": sum(not each["applied"] for each in self.records("step")),
            "seconds": steps[-1]["time"] - steps[0]["time"] if len(steps) > 1 and "time" in steps[0] else None,
        }


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table: each row's last held-out result, and its lowest training loss in every quarter of the run."""
    lines = ["| run | step | MLM, nats | [MASK] only | NSP | training MLM by quarter |", "|---|---|---|---|---|---|"]
    for row in rows:
        last = row["heldout"][-1] if row["heldout"] else {}
        values = [f"{last[key]:.3f}" if last.get(key) is not None else "" for key in COLUMNS]
        losses = [each["mlm_loss"] for each in row["steps"] if "mlm_loss" in each]
        quarters = [losses[max(0, len(losses) * q // 4 - 1)] for q in (1, 2, 3, 4)] if losses else []
        shown = ", ".join(f"{value:.2f}" for value in quarters)
        lines.append(f"| {row['name']} | {last.get('step', '')} | {' | '.join(values)} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("plan", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--beside", type=int, default=1, help="rows that run at the same time (%(default)s)")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs to spread them over (%(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after these no row starts, and all stop")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all rows; repeatable")
    given = parser.parse_args()
    begun, out = time.monotonic(), given.out
    plan = yaml.safe_load(given.plan.read_text())
    out.mkdir(parents=True, exist_ok=True)
    rows = [Variation(name, changes or {}, plan["base"], out) for name, changes in plan["rows"].items()]
    waiting, running = list(rows), list[Variation]()
    while waiting or running:
        late = time.monotonic() - begun > given.seconds
        if late:
            waiting.clear()
            for row in running:
                row.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
        while waiting and len(running) < given.beside:
            row = waiting.pop(0)
            busy = [row.gpu for row in running]
            row.start(given.set, min(range(given.gpus), key=busy.count))
            running.append(row)
        for row in [each for each in running if late or each.process.poll() is not None]:  # type: ignore[union-attr]
            code = row.process.wait()  # type: ignore[union-attr]
            running.remove(row)
            done = row.summary()
            last = done["heldout"][-1] if done["heldout"] else {}
            shown = ", ".join(f"{key} {last[key]:.3f}" for key in COLUMNS if last.get(key) is not None)
            print(
                f"[{time.monotonic() - begun:5.0f} s] {row.name}: code {code}, step {last.get('step')}: {shown}",
                flush=True,
            )
        (out / "curves.json").write_text(json.dumps([row.summary() for row in rows if row.process is not None]))
        time.sleep(0.5)
    text = table([row.summary() for row in rows if row.process is not None])
    (out / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
