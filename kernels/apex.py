"""Finds NVIDIA's Apex and its compiled extensions. PyPI's package named apex is unrelated (a web toolkit).

NVIDIA's comes with its PyTorch images, or is built from source. It is recognized by its files: nothing that is named
like it is imported until these have shown whose it is, because a wrong package could run anything. Lambert calls the
extensions themselves, not Apex's Python.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from kernels.backend import UnavailableError

PROOF = ("multi_tensor_apply", "normalization/fused_layer_norm.py", "optimizers/fused_adam.py")  # of NVIDIA's package
ABSENT, FOREIGN = "absent", "an unrelated package named apex (not NVIDIA's), not used"


@dataclass(frozen=True)
class Apex:
    """NVIDIA's Apex, as installed here."""

    folder: Path  # contains the package and, next to it, the extensions
    version: str  # "0.1", or "" if it was not installed as a package

    def __str__(self) -> str:
        return f"NVIDIA Apex {self.version}".strip()

    def has(self, name: str) -> bool:
        """Whether it was built with the extension ``name``: a compiled module next to the package."""
        spec = _spec(name)
        where = Path(spec.origin) if spec is not None and spec.origin else None
        return where is not None and where.parent == self.folder and where.name.endswith(tuple(EXTENSION_SUFFIXES))


def find() -> Apex | None:
    """NVIDIA's Apex; None if there is none, or only another package of its name."""
    spec = _spec("apex")
    for text in (spec and spec.submodule_search_locations) or ():
        package = Path(text)
        if all((package / name).exists() for name in PROOF):
            return Apex(package.parent, _version(package))
    return None


def describe(used: bool) -> str:
    """One word for logs and metrics on what ``import apex`` would import; ``used``: whether the run uses it."""
    found = find()
    if found is None:
        return ABSENT if _spec("apex") is None else FOREIGN
    return str(found) if used else f"{found}, not used"


def keep_foreign_out() -> None:
    """Make ``import apex`` fail in this process if it would import another package than NVIDIA's.

    DeepSpeed imports whatever has that name, and does without it if the import fails.
    """
    if describe(used=False) == FOREIGN:
        sys.modules.setdefault("apex", None)  # type: ignore[arg-type]


@cache
def extension(name: str) -> Any:
    """Apex's compiled extension ``name``. Raises UnavailableError if it is missing or cannot be loaded."""
    found = find()
    if found is None:
        only = ", only a package of the same name that is not NVIDIA's" if _spec("apex") else ""
        raise UnavailableError(f"apex is set, but NVIDIA's Apex is not installed{only}: install it, or do not set apex")
    if not found.has(name):
        raise UnavailableError(f"apex is set, but {found} was built without {name}: build it with APEX_CUDA_EXT=1")
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        raise UnavailableError(
            f"apex is set, but {found}'s {name} cannot be loaded: build it against this PyTorch: {error}"
        ) from error


def _spec(name: str) -> ModuleSpec | None:
    """The module that ``import name`` would find if nothing had been imported yet. Runs none of its code."""
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    return next((spec for find in finders if find is not None and (spec := find(name, None)) is not None), None)


def _version(package: Path) -> str:
    installed = (d for d in distributions(name="apex") if Path(str(d.locate_file("apex"))) == package)
    return next((d.version for d in installed), "")
