"""The identity of a process: what launchers set, contradictions in it, and the meeting of real processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.ranks import environment, finish, fork, fork_one, free_port
from trainer.errors import TrainerError
from trainer.ranks.world import gpu_of, place_for_deepspeed, read_world

pytestmark = pytest.mark.slow

NODE = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "MASTER_ADDR": "node-0"}
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ABSENT: dict[str, str | None] = dict.fromkeys(LAUNCHED)  # of the variables that launchers set
JOIN = """
import sys, torch, torch.distributed as dist
from trainer.ranks.world import from_launcher, join, leave
world = from_launcher("cpu")
join(world, 30)
rank = torch.tensor([float(world.rank)])
dist.all_reduce(rank)
print(f"{world.rank} of {world.size}: {rank.item()}", flush=True)
leave(int(sys.argv[1]))
"""


def test_a_lone_process_is_rank_0_of_1() -> None:
    world = read_world({}, "cpu")
    assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
    assert world.is_main and world.is_local_main and world.device == torch.device("cpu")


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])  # torchrun's and deepspeed's
def test_launchers_describe_a_place(name: str) -> None:
    world = read_world(NODE | {name: "8"}, "cpu")
    assert (world.rank, world.size, world.local_rank, world.local_size) == (9, 16, 1, 8)
    assert not world.is_main and not world.is_local_main
    first = read_world(NODE | {"RANK": "8", "LOCAL_RANK": "0", name: "8"}, "cpu")
    assert first.is_local_main and not first.is_main


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "8"}, "set WORLD_SIZE but not LOCAL_RANK, RANK: start the run with"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "WORLD_SIZE is 2 but MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "set RANK, WORLD_SIZE but not LOCAL_RANK"),
        (NODE | {"RANK": "-1"}, "RANK='-1' in the environment is not a number"),
        (NODE | {"WORLD_SIZE": "many"}, "WORLD_SIZE='many' in the environment is not a number"),
        (NODE | {"RANK": "9" * 5000}, f"RANK='{'9' * 80}' in the environment is not a number"),
        (NODE | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 in the environment is not a port, 1 to 65535"),
        (NODE | {"MASTER_PORT": "http"}, "MASTER_PORT='http' in the environment is not a number"),
        (NODE | {"RANK": "16"}, "rank 16 of 16, local rank 1 of 16: a rank must be smaller"),
        (NODE | {"LOCAL_WORLD_SIZE": "1"}, "rank 9 of 16, local rank 1 of 1: a rank must be smaller"),
        (NODE | {"LOCAL_WORLD_SIZE": "17"}, "local rank 1 of 17: .* a node's count no larger than all"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(TrainerError, match=message) as error:
        read_world(environ, "cpu")
    assert "\n" not in str(error.value)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert read_world(NODE, "auto").device.type == "cpu"
    with pytest.raises(TrainerError, match="run.device is cuda but PyTorch sees no GPU"):
        read_world(NODE, "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert read_world(NODE, "auto").device == torch.device("cuda", 1)


TASKS = {  # of srun: 8 tasks, 4 on each of two nodes
    **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "6", "SLURM_LOCALID": "2", "SLURM_NODEID": "1"},
    **{"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "gpu[1-2]"},
}


@pytest.mark.parametrize(
    ("visible", "number"),
    [
        (4, 2),  # all of the node's
        (1, 0),  # srun --gpus-per-task=1: its own, as number 0
        (2, 0),  # srun --gpus-per-task=2: two of its own, of which it uses one
    ],
)
def test_a_rank_that_sees_only_its_own_gpus_takes_one_of_them(
    visible: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    world = read_world(TASKS, "auto")
    assert (world.rank, world.size, world.local_rank, world.local_size) == (6, 8, 2, 4)
    assert world.device == torch.device("cuda", number)
    assert [gpu_of(rank, 1) for rank in range(4)] == [0] * 4 and [gpu_of(rank, 4) for rank in range(4)] == [0, 1, 2, 3]


def test_deepspeed_is_told_the_gpus_number() -> None:
    """DeepSpeed reads LOCAL_RANK for that, and asserts that Open MPI's local rank is the same."""
    assert place_for_deepspeed({"LOCAL_RANK": "3"}, torch.device("cuda", 0)) == {"LOCAL_RANK": "0"}
    mpi = "OMPI_COMM_WORLD_LOCAL_RANK"
    assert place_for_deepspeed({mpi: "3"}, torch.device("cuda", 0)) == {"LOCAL_RANK": "0", mpi: "0"}
    assert place_for_deepspeed({"LOCAL_RANK": "3"}, torch.device("cpu")) == {}


