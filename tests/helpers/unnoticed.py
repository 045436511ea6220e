"""Finds the fields of an exported JSON file that the export's proof does not check."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path


def unnoticed(path: Path, proof: Callable[[], object]) -> list[str]:
    """The fields of a JSON file that can be changed, one at a time, without ``proof`` raising an error."""
    written, left = json.loads(path.read_text()), []
    for name, value in written.items():
        path.write_text(json.dumps(written | {name: changed(value)}))
        try:
            proof()
        except Exception:  # noticed; transformers raises errors of many classes for a wrong field
            continue
        left.append(name)
    path.write_text(json.dumps(written))
    proof()
    return left


def changed(value: object) -> object:
    """Another value of the same kind."""
    match value:
        case bool():
            return not value
        case None:
            return 0.5
        case int():
            return value + 1
        case float():
            return value * 1.5 or 0.5
        case list():
            return ["BertModel"]
        case dict():
            return {name: changed(each) for name, each in value.items()}
    return {"bert": "electra", "megatron-bert": "bert", "gelu": "gelu_pytorch_tanh", "float32": "float16"}.get(
        str(value), f"{value}x"
    )
