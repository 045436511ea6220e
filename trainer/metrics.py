"""What a run says about itself: JSON lines on disk first, Prometheus, and the progress line.

One table declares every series. Each node has one exporter, owned by its local rank 0; series that
describe the run come from global rank 0 only, series that describe ranks from each node.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, start_http_server

from trainer.engine import SUMS, StepResult
from trainer.errors import TrainerError
from trainer.loader import StepBatch
from trainer.model import ModelConfig
from trainer.saving import Saved
from trainer.state import TrainState
from trainer.world import World

TASKS = ("mlm", "nsp")
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)

# name: (type, labels, help). Exposed as lambert_<name>; prometheus_client adds _total and _info.
RUN_SERIES: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "run": (Info, (), "Versions, model, optimizer, ZeRO stage, precision and back ends really in use."),
    "step": (Gauge, (), "Optimizer steps taken since the run began, over restarts."),
    "target_steps": (Gauge, (), "Optimizer steps that the configuration asks for."),
    "phase": (Gauge, (), "Number of the current phase, from 0."),
    "restarts": (Gauge, (), "Times that the run was resumed from a checkpoint."),
    "steps": (Counter, (), "Optimizer steps taken by this process."),
    "samples": (Counter, (), "Sequences trained on by this process."),
    "tokens": (Counter, (), "Valid tokens trained on by this process; padding does not exist."),
    "model_flops": (Counter, (), "Floating-point operations of the model, forward and backward."),
    "skipped_steps": (Counter, (), "Steps whose gradients overflowed and were not applied."),
    "loss": (Gauge, ("task", "split"), "Mean loss in nats over the last logged steps."),
    "accuracy_ratio": (Gauge, ("task", "split"), "Share of right predictions over the last logged steps."),
    "learning_rate": (Gauge, (), "Learning rate of the last step."),
    "gradient_norm": (Gauge, (), "Global gradient norm of the last step, unscaled, before clipping."),
    "loss_scale": (Gauge, (), "Loss scale of the last step; 1 without fp16."),
    "trust_ratio": (Gauge, ("statistic",), "LAMB's trust ratios of the last step over the adapted tensors."),
    "step_duration_seconds": (Histogram, (), "Wall time of a step."),
    "last_step_timestamp_seconds": (Gauge, (), "Unix time at which the last step ended."),
    "checkpoint_stall_seconds": (Counter, (), "Time that training stood still for checkpoints of this process."),
    "checkpoint_failures": (Counter, (), "Checkpoints of this process that could not be saved."),
    "checkpoint_duration_seconds": (Gauge, (), "Time from the last checkpoint's step to its name on the disk."),
    "checkpoint_size_bytes": (Gauge, (), "Size of the last checkpoint."),
    "checkpoint_last_success_timestamp_seconds": (Gauge, (), "Unix time of the last whole checkpoint."),
}
NODE_SERIES: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "data_wait_seconds": (Counter, ("rank",), "Time that a rank waited for its data."),
    "memory_peak_bytes": (Gauge, ("rank",), "Highest memory that a rank's device held; 0 on CPUs."),
}


@dataclass(frozen=True)
class MetricsConfig:
    """Where the numbers go, and how often."""

    port: int | None = 9464  # of the node's exporter; null switches it off
    address: str = "0.0.0.0"
    log_every_steps: int = 10  # ranks talk to one another about numbers, and about a SIGTERM, only then
    print_seconds: float = 3.0  # between two progress lines, at least

    def problems(self) -> list[str]:
        """What cannot be, each with its remedy."""
        found = []
        if self.port is not None and not 1 <= self.port <= 65535:
            found.append(f"port is {self.port}: must lie between 1 and 65535, or be null for no exporter")
        if self.log_every_steps < 1:
            found.append(f"log_every_steps is {self.log_every_steps}: must be 1 or more")
        return found


def model_flops(model: ModelConfig, batch: StepBatch) -> float:
    """Operations of one step's forward and backward over the global batch.

    ``6 N + 12 L H s`` a token with N = L (4 H² + 2 H I), which is 12 L H² where I = 4 H, and
    ``6 (H² + H V)`` a predicted token.
    """
    weights = model.layers * (4 * model.hidden**2 + 2 * model.hidden * model.intermediate)
    encoder = 6 * weights * batch.counts.tokens
    attention = 12 * model.layers * model.hidden * batch.counts.squares
    head = 6 * (model.hidden**2 + model.hidden * model.vocab_size) * batch.counts.targets
    return float(encoder + attention + head)


class Exporter:
    """The series of this process in a registry of its own, served over HTTP."""

    def __init__(self, config: MetricsConfig, world: World) -> None:
        self.registry = CollectorRegistry()
        self.series: dict[str, Any] = {}
        declared = (RUN_SERIES if world.is_main else {}) | (NODE_SERIES if world.is_local_main else {})
        for name, (kind, labels, text) in declared.items():
            extra = {"buckets": _SECONDS} if kind is Histogram else {}
            self.series[name] = kind(f"lambert_{name}", text, labels, registry=self.registry, **extra)
        if config.port is not None and world.is_local_main:
            try:
                start_http_server(config.port, config.address, self.registry)
            except OSError as error:
                raise TrainerError(
                    f"metrics.port {config.port} on {config.address} cannot be opened ({error.strerror}): set another "
                    "metrics.port, or null for no exporter"
                ) from None

    def __getitem__(self, name: str) -> Any:
        return self.series[name]


@dataclass
class _Pending:
    """A step whose numbers are still on the device."""

    state: TrainState
    batch: StepBatch
    result: StepResult
    rate: float
    seconds: float
    ended: float = field(default_factory=time.time)


class Metrics:
    """Collects steps, and every ``log_every_steps`` agrees over the ranks, writes, exports and prints."""

    def __init__(
        self, config: MetricsConfig, folder: Path, model: ModelConfig, target_steps: int, world: World
    ) -> None:
        self.config, self.model, self.world, self.target_steps = config, model, world, target_steps
        self.exporter = Exporter(config, world)
        self.path = folder / "metrics.jsonl"
        self._pending: list[_Pending] = []
        self._cut = False  # whether the last line may be half a line
        self._clock, self._printed, self._waited = time.perf_counter(), 0.0, 0.0
        if world.is_main:
            self.exporter["target_steps"].set(target_steps)
            _end_last_line(self.path)

    def describe(self, state: TrainState, facts: dict[str, str]) -> None:
        """Say once what really runs, and from where on: in the log, as the metrics and in the JSON lines."""
        if self.world.is_main:
            self._export_state(state, time.time())
            self.exporter["run"].info(facts)
            self._write([{"event": "start", "time": time.time(), **facts}])
            print("lambert: " + " · ".join(f"{key} {value}" for key, value in facts.items()), flush=True)

    def start_clock(self) -> None:
        """Begin the next step's time now; what happened before belongs to no step."""
        self._clock = time.perf_counter()

    def step(self, state: TrainState, batch: StepBatch, result: StepResult, rate: float) -> None:
        """Take note of a step; ``state`` is the one after it."""
        now = time.perf_counter()
        told = replace(batch, micro_batches=())  # the numbers are wanted, not the tensors
        self._pending.append(_Pending(state, told, result, rate, now - self._clock))
        self._clock, self._waited = now, self._waited + batch.wait_seconds
        if state.attempts % self.config.log_every_steps == 0:
            self.flush()

    def flush(self) -> None:
        """Complete the pending steps' numbers over the ranks and publish them. Every rank calls it.

        Raises TrainerError on all ranks when a loss or a gradient norm of an applied step is not finite.
        """
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        sums = torch.stack([p.result.sums for p in pending])  # (steps, 4)
        dist.all_reduce(sums)
        norms = torch.stack([p.result.gradient_norm.float() for p in pending]).tolist()
        records = [_record(p, s, n) for p, s, n in zip(pending, sums.tolist(), norms, strict=True)]
        self._export_node()
        if self.world.is_main:
            self._write(records)
            self._export_run(pending, records)
            self._print(pending[-1], records)
        _require_finite(records)

    def heldout(self, state: TrainState, figures: dict[str, float]) -> None:
        """Publish an evaluation on held-out data."""
        if self.world.is_main:
            self._write([{"event": "heldout", "time": time.time(), "step": state.step, **figures}])
            self._export_tasks([figures], "heldout")
            self._say(state.step, "held-out " + "  ".join(f"{name} {value:.3f}" for name, value in figures.items()))
        self.start_clock()

    def checkpoint(self, saved: Saved) -> None:
        """Publish what became of a save."""
        if not self.world.is_main:
            return
        at = {"time": saved.ended, "step": saved.step, "stall_seconds": saved.stall_seconds}
        self.exporter["checkpoint_stall_seconds"].inc(saved.stall_seconds)
        if saved.failure:
            self._write([{"event": "checkpoint_failed", **at, "reason": saved.failure}])
            self.exporter["checkpoint_failures"].inc()
            self._say(saved.step, f"no checkpoint: {saved.failure}")
            return
        self._write([{"event": "checkpoint", **at, "seconds": saved.seconds, "bytes": saved.size}])
        self.exporter["checkpoint_duration_seconds"].set(saved.seconds)
        self.exporter["checkpoint_size_bytes"].set(saved.size)
        self.exporter["checkpoint_last_success_timestamp_seconds"].set(saved.ended)
        times = f"in {saved.seconds:.2f} s, training stood still for {saved.stall_seconds:.2f} s"
        self._say(saved.step, f"saved {saved.folder} ({saved.size / 1e6:.1f} MB {times})")
        if saved.leftover:
            self._say(saved.step, f"older checkpoints could not be removed: {saved.leftover}")

    def _export_node(self) -> None:
        """Local rank 0 publishes what its node's ranks told: (data wait since the last time, peak memory)."""
        cuda = self.world.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.world.device) if cuda else 0
        own = torch.tensor([self._waited, float(peak)], dtype=torch.float64, device=self.world.device)
        told = [torch.empty_like(own) for _ in range(self.world.size)]
        dist.all_gather(told, own)
        self._waited = 0.0
        if self.world.is_local_main:
            for rank in range(self.world.rank, self.world.rank + self.world.local_size):
                wait, memory = told[rank].tolist()
                self.exporter["data_wait_seconds"].labels(str(rank)).inc(wait)
                self.exporter["memory_peak_bytes"].labels(str(rank)).set(memory)

    def _export_run(self, pending: list[_Pending], records: list[dict[str, Any]]) -> None:
        series, last, newest = self.exporter, pending[-1], records[-1]
        for p in pending:
            series["step_duration_seconds"].observe(p.seconds)
            series["steps" if p.result.applied else "skipped_steps"].inc()
            if p.result.applied:
                series["samples"].inc(p.batch.samples)
                series["tokens"].inc(p.batch.counts.tokens)
                series["model_flops"].inc(model_flops(self.model, p.batch))
        self._export_state(last.state, last.ended)
        for name in ("learning_rate", "gradient_norm", "loss_scale"):
            series[name].set(newest[name])
        self._export_tasks(records, "train")
        if last.result.trust is not None:
            for name, value in _statistics(last.result.trust).items():
                series["trust_ratio"].labels(name).set(value)

    def _export_tasks(self, records: list[dict[str, Any]], split: str) -> None:
        """Means over the records that know a task; a task that none knows has no series."""
        for task in TASKS:
            for series, figure in (("loss", f"{task}_loss"), ("accuracy_ratio", f"{task}_accuracy")):
                if any(figure in record for record in records):
                    self.exporter[series].labels(task, split).set(_mean(records, figure))
                else:
                    self.exporter[series].remove(task, split)

    def _export_state(self, state: TrainState, ended: float) -> None:
        for name in ("step", "phase", "restarts"):
            self.exporter[name].set(getattr(state, name))
        self.exporter["last_step_timestamp_seconds"].set(ended)

    def _print(self, last: _Pending, records: list[dict[str, Any]]) -> None:
        now = time.perf_counter()
        if now - self._printed < self.config.print_seconds and last.state.step < self.target_steps:
            return
        self._printed = now
        seconds = _mean(records, "seconds")
        left = (self.target_steps - last.state.step) * seconds
        tasks = [
            f"{task} {_mean(records, f'{task}_loss'):.3f} ({_mean(records, f'{task}_accuracy'):.1%})  "
            for task in TASKS
            if any(f"{task}_loss" in record for record in records)
        ]
        self._say(
            last.state.step,
            f"loss {_mean(records, 'loss'):.3f}  {''.join(tasks)}lr {last.rate:.2e}  "
            f"grad {records[-1]['gradient_norm']:.2f}  {_mean(records, 'tokens') / seconds:,.0f} tokens/s  "
            f"left {int(left) // 60}:{int(left) % 60:02d}",
        )

    def _say(self, step: int, text: str) -> None:
        print(f"lambert: step {step}/{self.target_steps}  {text}", flush=True)

    def _write(self, records: list[dict[str, Any]]) -> None:
        """Append to the JSON lines. A disk that is full costs lines, and one that says so, but no run."""
        try:
            if self._cut:
                _end_last_line(self.path)
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(_plain(record), allow_nan=False) + "\n" for record in records))
            self._cut = False
        except OSError as error:
            if not self._cut:
                print(f"lambert: {self.path} loses lines until it can be written again: {error}", flush=True)
            self._cut = True


