"""The folder of this node that stands for an address: a run works in it, or a command's copies are there."""

from __future__ import annotations

from pathlib import Path

from trainer.errors import TrainerError


def local_folder(address: str, cache: str, purpose: str = "runs") -> Path:
    """``cache``/runs/s3/bucket/runs/first for s3://bucket/runs/first. Raises TrainerError if there is no such home.

    ``purpose``: "runs" for a run's own files, "fetched" for copies.
    """
    kind, _, place = address.rstrip("/").partition("://")
    try:
        return Path(cache).expanduser() / purpose / kind / place
    except RuntimeError as error:
        raise TrainerError(f"cache.folder {cache} cannot be used ({error}): name a writable folder") from None
