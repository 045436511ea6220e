"""Launchers: the variables that each sets, translated into torchrun's."""

from __future__ import annotations

import pytest

from trainer.errors import TrainerError
from trainer.ranks.launchers import describe, each_nodes_tasks, first_host

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "9",
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
}
SRUN = {  # a step of 7 tasks over two of the job's three nodes
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "12",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_TASKS_PER_NODE": "4(x3)",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_JOB_NODELIST": "gpu[01-03]",
    "SLURM_STEP_NODELIST": "gpu[02-03]",
}
PLACE = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}


def test_mpirun_says_all_but_where_to_meet() -> None:
    assert describe(MPIRUN) == PLACE
    assert describe(MPIRUN | {"MASTER_ADDR": "node-0"}) == PLACE | {"MASTER_ADDR": "node-0"}
    assert describe(MPIRUN | SRUN) == PLACE  # mpirun in a batch job: its daemons are srun's tasks


def test_srun_says_all() -> None:
    place = {"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
    assert describe(SRUN) == place | {"MASTER_ADDR": "gpu02", "MASTER_PORT": "24567"}
    assert describe(SRUN | {"MASTER_ADDR": "ib-2"})["MASTER_ADDR"] == "ib-2"
    assert describe(SRUN | PLACE) == PLACE  # torchrun, started by srun


def test_a_batch_script_itself_is_one_process() -> None:
    assert describe({name: value for name, value in SRUN.items() if "STEP" not in name}) == {}
    assert describe({}) == {}
    assert describe({"MASTER_ADDR": "node-0"}) == {}


def test_a_launcher_that_is_not_known_starts_no_lone_runs() -> None:
    with pytest.raises(TrainerError, match="PMI_SIZE is 4 but this MPI is not supported: use"):
        describe({"PMI_SIZE": "4", "PMI_RANK": "2"})
    assert describe({"PMI_SIZE": "1"}) == {}


def test_srun_that_says_half_of_it_is_refused() -> None:
    with pytest.raises(TrainerError, match="Slurm set SLURM_PROCID but not SLURM_NODELIST"):
        describe({name: value for name, value in SRUN.items() if "NODELIST" not in name})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node-0", "node-0"),
        ("node-0,node-1", "node-0"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("gpu[7,9]", "gpu7"),
        ("rack[2-3]n[01-04]-ib,x", "rack2n01-ib"),
        ("a.example.org", "a.example.org"),
    ],
)
def test_the_first_of_slurms_hosts(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_an_empty_list_of_hosts_is_refused() -> None:
    with pytest.raises(TrainerError, match="list of nodes is '', which names no host"):
        first_host("")


def test_slurms_tasks_of_each_node() -> None:
    assert each_nodes_tasks("4") == [4]
    assert each_nodes_tasks("4(x2),3,1(x3)") == [4, 4, 3, 1, 1, 1]
    with pytest.raises(TrainerError, match="tasks per node is 'many'"):
        each_nodes_tasks("many")
