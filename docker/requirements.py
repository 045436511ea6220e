"""Lists what an image installs: python3 docker/requirements.py names|pins, in the folder of pyproject.toml.

names    Lambert's dependencies, from pyproject.toml
pins     the lines of requirements.lock for packages that are not installed yet, as constraints for pip. Packages of
         the base image stay unchanged; missing ones get the version that Lambert was tested with
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path


def names(pyproject: str) -> list[str]:
    """Return the dependencies in a pyproject.toml."""
    return list(tomllib.loads(pyproject)["project"]["dependencies"])


def pins(lock: str, installed: Iterable[str]) -> list[str]:
    """Return the ``name==version`` lines of a lock for packages that are not installed."""
    there = {normal(name) for name in installed}
    lines = [line for line in lock.splitlines() if line and not line.startswith("#")]
    return [line for line in lines if normal(line.partition("==")[0]) not in there]


def normal(name: str) -> str:
    """Normalize a package name, so that different spellings compare equal."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main(arguments: list[str]) -> int:
    """Print the requested list; returns the exit code."""
    match arguments:
        case ["names"]:
            print(*names(Path("pyproject.toml").read_text(encoding="utf-8")), sep="\n")
        case ["pins"]:
            installed = [distribution.metadata["Name"] for distribution in distributions()]
            print(*pins(Path("requirements.lock").read_text(encoding="utf-8"), installed), sep="\n")
        case _:
            print("requirements: error: wrong arguments: give names or pins", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
