"""A run's metrics: collected per step, then written to the metrics log, Prometheus and the progress line.

Steps are recorded as they end, without communication between ranks and without waiting for a device. Every
``log_every_steps`` steps, the ranks combine their numbers and rank 0 publishes them, to the metrics log first.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch
import torch.distributed as dist
from torch import Tensor

from data_prep.json_text import shown
from trainer.bounds import MOST_STEPS, outside
from trainer.checkpoint.changed_settings import Changes
from trainer.checkpoint.saving import Saved
from trainer.checkpoint.train_state import TrainState
from trainer.console import say, warn
from trainer.data.loader import StepBatch
from trainer.engine.engine import StepResult
from trainer.engine.stopwatch import Stopwatch
from trainer.errors import NotFiniteError
from trainer.model.bert import ModelConfig, Output
from trainer.model.flops import model_flops, peak_flops
from trainer.model.variance import variance_share
from trainer.monitor.devices import device_facts
from trainer.monitor.exporter import Exporter
from trainer.monitor.guard import Finding, Guard
from trainer.monitor.metrics_log import METRICS_LOG, STEP_PARTS, TIME_STATES, MetricsLog, Record, newest_steps, past
from trainer.monitor.plateau import PLATEAU_STEPS, Baseline, Plateau, announce
from trainer.monitor.progress_line import progress_line
from trainer.monitor.trackers import Name, Trackers
from trainer.monitor.train_job import TrainJob
from trainer.ranks.world import LONGEST_TIMEOUT_SECONDS, StatusServer, World

_SCALARS = Output._fields[:-1]  # the moments of the hidden states come last


@dataclass(frozen=True)
class MetricsConfig:
    """Where metrics are published, and how often."""

    port: int | None = 9464  # port of each node's Prometheus exporter; null: no exporter
    address: str = "0.0.0.0"  # address that the exporter listens on
    # steps between updates of the metrics; ranks also notice a SIGTERM only then; keep it under a minute of training
    log_every_steps: int = 10
    print_seconds: float = 3.0  # minimum time between two progress lines
    linger_seconds: float = 20.0  # longest wait after the end, for a scrape and the trackers; launchers kill after 30
    trackers: tuple[Name, ...] = ()  # where metrics are also sent while the run trains; each needs its package
    device_teraflops: float | None = None  # peak of one device, for the MFU; null: a known GPU's dense fp16 peak

    def problems(self) -> list[str]:
        """Every invalid setting, with what to change."""
        found = []
        if self.port is not None and not 1 <= self.port <= 65535:
            found.append(f"port is {shown(self.port)}: must be between 1 and 65535, or be null for no exporter")
        if not re.fullmatch(r"[\w.:%-]{1,253}", self.address, re.ASCII):
            found.append(f"address is {shown(self.address)}: must be an IP address of this node, or 0.0.0.0 for all")
        found += outside(
            self,
            log_every_steps=(1, MOST_STEPS),
            print_seconds=(0, LONGEST_TIMEOUT_SECONDS),
            linger_seconds=(0, LONGEST_TIMEOUT_SECONDS),
        )
        found += [
            f"trackers names {name} twice: name it once"
            for name in sorted({each for each in self.trackers if self.trackers.count(each) > 1})
        ]
        if self.device_teraflops is not None and not self.device_teraflops > 0:
            found.append(f"device_teraflops is {self.device_teraflops}: must be above 0, or null")
        return found + outside(self, device_teraflops=(-math.inf, 10**6))


@dataclass(frozen=True)
class Subject:
    """The run that the metrics describe."""

    name: str
    folder: Path
    model: ModelConfig
    target_steps: int | None  # None: unknown, because a phase ends by time
    remaining: Callable[[TrainState], tuple[int, float]]  # samples left, and seconds of training on top of them
    checkpoint_steps: int  # steps between two checkpoints
    baselines: tuple[Baseline, ...]  # one for each phase
    clipping: float = 0.0  # upper bound of the gradient norm; 0: none
    guard: Guard = field(default_factory=Guard)
    status_server: StatusServer | None = None  # where a TrainJob's progress goes; None: nowhere


@dataclass
class _Pending:
    """A step whose metrics are still on the device."""

    state: TrainState
    batch: StepBatch
    result: StepResult
    rate: float
    seconds: float
    ended: float = field(default_factory=time.time)


@dataclass(frozen=True)
class _Exchanged:
    """The numbers that all ranks exchanged, for the steps since the last exchange."""

    parts: Tensor  # (ranks, STEP_PARTS) seconds
    memory: Tensor  # (ranks,) bytes, the peak so far
    stuck: bool  # whether the run was on the plateau when the steps before these were judged
    tokens: int  # tokens processed by the model, on all ranks

    @property
    def compute(self) -> Tensor:
        """(ranks,) seconds of each rank's own work, without the time it waits for other ranks."""
        return self.parts.sum(1) - self.parts[:, STEP_PARTS.index("reduce")]


