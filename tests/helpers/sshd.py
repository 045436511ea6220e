"""Hosts of a small cluster: nodes with a host name, their own processes, and a real sshd for their user.

A host is a node of :mod:`nodes` with its own host name, process ids and mounts; files are shared, as on a cluster.
Its sshd is process 1, so the host dies with it. The names are in every host's /etc/hosts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import nodes
from tests.helpers.programs import FOLDER, program

PATIENCE = 30.0  # seconds
NETNS = Path("/etc/netns")  # `ip netns exec NAME` puts the files of NETNS/NAME over those of /etc
SSHD = """
Port 22
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PidFile none
SetEnv TMPDIR={temporary}
"""
SSH = """
IdentityFile {folder}/key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
ServerAliveInterval 5
ServerAliveCountMax 3
"""
BOOT = """set -e
hostname "$0"
{union}
mount -t tmpfs tmpfs /run
mkdir -m 755 /run/sshd
exec "$(command -v sshd)" -D -e -f {folder}/sshd_config"""


@dataclass(frozen=True)
class Host:
    """A running host. ``init`` is the id of its process 1 on this machine."""

    name: str
    node: nodes.Node
    init: int
    temporary: Path  # for TMPDIR: process numbers, which are in the names of files there, are not unique

    def command(self, words: list[str], folder: Path, environ: dict[str, str]) -> list[str]:
        """A command that runs ``words`` on this host, in a folder, with only these variables.

        :func:`inside` finds its process.
        """
        enter = ["nsenter", f"--target={self.init}", "--net", "--uts", "--pid", "--mount"]
        variables = [f"{name}={value}" for name, value in ({"TMPDIR": str(self.temporary)} | environ).items()]
        return [*enter, "env", "--ignore-environment", f"--chdir={folder}", *variables, *words]

    def pids(self, words: str = "") -> list[int]:
        """The host's processes with ``words`` in their command, oldest first, except for its sshd.

        Zombies do not count.
        """
        found, mine = [], _pid_namespace(self.init)
        for path in Path("/proc").glob("[0-9]*"):
            pid = int(path.name)
            command = command_of(pid)
            if pid != self.init and command and words in command and mine and _pid_namespace(pid) == mine:
                found.append(pid)
        return sorted(found)

    def kill(self) -> None:
        """Kill everything on this host. Its connections are closed, so peers notice."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)

    def cut(self) -> None:
        """Unplug its network: from then on it sends nothing at all."""
        subprocess.run(["ip", "-n", self.node.namespace, "link", "set", nodes.INTERFACE, "down"], check=True)


def command_of(pid: int) -> str:
    """The words of a process; empty for one that has ended or belongs to the kernel."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    words = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def inside(process: subprocess.Popen[str]) -> int:
    """The process that :meth:`Host.command` started. Send signals to it, because nsenter forwards none."""
    assert wait_for(lambda: children_of(process.pid) or process.poll() is not None)
    return children_of(process.pid)[0]


def wait_for(done: Callable[[], object], timeout: float = PATIENCE) -> bool:
    """Wait until ``done()``; returns whether it was true in time."""
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def children_of(pid: int) -> list[int]:
    """The processes that a process started and that are still there."""
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@contextlib.contextmanager
def hosts(count: int, folder: Path) -> Iterator[list[Host]]:
    """``count`` hosts named node-0, node-1, …; ``folder``/bin has the ``ssh`` that reaches them by name.

    Everything is removed afterwards. Skips the test if the rights or the programs are missing.
    """
    for name in ("sshd", "ssh"):
        program(name)
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
    (folder / "ssh_config").write_text(SSH.format(folder=folder))
    (folder / "bin").mkdir()
    (folder / "bin/ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder}/ssh_config "$@"\n')
    (folder / "bin/ssh").chmod(0o755)
    # the kernel removes a cable later than its namespace, and our next one has the same name
    assert wait_for(lambda: not Path(f"/sys/class/net/lt{os.getpid()}").exists())
    with contextlib.ExitStack() as stack:
        # short, because socket paths must be
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-", ignore_cleanup_errors=True))
        (folder / "sshd_config").write_text(SSHD.format(folder=folder, temporary=temporary))
        cluster = stack.enter_context(nodes.cluster(count))
        for path in NETNS.glob(f"{nodes.NAME}-*"):  # left by a process that was killed before it could clean up
            if not Path("/proc", path.stem.removeprefix(f"{nodes.NAME}-")).exists():
                shutil.rmtree(path, ignore_errors=True)
        table = {f"node-{number}": node for number, node in enumerate(cluster)}
        yield [stack.enter_context(_booted(name, table, folder, Path(temporary))) for name in table]


@contextlib.contextmanager
def _booted(name: str, table: dict[str, nodes.Node], folder: Path, temporary: Path) -> Iterator[Host]:
    node = table[name]
    over = NETNS / node.namespace
    over.mkdir(parents=True)
    known = "".join(f"{other.address} {host}\n" for host, other in table.items())
    (over / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
    (over / "passwd").write_text(_users(folder))
    boot = BOOT.format(folder=folder, union=_union())
    separate = ["unshare", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child", "sh", "-c", boot, name]
    log = folder / f"{name}.sshd.log"
    with log.open("w") as file:
        process = subprocess.Popen(node.command(*separate), stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + PATIENCE
        while not _answers(node.address):
            if process.poll() is not None:
                pytest.skip(f"no host with an sshd here: {' '.join(log.read_text().split())[-300:]}")
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield Host(name, node, children_of(process.pid)[0], temporary)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(over)
        with contextlib.suppress(OSError):  # not empty: other processes use it
            NETNS.rmdir()


def _users(home: Path) -> str:
    """An /etc/passwd in which our user's home is a given folder, and which has sshd's own user."""
    users = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
    users = [[*user[:5], str(home), "/bin/sh"] if user[2] == str(os.getuid()) else user for user in users]
    if "sshd" not in [user[0] for user in users]:  # installing the package would have created it
        users.append(["sshd", "x", "65533", "65534", "", "/run/sshd", "/usr/sbin/nologin"])
    return "".join(":".join(user) + "\n" for user in users)


def _union() -> str:
    """The command that adds the unpacked programs and libraries to the system's /usr; the system's files come first."""
    return f"mount -t overlay overlay -o lowerdir=/usr:{FOLDER}/usr /usr" if (FOLDER / "usr").exists() else ""


def _answers(address: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, 22), timeout=1):
        return True
    return False


def _pid_namespace(pid: int) -> int:
    """The number of a process's namespace; 0 if it has ended."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return 0
