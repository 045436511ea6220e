"""A run's folder: its lock, and what a run leaves in it besides checkpoints and metrics. Rank 0 calls these."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import IO

import yaml

from data_prep.atomic import replacing
from data_prep.manifest import TOKENIZER_FOLDER
from data_prep.tokenizer import TOKENIZER_FILES
from trainer.console import Tell
from trainer.run.config import Config, to_tree
from trainer.run.lock import LOCK_PATIENCE_SECONDS, hold
from trainer.run.phases import Plan
from trainer.run.resume_checks import require_own_folder
from trainer.run.stop_request import forget_request

ENDED = "ended.json"  # "how" is "done", "reached" (evaluation.stop_at) or "stopped"


def take(config: Config, tell: Tell) -> IO[str] | None:
    """Create and lock the folder. Raises TrainerError if it is not a run's folder, or another run writes to it."""
    folder = Path(config.run.folder)
    require_own_folder(folder)
    lock = hold(folder, patience(config), tell)
    forget_request(folder)  # an earlier attempt's, which was killed before it saw it
    return lock


def patience(config: Config) -> float:
    """Seconds to wait for an earlier attempt to end; meanwhile, the other ranks wait in a collective."""
    return min(LOCK_PATIENCE_SECONDS, config.run.timeout_seconds / 2)


def leave_configuration(folder: Path, plan: Plan) -> None:
    """Write the resolved configuration and a copy of the tokenizer."""
    with replacing(folder / "config.yaml") as file:
        file.write(yaml.safe_dump(to_tree(plan.config), sort_keys=False).encode())
    given, own = plan.phases[0].loader.folder / TOKENIZER_FOLDER, folder / TOKENIZER_FOLDER
    own.mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        if (given / name).exists():
            with replacing(own / name) as file:
                file.write((given / name).read_bytes())


def leave_end(folder: Path, how: str, step: int) -> None:
    """Write how and at which step the run ended, which a killed run does not leave, and forget a request to stop."""
    (folder / ENDED).write_text(json.dumps({"how": how, "step": step}) + "\n", "utf-8")
    with suppress(OSError):  # the run has ended well; the next start reports what it cannot remove
        forget_request(folder)


def forget_end(folder: Path) -> None:
    """Remove how an earlier attempt ended."""
    (folder / ENDED).unlink(missing_ok=True)
