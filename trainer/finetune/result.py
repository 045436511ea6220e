"""How a run ended, as a file of its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint import sync
from trainer.errors import TrainerError
from trainer.world import World, broadcast_text, together

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


def write_json(path: Path, tree: Any) -> None:
    """Plain data as a file, whole or not at all."""
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    sync(draft)
    draft.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """What ``write_json`` wrote of a mapping. Raises TrainerError for anything else."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TrainerError(f"{path} is damaged ({error}): remove its folder, or name another --out") from None
    if not isinstance(tree, dict):
        raise TrainerError(f"{path} is none of ours: remove it, or name another --out")
    return tree


def read_result(folder: Path, world: World) -> Result | None:
    """How the run of a folder ended, as rank 0 reads it, for all ranks; None for one that has not."""
    path = folder / RESULT

    def read() -> str:
        return json.dumps(read_json(path)) if world.is_main and path.is_file() else ""

    text = broadcast_text(together(read, world), world)
    if not text:
        return None
    tree = json.loads(text)
    return Result(**tree | {"evaluations": tuple(tree["evaluations"])})
