"""The backend reports what runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import backend
from tests.helpers.ranks import ROOT


def test_cpus_run_pytorch_and_gpus_triton() -> None:
    on_cpu, on_gpu = backend.resolve("cpu"), backend.resolve("cuda")
    assert on_cpu.name == "torch" and "PyTorch" in on_cpu.reason
    assert on_gpu.name == "triton" and "Triton 3." in on_gpu.reason


def test_a_choice_holds_inside_and_only_there() -> None:
    with backend.using("torch"):
        assert backend.resolve("cuda").name == "torch"
    with pytest.raises(ValueError, match="one of auto, triton, torch"), backend.using("cuda"):
        pass
    assert backend.resolve("cuda").name == "triton"


def test_a_dtype_without_kernels_is_refused() -> None:
    with backend.using("triton"), pytest.raises(TypeError, match="float64"):
        backend.fused(torch.zeros(1, dtype=torch.float64))


def test_without_a_sound_triton_the_package_imports_and_a_gpu_is_refused(tmp_path: Path) -> None:
    unsound = {
        "absent": "raise ModuleNotFoundError('No module named triton')",
        "empty": "",
        "without a language": "jit = cdiv = next_power_of_2 = print",
        "broken": "raise RuntimeError('0 active drivers')",
    }
    for name, source in unsound.items():
        (tmp_path / name / "triton").mkdir(parents=True)
        (tmp_path / name / "triton" / "__init__.py").write_text(source)
    names = ", ".join(f"kernels.{path.stem}" for path in sorted((ROOT / "kernels").glob("[a-z]*.py")))
    # PyTorch looks for Triton, too, and does not guard itself: it comes first, once, and then Triton is replaced.
    code = f"""
import os, sys, torch
for name in {list(unsound)}:
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    for module in [module for module in sys.modules if module.split(".")[0] == "triton"]:
        del sys.modules[module]
    sys.path.insert(0, name)
    import {names}; from kernels import backend
    assert backend.resolve("cpu").name == "torch"
    try: backend.resolve("cuda")
    except backend.UnavailableError as error: print(f"{{name}}: {{error}}", flush=True)
    os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    for name in unsound:
        assert f"{name}: the kernels need Triton on a GPU" in done.stdout, done.stderr
