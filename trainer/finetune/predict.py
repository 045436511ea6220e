"""Predictions as a file: one row per record, as JSON lines or TSV."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.atomic import replacing
from trainer.finetune.formats import split_name


def default_name(path: Path) -> str:
    """The name for a file's predictions in the output folder, if the user gives none."""
    return f"predictions-{split_name(path)[0].stem}.jsonl"


def write_predictions(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows atomically; in TSV, anything that is neither text nor number is written as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) for row in rows] if path.suffix == ".jsonl" else list(_tabs(rows))
    with replacing(path) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())


def _tabs(rows: Sequence[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return ["\t".join(names), *("\t".join(_cell(row.get(name)) for name in names) for row in rows)]


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
    return " ".join(text.split("\t")).replace("\r", " ").replace("\n", " ")
