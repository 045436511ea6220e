"""Wheels for a host without network: made-up packages, collected by pip from a folder, then installed offline."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest

from deploy.wheels import WheelsError, misjudged, pip_options, read_lock
from tests.helpers import ranks

pytestmark = pytest.mark.slow


def make_wheel(folder: Path, file: str, *needs: str) -> Path:
    """A wheel with one module of its package's name, and what it needs."""
    name, version = file.split("-")[:2]
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(
        f"Requires-Dist: {n}\n" for n in needs
    )
    metadata += "".join(f"Provides-Extra: {extra}\n" for extra in re.findall(r'extra == "(\w+)"', metadata))
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / file, "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n")
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(
            f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {file[:-4].split('-', 2)[2]}\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return folder / file


def collect(folder: Path, *arguments: str, index: Path) -> subprocess.CompletedProcess[str]:
    """The command, with a folder for an index and no other."""
    environ = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "PYTHONPATH": str(ranks.ROOT),
    }
    begin = [sys.executable, "-m", "deploy.wheels", "--platform", "manylinux_2_28_x86_64", "--lock", "lock.txt"]
    command = [*begin, "--out", "wheels", *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | environ, capture_output=True, text=True, timeout=300)


def test_a_wheel_for_an_older_glibc_or_any_machine_fits_and_no_other(tmp_path: Path) -> None:
    fits = [
        *("cp312-cp312-manylinux_2_28_x86_64", "cp312-cp312-manylinux_2_17_x86_64", "py3-none-any"),
        *("cp39-abi3-linux_x86_64", "cp312-abi3-manylinux2014_x86_64", "py3-none-manylinux1_x86_64"),
        "cp310-abi3-manylinux_2_27_x86_64",
    ]
    not_ours = [
        *("cp311-cp311-manylinux_2_28_x86_64", "cp312-cp312-manylinux_2_31_x86_64", "cp313-abi3-manylinux_2_28_x86_64"),
        *("cp312-cp312-manylinux_2_28_aarch64", "cp312-cp312-macosx_11_0_arm64", "cp312-cp312-musllinux_1_2_x86_64"),
    ]
    wanted = [f"fits{number}-1-{tag}.whl" for number, tag in enumerate(fits)]
    wanted += [f"other{number}-1-py3-none-any.whl" for number in range(len(not_ours))]
    for name in [*wanted, *(f"other{number}-2-{tag}.whl" for number, tag in enumerate(not_ours))]:
        make_wheel(tmp_path / "index", name)
    (tmp_path / "lock.txt").write_text("".join(f"{name.partition('-')[0]}\n" for name in wanted))
    done = collect(tmp_path, "--python", "3.12", index=tmp_path / "index")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "wheels").glob("*.whl")) == sorted(wanted)


@pytest.mark.parametrize(
    ("python", "platform"),
    [
        ("312", "manylinux_2_28_x86_64"),
        ("3.12", "manylinux2014_x86_64"),
        ("3.12", "win_amd64"),
        ("3.12", "manylinux_2_28_mips"),
    ],
)
def test_a_host_that_is_not_understood_is_refused(python: str, platform: str) -> None:
    with pytest.raises(WheelsError, match=r"^--p(ython|latform) is .*: give "):
        pip_options(python, platform)


def wheel(folder: Path, name: str, *needs: str) -> Distribution:
    (found,) = distributions(path=[str(make_wheel(folder, f"{name}-1-py3-none-any.whl", *needs))])
    return found


def test_a_condition_that_differs_on_the_host_is_named(tmp_path: Path) -> None:
    python = "{}.{}".format(*sys.version_info)
    torch = wheel(tmp_path, "torch", 'always; sys_platform == "linux"', 'never; python_version < "3.9"', "extra[some]")
    arm = 'arm; platform_machine == "aarch64"'
    extra = wheel(
        tmp_path, "extra", f'{arm} and extra == "other"', f'{arm} and extra == "some"', 'new; python_version == "3.99"'
    )
    assert misjudged([torch, extra], python, platform.machine()) == []
    assert misjudged([torch, extra], "3.98", platform.machine()) == []
    assert misjudged([torch, extra], "3.99", "x86_64") == ['extra needs new; python_version == "3.99"']
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[platform.machine()]
    assert misjudged([torch, extra], python, other) == [f'extra needs {arm} and extra == "some"']


