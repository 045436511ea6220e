"""Every kernel compiles for an H100, where there is no GPU either: the interpreter takes what the compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ROOT


@pytest.mark.parametrize(("which", "kernels"), [("attention", 10), ("rows", 20), ("optimizers", 12)])
def test_kernels_compile_for_an_h100(which: str, kernels: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "compile_kernels.py", which],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.split()) == kernels
