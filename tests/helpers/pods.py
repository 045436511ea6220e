"""Starts a run's pods as a cluster would: the rendered command as process 1, with the environment of a controller.

A pod is a node of :mod:`nodes` with its own host name, processes, mounts and /dev. The test is the kubelet, the
controller and the cluster's DNS: a pod's own name is in its /etc/hosts, the others' names are as :class:`Gang` says.
Volumes are folders; a container's root file system and user are not reproduced.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_prep.manifest import load_manifest
from tests.helpers import helm, nodes
from tests.helpers.ranks import ROOT
from tests.helpers.runs import lines
from tests.helpers.sshd import children_of, wait_for

KINDS = ("job", "jobset", "trainjob")
RELEASE, RUN = "bert", "small"
SIZE = 2  # pods, of one rank each
POD_PATIENCE_SECONDS = 180.0  # seconds
PORT = 29500  # where ranks meet
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
# a container's /dev, as runtimes create it: no devices, and the kubelet's file for a last message
BOOT = """set -e
hostname "$0"
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/nsswitch.conf /etc/nsswitch.conf
mkdir {folder}/dev
mount -t tmpfs tmpfs {folder}/dev
cd {folder}/dev
for each in null zero full random urandom; do touch $each; mount --bind /dev/$each $each; done
ln -s /proc/self/fd fd
mkdir shm
mount -t tmpfs -o size={shm} tmpfs shm
touch termination-log
mount --bind {folder}/termination-log termination-log
mount --rbind {folder}/dev /dev
cd {folder}/scratch
exec "$@" """


@dataclass(frozen=True)
class Contract:
    """The environment that the chart and a controller give the pods of a run."""

    hosts: str  # of a pod, without its index
    subdomain: str
    command: list[str]
    environ: dict[str, str]  # with INDEX in place of the pod's own
    mounts: dict[str, str]  # where in a pod: the volume, and a folder in it
    config: str
    shm: str  # bytes of /dev/shm, as tmpfs reads them
    claims: tuple[str, ...] = ()  # volumes that all pods share, as folders of the gang

    def name(self, index: int) -> str:
        """The name of a pod in the cluster's DNS, as its namespace's search path makes it short."""
        return f"{self.hosts}-{index}.{self.subdomain}"


def contract(kind: str, folder: Path, shards: Path, train: Path, steps: int, every: int) -> Contract:
    """The contract of a small run in ``folder``/runs that saves every ``every`` steps. Skips the test without Helm.

    ``train``: the shards that the run's configuration names; ``shards``, or a folder that does not exist.
    """
    documents = _rendered(folder, _values(folder, shards, train, steps, every) | {"kind": kind})
    pod = helm.pod(documents)
    [container] = pod["containers"]
    given = [(entry["name"], entry.get("value", entry.get("valueFrom"))) for entry in container["env"]]
    sizes = {volume["name"]: volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume}
    return Contract(
        RELEASE if kind == "job" else f"{RELEASE}-node-0",
        RELEASE if kind != "job" else pod["subdomain"],  # a JobSet's own name, unless network.subdomain says another
        container["command"] + container["args"],
        {name: _resolved(value) for name, value in given} | _controller(documents),
        {mount["mountPath"]: f"{mount['name']}/{mount.get('subPath', '')}" for mount in container["volumeMounts"]},
        helm.one(documents, "ConfigMap")["data"]["run.yaml"],
        sizes["shm"]["sizeLimit"].removesuffix("i"),
    )


def preparation(folder: Path, pods: int, words: list[str]) -> Contract:
    """The contract of pods that prepare data by one command; ``folder``/corpus and ``folder``/data are their volumes.

    Skips the test without Helm.
    """
    prep = {"enabled": True, "pods": pods, "processes": 1, "corpusClaim": "corpus", "commands": [words]}
    documents = _rendered(folder, {"image": {"repository": "none"}, "data": {"claim": "data"}, "dataPrep": prep})
    pod = helm.pod(documents)
    [container] = pod["containers"]
    return Contract(
        RELEASE,
        "no-service",
        container["command"] + container["args"],
        {entry["name"]: _resolved(entry["value"]) for entry in container["env"]} | _controller(documents),
        {mount["mountPath"]: f"{mount['name']}/{mount.get('subPath', '')}" for mount in container["volumeMounts"]},
        "",
        "64M",
        tuple(volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume),
    )


def _rendered(folder: Path, values: helm.Json) -> list[helm.Json]:
    """The objects that the chart renders from the values. Skips the test without Helm."""
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    try:
        done = helm.run("template", RELEASE, str(helm.CHART), "--values", str(path))
    except helm.NoHelmError as error:
        pytest.skip(str(error))
    assert done.returncode == 0, done.stderr
    return helm.documents(done.stdout)


def _values(folder: Path, shards: Path, train: Path, steps: int, every: int) -> helm.Json:
    vocab_size = load_manifest(shards).tokenizer.vocab_size
    phase = {"name": "only", "train": str(train), "sequence_length": 32, "steps": steps}
    return {
        **{"nodes": SIZE, "gpus": 0, "cpuRanks": 1, "image": {"repository": "none"}, "shm": "256Mi"},
        **{"stepSeconds": 1, "saveSeconds": 10, "env": {"OMP_NUM_THREADS": 1}},
        "runs": {"path": str(folder / "runs")},
        "data": {"path": str(shards.parent), "claim": "shards"},
        "run": {
            "run": {"name": RUN, "seed": 5, "timeout_seconds": 120},
            "model": {"layers": 1, "hidden": 16, "heads": 2, "intermediate": 32, "max_positions": 32}
            | {"vocab_size": vocab_size},
            "phases": [phase | {"global_batch": 30, "micro_batch": 8, "learning_rate": 0.01}],
            "checkpoint": {"every_steps": every},
            "metrics": {"log_every_steps": 1, "linger_seconds": 0},
        },
    }


def _resolved(value: Any) -> str:
    """A variable's value; the only one that the chart asks a cluster for is the completion index."""
    if isinstance(value, dict):
        assert value == {"fieldRef": {"fieldPath": INDEX}}, value
        return INDEX
    return str(value)