@pytest.mark.parametrize("launched", [{"LOCAL_RANK": "3"}, {"LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}])
def test_deepspeed_then_takes_that_gpu(launched: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine's own words, run with an accelerator that notes what it is asked for."""
    from deepspeed.runtime import engine

    taken: list[int] = []
    fake = SimpleNamespace(set_device=taken.append, device_name=lambda index: f"cuda:{index}")
    monkeypatch.setattr(engine, "get_accelerator", lambda: fake)
    monkeypatch.setattr(engine, "dist", SimpleNamespace(get_world_size=lambda: 4, get_rank=lambda: 3))
    for name, value in (launched | place_for_deepspeed(launched, torch.device("cuda", 0))).items():
        monkeypatch.setenv(name, value)
    own = SimpleNamespace()
    engine.DeepSpeedEngine._configure_with_arguments(own, None, None)
    engine.DeepSpeedEngine._set_distributed_vars(own, None)
    assert taken == [0] and own.device == torch.device("cuda", 0) and own.global_rank == 3


def test_sruns_tasks_meet_as_ranks_of_one_node() -> None:
    """The ranks start as by srun with --gpus-per-task=1, on CPUs: each has its own local rank, and sees device 0."""
    port = str(free_port())
    given = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost"}
    common = ABSENT | TASKS | given | {"SLURM_NODEID": "0", "MASTER_PORT": port}
    own = [common | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
    processes = [fork_one(0, 1, 0, "-c", JOIN, "0", **settings) for settings in own]
    ended = finish(processes, timeout=60)
    assert [code for code, _ in ended] == [0, 0], ended
    assert [output.strip() for _, output in ended] == ["0 of 2: 1.0", "1 of 2: 1.0"]


def test_every_rank_has_all_ranks_texts() -> None:
    code = (
        "from trainer.ranks.world import from_launcher, gather_texts, join, leave\n"
        "world = from_launcher('cpu'); join(world, 60)\n"
        "assert gather_texts('é' * world.rank, world) == ['', 'é', 'éé']\n"
        "leave(0)\n"
    )
    assert [code for code, _ in finish(fork(3, "-c", code))] == [0, 0, 0]


def test_ranks_meet_and_leave_with_their_code() -> None:
    ended = finish(fork(2, "-c", JOIN, "0"), timeout=60)
    assert [code for code, _ in ended] == [0, 0]
    assert [output.strip() for _, output in ended] == ["0 of 2: 1.0", "1 of 2: 1.0"]


def test_ranks_whose_launcher_names_no_port_meet_at_torchruns() -> None:
    """Rank 0 is not there, and the other one reports where it looked."""
    alone = fork_one(1, 2, 0, "-c", JOIN.replace("30", "1"), "0", MASTER_PORT=None)
    [(code, said)] = finish([alone], timeout=60)
    assert code != 0 and "rank 1 cannot meet the other ranks at 127.0.0.1:29500" in said


def test_a_lone_process_meets_itself_without_a_launcher() -> None:
    [(code, said)] = finish([fork_one(0, 1, 0, "-c", JOIN, "2", **ABSENT)], timeout=60)
    assert (code, said.strip()) == (2, "0 of 1: 0.0")


def test_what_fails_on_one_rank_is_raised_on_all_and_reported_by_the_first() -> None:
    code = (
        "from pathlib import Path\n"
        "from trainer.errors import TrainerError\n"
        "from trainer.ranks.world import broadcast_text, from_launcher, join, leave, together\n"
        "world = from_launcher('cpu'); join(world, 60)\n"
        "assert together(lambda: world.rank, world) == world.rank\n"
        "assert broadcast_text('the é' if world.is_main else 'other', world) == 'the é'\n"
        "assert broadcast_text('', world) == ''\n"
        "try:\n"
        "    together(lambda: Path('/nowhere/at/all').read_text() if world.rank else '', world)\n"
        "except TrainerError as error:\n"
        "    print(world.rank, 'told:', error, flush=True)\n"
        "    leave(2)\n"
    )
    ended = finish(fork(3, "-c", code))
    assert [code for code, _ in ended] == [2, 2, 2]
    reported = [output.split("told:")[1].strip() for _, output in ended]
    assert reported[0] == reported[2] == "" and "No such file or directory: '/nowhere/at/all'" in reported[1]


def test_a_node_with_a_folder_of_its_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node without the shared folder would keep its part of every checkpoint to itself."""
    alone = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    monkeypatch.setattr("tests.helpers.ranks.environment", lambda *place: environment(*place) | alone)
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import trainer.ranks.world\n"
        "from trainer.errors import TrainerError\n"
        "from trainer.ranks.world import from_launcher, join, leave, require_shared\n"
        "world = from_launcher('cpu'); join(world, 60)\n"
        "trainer.ranks.world.SHARE_SECONDS = 0.5\n"
        "require_shared(Path(sys.argv[1], '0'), world)\n"
        "try:\n"
        "    require_shared(Path(sys.argv[1], str(world.rank)), world)\n"
        "except TrainerError as error:\n"
        "    print(world.rank, 'told:', error, flush=True)\n"
        "    leave(2)\n"
    )
    ended = finish(fork(2, "-c", code, str(tmp_path)))
    assert [code for code, _ in ended] == [2, 2]
    assert ended[0][1].split("told:")[1].strip() == ""
    assert f"run.folder {tmp_path}/1 on " in ended[1][1] and "is not the one that rank 0 writes to" in ended[1][1]
    assert [path for name in ("0", "1") for path in (tmp_path / name).iterdir()] == []
