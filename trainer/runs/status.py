"""The status of a run, read from the files in its folder: its journal, its configuration and its lock."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from trainer.engine.schedule import Phase, batch_of, known_phases, samples_in
from trainer.errors import TrainerError
from trainer.monitor.history import History, StepColumns, skim_history
from trainer.monitor.metrics_log import METRICS_LOG
from trainer.monitor.quantities import duration
from trainer.run.lock import LOCK_FILE, held
from trainer.run.stop_request import STOP_FILE
from trainer.strict_yaml import LARGEST_YAML_BYTES, parse_yaml

CONFIG = "config.yaml"
RECENT_STEPS = 100  # a run's speed is that of its newest steps
SILENT_SECONDS, SILENT_STEPS = 600.0, 20  # the longer of the two, like the alert LambertStalled
LIVE = ("running", "silent")  # the states of a run that may still take steps


@dataclass(frozen=True)
class RunStatus:
    """A run as ``--json`` prints it. Times are in seconds, and None is what is not known."""

    name: str
    folder: str
    state: str  # running, silent, killed, done, reached, stopped, failed or unreadable
    reason: str = ""  # why it failed, what it reached or was asked, or what is wrong with its journal
    phase: str | None = None
    step: int | None = None  # optimizer steps taken
    target_steps: int | None = None  # None, too, if a phase ends by time
    seconds_left: float | None = None  # of training, at the speed of the newest steps
    heldout_mlm_loss: float | None = None
    heldout_nsp_loss: float | None = None
    heldout_step: int | None = None
    tokens_per_second: float | None = None  # of the newest RECENT_STEPS steps
    goodput: float | None = None  # the share of the wall time that went into steps that count
    gpu_hours: float | None = None  # of all attempts; None on CPUs, and until it is measured
    cost: float | None = None  # GPU-hours times --price
    checkpoint_step: int | None = None
    checkpoint_time: float | None = None  # Unix time
    slowest_rank: int | None = None  # None if there is only one
    slowest_ratio: float | None = None  # its compute time over the mean of the ranks
    restarts: int | None = None
    last_time: float | None = None  # Unix time of the journal's last line


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """Every run's folder in or below ``folders``, once. Raises TrainerError for a folder that does not exist."""
    found: dict[Path, Path] = {}
    for top in folders:
        if not os.path.isdir(top):  # False, too, for a name that is too long
            raise TrainerError(f"{top} is not a folder: name the folders that contain runs")
        for path in _below(top):
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _below(top: Path) -> Iterator[Path]:
    links = list[Path]()
    for path, folders, _ in os.walk(top):
        folders[:] = sorted(name for name in folders if not name.startswith("step-"))  # no run is in a checkpoint
        links += [Path(path, name) for name in folders if os.path.islink(os.path.join(path, name))]
        if _is_run(Path(path)):
            yield Path(path)
    yield from filter(_is_run, links)


def _is_run(folder: Path) -> bool:
    """Whether a folder is a pre-training run's. Fine-tuning writes another journal, without a config.yaml."""
    if not os.path.isfile(folder / METRICS_LOG):
        return False
    if os.path.exists(folder / CONFIG):
        return True
    try:
        with (folder / METRICS_LOG).open("rb") as file:
            return file.read(100).startswith((b'{"event": "attempt"', b'{"event": "start"'))
    except OSError:
        return False


def skim(folder: Path) -> History:
    """The part of a run's history that its status needs. Raises TrainerError as `skim_history` does."""
    return skim_history(folder, RECENT_STEPS)


def read_status(
    folder: Path, now: float, price: float | None = None, read: Callable[[Path], History] = skim
) -> RunStatus:
    """The status of the run in ``folder`` at the Unix time ``now``. Bad files make its state unreadable."""
    name = folder.absolute().name  # "." has none
    try:
        history = read(folder)
    except TrainerError as error:
        return RunStatus(name, str(folder), "unreadable", str(error))
    if history.seen is None and not (history.end or len(history.steps["step"])):
        return RunStatus(name, str(folder), "unreadable", f"{folder / METRICS_LOG} contains no record of a run")
    config = read_config(folder)
    phases, steps = _phases(config), _recent(history.steps)
    state, reason = _state(folder, history, now, _silence(steps, config))
    return RunStatus(
        name=history.facts.get("run") or name,
        folder=str(folder),
        state=state,
        reason=reason,
        step=int(steps["step"][-1]) if len(steps["step"]) else 0,
        goodput=_known(history.goodput),
        restarts=len(history.restarts),
        last_time=_known(history.seen),
        **_progress(history, steps, phases, state),
        **_outcome(history),
        **_cost(history, price),
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration that the run has left in its folder; empty if there is none, or it is damaged."""
    try:
        with open(folder / CONFIG, "rb", opener=_no_link) as file:
            data = file.read(LARGEST_YAML_BYTES + 1) or b""  # None: a pipe
        tree = _parsed(data.decode("utf-8-sig")) if len(data) <= LARGEST_YAML_BYTES else None
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _no_link(path: str, flags: int) -> int:
    """Open a file in a run's folder for whoever asks for the run: a link may lead to any file, and a pipe waits."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


@lru_cache(maxsize=1024)  # a list that is shown again and again would spend most of its time here
def _parsed(text: str) -> Any:
    return parse_yaml(text)


def _phases(config: Mapping[str, Any]) -> list[Phase]:
    """The phases of a run's configuration; none if they are damaged, or from a version with other rules."""
    try:
        phases = known_phases(config["phases"])
        _left(phases, 0, ranks=1, pace=1.0)  # fails for a value of the wrong type
        wrong = any(phase.problems() or not isinstance(phase.steps, int | None) for phase in phases)
        return [] if wrong else phases
    except (ArithmeticError, AssertionError, AttributeError, KeyError, TypeError, ValueError):
        return []


def _recent(steps: StepColumns) -> StepColumns:
    """The newest steps, of one phase and without a gap."""
    rows, phases = steps["step"], steps["phase"]
    breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(phases) != 0))
    first = max(len(rows) - RECENT_STEPS, breaks[-1] + 1 if len(breaks) else 0, 0)
    return {key: column[first:] for key, column in steps.items()}


