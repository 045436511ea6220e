"""Runs' folders without training: journals of given or invented records, and their configurations."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

NOW = 1_000_000.0
PHASE = {"name": "short", "train": "shards", "sequence_length": 32, "steps": 100, "learning_rate": 0.01}
PHASES = [PHASE | {"global_batch": 8, "micro_batch": 8}, PHASE | {"name": "long", "global_batch": 16, "micro_batch": 8}]
START = {"event": "start", "run": "first", "ranks": "2", "device": "cuda"}


def step(number: int, at: float = NOW, **more: Any) -> dict[str, Any]:
    """The record of a step that ended ``at``."""
    own = {"event": "step", "time": at, "step": number, "phase": 0, "samples": 8 * number, "restarts": 0, "tokens": 300}
    return {**own, "applied": True, "seconds": 0.5, "mlm_loss": 5.0, "nsp_loss": 0.7, **more}


def journal(records: Iterable[dict[str, Any]]) -> str:
    """The records, one line each."""
    return "".join(json.dumps(record) + "\n" for record in records)


def write(folder: Path, records: list[dict[str, Any]], config: object = None, end: str = "") -> Path:
    """A run's folder with these records, one line each."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text(journal(records) + end)
    (folder / "config.yaml").write_text(yaml.safe_dump(config or {"phases": PHASES}, sort_keys=False))
    return folder


def begun(folder: Path, taken: int = 20, at: float = NOW, **facts: str) -> list[dict[str, Any]]:
    """The records of a run that has taken steps, the last of them ``at``."""
    own = {"event": "attempt", "time": at - taken, "restarts": 0}, {**START, "time": at - taken, "step": 0, **facts}
    return [*own, *(step(number, at - taken + number) for number in range(1, taken + 1))]


def invented(rng: random.Random) -> str:
    """The journal of a run that is killed now and then, goes back, and loses the end of a line."""
    at, taken, last, text = 0.0, 0, 0, ""
    for attempt in range(rng.randint(1, 4)):
        at, facts = at + 1, {"run": "a", "ranks": str(rng.randint(1, 4))}
        records: list[dict[str, Any]] = [{"event": "attempt", "time": at, "restarts": attempt}]
        records.append({"event": "start", "time": at, "step": taken, "rolled_back": 0, **facts})
        if attempt and taken < last - 2 and rng.random() < 0.3:
            records = []  # lost on a full disk
        for number in range(taken + 1, taken + rng.randint(5, 60)):
            at += 1
            if rng.random() < 0.1:
                records.append(step(number - 1, at, applied=False, restarts=attempt))
            records.append(step(number, at, restarts=attempt, mlm_loss=rng.random()))
            if number % 5 == 0:
                parts = {"parts": {}, "compute": [0.1, 0.2, rng.random()], "slowest": rng.randint(0, 3)}
                records.append({"event": "ranks", "time": at, "step": number, **parts})
                records.append({"event": "time", "time": at, "step": number, "spent": {"productive": at}})
            for event in ("heldout", "checkpoint", "checkpoint_failed"):
                if rng.random() < 0.05:
                    losses = {"mlm_loss": rng.random(), "seconds": 1.0, "stall_seconds": 0.1, "bytes": 9}
                    records.append({"event": event, "time": at, "step": number, **losses})
        last = max(record["step"] for record in records if record["event"] == "step")
        taken = rng.randint(0, last)
        if rng.random() < 0.3:
            records.append({"event": "end", "time": at + 1, "spent": {"productive": at}, "how": "stopped"})
        text += "".join(json.dumps(record) + "\n" for record in records)
        if rng.random() < 0.5:
            text = text[: -rng.randint(2, 150)] + "\n"
    return text
