"""Cleanup of files that a killed process or a person left where Lambert writes; they never block a save."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from itertools import count
from pathlib import Path

_LINK = "it is a link and may point to something still needed: remove it by hand"


def temporary(path: Path) -> Path:
    """An unused path, ``.NAME.tmp`` or ``.NAME.tmp1`` and so on, for a draft to be renamed to ``path``."""
    names = (path.with_name(f".{path.name}.tmp{number or ''}") for number in count())
    return next(name for name in names if not os.path.lexists(name))


def drafts(folder: Path, name: str) -> list[Path]:
    """Files in ``folder`` with such a temporary name. ``name``: a regular expression for their final names."""
    pattern = re.compile(rf"\.{name}\.tmp\d*")
    return sorted(path for path in folder.glob(".*") if pattern.fullmatch(path.name))


def remove(path: Path) -> str:
    """Remove a file or a folder, but never a link. Returns one line with the reason if it failed, else an empty one."""
    if path.is_symlink():
        return f"{path}: {_LINK}"
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        name = Path(error.filename or path).name  # Python reports it here without its folder
        inside = "" if name == path.name else f", for {name} in it"
        return f"{path}: {error.strerror}{inside}" if os.path.lexists(path) else ""
    return ""


def move_aside(path: Path) -> Path | None:
    """Rename ``path``, if it exists, so that its name is free at once. Returns the new path, to be removed later."""
    if not os.path.lexists(path):
        return None
    return path.rename(temporary(path))


def stuck(paths: Iterable[Path]) -> dict[Path, str]:
    """The paths that `remove` could not remove, with reasons, as far as can be seen without trying."""
    found = {}
    for path in paths:
        folders = [path.parent, *(Path(base) for base, _, _ in os.walk(path))]
        closed = next((folder for folder in folders if not os.access(folder, os.W_OK | os.X_OK)), None)
        if path.is_symlink():
            found[path] = f"{path}: {_LINK}"
        elif closed is not None:
            found[path] = f"{path}: {closed} is not writable"
    return found
