"""Says which implementation of the kernels runs, and why."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Backend:
    """What computes the kernels of this process; logged once, and the label of a metric."""

    name: str  # "torch"
    reason: str  # why this one
    apex: str  # what the import name "apex" stands for here


def resolve() -> Backend:
    """The backend of every function in ``kernels``."""
    return Backend("torch", "the kernels are plain PyTorch on every device", apex())


def apex() -> str:
    """Whether NVIDIA Apex is installed. PyPI's package of that name is another one (a web toolkit).

    Looks at files only: importing a wrong or broken package could fail or run foreign code.
    """
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "absent"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if any((folder / "normalization" / "fused_layer_norm.py").is_file() for folder in folders):
        return "NVIDIA Apex, not used"
    return "an unrelated package named apex (not NVIDIA's), not used"
