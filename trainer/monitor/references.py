"""Published figures of others' runs, with their sources, for those of a run that can be laid beside them.

The data are ``references.json``: nothing is in it that its source does not say. Nobody has published a whole curve in
numbers, so they are where a run began or ended.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from data_prep.json_text import read_text
from trainer.strict_yaml import LARGEST, parse_yaml


@dataclass(frozen=True)
class Reference:
    """One published figure, from ``low`` to ``high``."""

    name: str
    figure: str  # as in the journal; "loss" is the sum of both tasks' losses
    low: float
    high: float
    held_out: bool  # else of training
    layers: int
    hidden: int
    sequence_length: int | None  # None: its source does not say
    batch: int | None  # likewise; sequences
    setting: str
    source: str

    @property
    def value(self) -> str:
        """For people."""
        show = "{:.1%}" if self.figure.endswith("accuracy") else "{:.4g}"
        return " to ".join(dict.fromkeys(show.format(value) for value in (self.low, self.high)))

    @property
    def where(self) -> str:
        """What it is of, for people."""
        parts = ["held out" if self.held_out else "training"]
        parts += [f"length {self.sequence_length}"] if self.sequence_length else []
        return ", ".join(parts + ([f"batch {self.batch:,}"] if self.batch else []))


def load_references() -> list[Reference]:
    """All of them."""
    content = json.loads(Path(__file__).with_name("references.json").read_text(encoding="utf-8"))
    return [Reference(**each) for each in content]


def fitting(folder: Path) -> list[Reference]:
    """Those of the model's shape and a phase's sequence length, by the configuration that the run left in ``folder``.

    None where it left none, or none that says so.
    """
    try:
        config = parse_yaml(read_text(folder / "config.yaml", LARGEST))
        shape = config["model"]["layers"], config["model"]["hidden"]
        lengths = {phase["sequence_length"] for phase in config["phases"]}
    except (OSError, ValueError, LookupError, TypeError):
        return []
    return [
        each
        for each in load_references()
        if (each.layers, each.hidden) == shape and each.sequence_length in {None, *lengths}
    ]