def _end_last_line(path: Path) -> None:
    """A kill may have cut the last line short; the next one must not grow out of it."""
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END) > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _record(pending: _Pending, sums: list[float], norm: float) -> dict[str, Any]:
    """One step as a JSON line: sums over the global batch made means. Data without pairs have no second task."""
    total, counts = dict(zip(SUMS, sums, strict=True)), pending.batch.counts
    divisors = {"mlm": max(counts.targets, 1)} | ({"nsp": counts.pairs} if counts.pairs else {})
    losses = {f"{task}_loss": total[f"{task}_loss"] / count for task, count in divisors.items()}
    trust = pending.result.trust
    return {
        "event": "step",
        "time": pending.ended,
        **{k: v for k, v in asdict(pending.state).items() if k in ("step", "phase", "position", "samples", "restarts")},
        "tokens": counts.tokens,
        "loss": sum(losses.values()),
        **losses,
        **{f"{task}_accuracy": total[f"{task}_correct"] / count for task, count in divisors.items()},
        "learning_rate": pending.rate,
        "gradient_norm": norm if pending.result.applied else math.inf,
        "loss_scale": pending.result.loss_scale,
        "applied": pending.result.applied,
        "seconds": pending.seconds,
        "wait_seconds": pending.batch.wait_seconds,
        **({f"trust_{k}": v for k, v in _statistics(trust).items()} if trust is not None else {}),
    }


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """The record with null for what is not finite, which JSON cannot say."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def _statistics(trust: torch.Tensor) -> dict[str, float]:
    return {"min": float(trust.min()), "mean": float(trust.mean()), "max": float(trust.max())}


def _mean(records: list[dict[str, Any]], name: str) -> float:
    """Over the records that have it, one at least."""
    values = [float(record[name]) for record in records if name in record]
    return sum(values) / len(values)


def _require_finite(records: list[dict[str, Any]]) -> None:
    for record in records:
        if record["applied"] and not (math.isfinite(record["loss"]) and math.isfinite(record["gradient_norm"])):
            raise TrainerError(
                f"step {record['step']}: loss {record['loss']}, gradient norm {record['gradient_norm']}: training "
                "diverged; lower the learning rate or lengthen the warm-up, and start again from the last checkpoint"
            )
