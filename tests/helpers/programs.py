"""Finds programs for the tests on the system, or unpacks them from Debian's packages without installing."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "programs"  # in the environment, so that all test runs share one download
SYSTEM = f"{os.environ['PATH']}:/usr/sbin"
PACKAGES = {  # program: the package that holds it, and others that it needs and that a machine may lack
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "amtool": "prometheus-alertmanager",
    "prometheus-alertmanager": "prometheus-alertmanager",
    "prometheus-pushgateway": "prometheus-pushgateway",
    "prometheus-node-exporter": "prometheus-node-exporter",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server libwrap0",
    "pdsh": "pdsh libgenders0",
    "slurmctld-wlm": "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2 libhwloc15",
}


def program(name: str) -> str:
    """The path of a program of PACKAGES. Skips the test if neither the machine nor apt has it."""
    unpacked = f"{FOLDER}/usr/bin:{FOLDER}/usr/sbin"
    found = shutil.which(name, path=SYSTEM) or shutil.which(name, path=unpacked)
    if found is None:
        reason = _unpack(PACKAGES[name])
        found = shutil.which(name, path=unpacked)
        if found is None:
            pytest.skip(f"no {name} here, and apt-get does not bring it: {reason}")
    return found


def _unpack(packages: str) -> str:
    """Download packages as any user may, and unpack them into FOLDER; returns the reason if that fails."""
    lists, cache = FOLDER / "lists", FOLDER / "cache"  # the system's lists may be missing, old, or unreadable
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    cache.mkdir(exist_ok=True)
    apt = ["apt-get", "--quiet", "-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}"]
    unpack = ["sh", "-e", "-c", f"for each in {packages}; do dpkg-deb -x ${{each}}_*.deb .; done"]
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other test processes may download it, too
        for command in ([*apt, "update"], [*apt, "download", *packages.split()], unpack):
            try:
                done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=300)
            except (OSError, subprocess.TimeoutExpired) as error:
                return str(error)
            if done.returncode != 0:
                return " ".join(done.stderr.split())[-300:]
    return "the package does not hold it"
