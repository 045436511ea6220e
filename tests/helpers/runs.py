"""Writes a small run's configuration, changes its checkpoints, and reads its JSON lines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from data_prep.manifest import load_manifest
from tests.helpers.ranks import Forked
from trainer.checkpoint.reading import tree_sha256
from trainer.monitor.metrics_log import read_lines


def change_record(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the tree in a checkpoint's checkpoint.json, and sign it again."""
    path = folder / "checkpoint.json"
    tree = json.loads(path.read_text())
    del tree["sha256"]
    change(tree)
    path.write_text(json.dumps({**tree, "sha256": tree_sha256(tree)}))


def write_config(folder: Path, shards: Path, steps: int, **sections: dict[str, Any]) -> Path:
    """Write ``folder``/run.yaml: one phase of ``steps`` steps of 30 samples; the run is in ``folder``/run."""
    config: dict[str, Any] = {
        "run": {"name": "test", "folder": str(folder / "run"), "seed": 5},
        "model": {
            **{"layers": 1, "hidden": 16, "heads": 2, "intermediate": 32, "max_positions": 32},
            "vocab_size": load_manifest(shards).tokenizer.vocab_size,
        },
        "phases": [
            {
                **{"name": "only", "train": str(shards), "sequence_length": 32, "steps": steps},
                **{"global_batch": 30, "micro_batch": 8, "learning_rate": 0.01},
            }
        ],
        "checkpoint": {"every_steps": 10},
        "metrics": {"port": None, "log_every_steps": 2},
    }
    for name, section in sections.items():
        config[name] = config.get(name, {}) | section
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def lines(folder: Path, event: str) -> list[dict[str, Any]]:
    """The run's lines of one kind so far."""
    path = folder / "metrics.jsonl"
    return [record for record in (read_lines(path) if path.exists() else []) if record["event"] == event]


def kept_steps(folder: Path) -> list[dict[str, Any]]:
    """The run's applied steps in the order in which they were taken, without those that a restart rolled back."""
    kept: list[dict[str, Any]] = []
    for line in read_lines(folder / "metrics.jsonl"):
        if line["event"] == "start":
            kept = [step for step in kept if step["step"] <= line["step"]]
        elif line["event"] == "step" and line["applied"]:
            kept.append(line)
    return kept


def wait_for(done: Callable[[], object], *processes: Forked, timeout: float = 120) -> None:
    """Wait until ``done()``; fails with the output of the first process that ends before that."""
    deadline = time.monotonic() + timeout
    while not done():
        for process in processes:
            assert process.returncode is None, process.communicate(timeout=timeout)[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