def _expanded(word: str, environ: dict[str, str]) -> str:
    """A word of a container's command, with each $(NAME) replaced by the variable, as the kubelet does it."""
    return re.sub(r"\$\((\w+)\)", lambda name: environ.get(name[1], name[0]), word)


def _controller(documents: list[helm.Json]) -> dict[str, str]:
    """The variables that the Job controller adds, or Kubeflow Trainer by its torch policy."""
    environ = {"JOB_COMPLETION_INDEX": INDEX}
    if "TrainJob" in [document["kind"] for document in documents]:
        trainer = helm.one(documents, "TrainJob")["spec"]["trainer"]
        assert helm.one(documents, "TrainingRuntime")["spec"]["mlPolicy"]["torch"] == {}
        environ |= {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
        environ |= {"PET_NODE_RANK": INDEX, "PET_MASTER_PORT": str(PORT)}
        environ |= {"PET_MASTER_ADDR": f"{RELEASE}-node-0-0.{RELEASE}"}
    return environ


@dataclass
class Pod:
    """A started pod; one that replaces it later is another object."""

    index: int
    folder: Path
    node: nodes.Node
    process: subprocess.Popen[bytes]
    killed: bool = False  # killed by a test: some versions of unshare cannot report that as their own exit

    @property
    def code(self) -> int | None:
        """The container's exit code as Kubernetes reports it; None while it runs."""
        code = self.process.poll()
        if code is None or not self.killed:
            return code
        return 128 + signal.SIGKILL

    @property
    def reason(self) -> str:
        """The contents of the termination log."""
        return (self.folder / "termination-log").read_text(encoding="utf-8")

    @property
    def output(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def send(self, number: int) -> None:
        """Send its process 1 a signal, as the kubelet does. A SIGKILL ends everything in the pod."""
        assert wait_for(lambda: children_of(self.process.pid) or self.code is not None)
        assert self.code is None, self.output
        os.kill(children_of(self.process.pid)[0], number)
        self.killed |= number == signal.SIGKILL

    def ranks(self) -> list[int]:
        """The process ids, on this machine, of the pod's ranks."""
        found = children_of(self.process.pid)
        return [child for first in found for child in children_of(first)]

    def meets(self) -> bool:
        """Whether it listens at the meeting place, or has connected to it."""
        tables = [Path(f"/proc/{rank}/net/{table}") for rank in self.ranks() for table in ("tcp", "tcp6")]
        rows = [row.split() for table in tables if table.exists() for row in table.read_text().splitlines()[1:]]
        return any(f"{PORT:04X}" in (row[1].rpartition(":")[2], row[2].rpartition(":")[2]) for row in rows)

    def end(self) -> int:
        """Its exit code, once it has ended. Fails if it does not end."""
        assert wait_for(lambda: self.code is not None, POD_PATIENCE_SECONDS), self.output
        assert self.code is not None
        return self.code


@dataclass
class Gang:
    """The pods of a run, and their cluster's DNS."""

    contract: Contract
    folder: Path
    free: list[nodes.Node]
    pods: list[Pod] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # name: address

    @property
    def run(self) -> Path:
        return self.folder / "runs" / RUN

    def start(self, index: int, known: bool = True) -> Pod:
        """Start a pod with a new address, in the DNS at once or, if not ``known``, after :meth:`tell`."""
        folder, node, host = self.folder / f"pod-{len(self.pods)}", self.free.pop(0), f"{self.contract.hosts}-{index}"
        (folder / "scratch").mkdir(parents=True)
        for name, text in (("hosts", ""), ("nsswitch.conf", "hosts: files\n"), ("termination-log", "")):
            (folder / name).write_text(text)
        boot = BOOT.format(folder=folder, shm=self.contract.shm)
        apart = ["unshare", "--uts", "--ipc", "--pid", "--mount-proc", "--fork", "--kill-child", "sh", "-c", boot, host]
        given = self._environ(index, host, folder)
        environ = [f"{name}={value}" for name, value in given.items()]
        words = [self._mapped(_expanded(word, given), folder) for word in self.contract.command]
        with (folder / "log").open("wb") as log:
            command = node.command(*apart, "env", "--ignore-environment", *environ, *words)
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.pods.append(Pod(index, folder, node, process))
        if known:
            self.names[self.contract.name(index)] = node.address
        self._publish()
        return self.pods[-1]

    def start_all(self) -> list[Pod]:
        return [self.start(index) for index in range(SIZE)]

    def tell(self, pod: Pod) -> None:
        """Add the pod to the DNS from now on."""
        self.names[self.contract.name(pod.index)] = pod.node.address
        self._publish()

    def trained(self, steps: int) -> bool:
        """Whether the run has taken that many steps. Fails if a pod has ended before."""
        done = lines(self.run, "step")
        if not done or done[-1]["step"] < steps:
            assert all(pod.code is None for pod in self.pods[-SIZE:]), self.output()
            return False
        return True

    def losses(self) -> dict[int, Any]:
        """Losses by step; for a repeated step, the last one counts."""
        return {line["step"]: line["loss"] for line in lines(self.run, "step")}

    def output(self) -> str:
        return "\n".join(f"pod {pod.index}, {pod.folder.name}:\n{pod.output}{pod.reason}" for pod in self.pods)

    def _environ(self, index: int, host: str, folder: Path) -> dict[str, str]:
        given = {name: self._mapped(value, folder) for name, value in self.contract.environ.items()}
        given = {name: str(index) if value == INDEX else value for name, value in given.items()}
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        return given | {"HOSTNAME": host, "PATH": path, "PYTHONPATH": str(ROOT)}  # the last two are the image's

    def _mapped(self, word: str, folder: Path) -> str:
        """The word, with a path in the pod replaced by the folder mounted there. Fails if there is none."""
        if not word.startswith("/"):
            return word
        found = [mount for mount in self.contract.mounts if f"{word}/".startswith(f"{mount}/")]
        assert found, f"{word} is under none of {list(self.contract.mounts)}"
        volume, _, inside = self.contract.mounts[max(found, key=len)].partition("/")
        place = (self.folder if volume in self.contract.claims else folder) / volume / inside
        place.mkdir(parents=True, exist_ok=True)
        if volume == "config":
            (place / "run.yaml").write_text(self.contract.config)
        rest = word.removeprefix(max(found, key=len))
        return f"{place}{rest}"

    def _publish(self) -> None:
        """Publish the names that each pod can resolve: its own, as the kubelet writes it, and those in the DNS."""
        lines = "".join(f"{address} {name}\n" for name, address in self.names.items())
        for pod in self.pods:
            host = self.contract.name(pod.index).partition(".")
            own = f"{pod.node.address} {host[0]}.{host[2]}.default.svc.cluster.local {host[0]}\n"
            (pod.folder / "hosts").write_text(f"127.0.0.1 localhost\n{own}{lines}")  # in place: it is mounted


@contextlib.contextmanager
def gang(contract: Contract, folder: Path, pods: int = 3 * SIZE) -> Iterator[Gang]:
    """A gang with room for ``pods`` pods over time, removed afterwards. Skips the test without namespaces."""
    with nodes.cluster(pods) as cluster:
        made = Gang(contract, folder, list(cluster))
        made.run.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield made
        finally:
            for pod in made.pods:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pod.process.pid, signal.SIGKILL)  # and everything in it, by --kill-child
                pod.process.wait()
