"""How a run ended, as a file of its folder; and what the runs of a setting come to."""

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
class Result:
    """How a run ended."""

    how: str  # "done"; "degenerate": it says the same of everything; "diverged": it has no figures
    seed: int
    setting: dict[str, float]
    figures: dict[str, float]  # on dev, of the best evaluation
    step: int  # of that
    steps: int  # taken
    seconds: float
    examples_per_second: float
    evaluations: tuple[dict[str, Any], ...]
    reason: str = ""


@dataclass(frozen=True)
class Row:
    """What the seeds of one setting come to, by the task's measure on dev. A run that diverged counts as the lowest."""

    setting: Setting
    values: tuple[float | None, ...]  # of each seed; None: it diverged
    median: float | None  # None: half of them or more diverged
    spread: float | None  # standard deviation over seeds with a value; None for fewer than two
    best: float | None
    diverged: int  # runs
    constant: int  # runs that say the same of everything


def summarise(results: Sequence[Result], measure: str) -> list[Row]:
    """A row for each setting, in the order of their first runs. Pure."""
    rows = []
    for setting in dict.fromkeys(Setting(**result.setting) for result in results):  # type: ignore[arg-type]
        own = [result for result in results if result.setting == asdict(setting)]
        values = tuple(result.figures.get(measure) for result in own)
        known = [value for value in values if value is not None]
        middle = statistics.median([-1e9 if value is None else value for value in values])
        rows.append(
            Row(
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
    """Plain data as a file, whole or not at all."""
    with replacing(path) as file:
        file.write((json.dumps(tree, indent=1) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """What ``write_json`` wrote of a mapping. Raises TrainerError for anything else."""
    try:
        tree = parse_json(read_text(path))
    except ValueError as error:
        raise TrainerError(f"{path} is damaged ({error}): remove its folder, or name another --out") from None
    if not isinstance(tree, dict):
        raise TrainerError(f"{path} is none of ours: remove it, or name another --out")
    return tree


def read_result(out: Path, setting: Setting, seed: int, world: World) -> Result | None:
    """How a run ended, as rank 0 reads it, for all ranks; None for one that has not.

    Raises TrainerError where its folder has another setting's result, whose numbers are alike in 6 digits.
    """
    path = out / setting.folder(seed) / RESULT

    def read() -> str:
        if not world.is_main or not path.is_file():
            return ""
        tree = read_json(path)
        if tree.get("setting") != asdict(setting):
            raise TrainerError(f"{path.parent} is another setting's, {tree.get('setting')}: name another --out")
        return json.dumps(tree)

    text = broadcast_text(together(read, world), world)
    if not text:
        return None
    tree = json.loads(text)
    return Result(**tree | {"evaluations": tuple(tree["evaluations"])})
