"""Remembers which stages of a script are done, and with which inputs, in ``stages.json`` of its output folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.atomic import replacing
from data_prep.json_text import read_json
from data_prep.manifest import file_sha256
from trainer.errors import TrainerError

NAME = "stages.json"


def tree_hashes(folder: Path) -> dict[str, str]:
    """The sha256 of each file in a folder, by name."""
    return {path.name: file_sha256(path) for path in sorted(folder.iterdir()) if path.is_file()}


@dataclass
class Done:
    """The stages that were begun in a folder, each with its inputs and whether it was finished."""

    path: Path
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, out: Path) -> Done:
        """Read the folder's record, or start one. Raises TrainerError for a folder with other files."""
        path = out / NAME
        if path.is_file():
            return cls(path, _read(path))
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise TrainerError(f"--out {out} was not made by this script: name a new folder")
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainerError(f"--out {out} cannot be created ({error.strerror}): name another folder") from None
        done = cls(path)
        done._write()
        return done

    def changed(self, stage: str, inputs: dict[str, str]) -> bool:
        """Whether the stage was begun with other inputs."""
        return stage in self.stages and self.stages[stage]["inputs"] != inputs

    def is_done(self, stage: str, product: Path, inputs: dict[str, str], more: str = "") -> bool:
        """Whether the stage has made ``product`` from these inputs; if not, it begins now.

        ``more``: inputs that do not count as ``changed``, because the stage can continue with others.
        """
        now = {"inputs": inputs, "more": more}
        if self.stages.get(stage) == now | {"finished": True} and product.exists():
            print("already done")
            return True
        self.stages[stage] = now | {"finished": False}
        self._write()
        return False

    def finish(self, stage: str) -> None:
        """Record that the stage is finished."""
        self.stages[stage]["finished"] = True
        self._write()

    def _write(self) -> None:
        with replacing(self.path) as file:
            file.write((json.dumps(self.stages, indent=1) + "\n").encode())


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The record in a file. Raises TrainerError for one that `Done` did not write."""
    try:
        tree = read_json(path)
    except ValueError as error:
        raise TrainerError(f"{path} is damaged ({error}): name a new --out") from None
    fields = {"inputs", "more", "finished"}
    if not (isinstance(tree, dict) and all(isinstance(each, dict) and each.keys() == fields for each in tree.values())):
        raise TrainerError(f"{path} is damaged: name a new --out")
    return tree
