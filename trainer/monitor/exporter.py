"""The Prometheus series of a run: one table declares them all, and one exporter per node serves them.

Series about the run come only from global rank 0; series about ranks come from local rank 0 of each node. Every series
has the label ``run``, so queries can follow a run that restarts on other nodes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import product
from threading import Event
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Metric

from data_prep.endpoint import Endpoint
from trainer.checkpoint.train_state import TrainState
from trainer.errors import TrainerError
from trainer.monitor.guard import ACTIONS
from trainer.monitor.metrics_log import LOSS_TASKS, STEP_PARTS, TIME_STATES, Record
from trainer.ranks.world import World

STATES = ("starting", "training", "stopped", "done", "failed")  # the last three are final
ANSWER = 1.0  # seconds allowed for answering a scrape that has begun
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_SPLITS = ("train", "heldout")

# name: (type, {label other than run: its values}, help). Exposed as lambert_<name>, plus _total or _info by type.
SeriesTable = dict[str, tuple[Any, dict[str, tuple[str, ...]], str]]
RUN_SERIES: SeriesTable = {
    "run": (Info, {}, "Versions, model, optimizer, ZeRO stage, precision and back ends actually in use."),
    "run_state": (Gauge, {"state": STATES}, "1 for the run's current state, 0 for the others."),
    "ended_timestamp_seconds": (Gauge, {}, "Unix time at which the run stopped, finished or failed; 0 until then."),
    "last_step_timestamp_seconds": (
        Gauge,
        {},
        "Unix time at which the last step ended; before the first step, the start.",
    ),
    "time_seconds": (Counter, {"state": TIME_STATES}, "Wall time of this process, by what it was spent on."),
    "step": (Gauge, {}, "Optimizer steps taken since the run began, across restarts."),
    "target_steps": (Gauge, {}, "Optimizer steps set by the configuration."),
    "phase": (Gauge, {}, "Number of the current phase, starting at 0."),
    "ranks": (Gauge, {}, "Number of ranks that train, which may change when the run restarts."),
    "restarts": (Gauge, {}, "Number of restarts, including those that took no step."),
    "rolled_back_steps": (Gauge, {}, "Steps lost at the last restart or rollback, which are taken again."),
    "guard_actions": (Counter, {"action": ACTIONS}, "What the guard did in this process: see docs/guard.md."),
    "left_out_samples": (Counter, {}, "Samples skipped by this process, after a rollback or by pass_over."),
    "steps": (Counter, {}, "Optimizer steps taken by this process."),
    "skipped_steps": (Counter, {}, "Steps skipped because their gradients overflowed."),
    "clipped_steps": (Counter, {}, "Steps whose gradients were clipped."),
    "nonfinite": (Counter, {"where": ("loss", "gradient")}, "Applied steps with a non-finite loss or gradient."),
    "samples": (Counter, {}, "Sequences trained on by this process."),
    "tokens": (
        Counter,
        {"kind": ("valid", "padding")},
        "Valid tokens of applied steps, and padding tokens, since this process started.",
    ),
    "targets": (Counter, {}, "Masked tokens predicted by this process."),
    "model_flops": (Counter, {}, "Floating-point operations of the model, forward and backward."),
    "peak_flops": (Gauge, {}, "Peak floating-point operations per second of all the run's devices; 0 if unknown."),
    "loss": (Gauge, {"task": LOSS_TASKS, "split": _SPLITS}, "Mean loss in nats over the last logged steps."),
    "accuracy_ratio": (
        Gauge,
        {"task": LOSS_TASKS, "split": _SPLITS},
        "Share of correct predictions over the last logged steps.",
    ),
    "unigram_loss": (Gauge, {}, "MLM loss in nats of predicting word frequencies, in the current phase."),
    "token_variance_ratio": (
        Gauge,
        {},
        "Share of the last layer's mean square that is variance over tokens, in the last step.",
    ),
    "plateau": (Gauge, {}, "1 if the run is on the unigram plateau, else 0."),
    "learning_rate": (Gauge, {}, "Learning rate of the last step."),
    "gradient_norm": (Gauge, {}, "Global gradient norm of the last step, unscaled, before clipping."),
    "loss_scale": (Gauge, {}, "Loss scale of the last step; 1 if not fp16."),
    "trust_ratio": (Gauge, {"statistic": ("min", "mean", "max")}, "LAMB's trust ratios over the adapted tensors."),
    "step_duration_seconds": (Histogram, {}, "Wall time of a step."),
    "checkpoint_stall_seconds": (Counter, {}, "Time that training was stalled by this process's checkpoints."),
    "checkpoint_failures": (Counter, {}, "Checkpoints that this process failed to save."),
    "checkpoint_duration_seconds": (Gauge, {}, "Time from the last checkpoint's step until it was complete on disk."),
    "checkpoint_size_bytes": (Gauge, {}, "Size of the last checkpoint."),
    "checkpoint_step": (Gauge, {}, "Step of the last complete checkpoint, initially the one resumed from."),
    "checkpoint_interval_steps": (Gauge, {}, "Configured steps between checkpoints."),
    "checkpoint_last_success_timestamp_seconds": (Gauge, {}, "Unix time of the last complete checkpoint."),
}
NODE_SERIES: SeriesTable = {
    "rank": (Info, {"rank": ()}, "Node and device of a rank, and its GPU's UUID as dcgm-exporter reports it."),
    "step_part_seconds": (Counter, {"rank": (), "part": STEP_PARTS}, "Time of a rank's steps, by what it was doing."),
    "memory_peak_bytes": (Gauge, {"rank": ()}, "Peak memory of a rank: on its GPU, or of its process if it has none."),
}


class Exporter:
    """This process's series, in their own registry, served over HTTP unless ``port`` is None.

    Raises TrainerError if the port cannot be opened.
    """

    def __init__(self, run: str, port: int | None, address: str, world: World) -> None:
        # prometheus_client would add a second series for each counter, which nobody reads
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.run, self.registry, self._scrapes = run, CollectorRegistry(), _Scrapes()
        self.registry.register(self._scrapes)  # first, so that it sees a scrape before any series is read
        self.series: dict[str, Any] = {}
        self._spent: dict[str, float] = {}  # already counted in time_seconds
        declared = (RUN_SERIES if world.is_main else {}) | (NODE_SERIES if world.is_local_main else {})
        for name, (kind, labels, text) in declared.items():
            extra = {"buckets": _SECONDS} if kind is Histogram else {}
            made = kind(f"lambert_{name}", text, ["run", *labels], registry=self.registry, **extra)
            self.series[name] = made
            if kind is not Gauge and kind is not Info:  # a counter must exist before its first event to show it
                for values in product(*labels.values()):
                    made.labels(run, *values)
        if world.is_main:
            self.set_state("starting")
            self("ended_timestamp_seconds").set(0)
            self("last_step_timestamp_seconds").set(time.time())
        if port is not None and world.is_local_main:
            try:
                Endpoint(port, address, prometheus_client.make_wsgi_app(self.registry))
            except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
                reason = error.strerror if isinstance(error, OSError) else "no such host"
                raise TrainerError(
                    f"metrics.port {port} on {address} cannot be opened ({reason}): set another metrics.port, "
                    "or null for no exporter"
                ) from None

    def __call__(self, name: str, *labels: object) -> Any:
        """The series ``name`` with these values of its labels other than ``run``."""
        return self.series[name].labels(self.run, *labels)

    def publish(self, records: list[Record]) -> None:
        """Update the run's series from the records of the metrics log. Called on global rank 0 only."""
        self._publish_steps([record for record in records if record["event"] == "step"])
        for record in records:
            match record["event"]:
                case "attempt":
                    self("restarts").set(record["restarts"])
                case "start":
                    self("checkpoint_step").set(record["step"])
                    self("rolled_back_steps").set(record["rolled_back"])
                    self.set_state("training")
                case "plateau" | "guard" | "rollback":
                    self._publish_judgement(record)
                case "heldout":
                    self._publish_tasks([record], "heldout")
                case "checkpoint" | "checkpoint_failed":
                    self._publish_checkpoint(record)
                case "ranks":
                    self("tokens", "padding").inc(record["padding"])
                case "time":
                    self._publish_time(record["spent"])
                case "end":
                    self._publish_time(record["spent"])
                    self("nonfinite", "gradient").inc(record["diverged"])
                    self.set_state(record["how"])
                    self("ended_timestamp_seconds").set(record["time"])

    def publish_progress(self, state: TrainState, ended: float) -> None:
        """Update the run's progress after a step."""
        for name in ("step", "phase"):
            self(name).set(getattr(state, name))
        self("last_step_timestamp_seconds").set(ended)

    def publish_rank(self, rank: int, parts: dict[str, float], memory: float) -> None:
        """Update the series of a rank of this node: seconds of STEP_PARTS since the last call, and memory in bytes."""
        for part in STEP_PARTS:
            self("step_part_seconds", rank, part).inc(parts.get(part, 0.0))
        self("memory_peak_bytes", rank).set(memory)

    def set_state(self, state: str) -> None:
        """Set the run's state, one of STATES."""
        for one in STATES:
            self("run_state", one).set(one == state)

    def _publish_steps(self, steps: list[Record]) -> None:
        """Add the steps to the counters; gauges show the last step, or the mean of the steps."""
        if not steps:
            return
        for step in steps:
            self("step_duration_seconds").observe(step["seconds"])
            self("steps" if step["applied"] else "skipped_steps").inc()
            self("left_out_samples").inc(step["left_out"])
            if step["applied"]:
                self("samples").inc(step["batch"])
                self("tokens", "valid").inc(step["tokens"])
                self("targets").inc(step["targets"])
                self("model_flops").inc(step["flops"])
                self("clipped_steps").inc(step["clipped"])
                self("nonfinite", "loss").inc(not math.isfinite(step["loss"]))
                self("nonfinite", "gradient").inc(not math.isfinite(step["gradient_norm"]))
        for name in ("learning_rate", "gradient_norm", "loss_scale", "unigram_loss"):
            self(name).set(steps[-1][name])
        self("token_variance_ratio").set(steps[-1]["token_variance"])
        for statistic in ("min", "mean", "max"):
            if f"trust_{statistic}" in steps[-1]:
                self("trust_ratio", statistic).set(steps[-1][f"trust_{statistic}"])
        self._publish_tasks([step for step in steps if step["applied"]] or steps, "train")

    def _publish_judgement(self, record: Record) -> None:
        match record["event"]:
            case "plateau":
                self("plateau").set(record["on"])
            case "guard":
                self("guard_actions", record["action"]).inc()
            case "rollback":
                self("checkpoint_step").set(record["step"])
                self("rolled_back_steps").set(record["rolled_back"])

    def _publish_checkpoint(self, record: Record) -> None:
        self("checkpoint_stall_seconds").inc(record["stall_seconds"])
        if record["event"] == "checkpoint_failed":
            self("checkpoint_failures").inc()
            return
        self("checkpoint_duration_seconds").set(record["seconds"])
        self("checkpoint_size_bytes").set(record["bytes"])
        self("checkpoint_step").set(record["step"])
        self("checkpoint_last_success_timestamp_seconds").set(record["time"])

    def _publish_time(self, spent: dict[str, float]) -> None:
        """Update time_seconds. ``spent``: this process's seconds so far, by what they were spent on."""
        for state, seconds in spent.items():
            self("time_seconds", state).inc(seconds - self._spent.get(state, 0.0))
        self._spent = spent

    def _publish_tasks(self, records: list[Record], split: str) -> None:
        """Publish means over the records that have a task; a task in none of them has no series."""
        for task in LOSS_TASKS:
            for series, metric in (("loss", f"{task}_loss"), ("accuracy_ratio", f"{task}_accuracy")):
                known = [record[metric] for record in records if metric in record]
                if known:
                    self(series, task, split).set(sum(known) / len(known))
                else:
                    self.series[series].remove(self.run, task, split)

    def linger(self, seconds: float) -> None:
        """Wait up to ``seconds`` for Prometheus to scrape the final values; do not wait if it has never scraped."""
        if self._scrapes.came.is_set():
            self._scrapes.came.clear()
            if self._scrapes.came.wait(seconds):
                time.sleep(ANSWER)


class _Scrapes:
    """A collector without series that notices when the registry is scraped."""

    def __init__(self) -> None:
        self.came = Event()

    def collect(self) -> Iterator[Metric]:
        """Called by each scrape, before it reads the series."""
        self.came.set()
        return iter(())

    def describe(self) -> list[Metric]:
        """Called instead of ``collect`` when the collector is registered."""
        return []
