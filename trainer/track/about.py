"""The identity of a run on a tracker: its name, its settings, and an id that any copy of the run has, too."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import TrainerError
from trainer.monitor.metrics_log import LONGEST_LINE, METRICS_LOG, parsed
from trainer.runs.status import read_config

Setting = str | int | float | bool | None
_LOGIN = re.compile(r"://[^\s/?#]*@")
_QUERY = re.compile(r"(://[^\s?#]*)[?#]\S*")  # may sign the address


@dataclass(frozen=True)
class About:
    """A run, as a tracker knows it."""

    id: str  # 16 hexadecimal digits
    name: str
    folder: Path
    begun: float  # Unix time in seconds
    settings: dict[str, Setting]  # the configuration, by key such as phases.0.steps


def about(folder: Path) -> About:
    """Describe the run in ``folder``. The id is a hash of the first line of its journal, so it lasts as long as that.

    Raises TrainerError if there is no journal, or if nothing is in it.
    """
    try:
        with (folder / METRICS_LOG).open("rb") as file:
            line = file.readline(LONGEST_LINE)
    except FileNotFoundError:
        raise TrainerError(f"no {METRICS_LOG} in {folder}: name the folder of a run") from None
    except OSError as error:
        raise TrainerError(f"{folder / METRICS_LOG} cannot be read: {error.strerror}") from None
    if not line.endswith(b"\n"):
        raise TrainerError(f"{folder / METRICS_LOG} is empty: try again once the run has started")
    config = read_config(folder)
    section = config.get("run")
    name = section.get("name") if isinstance(section, dict) else None
    begun = (parsed(line.decode(errors="replace")) or {}).get("time")
    return About(
        id=hashlib.sha256(line).hexdigest()[:16],
        name=str(name or folder.resolve().name),
        folder=folder,
        begun=float(begun) if isinstance(begun, int | float) else 0.0,
        settings={key: without_secrets(value) if isinstance(value, str) else value for key, value in flat(config)},
    )


def as_text(value: Setting) -> str:
    """One setting as text."""
    return value if isinstance(value, str) else f"{value:.10g}" if isinstance(value, float) else json.dumps(value)


def without_secrets(text: str) -> str:
    """The text with no user name, password or query in its addresses."""
    return _QUERY.sub(r"\1", _LOGIN.sub("://", text))


def flat(tree: Any, key: str = "") -> Iterator[tuple[str, Setting]]:
    """Yield the leaves of plain data, by keys such as phases.0.steps. An empty list or mapping is a leaf, as text."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in inner:
        yield from flat(value, f"{key}.{name}" if key else str(name))
    if isinstance(tree, dict | list):
        if not tree and key:
            yield key, str(tree)
    else:
        yield key, tree
