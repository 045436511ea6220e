"""Averaging the weights of a run's newest checkpoints, for evaluation and export; training never uses the average.

The method is stochastic weight averaging (Izmailov et al., "Averaging Weights Leads to Wider Optima and Better
Generalization", 2018), with the latest checkpoints (Kaddour, "Stop Wasting My Time! Saving Days of ImageNet and BERT
Training with Latest Weight Averaging", 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.checkpoint.changed_settings import differing, spelled
from trainer.checkpoint.reading import (
    Checkpoint,
    Pieces,
    find,
    named,
    read,
    require_finite,
    require_shapes,
    step_of,
    verify,
)
from trainer.checkpoint.train_state import state_of
from trainer.console import Tell, warn
from trainer.errors import TrainerError, exit_code, explain
from trainer.exits import FAILED


def average(checkpoints: Sequence[Checkpoint]) -> dict[str, Tensor]:
    """The mean of the checkpoints' weights: whole fp32 tensors on the CPU, each summed in fp64.

    The checkpoints have equal shapes; :func:`select` has verified them. In memory are the result and one parameter in
    fp64, for any number of checkpoints. Raises TrainerError if a weight is not finite.
    """
    first, *others = [Pieces(found) for found in checkpoints]
    mean = {}
    for name in checkpoints[0].shapes:
        total = first.whole(name).double()
        for pieces in others:
            total += pieces.whole(name)
        mean[name] = (total / len(checkpoints)).float()
    newest = checkpoints[0].folder
    require_finite(f"{steps(checkpoints)} of {newest.parent}" if others else f"checkpoint {newest}", mean)
    return mean


def select(path: Path, count: int | None, tell: Tell) -> list[Checkpoint]:
    """The checkpoints whose weights a command averages, newest first, with the sha256 of every part verified.

    Without a ``count`` it is the one that ``find`` returns. With one, it is the newest ``count`` intact checkpoints of
    the run's folder ``path``; ``tell`` receives a warning for each damaged one that is skipped. Raises TrainerError if
    there are fewer, or if they are from different runs or phases.
    """
    if count is None:
        found = find(path, tell)
        verify(found)
        return [found]
    if (path / "checkpoint.json").is_file():
        raise TrainerError(f"{path} is a single checkpoint, so it has no average: name its run's folder")
    intact, skipped = _newest(path, count)
    if not intact:
        raise TrainerError("; ".join([f"no intact checkpoint in {path}: name a run's folder", *skipped]))
    if len(intact) < count:
        advice = (
            f"--average {count} needs {count} intact checkpoints, but {path} has {len(intact)}: use a smaller number, "
            f"or train with checkpoint.keep at {count} or more"
        )
        raise TrainerError("; ".join([advice, *skipped]))
    for problem in skipped:
        warn(f"not used: {problem}", tell)
    _require_one_phase(intact)
    return intact


def steps(checkpoints: Sequence[Checkpoint]) -> str:
    """The steps of the checkpoints in words: "step 30" for one, otherwise "the mean of steps 10, 20 and 30"."""
    *others, last = (f"{found.record['state']['step']:,}" for found in reversed(checkpoints))
    return f"the mean of steps {', '.join(others)} and {last}" if others else f"step {last}"


def _newest(root: Path, count: int) -> tuple[list[Checkpoint], list[str]]:
    """Up to ``count`` intact checkpoints under ``root``, newest first, and why each damaged one was skipped."""
    intact: list[Checkpoint] = []
    skipped = []
    for folder in sorted(named(root), key=step_of, reverse=True):
        if len(intact) == count:
            break
        try:
            found = read(folder)
            verify(found)
            state_of(found)  # refuses a record that no run could resume from
            intact.append(found)
        except (TrainerError, OSError) as error:
            if exit_code(error) == FAILED:
                raise  # the machine is short of memory or file handles: the checkpoint may be intact
            skipped.append(explain(error))
    return intact, skipped


def _require_one_phase(checkpoints: Sequence[Checkpoint]) -> None:
    """Raise TrainerError unless all checkpoints are from one run and one phase of it, and have equal shapes."""
    newest = checkpoints[0]
    for other in checkpoints[1:]:
        if changes := differing(_origin(other), _origin(newest)):
            raise TrainerError(
                f"checkpoint {other.folder} is from a different run or phase than {newest.folder.name} "
                f"({spelled(changes)}): use a smaller --average, or none"
            )
        require_shapes(f"checkpoint {other.folder}", other.shapes, newest.shapes)


def _origin(found: Checkpoint) -> dict[str, Any]:
    """The facts that checkpoints must share: the run's identity, and the name and shards of the current phase."""
    identity = found.record["identity"]
    phase = identity["phases"][state_of(found).phase]
    fixed = {key: value for key, value in identity.items() if key != "phases"}
    return fixed | {"phase": phase["name"], "shards": phase["shards"]}
