"""Wheels for a host without network: made-up packages, collected by pip from a folder, then installed offline."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import ranks
from packaging.requirements import Requirement

from deploy.wheels import Target, Wheel, WheelsError, needed, problems, read_lock, read_target, read_wheel

pytestmark = pytest.mark.slow

HOST = Target((3, 12), "x86_64", 28)


def make_wheel(folder: Path, file: str, *needs: str) -> Path:
    """A wheel with one module of its package's name, and what it needs."""
    name, version = file.split("-")[:2]
    folder.mkdir(exist_ok=True)
    told = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(
        f"Requires-Dist: {n}\n" for n in needs
    )
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / file, "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n")
        archive.writestr(f"{info}/METADATA", told)
        archive.writestr(
            f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {file[:-4].split('-', 2)[2]}\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return folder / file


def made(folder: Path, **wheels: list[str]) -> list[Wheel]:
    """Wheels that fit, named ``name_version``, as "torch_2_13" of 2.13, with their needs."""
    found = []
    for word, needs in wheels.items():
        name, _, version = word.partition("_")
        found.append(read_wheel(make_wheel(folder, f"{name}-{version.replace('_', '.')}-py3-none-any.whl", *needs)))
    return found


def lock(*lines: str) -> list[Requirement]:
    return [Requirement(line) for line in lines]


def collect(folder: Path, *arguments: str, index: Path) -> subprocess.CompletedProcess[str]:
    """The command, with a folder for an index and no other."""
    told = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "PYTHONPATH": str(ranks.ROOT),
    }
    begin = [sys.executable, "-m", "deploy.wheels", "--platform", "manylinux_2_28_x86_64", "--lock", "lock.txt"]
    command = [*begin, "--out", "wheels", *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | told, capture_output=True, text=True, timeout=300)


def test_a_wheel_for_an_older_glibc_or_any_machine_fits_and_no_other() -> None:
    fits = [
        *(
            "cp312-cp312-manylinux_2_28_x86_64",
            "cp312-cp312-manylinux_2_17_x86_64",
            "py3-none-any",
            "cp39-abi3-linux_x86_64",
        ),
        *("cp312-abi3-manylinux2014_x86_64", "py3-none-manylinux1_x86_64", "cp310-abi3-manylinux_2_27_x86_64"),
    ]
    not_ours = [
        *("cp311-cp311-manylinux_2_28_x86_64", "cp312-cp312-manylinux_2_31_x86_64", "cp313-abi3-manylinux_2_28_x86_64"),
        *("cp312-cp312-manylinux_2_28_aarch64", "cp312-cp312-macosx_11_0_arm64", "cp312-cp312-musllinux_1_2_x86_64"),
    ]
    names = {str(tag) for tag in HOST.tags}
    assert names >= set(fits)
    assert not names & set(not_ours)


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
        read_target(python, platform)


def test_conditions_are_asked_about_the_host_not_about_this_machine(tmp_path: Path) -> None:
    arm = Target((3, 12), "aarch64", 28)
    wheels = made(
        tmp_path,
        torch_1=[
            *('old; python_version < "3.12"', 'other; sys_platform == "win32"', 'choice; extra == "choice"'),
            *('cuda; platform_machine == "x86_64"', 'sve; platform_machine == "aarch64"'),
        ],
    )
    assert set(needed(lock("torch==1"), wheels, HOST)) == {"torch", "cuda"}
    assert set(needed(lock("torch==1"), wheels, arm)) == {"torch", "sve"}


def test_what_is_needed_is_followed_through_extras(tmp_path: Path) -> None:
    wheels = made(
        tmp_path, torch_1=["toolkit[blas]==13"], toolkit_13=['cu-blas==2; extra == "blas"', 'fft; extra == "fft"']
    )
    found = needed(lock("torch==1"), wheels, HOST)
    assert set(found) == {"torch", "toolkit", "cu-blas"}
    assert problems(lock("torch==1"), wheels, HOST, set()) == ["cu-blas is missing (toolkit 13)"]
    assert problems(lock("torch==1"), wheels, HOST, {"cu-blas"}) == []


