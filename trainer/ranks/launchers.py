"""What each launcher says of a process, in torchrun's words: ``deepspeed``, ``torchrun``, ``mpirun``, ``srun``.

Pure functions of an environment; only :mod:`trainer.ranks.world` reads the real one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainer.errors import TrainerError

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
OTHER_MPIS = ("PMI_SIZE", "MV2_COMM_WORLD_SIZE")
PORTS = range(20_000, 30_000)  # below those that systems give out by themselves


def describe(environ: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK; LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as far as they are known.

    Empty for one process that nobody launched. Raises TrainerError when a launcher says half of it, or is not known.
    """
    if any(name in environ for name in PLACE):
        return _torchrun(environ)
    if MPI["RANK"] in environ:  # before Slurm's: mpirun starts its own processes through srun
        found = {name: environ[source] for name, source in MPI.items()}
    elif "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:  # a batch script itself is no step
        found = _slurm(environ)
    else:
        for name in OTHER_MPIS:
            if environ.get(name, "1") != "1":
                raise TrainerError(
                    f"{name} is {environ[name]} but the MPI that says so is not known here: use Open MPI's mpirun, "
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
    """Whether all ranks are surely on this node. A launcher that does not say how many are here leaves it open."""
    told = describe(environ)
    address, local = told.get("MASTER_ADDR", environ.get("MASTER_ADDR")), told.get("LOCAL_WORLD_SIZE")
    return address in LOOPBACK or (local is not None and local == told["WORLD_SIZE"])


def _slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """The place of one of ``srun``'s tasks. A step's own variables hide those of the job around it."""

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
        "MASTER_PORT": str(PORTS[int(job) % len(PORTS)]),  # jobs that share a node have their own
    }


def first_host(nodes: str) -> str:
    """The first name of Slurm's list, which may hold ranges: ``gpu[07-09,12],login1`` begins with gpu07."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise TrainerError(f"Slurm's list of nodes is {nodes!r}, which names none: set MASTER_ADDR")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def each_nodes_tasks(text: str) -> list[int]:
    """The number of tasks of each node: ``4(x2),3`` says 4, 4, 3."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part, re.ASCII)
        if match is None:
            raise TrainerError(f"Slurm's number of tasks a node is {text!r}, not like 4(x2),3: start the run with srun")
        found += [int(match[1])] * int(match[2] or 1)
    return found
