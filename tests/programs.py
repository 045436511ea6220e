"""Prometheus and its companions for the tests: from the PATH, else from Debian's packages, without installing them."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "programs"  # of the environment, so that one download serves all runs of the tests
PACKAGES = {
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "amtool": "prometheus-alertmanager",
    "prometheus-alertmanager": "prometheus-alertmanager",
    "prometheus-pushgateway": "prometheus-pushgateway",
    "prometheus-node-exporter": "prometheus-node-exporter",
}


def program(name: str) -> str:
    """The path of a program of PACKAGES. Skips the test where neither the machine nor apt has it."""
    found = shutil.which(name) or shutil.which(name, path=str(FOLDER / "usr/bin"))
    if found is None:
        reason = _unpack(PACKAGES[name])
        found = shutil.which(name, path=str(FOLDER / "usr/bin"))
        if found is None:
            pytest.skip(f"no {name} here, and apt-get does not bring it: {reason}")
    return found


def _unpack(package: str) -> str:
    """Download a package as any user may, and unpack it into FOLDER; why not, where it cannot be."""
    lists, cache = FOLDER / "lists", FOLDER / "cache"  # the system's may be absent, old, or another user's
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    cache.mkdir(exist_ok=True)
    apt = ["apt-get", "--quiet", "-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}"]
    unpack = ["sh", "-c", f"dpkg-deb -x {package}_*.deb ."]
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes of the tests want it, too
        for command in ([*apt, "update"], [*apt, "download", package], unpack):
            try:
                done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=300)
            except (OSError, subprocess.TimeoutExpired) as error:
                return str(error)
            if done.returncode != 0:
                return " ".join(done.stderr.split())[-300:]
    return "the package does not hold it"
