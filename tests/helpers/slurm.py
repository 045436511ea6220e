"""A small Slurm over the hosts of :mod:`sshd`: munged and slurmctld on the first, slurmd on each.

Everything runs as root, keeps its state in the site's folder, and reads nothing from /etc.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.launches import Site
from tests.helpers.programs import FOLDER, SYSTEM, program
from tests.helpers.sshd import wait_for

PATIENCE = 60.0  # seconds
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")
CONFIG = """
ClusterName=lambert
SlurmctldHost={names[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=30
MessageTimeout=10
ReturnToService=2
SchedulerParameters=sched_interval=2,batch_sched_delay=0
SlurmctldDebug=info
SlurmdDebug=info
GresTypes=gpu
NodeName={names[0]},{names[1]} CPUs=4 RealMemory=1000 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
GPUS = "Name=gpu File={folder}/gpu[0-1]\n"  # files in place of devices: only the assignment to tasks matters here


def fetch_slurm() -> None:
    """Unpack Slurm if it is not installed, before hosts are booted: they find what is unpacked by then.

    Skips the test if apt does not have it.
    """
    if any(shutil.which(name, path=SYSTEM) is None for name in PROGRAMS):
        program("slurmctld-wlm")
        for name in ("slurmctld", "slurmd", "slurmstepd"):  # as the packages' installation would
            with contextlib.suppress(FileExistsError):
                (FOLDER / "usr/sbin" / name).symlink_to(f"{name}-wlm")


@contextlib.contextmanager
def slurm(site: Site) -> Iterator[None]:
    """Run Slurm until the block ends. Skips the test if Slurm is neither installed nor unpacked: see `fetch_slurm`."""
    for name in PROGRAMS:
        if shutil.which(name, path=f"{SYSTEM}:{FOLDER}/usr/bin:{FOLDER}/usr/sbin") is None:
            pytest.skip(f"no {name} here: install slurmctld, slurmd, slurm-client and munge")
    folder, environ = site.folder, site.environ()
    names = [host.name for host in site.hosts]
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, names=names))
    (folder / "gres.conf").write_text(GPUS.format(folder=folder))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    for number in range(2):
        (folder / f"gpu{number}").touch()
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    munge = ["munged", "--foreground", "--force", "--socket", f"{folder}/munge.socket"]
    munge += ["--key-file", f"{folder}/munge.key", "--pid-file", f"{folder}/munge.pid"]
    munge += ["--log-file", f"{folder}/munge.log", "--seed-file", f"{folder}/munge.seed"]
    commands = [(0, munge), (0, ["slurmctld", "-D"]), (0, ["slurmd", "-D"]), (1, ["slurmd", "-D"])]
    with contextlib.ExitStack() as stack:
        for number, words in commands:
            log = stack.enter_context((folder / f"{words[0]}-{number}.log").open("w"))
            command = site.hosts[number].command(words, folder, environ)
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(process.wait)
            stack.callback(process.kill)
            if words[0] == "munged":
                _require(wait_for((folder / "munge.socket").exists), folder)
        ready = wait_for(lambda: ask(site, "sinfo", "--noheader", "-o", "%t %D") == "idle 2", PATIENCE)
        _require(ready, folder)
        yield


def ask(site: Site, *words: str) -> str:
    """The output of a Slurm command on the first host; empty if it fails."""
    environ = site.environ()
    command = site.hosts[0].command(list(words), site.folder, environ)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _require(holds: bool, folder: Path) -> None:
    assert holds, "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in folder.glob("*.log"))
