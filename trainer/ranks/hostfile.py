"""Check the files that ``deepspeed`` reads before it starts ranks on other nodes: a host file and ``.deepspeed_env``.

If the host file is missing, ``deepspeed`` runs on one node. At a bad line it stops with a traceback, or
without the line's number. Here both are refused beforehand, with the line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from data_prep.json_text import read_text, shown
from trainer.errors import TrainerError

ENVIRONMENT = ".deepspeed_env"
LARGEST_HOSTFILE_BYTES = 1 << 22  # bytes
MOST_SLOTS = 4096  # ranks per node: at most one per GPU or, without GPUs, per core
_HOST = re.compile(r"[A-Za-z0-9][\w.:@-]*", re.ASCII)  # ssh and pdsh read a leading hyphen as an option
FORWARDED = ("MLFLOW", "PYTHON", "MV2", "UCX")  # prefixes that deepspeed passes on unasked; on GPUs also NCCL


def read_hosts(path: Path) -> dict[str, int]:
    """Read the ranks ("slots") of each host. Raises TrainerError listing every bad line, or if the file is missing."""
    hosts: dict[str, int] = {}
    problems = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        line = line.strip()
        match = re.match(r"(\S+)\s+slots=0*(\d{1,6})(?!\S)", line, re.ASCII)
        if line == "" or line.startswith("#"):
            continue
        if match is None:
            problems.append(f"line {number} is {shown(line)}: write it as `node-0 slots=8`")
        elif not _HOST.fullmatch(match[1]):
            problems.append(
                f"line {number}: {shown(match[1])} is not a host name: start with a letter or a digit, then use only "
                "letters, digits, dots, hyphens, colons, @ and _"
            )
        elif int(match[2]) > MOST_SLOTS:
            problems.append(f"line {number}: {match[1]} has {match[2]} slots: must be {MOST_SLOTS:,} or less")
        elif int(match[2]) == 0:
            problems.append(f"line {number}: {match[1]} has no slots: give it its number of GPUs, or remove the line")
        elif match[1] in hosts:
            problems.append(f"line {number}: {match[1]} is listed twice: add up its slots in one line")
        else:
            hosts[match[1]] = int(match[2])
    if not hosts and not problems:
        problems.append("it names no host: write lines like `node-0 slots=8`")
    _refuse(path, problems)
    return hosts


def read_environment(home: Path, here: Path) -> dict[str, str]:
    """Read the variables that ``deepspeed`` sets on every rank, from the files in ``home`` and ``here``; ``here`` wins.

    Raises TrainerError listing every bad line of a file.
    """
    found: dict[str, str] = {}
    for path in (home / ENVIRONMENT, here / ENVIRONMENT):
        if path.is_file():
            found |= _variables(path)
    return found


def _variables(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    problems = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        name, equals, value = line.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name.strip()):  # deepspeed does not accept comments
            problems.append(f"line {number} is {shown(line)}: write NAME=value, and no empty lines or comments")
        elif re.search(r'["$`\\]', value):
            problems.append(
                f'line {number}: {name} contains one of " $ ` \\, which a shell reads: remove it, deepspeed adds quotes'
            )
        else:
            found[name.strip()] = value.strip()
    _refuse(path, problems)
    return found


def left_behind(settings: Mapping[str, str], given: Mapping[str, str], gpus: bool) -> list[str]:
    """List this shell's settings that ``deepspeed`` does not pass on to other nodes, or passes with another value."""
    prefixes = (*FORWARDED, "NCCL") if gpus else FORWARDED
    names = [name for name in sorted(settings) if name in given or not name.startswith(prefixes)]
    return [name for name in names if given.get(name) != settings[name]]


def _read(path: Path) -> str:
    try:
        return read_text(path, LARGEST_HOSTFILE_BYTES)
    except (OSError, ValueError) as error:
        raise TrainerError(f"cannot read {path} ({error}): name an existing text file") from None


def _refuse(path: Path, problems: list[str]) -> None:
    if problems:
        raise TrainerError("\n  - ".join([f"{path}: {len(problems)} problem(s)", *problems]))
