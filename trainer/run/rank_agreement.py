"""Facts that must be the same on every rank of a run: code, package versions, configuration and data."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from data_prep.manifest import manifest_hash
from kernels import apex
from trainer.ranks.world import World
from trainer.run.config import fingerprint, to_tree
from trainer.run.phases import Plan

ROOT = Path(__file__).parents[2]
PACKAGES = ("deepspeed", "torch", "triton", "numpy")  # those that a run uses; optional ones may differ


def facts(plan: Plan, world: World) -> dict[str, str]:
    """Return the facts under names that a user knows. Code, configuration and shards are short hashes."""
    found = {"WORLD_SIZE": str(world.size), "device": world.device.type, "python": platform.python_version()}
    found |= {name: _version(name) for name in PACKAGES}
    found |= {"CUDA": torch.version.cuda or "none"}
    if plan.config.optimizer.implementation == "apex":
        found |= {"Apex": apex.describe(used=True)}
    found |= {"Lambert's code": code(), "the configuration": fingerprint(to_tree(plan.config))}
    return found | {f"the shards of {data.phase.name}": manifest_hash(data.loader.folder)[:16] for data in plan.phases}


def code() -> str:
    """Return a short hash of the source files, which differs on a node with an old checkout."""
    found = hashlib.sha256()
    for package in ("data_prep", "kernels", "trainer"):
        for path in sorted((ROOT / package).rglob("*.py")):
            found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
