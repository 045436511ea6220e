"""NVIDIA's Apex is recognized by its files, and another package of its name is never imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from kernels import apex
from kernels.backend import UnavailableError
from tests.helpers.ranks import ROOT

MARK = "import pathlib; pathlib.Path(__file__).with_name('ran').touch()\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder where Python looks first, and no other package apex."""
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not (Path(folder) / "apex").exists()])
    monkeypatch.syspath_prepend(str(tmp_path))
    apex.extension.cache_clear()
    yield tmp_path
    apex.extension.cache_clear()


def plant(folder: Path, *files: str) -> None:
    """Write files that leave the mark ``ran`` beside them if they are imported."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(MARK)


def plant_nvidias(folder: Path, *extensions: str) -> None:
    """Write files named as NVIDIA's Apex names its own; no content is theirs."""
    plant(folder, "apex/__init__.py", "apex/multi_tensor_apply/__init__.py")
    plant(folder, "apex/normalization/fused_layer_norm.py", "apex/optimizers/fused_adam.py")
    plant(folder, *(name + EXTENSION_SUFFIXES[0] for name in extensions))


def ran(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("ran")]


@pytest.mark.parametrize(
    "files", [["apex.py"], ["apex/__init__.py", "apex/interfaces.py"], ["apex/optimizers/fused_adam.py"]]
)
def test_another_package_of_the_name_is_seen_and_not_imported(files: list[str], site: Path) -> None:
    plant(site, *files, "amp_C" + EXTENSION_SUFFIXES[0])
    assert apex.find() is None
    assert apex.describe(used=False) == "an unrelated package named apex (not NVIDIA's), not used"
    with pytest.raises(UnavailableError, match="only a package of the same name that is not NVIDIA's: install"):
        apex.extension("amp_C")
    assert ran(site) == []


def test_nvidias_is_named_with_its_version_and_not_imported(site: Path) -> None:
    assert apex.describe(used=False) == "absent"
    plant_nvidias(site, "amp_C")
    assert apex.describe(used=False) == "NVIDIA Apex, not used"
    (site / "apex-0.1.dist-info").mkdir()
    (site / "apex-0.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n")
    assert apex.describe(used=True) == "NVIDIA Apex 0.1"
    found = apex.find()
    assert found is not None and found.has("amp_C") and not found.has("fused_dense_cuda")
    assert ran(site) == []


def test_an_extension_must_be_compiled_and_lie_next_to_the_package(
    site: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_nvidias(site)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.syspath_prepend(str(elsewhere))
    plant(site, "amp_C.py")
    plant(elsewhere, "fused_dense_cuda" + EXTENSION_SUFFIXES[0])
    for name in ("amp_C", "fused_dense_cuda", "fused_layer_norm_cuda"):
        with pytest.raises(UnavailableError, match=f"NVIDIA Apex was built without {name}: build it with APEX_CUDA_"):
            apex.extension(name)
    plant_nvidias(site, "fused_layer_norm_cuda")
    with pytest.raises(UnavailableError, match="fused_layer_norm_cuda cannot be loaded: build it against this PyTorch"):
        apex.extension("fused_layer_norm_cuda")  # a text is not a library
    assert ran(site) == ran(elsewhere) == []


EACH_FORKED = """
import os, sys, torch
for code in sys.argv[2:]:
    if os.fork() == 0:
        exec(code)
        os._exit(0)
    assert os.wait()[1] == 0
    print('ran:', os.path.exists(sys.argv[1]), flush=True)
"""


@pytest.mark.slow
def test_neither_deepspeed_nor_the_benches_import_another_package(tmp_path: Path) -> None:
    """DeepSpeed by itself imports whatever is named apex."""
    plant(tmp_path, "apex/__init__.py", "apex/optimizers.py")
    (tmp_path / "apex/__init__.py").write_text(MARK + "raise ImportError\n")

    codes = (
        "from trainer.engine.engine import _load_deepspeed as load; assert '0.1' in load(print).__version__",
        "from kernels.bench import _installed; _installed('deepspeed.ops.adam', 'FusedAdam')",
        "import deepspeed",
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-c", EACH_FORKED, str(tmp_path / "apex/ran"), *codes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall("^ran: (.+)", done.stdout, re.MULTILINE) == ["False", "False", "True"]
