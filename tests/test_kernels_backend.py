"""The backend says what runs, and tells NVIDIA Apex from the package that has its name on PyPI."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels import backend


def test_the_backend_is_torch_and_says_why() -> None:
    found = backend.resolve()
    assert found.name == "torch" and "PyTorch" in found.reason


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("apex/normalization/fused_layer_norm.py", "NVIDIA Apex"),
        ("apex/interfaces.py", "an unrelated package"),
        ("apex.py", "an unrelated package"),
    ],
)
def test_apex_is_looked_at_and_not_imported(
    file: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert backend.apex().startswith(said)
