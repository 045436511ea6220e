"""The values that a tracker draws as curves, taken from the records of a run's journal."""

from __future__ import annotations

from typing import NamedTuple

from trainer.monitor.metrics_log import Record, tokens_per_second

_OPTIMIZER = ("learning_rate", "gradient_norm", "loss_scale", "trust_min", "trust_mean", "trust_max")
# The first part of each metric's name. A checkpoint is recorded once it is on disk, when later steps have been taken.
FAMILIES = ("train", "optimizer", "speed", "heldout", "ranks", "parts", "checkpoint")


class Point(NamedTuple):
    """Some metrics at one step."""

    step: int
    time: float  # Unix time in seconds
    values: dict[str, float]  # by name; never empty


def points(record: Record) -> list[Point]:
    """The metrics in one record of the journal; empty for an event that has no curve."""
    values = scalars(record)
    return [Point(int(record["step"]), float(record["time"]), values)] if values else []


def scalars(record: Record) -> dict[str, float]:
    """Names and values of the metrics in one record of the journal; empty for an event that has no curve.

    A skipped step has none either: a tracker shows one value per step, that of the step taken.
    """
    match record["event"]:
        case "step" if record["applied"]:
            named = {f"train/{k}": v for k, v in record.items() if k == "loss" or k.endswith(("_loss", "_accuracy"))}
            named |= {"train/token_variance": record.get("token_variance"), "train/samples": record.get("samples")}
            named |= {f"optimizer/{key}": record.get(key) for key in _OPTIMIZER}
            named |= {"speed/seconds": record["seconds"], "speed/tokens_per_second": tokens_per_second(record)}
        case "heldout":
            named = {f"heldout/{k}": v for k, v in record.items() if k.endswith(("_loss", "_accuracy"))}
        case "checkpoint":
            named = {f"checkpoint/{key}": record.get(key) for key in ("seconds", "stall_seconds", "bytes")}
        case "ranks":
            named = {f"ranks/compute_{k}": v for k, v in zip(("min", "mean", "max"), record["compute"], strict=True)}
            named["ranks/memory_peak_bytes"] = record.get("memory_peak_bytes")
            named |= {f"parts/{part}": seconds for part, seconds in record["parts"].items()}
        case _:
            named = {}
    return {name: float(value) for name, value in named.items() if value is not None}
