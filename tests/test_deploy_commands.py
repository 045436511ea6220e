"""The commands around a run: their mistakes take one line, and `make clean` keeps the user's runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import launch, wheels
from kernels import bench
from tests.helpers.ranks import ROOT


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["wheels", "--python", "3.12"],
            "deploy.wheels: error: the following arguments are required: --platform, --out; see ",
        ),
        (
            ["wheels", *"--py 3.12 --platform p --out o".split()],
            "deploy.wheels: error: the following arguments are required: ",
        ),
        (["bench", "--onl", "adam"], "kernels.bench: error: unrecognized arguments: --onl adam"),
        (["bench", "--only", "sgd"], "kernels.bench: error: argument --only: invalid choice: 'sgd' (choose from "),
    ],
)
def test_a_mistake_takes_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as stop:
        wheels.main() if words[0] == "wheels" else bench.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and line.startswith(message)


def test_a_file_that_is_not_there_takes_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = ["--out", str(tmp_path / "new"), "--lock", str(tmp_path / "absent")]
    monkeypatch.setattr(sys, "argv", ["wheels", "--python", "3.12", "--platform", "manylinux_2_28_x86_64", *place])
    assert wheels.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("deploy.wheels: error: ") and "absent" in line


def test_the_launchers_options_are_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launch.LaunchParser().parse_args(["--node", "1"])
    assert capsys.readouterr().err == "lambert: error: unrecognized arguments: --node 1\n"


def test_clean_keeps_what_was_trained(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("requirements.lock", "runs/first/step-1", "runs/demo/step-1", ".venv/file", ".mypy_cache/file"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, timeout=60)
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["Makefile", "requirements.lock", "runs/first/step-1"]
