"""What an image installs: python3 docker/requirements.py names|pins, in the folder of pyproject.toml.

names    what Lambert needs, as pyproject.toml says
pins     the lines of requirements.lock whose package is not installed here: pip's constraints. What a base image
         brings stays as it is, and what it lacks comes in the version that Lambert was tested with
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path


def names(pyproject: str) -> list[str]:
    """The requirements of a pyproject.toml."""
    return list(tomllib.loads(pyproject)["project"]["dependencies"])


def pins(lock: str, installed: Iterable[str]) -> list[str]:
    """The lines ``name==version`` of a lock whose package is not among the installed."""
    there = {normal(name) for name in installed}
    lines = [line for line in lock.splitlines() if line and not line.startswith("#")]
    return [line for line in lines if normal(line.partition("==")[0]) not in there]


def normal(name: str) -> str:
    """A package's name as all its spellings are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main(arguments: list[str]) -> int:
    """Print the list that is asked for; returns the exit code."""
    match arguments:
        case ["names"]:
            print(*names(Path("pyproject.toml").read_text(encoding="utf-8")), sep="\n")
        case ["pins"]:
            installed = [distribution.metadata["Name"] for distribution in distributions()]
            print(*pins(Path("requirements.lock").read_text(encoding="utf-8"), installed), sep="\n")
        case _:
            print("requirements: error: say names or pins", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