class Metrics:
    """Collects steps; every ``log_every_steps`` steps it combines them over the ranks and publishes them."""

    def __init__(self, config: MetricsConfig, subject: Subject, world: World, watch: Stopwatch) -> None:
        self.config, self.subject, self.world, self.watch = config, subject, world, watch
        self.exporter = Exporter(subject.name, config.port, config.address, world)
        self.spent = dict.fromkeys(TIME_STATES, 0.0)  # all seconds of this process, by what they were spent on
        self.reached = 0  # the last step that ended on this rank
        self._clock = time.perf_counter()
        self._pending: list[_Pending] = []
        self._printed, self._waited, self._tokens, self._known_steps = 0.0, 0.0, 0, 0
        self._outlets: list[Callable[[list[Record]], None]] = []
        self._trackers = Trackers((), subject.folder, 0.0)  # none until it is known what runs
        self._plateau = Plateau(subject.model.dropout)
        if world.is_main:
            if subject.target_steps is not None:
                self.exporter("target_steps").set(subject.target_steps)
            self.exporter("ranks").set(self.world.size)
            self.exporter("checkpoint_interval_steps").set(subject.checkpoint_steps)
            self.exporter("peak_flops").set(self._peak_flops())
            path = subject.folder / METRICS_LOG
            self._known_steps, before, self._plateau.on = past(path)
            self._job = TrainJob(subject.status_server, subject.remaining)
            self._outlets = [MetricsLog(path).write, self.exporter.publish, self._job.write]
            self._publish([{"event": "attempt", "time": time.time(), "restarts": before}])

    def describe(self, state: TrainState, facts: dict[str, str], devices: Sequence[dict[str, str]] = ()) -> None:
        """Publish once what is running, and from which step on: in a printed line, the metrics log and Prometheus.

        ``devices``: each rank's `device_facts`; if empty, all ranks are assumed to be on this rank's device.
        """
        devices = devices or [device_facts(self.world.device)] * self.world.size
        self.reached = state.step
        if self.world.is_local_main:
            for rank in self._ranks():
                self.exporter("rank", rank).info(devices[rank])
                self.exporter.publish_rank(rank, {}, 0.0)
        if self.world.is_main:
            self.exporter("run").info({key: text for key, text in facts.items() if key != "run"})  # a label already
            self.exporter.publish_progress(state, time.time())
            self._plateau.on &= state.step > 0  # the metrics log may tell of a run that starts again
            self._plateau.resume(newest_steps(self.subject.folder / METRICS_LOG, PLATEAU_STEPS, state.step))
            self.exporter("plateau").set(self._plateau.on)
            lost = max(0, self._known_steps - state.step)
            begun = {"time": time.time(), "step": state.step, "rolled_back": lost}
            self._publish([{"event": "start", **begun, **facts, "hardware": devices[self.world.rank]["device"]}])
            say(" · ".join(f"{key} {value}" for key, value in facts.items()))
            self._trackers = Trackers(self.config.trackers, self.subject.folder, self.config.linger_seconds)
        self.spend("start")

    def changed(self, step: int, changes: Changes) -> None:
        """Record the settings that changed since the checkpoint of ``step`` from which the run resumes."""
        if self.world.is_main:
            self._publish([{"event": "changed", "time": time.time(), "step": step, "settings": changes}])

    @property
    def trained(self) -> float:
        """Seconds that this process spent in steps, including the wait for data, but no evaluation and no save."""
        return sum(self.spent[on] for on in ("productive", "rework", "skipped", "data"))

    def spend(self, on: str) -> None:
        """Count the time since the last call as spent ``on`` one of TIME_STATES, outside any step."""
        now = time.perf_counter()
        self.spent[on] += now - self._clock
        self._clock = now

    def step(self, state: TrainState, batch: StepBatch, result: StepResult, rate: float) -> None:
        """Record a step; ``state`` is the state after it."""
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        waited = min(batch.wait_seconds, seconds)
        again = state.step <= self._known_steps
        self.spent["data"] += waited
        self.spent["skipped" if not result.applied else "rework" if again else "productive"] += seconds - waited
        self._waited += waited
        self._tokens += sum(len(micro_batch.tokens) for micro_batch in batch.micro_batches)
        self.reached = state.step
        counted = replace(batch, micro_batches=())  # keep only the counts, not the tensors
        self._pending.append(_Pending(state, counted, result, rate, seconds))
        if self.world.is_main:
            self.exporter.publish_progress(state, self._pending[-1].ended)
        if state.attempts % self.config.log_every_steps == 0:
            self.flush()

    def flush(self) -> None:
        """Combine the pending steps' metrics over the ranks and publish them. Every rank must call it.

        Raises Setback on all ranks if the guard finds that training cannot go on from here.
        """
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        sums = torch.stack([p.result.sums for p in pending])  # (steps, 4 + D + 2)
        dist.all_reduce(sums)
        scalars, moments = sums[:, : len(_SCALARS)], sums[:, len(_SCALARS) :]
        sums = torch.cat([scalars, variance_share(moments)[:, None]], 1)  # (steps, 5)
        norms = torch.stack([p.result.gradient_norm.float() for p in pending]).tolist()
        rows = zip(pending, sums.tolist(), norms, _statistics([p.result.trust for p in pending]), strict=True)
        records = [self._record(*row) for row in rows]
        exchanged = self._exchange()
        found = self.subject.guard.judge(records, exchanged.parts.sum(1), exchanged.compute, exchanged.stuck)
        if self.world.is_local_main:
            for rank in self._ranks():
                parts = dict(zip(STEP_PARTS, exchanged.parts[rank].tolist(), strict=True))
                self.exporter.publish_rank(rank, parts, float(exchanged.memory[rank]))
        if self.world.is_main:
            changes = self._plateau.events(records)
            self._publish([*records, *self._notes(pending, exchanged), *changes])
            self._print(pending[-1], records)
            self._job.progress(pending[-1].state, records)
            for change in changes:
                tell = partial(self._say, change["step"])
                announce(change, self.subject.model, self.subject.clipping, tell)
        self.act(found)

    def act(self, found: list[Finding]) -> None:
        """Report what the guard found, then let it act. Raises Setback on all ranks if the run cannot go on."""
        for finding in found if self.world.is_main else ():
            self._publish([{"event": "guard", "time": time.time(), **asdict(finding)}])
            if finding.action != "stop":  # the run ends with a line of its own
                warn(self.subject.guard.told(finding), partial(self._say, finding.step))
        self.subject.guard.act(found)

    def went_back(self, state: TrainState) -> None:
        """Record that the run goes on from an earlier ``state``; drop the steps that are not yet logged."""
        lost, self.reached, self._pending = self.reached - state.step, state.step, []
        if self.world.is_main:
            self._known_steps = max(self._known_steps, state.step + lost)
            on, self._plateau = self._plateau.on, Plateau(self.subject.model.dropout)
            self._plateau.on = on
            self._plateau.resume(newest_steps(self.subject.folder / METRICS_LOG, PLATEAU_STEPS, state.step))
            self.exporter.publish_progress(state, time.time())
            self._publish([{"event": "rollback", "time": time.time(), "step": state.step, "rolled_back": lost}])
        self.spend("start")

    def heldout(self, state: TrainState, metrics: dict[str, float]) -> None:
        """Publish the metrics of an evaluation on held-out data."""
        if self.world.is_main:
            self._publish(
                [{"event": "heldout", "time": time.time(), "step": state.step, "phase": state.phase, **metrics}]
            )
            for series, metric in (("loss", "mask_loss"), ("accuracy_ratio", "mask_accuracy")):
                if metric in metrics:
                    self.exporter(series, "mask", "heldout").set(metrics[metric])
            self._say(state.step, "held-out " + "  ".join(f"{name} {value:.3f}" for name, value in metrics.items()))
        self.spend("evaluation")

    def checkpoint(self, saved: Saved) -> None:
        """Publish the outcome of a save."""
        if not self.world.is_main:
            return
        at = {"time": saved.ended, "step": saved.step, "stall_seconds": saved.stall_seconds}
        if saved.failure:
            self._publish([{"event": "checkpoint_failed", **at, "reason": saved.failure}])
            self._say(saved.step, f"no checkpoint: {saved.failure}")
            return
        self._publish([{"event": "checkpoint", **at, "seconds": saved.seconds, "bytes": saved.size}])
        times = f"in {saved.seconds:.2f} s, training stalled for {saved.stall_seconds:.2f} s"
        self._say(saved.step, f"saved {saved.place} ({saved.size / 1e6:.1f} MB {times})")
        if saved.leftover:
            warn(f"left behind: {saved.leftover}", partial(self._say, saved.step))

    def end(self, how: str, error: BaseException | str | None = None) -> None:
        """Publish that the run is "done", "stopped" or "failed", and why.

        Calls no collective, so metrics of pending steps are lost.
        """
        if self.world.is_main:
            diverged = isinstance(error, NotFiniteError)  # this shows in no step's record
            facts = {"how": how, "reason": str(error or ""), "diverged": diverged}
            self._publish([{"event": "end", "time": time.time(), "spent": dict(self.spent), **facts}])

    def linger(self) -> None:
        """Give the TrainJob, the trackers and Prometheus, if it has scraped before, time to get the end of the run."""
        if self.world.is_main:
            until = time.monotonic() + self.config.linger_seconds
            self._job.close()
            self.exporter.linger(self.config.linger_seconds)
            self._trackers.wait(until - time.monotonic())

    def _exchange(self) -> _Exchanged:
        """Exchange each rank's numbers, so that every rank has all of them."""
        cuda = self.world.device.type == "cuda"
        parts = {**self.watch.read(), "data": self._waited}
        memory = torch.cuda.max_memory_allocated(self.world.device) if cuda else getrusage(RUSAGE_SELF).ru_maxrss << 10
        own = [*(parts.get(part, 0.0) for part in STEP_PARTS), memory, self._plateau.on, self._tokens]
        row = torch.tensor(own, dtype=torch.float64, device=self.world.device)
        rows = [torch.empty_like(row) for _ in range(self.world.size)]
        dist.all_gather(rows, row)
        self._waited, self._tokens = 0.0, 0
        table = torch.stack(rows).cpu()  # (ranks, STEP_PARTS + 3); only rank 0 knows of a plateau
        return _Exchanged(table[:, :-3], table[:, -3], bool(table[0, -2]), int(table[:, -1].sum()))

    def _notes(self, pending: list[_Pending], exchanged: _Exchanged) -> list[Record]:
        """The records that go with the steps: one about the ranks, averaged per step, and one about the time spent."""
        at = {"time": pending[-1].ended, "step": pending[-1].state.step}
        compute = exchanged.compute / len(pending)
        ranks = {
            "parts": dict(zip(STEP_PARTS, (exchanged.parts.mean(0) / len(pending)).tolist(), strict=True)),
            "compute": [float(compute.min()), float(compute.mean()), float(compute.max())],
            "slowest": int(compute.argmax()),
            "memory_peak_bytes": int(exchanged.memory.max()),
            "padding": exchanged.tokens - sum(p.batch.counts.tokens for p in pending),
        }
        return [{"event": "ranks", **at, **ranks}, {"event": "time", **at, "spent": dict(self.spent)}]

    def _ranks(self) -> range:
        """The ranks of this node. Called on its local rank 0."""
        return range(self.world.rank, self.world.rank + self.world.local_size)

    def _peak_flops(self) -> float:
        """Peak FLOP/s of all the run's devices, assumed to be alike; 0 if unknown."""
        if self.config.device_teraflops is not None:
            return self.config.device_teraflops * 1e12 * self.world.size
        cuda = self.world.device.type == "cuda"
        return peak_flops(torch.cuda.get_device_name(self.world.device)) * self.world.size if cuda else 0.0

    def _publish(self, records: list[Record]) -> None:
        for outlet in self._outlets:
            outlet(records)

    def _print(self, last: _Pending, records: list[Record]) -> None:
        now = time.perf_counter()
        if now - self._printed < self.config.print_seconds and last.state.step != self.subject.target_steps:
            return
        self._printed = now
        self._say(last.state.step, progress_line(records, last.rate, *self.subject.remaining(last.state)))

    def _say(self, step: int, text: str) -> None:
        target = self.subject.target_steps
        say(f"step {step if target is None else f'{step}/{target}'}  {text}")

    def _record(self, pending: _Pending, sums: list[float], norm: float, trust: dict[str, float]) -> Record:
        """The record of one step, with sums over the global batch turned into means. Without pairs there is no NSP."""
        total = dict(zip((*_SCALARS, "token_variance"), sums, strict=True))
        counts, result = pending.batch.counts, pending.result
        baseline = self.subject.baselines[pending.state.phase]
        divisors = {"mlm": max(counts.targets, 1)} | ({"nsp": counts.pairs} if counts.pairs else {})
        losses = {f"{task}_loss": total[f"{task}_loss"] / count for task, count in divisors.items()}
        state = asdict(pending.state)
        return {
            "event": "step",
            "time": pending.ended,
            **{key: state[key] for key in ("step", "phase", "position", "samples", "restarts")},
            "batch": pending.batch.samples,
            "left_out": pending.batch.left_out,
            "tokens": counts.tokens,
            "targets": counts.targets,
            "flops": model_flops(self.subject.model, counts),
            "loss": sum(losses.values()),
            **losses,
            **{f"{task}_accuracy": total[f"{task}_correct"] / count for task, count in divisors.items()},
            "warming_up": baseline.warms_up(pending.state),
            "unigram_loss": baseline.unigram_loss,
            "token_variance": total["token_variance"],
            "learning_rate": pending.rate,
            "gradient_norm": norm if result.applied else math.inf,
            "clipped": result.applied and 0 < self.subject.clipping < norm,
            "loss_scale": result.loss_scale,
            "applied": result.applied,
            "seconds": pending.seconds,
            "wait_seconds": pending.batch.wait_seconds,
            **trust,
        }


def _statistics(trusts: list[Tensor | None]) -> list[dict[str, float]]:
    """Minimum, mean and maximum of each step's trust ratios, empty for a step without; read with one device sync."""
    known = [torch.stack([trust.min(), trust.mean(), trust.max()]) for trust in trusts if trust is not None]
    rows = iter(torch.stack(known).tolist() if known else [])
    names = ("trust_min", "trust_mean", "trust_max")
    return [{} if trust is None else dict(zip(names, next(rows), strict=True)) for trust in trusts]