def test_each_thing_that_is_wrong_is_named(tmp_path: Path) -> None:
    wheels = [
        *made(tmp_path, torch_2_13=["triton==3.7.1", "gone"], triton_3_9=[]),
        read_wheel(make_wheel(tmp_path, "numpy-2.4-cp311-cp311-manylinux_2_28_x86_64.whl")),
    ]
    assert problems(lock("torch==2.13", "triton==3.9", "numpy==2.5", "yaml==6"), wheels, HOST, set()) == [
        "numpy-2.4-cp311-cp311-manylinux_2_28_x86_64.whl does not fit the platform",
        "gone is missing (torch 2.13)",
        "requirements.lock needs numpy==2.5, not 2.4",
        "torch 2.13 needs triton==3.7.1, not 3.9",
        "yaml is missing (requirements.lock)",
    ]


def test_a_build_of_a_version_is_that_version(tmp_path: Path) -> None:
    wheels = [read_wheel(make_wheel(tmp_path, "torch-2.13.0+cpu-py3-none-any.whl"))]
    assert problems(lock("torch==2.13.0"), wheels, HOST, set()) == []


def test_what_is_excluded_must_be_in_the_lock() -> None:
    text = "# all\nTorch==2.13.0\nnumpy==2.4.6\n"
    assert [str(line) for line in read_lock(text, ["torch"])] == ["numpy==2.4.6"]
    with pytest.raises(WheelsError, match="--exclude names tork, not in requirements.lock: correct the name"):
        read_lock(text, ["tork"])


def test_a_file_that_is_no_wheel_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch-1-py3-none-any.whl").write_text("<html>")
    with pytest.raises(WheelsError, match=r"torch-1-py3-none-any\.whl is not a readable wheel: "):
        read_wheel(tmp_path / "torch-1-py3-none-any.whl")


def test_from_an_index_to_an_installation_without_network(tmp_path: Path) -> None:
    """Collects the lock's packages and, in two rounds, what they need besides; nothing for another host."""
    index = tmp_path / "index"
    make_wheel(
        index, "alpha-1.0-cp312-cp312-manylinux_2_28_x86_64.whl", "beta[more]>=2", 'never; python_version < "3.12"'
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
        "SHA256SUMS",
        "alpha-1.0-cp312-cp312-manylinux_2_28_x86_64.whl",
        "beta-2.0-py3-none-manylinux_2_27_x86_64.whl",
        "gamma-3.0-py3-none-any.whl",
        "requirements.txt",
    ]
    for line in (folder / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest

    # the command that it prints, except for the target folder, and for a host that is not this one
    command = done.stdout.splitlines()[-1].split()
    command[0:1] = [sys.executable, "-m", "pip"]
    command += ["--quiet", "--target", "site", "--only-binary=:all:", "--python-version=3.12"]
    command += [f"--platform={name}" for name in HOST.platforms]
    installed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert installed.returncode == 0, installed.stderr
    assert {path.stem for path in (tmp_path / "site").glob("*.py")} == {"alpha", "beta", "gamma"}
    make_wheel(folder, "gamma-3.0-py3-none-any.whl", "altered")
    altered = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert altered.returncode != 0 and "THESE PACKAGES DO NOT MATCH THE HASHES" in altered.stderr

    again = collect(tmp_path, "--python", "3.12", index=index)
    assert again.returncode == 2
    assert again.stderr == "wheels: error: wheels already exists: name a new folder, or remove this one\n"


def test_a_folder_that_would_not_be_whole_does_not_come_to_be(tmp_path: Path) -> None:
    index = tmp_path / "index"
    make_wheel(index, "alpha-1.0-py3-none-any.whl", "beta==1")
    make_wheel(index, "beta-2.0-py3-none-any.whl")
    (tmp_path / "lock.txt").write_text("alpha==1.0\nbeta==2.0\n")
    done = collect(tmp_path, "--python", "3.12", index=index)
    assert done.returncode == 2
    assert done.stderr == "wheels: error: alpha 1.0 needs beta==1, not 2.0\n"
    (tmp_path / "lock.txt").write_text("alpha==1.0\nmissing==1\n")
    done = collect(tmp_path, "--python", "3.12", index=index)
    assert done.returncode == 2 and "No matching distribution found for missing==1" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "lock.txt"]
