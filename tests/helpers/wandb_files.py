"""Reads the files that Weights & Biases writes offline, with its own messages.

The library's reader is part of its program for uploads. The container is LevelDB's log: a header of 7 bytes, then
blocks of 32 KiB, whose fragments start with a checksum, a length and a kind.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER, FILE_HEADER = 1 << 15, 7, 7
WHOLE, LAST = 1, 4


def messages(path: Path) -> Iterator[Any]:
    """The records of a ``.wandb`` file."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), FILE_HEADER, b""
    assert data[:4] == b":W&B"
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (WHOLE, LAST):
            yield Record.FromString(parts)
            parts = b""


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's history, each by the names of its values."""
    found = []
    for record in messages(path):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found.append(items)
    return found


def settings(path: Path) -> dict[str, Any]:
    """A run's configuration, as it was last changed."""
    found = dict[str, Any]()
    for record in messages(path):
        kind = record.WhichOneof("record_type")
        updates = record.run.config.update if kind == "run" else record.config.update if kind == "config" else ()
        found |= {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in updates}
    return found


def summary(path: Path) -> dict[str, Any]:
    """A run's summary as it was set, without the last values of its history."""
    found = dict[str, Any]()
    for record in messages(path):
        if record.WhichOneof("record_type") == "summary":
            found |= {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.summary.update}
    return found
