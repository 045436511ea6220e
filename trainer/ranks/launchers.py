"""Translate each launcher's environment into torchrun's variables: ``deepspeed``, ``torchrun``, ``mpirun``, ``srun``.

These are pure functions of an environment; only :mod:`trainer.ranks.world` reads the real one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainer.errors import TrainerError

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
MPI_VARIABLES = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
OTHER_MPIS = ("PMI_SIZE", "MV2_COMM_WORLD_SIZE")
ELASTIC = "LAMBERT_ELASTIC"  # environment variable, set by deploy.launch if the number of nodes may change
PORTS = range(20_000, 30_000)  # below the ephemeral ports


def describe(environ: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK, and LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT if known.

    Empty for a process without a launcher. Raises TrainerError if a launcher is unknown or sets only some of them.
    """
    if any(name in environ for name in PLACE):
        return _torchrun(environ)
    if MPI_VARIABLES["RANK"] in environ:  # checked before Slurm: mpirun starts its processes through srun
        found = {name: environ[source] for name, source in MPI_VARIABLES.items()}
    elif "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:  # a batch script itself is not a step
        found = _slurm(environ)
    else:
        for name in OTHER_MPIS:
            if environ.get(name, "1") != "1":
                raise TrainerError(
                    f"{name} is {environ[name]} but this MPI is not supported: use Open MPI's mpirun, "
                    "srun, torchrun or deepspeed, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_ADDR"
                )
        found = {}
    return found | {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environ and found}


def _torchrun(environ: Mapping[str, str]) -> dict[str, str]:
    missing = sorted(set(PLACE) - set(environ))
    if missing:
        given = [name for name in PLACE if name in environ]
        raise TrainerError(
            f"the launcher set {', '.join(given)} but not {', '.join(missing)}: start the run with "
            "`deepspeed --module trainer …` or `torchrun -m trainer …`, or unset them all for one process"
        )
    found = {name: environ[name] for name in (*PLACE, "MASTER_ADDR", "MASTER_PORT") if name in environ}
    # deepspeed's launcher says LOCAL_SIZE, torchrun says LOCAL_WORLD_SIZE
    local = environ.get("LOCAL_WORLD_SIZE", environ.get("LOCAL_SIZE"))
    return found if local is None else found | {"LOCAL_WORLD_SIZE": local}


def on_one_node(environ: Mapping[str, str]) -> bool:
    """Whether all ranks are certainly on this node. False if the launcher does not say how many are here."""
    described = describe(environ)
    address, local = described.get("MASTER_ADDR", environ.get("MASTER_ADDR")), described.get("LOCAL_WORLD_SIZE")
    return address in LOOPBACK or (local is not None and local == described["WORLD_SIZE"])


def _slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Describe one of ``srun``'s tasks. A step's own variables override those of its job."""

    def said(name: str) -> str:
        found = environ.get(f"SLURM_STEP_{name}", environ.get(f"SLURM_{name}", environ.get(f"SLURM_JOB_{name}")))
        if found is None:
            raise TrainerError(f"Slurm set SLURM_PROCID but not SLURM_{name}: start the run with srun")
        return found

    size = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
    tasks = each_nodes_tasks(said("TASKS_PER_NODE"))
    job = environ.get("SLURM_JOB_ID", "0")
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(tasks[int(environ.get("SLURM_NODEID", "0"))]),
        "MASTER_ADDR": first_host(said("NODELIST")),
        "MASTER_PORT": str(PORTS[int(job) % len(PORTS)]),  # jobs that share a node get different ports
    }


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list, which may contain ranges: gpu07 for ``gpu[07-09,12],login1``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise TrainerError(f"Slurm's list of nodes is {nodes!r}, which names no host: set MASTER_ADDR")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def each_nodes_tasks(text: str) -> list[int]:
    """Return each node's number of tasks: ``4(x2),3`` means 4, 4, 3."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part, re.ASCII)
        if match is None:
            raise TrainerError(
                f"Slurm's number of tasks per node is {text!r}, not like 4(x2),3: start the run with srun"
            )
        found += [int(match[1])] * int(match[2] or 1)
    return found