def test_what_is_excluded_must_be_in_the_lock() -> None:
    text = "# all\nTorch==2.13.0\nnumpy==2.4.6\n"
    assert [str(line) for line in read_lock(text, ["torch"])] == ["numpy==2.4.6"]
    with pytest.raises(WheelsError, match="--exclude names tork, not in requirements.lock: correct the name"):
        read_lock(text, ["tork"])
    with pytest.raises(WheelsError, match="--exclude needs torch: "):
        read_lock(text, ["numpy"])


def test_from_an_index_to_an_installation_without_network(tmp_path: Path) -> None:
    """Collects the lock's packages and, in two rounds, what they need besides; nothing for another host."""
    index = tmp_path / "index"
    make_wheel(
        index, "alpha-1.0-cp312-cp312-manylinux_2_28_x86_64.whl", "beta[more]>=2", 'never; python_version < "3.9"'
    )
    make_wheel(index, "alpha-1.0-cp311-cp311-manylinux_2_28_x86_64.whl")
    make_wheel(index, "beta-2.0-py3-none-manylinux_2_27_x86_64.whl", 'gamma==3.*; extra == "more"')
    for version in ("3.0", "4.0"):
        make_wheel(index, f"gamma-{version}-py3-none-any.whl")
    (tmp_path / "lock.txt").write_text("alpha==1.0\n")

    done = collect(tmp_path, "--python", "3.12", index=index)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "wheels"
    assert sorted(path.name for path in folder.iterdir()) == [
        "alpha-1.0-cp312-cp312-manylinux_2_28_x86_64.whl",
        "beta-2.0-py3-none-manylinux_2_27_x86_64.whl",
        "gamma-3.0-py3-none-any.whl",
        "requirements.txt",
    ]
    assert len((folder / "requirements.txt").read_text().splitlines()) == 3

    # the command that it prints, except for the target folder, and for a host that is not this one
    command = done.stdout.splitlines()[-1].split()
    command[0:1] = [sys.executable, "-m", "pip"]
    command += ["--quiet", "--target", "site", *pip_options("3.12", "manylinux_2_28_x86_64")]
    installed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert installed.returncode == 0, installed.stderr
    assert {path.stem for path in (tmp_path / "site").glob("*.py")} == {"alpha", "beta", "gamma"}
    make_wheel(folder, "gamma-3.0-py3-none-any.whl", "altered")
    altered = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert altered.returncode != 0 and "THESE PACKAGES DO NOT MATCH THE HASHES" in altered.stderr

    again = collect(tmp_path, "--python", "3.12", index=index)
    assert again.returncode == 2
    assert again.stderr == "deploy.wheels: error: wheels already exists: name a new folder, or remove this one\n"


def test_what_the_host_has_is_not_collected(tmp_path: Path) -> None:
    make_wheel(tmp_path / "index", "alpha-1.0-py3-none-any.whl", "torch")
    (tmp_path / "lock.txt").write_text("alpha==1.0\nTorch==2.13.0\n")
    done = collect(tmp_path, "--python", "3.12", "--exclude", "torch", index=tmp_path / "index")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "wheels").glob("*.whl")] == ["alpha-1.0-py3-none-any.whl"]


def test_a_folder_that_would_not_be_whole_does_not_come_to_be(tmp_path: Path) -> None:
    index = tmp_path / "index"
    make_wheel(index, "alpha-1.0-py3-none-any.whl", "beta==1")
    make_wheel(index, "beta-2.0-py3-none-any.whl")
    (tmp_path / "lock.txt").write_text("alpha==1.0\nbeta==2.0\n")
    done = collect(tmp_path, "--python", "3.12", index=index)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "deploy.wheels: error: pip download: ERROR: Cannot install alpha==1.0 and beta==2.0 because "
    )
    (tmp_path / "lock.txt").write_text("alpha==1.0\nmissing==1\n")
    done = collect(tmp_path, "--python", "3.12", index=index)
    assert done.returncode == 2 and "No matching distribution found for missing==1" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "lock.txt"]
