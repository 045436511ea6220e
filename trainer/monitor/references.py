"""Published results of other BERT runs, with their sources, to compare a run with.

The data are in ``references.json``, which states only what the sources state. No full curves have been published as
numbers, so these are values from the start or the end of a run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from data_prep.json_text import read_text
from trainer.strict_yaml import LARGEST_YAML_BYTES, parse_yaml


@dataclass(frozen=True)
class Reference:
    """One published metric, a value or a range from ``low`` to ``high``."""

    name: str
    figure: str  # the metric's name in the metrics log; "loss" is the sum of both tasks' losses
    low: float
    high: float
    held_out: bool  # False: from training
    layers: int
    hidden: int
    sequence_length: int | None  # None: the source does not say
    batch: int | None  # in sequences; None: the source does not say
    setting: str
    source: str

    @property
    def value(self) -> str:
        """The value or range as text."""
        show = "{:.1%}" if self.figure.endswith("accuracy") else "{:.4g}"
        return " to ".join(dict.fromkeys(show.format(value) for value in (self.low, self.high)))

    @property
    def where(self) -> str:
        """The data, sequence length and batch of the metric, as text."""
        parts = ["held out" if self.held_out else "training"]
        parts += [f"length {self.sequence_length}"] if self.sequence_length else []
        return ", ".join(parts + ([f"batch {self.batch:,}"] if self.batch else []))


def load_references() -> list[Reference]:
    """The published results that Lambert ships, as read from their file."""
    content = json.loads(Path(__file__).with_name("references.json").read_text(encoding="utf-8"))
    return [Reference(**each) for each in content]


def fitting(folder: Path) -> list[Reference]:
    """The results for the model shape and the sequence lengths in the configuration that a run left in ``folder``.

    Empty if the run left no configuration, or one that lacks them.
    """
    try:
        config = parse_yaml(read_text(folder / "config.yaml", LARGEST_YAML_BYTES))
        shape = config["model"]["layers"], config["model"]["hidden"]
        lengths = {phase["sequence_length"] for phase in config["phases"]}
    except (OSError, ValueError, LookupError, TypeError):
        return []
    return [
        each
        for each in load_references()
        if (each.layers, each.hidden) == shape and each.sequence_length in {None, *lengths}
    ]
