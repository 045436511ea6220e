"""Starts a run on two hosts under each launcher, as a user's shell would, and follows its commands and ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers import nodes
from tests.helpers.ranks import ROOT
from tests.helpers.runs import lines
from tests.helpers.sshd import Host, command_of, hosts, inside, wait_for

PYTHON = sys.executable
BIN = Path(PYTHON).parent
TIMEOUT = 600.0  # seconds; a busy machine takes many times as long as an idle one
PORT = "29500"  # every run of a test has its own hosts
SETTINGS = {  # variables that a rank on any host needs
    "GLOO_SOCKET_IFNAME": nodes.INTERFACE,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}
TRAINER = ["-m", "trainer", "--config", "CONFIG"]
MEET = ["--master_addr", "node-0", "--master_port", PORT]
MPI = ["--mca", "btl_tcp_if_include", nodes.INTERFACE, "--mca", "oob_tcp_if_include", nodes.INTERFACE]
AS_ROOT = ["--allow-run-as-root"]  # these tests run as root; a user should not


@dataclass(frozen=True)
class Site:
    """Two hosts, and their user's working folder."""

    hosts: list[Host]
    folder: Path

    def environ(self) -> dict[str, str]:
        """The user's own variables on a host, without any that a launcher sets."""
        path = f"{self.folder}/bin:{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {"PATH": path, "HOME": str(self.folder), "SLURM_CONF": f"{self.folder}/slurm.conf"}


@contextlib.contextmanager
def site(folder: Path) -> Iterator[Site]:
    """Two hosts whose user has a host file, and the ranks' settings in the file that ``deepspeed`` reads."""
    with hosts(2, folder) as pair:
        (folder / "hostfile").write_text("".join(f"{host.name} slots=1\n" for host in pair))
        (folder / ".deepspeed_env").write_text("".join(f"{key}={value}\n" for key, value in SETTINGS.items()))
        yield Site(pair, folder)


Shell = tuple[list[str], dict[str, str]]  # words, and variables set before them


def deepspeed_pdsh() -> list[Shell]:
    """Launch with pdsh; the other host gets its variables from .deepspeed_env, and PYTHONPATH from here."""
    return [(["deepspeed", "-H", "hostfile", "--module", *TRAINER[1:]], {"PYTHONPATH": str(ROOT)})]


def deepspeed_openmpi() -> list[Shell]:
    words = ["deepspeed", "-H", "hostfile", "--launcher", "openmpi", "--launcher_args", " ".join(AS_ROOT + MPI)]
    return [([*words, "--module", *TRAINER[1:]], {"PYTHONPATH": str(ROOT)})]


def deepspeed_no_ssh() -> list[Shell]:
    words = ["deepspeed", "-H", "hostfile", "--no_ssh", *MEET, "--node_rank", "NODE", "--module", *TRAINER[1:]]
    return [(words, SETTINGS)] * 2


def torchrun() -> list[Shell]:
    words = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", "NODE", *MEET]
    return [([*words, *TRAINER], SETTINGS)] * 2


def torchrun_pet() -> list[Shell]:
    """Launch as in a pod, without any flags."""
    return [(["torchrun", *TRAINER], SETTINGS | pet())] * 2


def pet() -> dict[str, str]:
    """The environment that configures ``torchrun`` for two nodes with one rank each."""
    meet = {"PET_MASTER_ADDR": "node-0", "PET_MASTER_PORT": PORT}
    return {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "NODE"} | meet


def deploy_launch() -> list[Shell]:
    return [(["python", "-m", "deploy.launch", *TRAINER[2:]], SETTINGS | pet())] * 2


def mpirun() -> list[Shell]:
    forward = [word for name in SETTINGS for word in ("-x", name)]
    words = ["mpirun", *AS_ROOT, "-n", "2", "--hostfile", "hostfile", *MPI, *forward, PYTHON, *TRAINER]
    return [(words, SETTINGS)]


def srun() -> list[Shell]:
    """Launch with srun. Ranks end by themselves after one has, so Slurm need not kill a rank before it prints why."""
    words = ["srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=120", PYTHON, *TRAINER]
    return [(words, SETTINGS)]


LAUNCHERS: dict[str, Callable[[], list[Shell]]] = {
    "deepspeed, pdsh": deepspeed_pdsh,
    "deepspeed, openmpi": deepspeed_openmpi,
    "deepspeed, no_ssh": deepspeed_no_ssh,
    "torchrun": torchrun,
    "torchrun, PET_*": torchrun_pet,
    "deploy.launch": deploy_launch,
    "mpirun": mpirun,
    "srun": srun,  # needs the Slurm of tests/helpers/slurm.py
}


class Started:
    """A run in progress: a command on the first host, or one on each."""

    def __init__(self, site: Site, shells: list[Shell], config: Path, log: Path) -> None:
        self.site, self.folder, self.log = site, config.parent / "run", log
        self.before = {pid for host in site.hosts for pid in host.pids()}  # daemons
        self.commands: list[subprocess.Popen[str]] = []
        with log.open("w") as file:
            for number, (words, environ) in enumerate(shells):
                values = {"CONFIG": str(config), "NODE": str(number)}
                words = [values.get(word, word) for word in words]
                environ = site.environ() | {name: values.get(value, value) for name, value in environ.items()}
                command = site.hosts[number].command(words, site.folder, environ)
                self.commands.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, text=True))

    def pid(self, number: int = 0) -> int:
        """The process id of a command, for signals."""
        return inside(self.commands[number])

    def pids(self) -> list[int]:
        """The process ids of everything that was launched, on both hosts."""
        return [pid for host in self.site.hosts for pid in host.pids() if pid not in self.before]

    def ranks(self) -> list[int]:
        """The processes that train, host by host."""
        return [pid for pid in self.pids() if is_rank(pid)]

    def training(self) -> bool:
        """Whether the run has taken some steps. Fails if a command has ended."""
        assert all(command.poll() is None for command in self.commands), self.output()
        return len(lines(self.folder, "step")) > 3

    def ended(self) -> bool:
        """Whether all commands have ended."""
        return all(command.poll() is not None for command in self.commands)

    def codes(self) -> list[int]:
        """The commands' exit codes, once they have ended. Fails if they do not end."""
        assert wait_for(self.ended, TIMEOUT), self.output()
        return [int(command.returncode) for command in self.commands]

    def output(self) -> str:
        """The output of all processes so far."""
        return self.log.read_text(errors="replace")

    def clear(self) -> None:
        """Kill the processes that are left."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for command in self.commands:
            command.kill()
            command.wait()


def is_rank(pid: int) -> bool:
    """Whether a process is the trainer itself, not a launcher with the trainer's name among its arguments."""
    words = command_of(pid).split()
    return (
        bool(words)
        and Path(words[0]).name.startswith("python")
        and words[1:4]
        in (
            ["-m", "trainer", "--config"],
            ["-u", "-m", "trainer"],
        )
    )


def losses(folder: Path) -> list[dict[str, Any]]:
    """The run's report for each step, without times."""
    timed = ("time", "seconds", "wait_seconds")
    return [{key: value for key, value in line.items() if key not in timed} for line in lines(folder, "step")]
