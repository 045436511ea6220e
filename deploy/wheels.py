"""Collects wheels for a host without network: python -m deploy.wheels --python 3.12 --platform P --out wheels

It fetches every package of requirements.lock as a wheel for the given Python and platform, and the dependencies that
the lock does not list, such as PyTorch's CUDA libraries. This machine's own Python does not matter. Then it checks the
folder: every dependency of every wheel, as evaluated on that host, must be in the folder and match. It also writes

    requirements.txt    every wheel with its hash, which pip checks
    SHA256SUMS          for `sha256sum --check` after copying

The folder is created only if every check passes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from email.parser import HeaderParser
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

LOCK = Path(__file__).resolve().parent.parent / "requirements.lock"
SOURCES = ("deepspeed",)  # no wheel on the index: built here, identical for every platform
LEGACY = {  # older names of some manylinux tags, by glibc minor version
    "x86_64": {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"},
    "aarch64": {17: "manylinux2014"},
}
ROUNDS = 5  # of resolving dependencies: PyTorch needs cuda-toolkit, which needs nvidia-cublas, and so on


class WheelsError(RuntimeError):
    """The folder of wheels cannot be completed; the message says why, in one line."""


@dataclass(frozen=True)
class Target:
    """The host that installs: its Python, its processor and its minimum glibc."""

    python: tuple[int, int]
    machine: str
    glibc: int  # the 28 of 2.28

    @cached_property
    def platforms(self) -> list[str]:
        """Its platform tags, newest first; a wheel for an older glibc fits too."""
        names = []
        for minor in range(self.glibc, 4, -1):
            names.append(f"manylinux_2_{minor}_{self.machine}")
            if minor in LEGACY[self.machine]:
                names.append(f"{LEGACY[self.machine][minor]}_{self.machine}")
        return [*names, f"linux_{self.machine}"]

    @cached_property
    def tags(self) -> set[Tag]:
        """The tags of wheels that fit."""
        interpreter = "cp{}{}".format(*self.python)
        own = cpython_tags(self.python, platforms=self.platforms)
        return {*own, *compatible_tags(self.python, interpreter, self.platforms)}

    @property
    def environment(self) -> dict[str, str]:
        """The environment that requirement markers are evaluated in."""
        version = "{}.{}".format(*self.python)
        return {
            **{
                "python_version": version,
                "python_full_version": f"{version}.0",
                "implementation_version": f"{version}.0",
            },
            **{"implementation_name": "cpython", "platform_python_implementation": "CPython", "os_name": "posix"},
            **{"sys_platform": "linux", "platform_system": "Linux", "platform_machine": self.machine},
            **{"platform_release": "", "platform_version": ""},
        }


@dataclass(frozen=True)
class Wheel:
    """A wheel: the parts of its file name, and its dependencies."""

    path: Path
    name: str
    version: Version
    tags: frozenset[Tag]
    needs: tuple[Requirement, ...]


def read_target(python: str, platform: str) -> Target:
    """Parse a target such as ("3.12", "manylinux_2_28_x86_64"). Raises WheelsError."""
    version, place = re.fullmatch(r"3\.(\d+)", python), re.fullmatch(r"manylinux_2_(\d+)_(\w+)", platform)
    if version is None:
        raise WheelsError(f"--python is {python!r}: give a version such as 3.12")
    if place is None or place[2] not in LEGACY:
        raise WheelsError(f"--platform is {platform!r}: give manylinux_2_N_x86_64 or manylinux_2_N_aarch64")
    return Target((3, int(version[1])), place[2], int(place[1]))


def read_wheel(path: Path) -> Wheel:
    """Read a wheel's metadata. Raises WheelsError if the file is not a wheel."""
    try:
        name, version, _, tags = parse_wheel_filename(path.name)
        with zipfile.ZipFile(path) as archive:
            (member,) = (entry for entry in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", entry))
            told = HeaderParser().parsestr(archive.read(member).decode("utf-8"))
        needs = tuple(map(Requirement, told.get_all("Requires-Dist", [])))
    except (ValueError, zipfile.BadZipFile, InvalidRequirement) as error:
        raise WheelsError(f"{path.name} is not a readable wheel: {error}") from None
    return Wheel(path, canonicalize_name(name), version, tags, needs)


def read_lock(text: str, exclude: Iterable[str]) -> list[Requirement]:
    """Parse a lock, without the excluded packages. Raises WheelsError if the lock does not list an excluded one."""
    requirements = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    left_out = {canonicalize_name(name) for name in exclude}
    if unknown := left_out - {canonicalize_name(requirement.name) for requirement in requirements}:
        raise WheelsError(f"--exclude names {', '.join(sorted(unknown))}, not in requirements.lock: correct the name")
    return [requirement for requirement in requirements if canonicalize_name(requirement.name) not in left_out]


def needed(
    lock: list[Requirement], wheels: Iterable[Wheel], target: Target
) -> dict[str, list[tuple[Requirement, str]]]:
    """Map each package that must be present to its requirements and who states them, following the given wheels."""
    there = {wheel.name: wheel for wheel in wheels}
    found: dict[str, list[tuple[Requirement, str]]] = {}
    done: set[tuple[str, str]] = set()
    waiting = [(requirement, "requirements.lock") for requirement in lock]
    while waiting:
        requirement, by = waiting.pop()
        name = canonicalize_name(requirement.name)
        found.setdefault(name, []).append((requirement, by))
        for extra in ("", *sorted(requirement.extras)):
            if name not in there or (name, extra) in done:
                continue
            done.add((name, extra))
            around = target.environment | {"extra": extra}
            for need in there[name].needs:
                if need.marker is None or need.marker.evaluate(around):
                    waiting.append((need, f"{name} {there[name].version}"))
    return found


def problems(lock: list[Requirement], wheels: list[Wheel], target: Target, exclude: set[str]) -> list[str]:
    """List what the folder lacks for the host; empty if complete. ``exclude``: canonical names that the host has."""
    there = {wheel.name: wheel for wheel in wheels}
    found = [f"{wheel.path.name} does not fit the platform" for wheel in wheels if not wheel.tags & target.tags]
    for name, reasons in sorted(needed(lock, wheels, target).items()):
        if name in exclude:
            continue
        for requirement, by in reasons:
            if name not in there:
                found.append(f"{name} is missing ({by})")
                break
            if not requirement.specifier.contains(there[name].version, prereleases=True):
                found.append(f"{by} needs {name}{requirement.specifier}, not {there[name].version}")
    return found


def collect(lock: list[Requirement], folder: Path, target: Target, options: argparse.Namespace) -> list[Wheel]:
    """Download the lock's wheels into a folder, then, in rounds, the dependencies that the lock does not list."""
    exclude = {canonicalize_name(name) for name in options.exclude}
    built = [str(need) for need in lock if canonicalize_name(need.name) in SOURCES]
    wanted = [str(need) for need in lock if canonicalize_name(need.name) not in SOURCES]
    pip("wheel", built, folder, ["--no-build-isolation"])  # isolation would download another PyTorch just to inspect it
    only = ["--only-binary=:all:", "--implementation=cp", "--python-version={}.{}".format(*target.python)]
    only += [f"--platform={name}" for name in target.platforms]
    only += [f"--extra-index-url={options.torch_index}"] if options.torch_index else []
    for _ in range(ROUNDS):
        pip("download", wanted, folder, only)
        wheels = [read_wheel(path) for path in sorted(folder.glob("*.whl"))]
        there = {wheel.name for wheel in wheels} | exclude
        wanted = [
            name + str(together([requirement for requirement, _ in reasons]))
            for name, reasons in sorted(needed(lock, wheels, target).items())
            if name not in there
        ]
        if not wanted:
            break
    return wheels


def together(requirements: list[Requirement]) -> str:
    """Join all version specifiers of one package."""
    return ",".join(sorted({str(requirement.specifier) for requirement in requirements} - {""}))


def pip(command: str, requirements: list[str], folder: Path, options: list[str]) -> None:
    """Put wheels of exactly these requirements into the folder. Raises WheelsError with pip's own error."""
    if not requirements:
        return
    begin = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", command, "--no-deps", *options]
    place = ["--dest" if command == "download" else "--wheel-dir", str(folder)]
    done = subprocess.run(
        [*begin, *place, *requirements],
        env=os.environ | {"DS_BUILD_OPS": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or done.stderr.splitlines()
        raise WheelsError(f"pip {command}: {' '.join(errors)[-600:]}")


def write_lists(wheels: list[Wheel], folder: Path) -> None:
    """Write requirements.txt and SHA256SUMS."""
    sums = {wheel: file_sha256(wheel.path) for wheel in wheels}
    pinned = [f"{wheel.name}=={wheel.version} --hash=sha256:{sums[wheel]}\n" for wheel in wheels]
    (folder / "requirements.txt").write_text("".join(pinned), encoding="utf-8")
    lines = [f"{sums[wheel]}  {wheel.path.name}\n" for wheel in wheels]
    lines.append(f"{file_sha256(folder / 'requirements.txt')}  requirements.txt\n")
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def file_sha256(path: Path) -> str:
    """Return a file's sha256 as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run(options: argparse.Namespace) -> str:
    """Collect and check the wheels, then move the folder into place. Returns install steps. Raises WheelsError."""
    target = read_target(options.python, options.platform)
    out: Path = options.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise WheelsError(f"{out} already exists: name a new folder, or remove this one")
    lock = read_lock(options.lock.read_text(encoding="utf-8"), options.exclude)
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        wheels = collect(lock, folder, target, options)
        if found := problems(lock, wheels, target, {canonicalize_name(name) for name in options.exclude}):
            raise WheelsError("; ".join(found))
        write_lists(wheels, folder)
        folder.chmod(0o755)
        folder.replace(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # still there only after a failure
    size = sum(path.stat().st_size for path in out.iterdir())
    python = f"python{options.python}"
    return (
        f"{len(wheels)} wheels, {size / 1e6:.0f} MB. On the host, in a virtual environment of {python}:\n"
        f"    (cd {out} && sha256sum --check --quiet SHA256SUMS)\n"
        f"    pip install --no-index --no-deps --find-links {out} --requirement {out}/requirements.txt"
    )


class Parser(argparse.ArgumentParser):
    """Reports errors in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"wheels: error: {message}; see {self.prog} --help\n")


def main() -> int:
    """Run the command line; returns the exit code."""
    about = "Collect wheels for a host without network."
    parser = Parser(prog="python -m deploy.wheels", description=about, allow_abbrev=False)
    parser.add_argument("--python", required=True, metavar="3.12", help="the host's Python version")
    parser.add_argument("--platform", required=True, metavar="manylinux_2_28_x86_64", help="its glibc and processor")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="the folder to create")
    parser.add_argument("--torch-index", metavar="URL", help="an additional index, for another build of PyTorch")
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="NAME", help="package the host has; repeatable"
    )
    parser.add_argument("--lock", type=Path, default=LOCK, help=argparse.SUPPRESS)
    try:
        print(run(parser.parse_args()))
    except (WheelsError, OSError) as error:  # OSError: for example a folder without write permission
        print(f"wheels: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
