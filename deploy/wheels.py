"""Collects wheels for a host without network: python -m deploy.wheels --python 3.12 --platform P --out wheels

pip resolves requirements.lock for the host, together with the dependencies that the lock does not list, such as
PyTorch's CUDA libraries, and downloads one wheel of each. requirements.txt lists their hashes, which pip checks when it
installs them. The folder is created only if everything was collected.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.markers import Marker, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from data_prep.manifest import file_sha256
from data_prep.options import CommandParser

LOCK = Path(__file__).resolve().parent.parent / "requirements.lock"
SOURCES = ("deepspeed",)  # no wheel on the index: built here, identical for every platform


class WheelsError(RuntimeError):
    """The folder of wheels cannot be completed; the message says why, in one line."""


def pip_options(python: str, platform: str) -> list[str]:
    """Return the options with which pip selects wheels for a host. Raises WheelsError if it is not a valid host."""
    if not re.fullmatch(r"3\.\d+", python):
        raise WheelsError(f"--python is {python!r}: give a version such as 3.12")
    place = re.fullmatch(r"manylinux_2_(\d+)_(x86_64|aarch64)", platform)
    if place is None:
        raise WheelsError(f"--platform is {platform!r}: give manylinux_2_N_x86_64 or manylinux_2_N_aarch64")
    names = [f"manylinux_2_{minor}" for minor in range(int(place[1]), 4, -1)]  # a wheel for an older glibc fits too
    names += ["manylinux2014", "linux"]
    return [
        *("--only-binary=:all:", "--implementation=cp", f"--python-version={python}"),
        *(f"--platform={name}_{place[2]}" for name in names),
    ]


def read_lock(text: str, exclude: Sequence[str]) -> list[Requirement]:
    """Parse a lock, without the excluded packages. Raises WheelsError if the lock does not list an excluded one."""
    requirements = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    left_out = {canonicalize_name(name) for name in exclude}
    if unknown := left_out - {canonicalize_name(requirement.name) for requirement in requirements}:
        raise WheelsError(f"--exclude names {', '.join(sorted(unknown))}, not in requirements.lock: correct the name")
    if left_out and "torch" not in left_out:
        raise WheelsError("--exclude needs torch: only PyTorch has dependencies that requirements.lock does not list")
    return [requirement for requirement in requirements if canonicalize_name(requirement.name) not in left_out]


def misjudged(wheels: Sequence[Distribution], python: str, machine: str) -> list[str]:
    """List the dependencies that differ between this machine and the host: pip resolves them for this machine."""
    here = {str(key): str(value) for key, value in default_environment().items()}
    host = here | {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": machine}
    if python != here["python_version"]:
        host |= {"python_version": python, "python_full_version": f"{python}.0"}
    needs = [(canonicalize_name(wheel.name), Requirement(text)) for wheel in wheels for text in wheel.requires or ()]
    extras = defaultdict[str, set[str]](lambda: {""})
    for _, need in needs:
        extras[canonicalize_name(need.name)] |= need.extras

    def differs(marker: Marker, extra: str) -> bool:
        return marker.evaluate(here | {"extra": extra}) != marker.evaluate(host | {"extra": extra})

    return [
        f"{name} needs {need}"
        for name, need in needs
        if need.marker and any(differs(need.marker, extra) for extra in extras[name])
    ]


def pip(command: str, options: Sequence[str], requirements: Sequence[Requirement]) -> None:
    """Run pip. Raises WheelsError with pip's own error."""
    begin = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", command, *options]
    done = subprocess.run(
        [*begin, *map(str, requirements)],
        env=os.environ | {"DS_BUILD_OPS": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or done.stderr.splitlines()
        raise WheelsError(f"pip {command}: {' '.join(errors)[-600:]}")


def collect(options: argparse.Namespace, folder: Path) -> list[Path]:
    """Put the wheels and requirements.txt into the folder; return the wheels. Raises WheelsError."""
    select = pip_options(options.python, options.platform)
    lock = read_lock(options.lock.read_text(encoding="utf-8"), options.exclude)
    if built := [need for need in lock if need.name in SOURCES]:
        # build isolation would download another PyTorch only to inspect it
        pip("wheel", ["--no-deps", "--no-build-isolation", f"--wheel-dir={folder}"], built)
    select += ["--no-deps"] if options.exclude else []  # the rest of the lock is complete
    select += [f"--extra-index-url={options.torch_index}"] if options.torch_index else []
    pip("download", [f"--dest={folder}", f"--find-links={folder}", *select], lock)
    paths = sorted(folder.glob("*.whl"))
    wheels = [wheel for path in paths for wheel in distributions(path=[str(path)])]
    if found := misjudged(wheels, options.python, options.platform.split("_", 3)[3]):
        raise WheelsError(f"{'; '.join(found)}: this differs on the host; run this command with the host's Python")
    pins = [f"{w.name}=={w.version} --hash=sha256:{file_sha256(p)}\n" for w, p in zip(wheels, paths, strict=True)]
    (folder / "requirements.txt").write_text("".join(pins), encoding="utf-8")
    return paths


def run(options: argparse.Namespace) -> str:
    """Collect the wheels, then move the folder into place. Returns the install command. Raises WheelsError."""
    out: Path = options.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise WheelsError(f"{out} already exists: name a new folder, or remove this one")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        wheels = collect(options, folder)
        size = sum(path.stat().st_size for path in wheels)
        folder.chmod(0o755)
        folder.replace(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # still there only after a failure
    return (
        f"{len(wheels)} wheels, {size / 1e6:.0f} MB. On the host, in a virtual environment of python{options.python}:\n"
        f"    pip install --no-index --no-deps --find-links {out} --requirement {out}/requirements.txt"
    )


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = CommandParser("python -m deploy.wheels", description="Collect wheels for a host without network.")
    parser.add_argument("--python", required=True, metavar="3.12", help="the host's Python version")
    parser.add_argument("--platform", required=True, metavar="manylinux_2_28_x86_64", help="its glibc and processor")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="the folder to create")
    parser.add_argument("--torch-index", metavar="URL", help="an additional index, for another build of PyTorch")
    text = "package that the host has, among them torch; repeatable"
    parser.add_argument("--exclude", action="append", default=[], metavar="NAME", help=text)
    parser.add_argument("--lock", type=Path, default=LOCK, help=argparse.SUPPRESS)
    try:
        print(run(parser.parse_args()))
    except (WheelsError, OSError) as error:  # OSError: for example a folder without write permission
        print(f"deploy.wheels: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
