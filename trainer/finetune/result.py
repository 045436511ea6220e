"""The result of a run, as a file in its folder, and the summary of a setting's runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_prep.atomic import replacing
from data_prep.json_text import parse_json, read_text
from trainer.errors import TrainerError
from trainer.finetune.options import Setting
from trainer.ranks.world import World, broadcast_text, together

RESULT = "result.json"  # in a run's folder, once it has ended


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    how: str  # "done"; "degenerate": the same answer for every input; "diverged": it has no metrics
    seed: int
    setting: dict[str, float]
    figures: dict[str, float]  # on dev, at the best evaluation
    step: int  # of that evaluation
    steps: int  # taken
    seconds: float
    examples_per_second: float
    evaluations: tuple[dict[str, Any], ...]
    reason: str = ""


@dataclass(frozen=True)
class SettingSummary:
    """One setting over its seeds, by the task's measure on dev. A run that diverged counts as the lowest."""

    setting: Setting
    values: tuple[float | None, ...]  # by seed; None: it diverged
    median: float | None  # None: half or more diverged
    spread: float | None  # standard deviation over seeds with a value; None for fewer than two
    best: float | None
    diverged: int  # runs
    constant: int  # runs with the same answer for every input


def summarise(results: Sequence[RunResult], measure: str) -> list[SettingSummary]:
    """Summarise each setting in a row, in the order of their first runs. Pure."""
    rows = []
    for setting in dict.fromkeys(Setting(**result.setting) for result in results):  # type: ignore[arg-type]
        own = [result for result in results if result.setting == asdict(setting)]
        values = tuple(result.figures.get(measure) for result in own)
        known = [value for value in values if value is not None]
        middle = statistics.median([-1e9 if value is None else value for value in values])
        rows.append(
            SettingSummary(
                setting,
                values,
                middle if middle > -1e8 else None,
                statistics.stdev(known) if len(known) > 1 else None,
                max(known, default=None),
                *(sum(result.how == how for result in own) for how in ("diverged", "degenerate")),
            )
        )
    return rows


def write_json(path: Path, tree: Any) -> None:
    """Write plain data as a JSON file, atomically."""
    with replacing(path) as file:
        file.write((json.dumps(tree, indent=1) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read a mapping that ``write_json`` wrote. Raises TrainerError for anything else."""
    try:
        tree = parse_json(read_text(path))
    except ValueError as error:
        raise TrainerError(f"{path} is damaged ({error}): remove its folder, or name another --out") from None
    if not isinstance(tree, dict):
        raise TrainerError(f"{path} was not written by this command: remove it, or name another --out")
    return tree


def read_result(out: Path, setting: Setting, seed: int, world: World) -> RunResult | None:
    """The result of a run, read by rank 0 for all ranks; None if the run has not ended.

    Raises TrainerError if its folder has the result of another setting, whose numbers agree to 6 digits.
    """
    path = out / setting.folder(seed) / RESULT

    def read() -> str:
        if not world.is_main or not path.is_file():
            return ""
        tree = read_json(path)
        if tree.get("setting") != asdict(setting):
            raise TrainerError(
                f"{path.parent} has the result of another setting, {tree.get('setting')}: name another --out"
            )
        return json.dumps(tree)

    text = broadcast_text(together(read, world), world)
    if not text:
        return None
    tree = json.loads(text)
    return RunResult(**tree | {"evaluations": tuple(tree["evaluations"])})
