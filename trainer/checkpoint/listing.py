"""The content of checkpoint.json, which lists a checkpoint's parts and makes it one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from trainer.checkpoint.reading import FORMAT, VERSION, tree_sha256


def listing(shapes: Mapping[str, torch.Size], parts: list[dict[str, Any]], record: dict[str, Any]) -> bytes:
    """The content of checkpoint.json, with its own sha256. ``parts``: the name, size and sha256 of each."""
    sizes = {name: list(shape) for name, shape in shapes.items()}
    return _signed({"format": FORMAT, "version": VERSION, "shapes": sizes, "parts": parts, "record": record})


def amended(content: bytes, **changes: Any) -> bytes:
    """A checkpoint.json with these items of its record replaced."""
    tree = json.loads(content)
    del tree["sha256"]
    tree["record"] |= changes
    return _signed(tree)


def _signed(tree: dict[str, Any]) -> bytes:
    return json.dumps({**tree, "sha256": tree_sha256(tree)}, indent=1).encode()