def _silence(steps: StepColumns, config: Mapping[str, Any]) -> float:
    """Seconds without a new line after which a run has stalled or was killed."""
    step = float(np.median(steps["seconds"])) if len(steps["seconds"]) else 0.0
    try:
        every = float(config["metrics"]["log_every_steps"])
    except (KeyError, OverflowError, TypeError, ValueError):
        every = 0.0
    return max(SILENT_SECONDS, (SILENT_STEPS + every) * step)


def _state(folder: Path, history: History, now: float, silence: float) -> tuple[str, str]:
    how, _, reason = history.end.partition(": ")
    lock, seen = held(folder), _known(history.seen) or 0.0
    if how and not (lock and _modified(folder / LOCK_FILE) > seen):  # else it has just been started again
        return ("reached", reason) if reason.startswith("reached ") else (how, reason)
    if lock is False:
        return "killed", ""
    asked = "asked to stop" if os.path.exists(folder / STOP_FILE) else ""
    if now - seen <= silence:
        return "running", asked
    return "silent", "; ".join(filter(None, [f"no new line in {METRICS_LOG} for {duration(now - seen)}", asked]))


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _progress(history: History, steps: StepColumns, phases: list[Phase], state: str) -> dict[str, Any]:
    """The phase, the target, the speed, and for a run that is not over the time left."""
    timed = any(phase.minutes is not None for phase in phases)
    counts = [phase.steps or 0 for phase in phases]
    found: dict[str, Any] = {"target_steps": sum(counts) if phases and not timed else None}
    seconds, tokens = (sum(steps[key].tolist()) for key in ("seconds", "tokens"))
    if seconds > 0:
        found["tokens_per_second"] = _known(tokens / seconds)
    if not len(steps["step"]) or _known(steps["phase"][-1]) is None:
        return found
    index = int(steps["phase"][-1])
    found["phase"] = str(phases[index].name) if 0 <= index < len(phases) else str(index)
    done = int(steps["step"][-1]) - sum(counts[:index])
    if state in LIVE and 0 <= index < len(phases) and not any(phase.minutes for phase in phases[: index + 1]):
        samples = float(steps["samples"][-1] - steps["samples"][0])  # taken in all of these steps but the first
        pace = sum(steps["seconds"][1:].tolist()) / samples if samples > 0 else math.nan
        ranks = max(1, int(history.facts.get("ranks", 1)))
        found["seconds_left"] = _known(_left(phases[index:], done, ranks, pace))
    return found


def _left(phases: list[Phase], done: int, ranks: int, pace: float) -> float:
    """Seconds of training left, ``done`` steps into the first of the phases, at ``pace`` seconds for a sample."""
    seconds = 0.0
    for phase in phases:
        if phase.minutes is not None:
            seconds += 60 * phase.minutes
        elif phase.steps is not None:
            batch, _ = batch_of(phase, ranks)
            seconds += pace * max(0, samples_in(phase, phase.steps, batch) - samples_in(phase, done, batch))
        done = 0
    return seconds


def _outcome(history: History) -> dict[str, Any]:
    """The newest held-out losses, the newest checkpoint, and the slowest rank."""
    found: dict[str, Any] = {}
    if len(history.heldout["step"]):
        found["heldout_step"] = int(history.heldout["step"][-1])
        found |= {f"heldout_{key}": _known(history.heldout[key][-1]) for key in ("mlm_loss", "nsp_loss")}
    if len(history.checkpoints["step"]):
        found["checkpoint_step"] = int(history.checkpoints["step"][-1])
        found["checkpoint_time"] = _known(history.checkpoints["time"][-1])
    ranks = {key: column[-1] for key, column in history.ranks.items() if len(column)}
    if _known(ranks.get("slowest")) is not None and history.facts.get("ranks", "1") != "1":
        found["slowest_rank"] = int(ranks["slowest"])
        mean = ranks["compute_mean"]
        found["slowest_ratio"] = _known(ranks["compute_max"] / mean) if mean > 0 else None
    return found


def _cost(history: History, price: float | None) -> dict[str, Any]:
    if history.facts.get("device") != "cuda" or not history.rank_seconds:
        return {}
    hours = history.rank_seconds / 3600
    return {"gpu_hours": _known(hours), "cost": None if price is None else _known(price * hours)}


def _known(value: float | None) -> float | None:
    """The value as a plain number; None if it is not finite."""
    return float(value) if value is not None and math.isfinite(value) else None


def in_order(statuses: Iterable[RunStatus]) -> list[RunStatus]:
    """Runs that may still take steps first; within these, and within the others, the newest line first."""
    return sorted(statuses, key=lambda each: (each.state not in LIVE, -(each.last_time or 0.0), each.folder))
