"""What a killed process left, or somebody put where a save writes: removed if it can be, and never in the way."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from itertools import count
from pathlib import Path

_LINK = "it is a link, and may lead to what is still needed: remove it by hand"


def temporary(path: Path) -> Path:
    """A free name beside ``path`` for what will be renamed to it: ``.NAME.tmp``, or with a number behind it."""
    names = (path.with_name(f".{path.name}.tmp{number or ''}") for number in count())
    return next(name for name in names if not os.path.lexists(name))


def drafts(folder: Path, name: str) -> list[Path]:
    """What has such a name in ``folder``; ``name``: a regular expression for what it was to become."""
    pattern = re.compile(rf"\.{name}\.tmp\d*")
    return sorted(path for path in folder.glob(".*") if pattern.fullmatch(path.name))


def remove(path: Path) -> str:
    """Remove a file or a folder, but no link. Returns why it could not be, in one line; empty if it is gone."""
    if path.is_symlink():
        return f"{path}: {_LINK}"
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        name = Path(error.filename or path).name  # without its folders, as Python has it here
        inside = "" if name == path.name else f", for {name} in it"
        return f"{path}: {error.strerror}{inside}" if os.path.lexists(path) else ""
    return ""


def move_aside(path: Path) -> Path | None:
    """Free the name ``path`` at once, and return what its holder, if it had one, is called now; to be removed later."""
    if not os.path.lexists(path):
        return None
    return path.rename(temporary(path))


def stuck(paths: Iterable[Path]) -> dict[Path, str]:
    """Those that `remove` could not remove, with the reason, as far as it can be told without trying."""
    found = {}
    for path in paths:
        folders = [path.parent, *(Path(base) for base, _, _ in os.walk(path))]
        closed = next((folder for folder in folders if not os.access(folder, os.W_OK | os.X_OK)), None)
        if path.is_symlink():
            found[path] = f"{path}: {_LINK}"
        elif closed is not None:
            found[path] = f"{path}: {closed} cannot be written"
    return found
