"""Preflight: the files that deepspeed reads, the network, and a trial under a real launcher's environment."""

from __future__ import annotations

import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import ranks
from tests.helpers.runs import change_record, write_config
from trainer import preflight
from trainer.errors import TrainerError
from trainer.ranks.hostfile import left_behind, read_environment, read_hosts
from trainer.ranks.network import falls_to_tcp, ports, spoken
from trainer.ranks.world import World
from trainer.run.config import load
from trainer.run.phases import Plan, open_phases

pytestmark = pytest.mark.slow

ALONE = World(0, 1, 0, 1, torch.device("cpu"))

# as NCCL 2.18 to 2.28 write it
SOCKET = (
    "node-0:41:41 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>\n"
    "node-0:41:90 [0] NCCL INFO NET/IB : No device found.\n"
    "node-0:41:90 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\n"
    "node-0:41:90 [0] NCCL INFO Using network Socket\n"
)
INFINIBAND = (
    "node-0:41:90 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>\n"
    "node-0:41:90 [0] NCCL INFO Using network IB\n"
)


def test_a_host_file_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# the cluster\n\nnode-0 slots=8  \nadmin@node-1\tslots=4 max_slots=4 # old\n")
    assert read_hosts(path) == {"node-0": 8, "admin@node-1": 4}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("node-0 slots=8\nnode-1 lots=8\n", "line 2 is 'node-1 lots=8': write it as `node-0 slots=8`"),
        ("node-0\n", "line 1 is 'node-0': write it as"),
        ("node-0 slots=8x\n", "line 1 is 'node-0 slots=8x': write it as"),
        ("node-0 slots=8\n\nnode-0 slots=8\n", "line 3: node-0 is listed twice: add up its slots in one line"),
        ("node-0 slots=0\n", "line 1: node-0 has no slots"),
        ("-oProxyCommand=id slots=8\n", "line 1: '-oProxyCommand=id' is not a host name: start with a letter or"),
        ("node-0;id slots=8\n", "line 1: 'node-0;id' is not a host name"),
        ("node-0 slots=4097\n", "line 1: node-0 has 4097 slots: must be 4,096 or less"),
        (f"node-0 slots={'9' * 5000}\n", "line 1 is 'node-0 slots=9999"),
        ("node-0 slots=\u0663\n", "line 1 is 'node-0 slots=\u0663': write it as"),
        ("# nothing\n", "it names no host: write lines like"),
    ],
)
def test_a_bad_host_file_is_refused_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(TrainerError) as error:
        read_hosts(path)
    assert str(error.value).startswith(f"{path}: 1 problem(s)\n  - {problem}")


def test_a_host_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="cannot read .*hosts .*No such file.*: name an existing text file"):
        read_hosts(tmp_path / "hosts")


def test_the_environment_here_holds_over_the_one_at_home(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    assert read_environment(home, here) == {}
    (home / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=eth1\nOMP_NUM_THREADS=4\n")
    (here / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=eth0\nNCCL_NOTE=it's a b=c\n")
    expected = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "4", "NCCL_NOTE": "it's a b=c"}
    assert read_environment(home, here) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("A=1\n\nB=2\n", "line 2 is '': write NAME=value, and no empty lines or comments"),
        ("# threads\n", "line 1 is '# threads': write NAME=value"),
        ("OMP_NUM_THREADS 4\n", "line 1 is 'OMP_NUM_THREADS 4': write NAME=value"),
        ('A="b c"\n', 'line 1: A contains one of " $ ` \\, which a shell reads: remove it, deepspeed adds quotes'),
        ("A=$HOME\n", "line 1: A contains one of"),
    ],
)
def test_a_bad_environment_file_is_refused_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / ".deepspeed_env").write_text(text)
    with pytest.raises(TrainerError) as error:
        read_environment(tmp_path / "home", tmp_path)
    assert f"1 problem(s)\n  - {problem}" in str(error.value)


def test_settings_that_no_other_node_gets_are_named() -> None:
    here = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4", "PYTHONPATH": "/work"}
    assert left_behind(here, {"OMP_NUM_THREADS": "4"}, gpus=True) == ["GLOO_SOCKET_IFNAME"]
    assert left_behind(here, {"OMP_NUM_THREADS": "2"}, gpus=False) == [
        "GLOO_SOCKET_IFNAME",
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
    ]


def test_a_fall_to_tcp_is_warned_about() -> None:
    assert (spoken(SOCKET), spoken(INFINIBAND), spoken("")) == ("Socket", "IB", "")
    assert falls_to_tcp(SOCKET).startswith("NCCL uses TCP, ")
    assert falls_to_tcp(INFINIBAND) == falls_to_tcp("") == ""


def test_infiniband_ports_that_are_up_are_named(tmp_path: Path) -> None:
    assert ports(tmp_path / "none") == []
    for device, state in {"mlx5_0": "4: ACTIVE\n", "mlx5_1": "1: DOWN\n"}.items():
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert ports(tmp_path) == ["mlx5_0:1 400 Gb/sec (4X NDR)"]


def test_two_ranks_say_that_they_are_ready(tiny_shards: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path, tiny_shards, 1200, run={"ranks": 2})
    grows = "phases.0.batch_warmup=[{steps: 100, global_batch: 10}, {steps: 50, global_batch: 20}]"
    options = ("--config", str(path), "--set", grows)
    (first, first_output), (second, _) = ranks.finish(ranks.fork(2, "trainer/preflight.py", *options))
    assert (first, second) == (0, 0), first_output
    assert "2 rank(s) met in " in first_output and "ranks 0 and 1: " in first_output
    stages = "100 steps of 10, then 50 steps of 20, then 30 per step"
    assert f"phase only: 1,200 steps, 33,500 samples: {stages}\n" in first_output
    assert (
        "is written by rank 0 and seen by every node" in first_output
        and "all-reduce of 64 MiB over gloo: " in first_output
    )
    assert first_output.splitlines()[-1] == "lambert: ready"
    assert not (tmp_path / "run").exists()


def trial(path: Path, *options: str) -> tuple[int, str]:
    [ended] = ranks.finish(ranks.fork(1, "trainer/preflight.py", "--config", str(path), *options))
    return ended


def test_alone_it_counts_the_ranks_of_the_host_file(tiny_shards: Path, tmp_path: Path) -> None:
    hosts, path = tmp_path / "hosts", write_config(tmp_path, tiny_shards, 4, run={"ranks": 16})
    hosts.write_text("node-0 slots=8\nnode-1 slots=8\n")
    budget = ("--set", "phases.0.minutes=20", "--set", "phases.0.steps=0")
    code, said = trial(path, "--hostfile", str(hosts), *budget)
    assert "phase only: 20 minutes of training: 30 per step\n" in said
    assert code == 0 and said.splitlines()[-1] == "lambert: ready", said
    code, said = trial(path, "--hostfile", str(hosts), "--set", "run.ranks=8")
    assert code == 2 and "16 rank(s) were started but run.ranks is 8" in said


def test_alone_it_finds_the_micro_batch_of_the_ranks_of_the_host_file(
    tiny_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test cannot ask a GPU, so it sees how many ranks the planner is asked for."""
    asked = list[int]()

    def settled(plan: Plan, world: World, number: int) -> Plan:
        asked.append(number)
        raise TrainerError("enough")

    monkeypatch.setattr(preflight, "meet", lambda plan, world: None)
    monkeypatch.setattr(preflight, "settle", settled)
    hosts, plan = tmp_path / "hosts", open_phases(load(write_config(tmp_path, tiny_shards, 4)), ALONE)
    hosts.write_text("node-0 slots=8\nnode-1 slots=8\n")
    for given, world in ((hosts, ALONE), (None, ALONE), (hosts, replace(ALONE, size=16, rank=3))):
        with pytest.raises(TrainerError, match="enough"):
            preflight._try_all(plan, world, given)
    assert asked == [16, 1, 16]


def test_what_the_run_would_refuse_is_not_ready(tiny_shards: Path, tmp_path: Path) -> None:
    path, other = write_config(tmp_path, tiny_shards, 2), tmp_path / "other"
    assert [code for code, _ in ranks.finish(ranks.fork(1, "trainer/__main__.py", "--config", str(path)))] == [0]
    code, said = trial(path)
    assert code == 0 and f"the run will continue from {tmp_path / 'run' / 'step-00000002'}" in said
    newer = Path(shutil.copytree(tmp_path / "run" / "step-00000002", tmp_path / "run" / "step-00000003"))
    change_record(newer, lambda tree: tree["record"]["state"].update(position=-5))
    code, said = trial(path)
    assert code == 0 and f"the run will continue from {tmp_path / 'run' / 'step-00000002'}" in said
    shutil.rmtree(newer)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for changes, message in (
            (["run.seed=6"], "belongs to another run (seed was 5, now 6)"),
            (["run.resume=never"], "run.resume is never"),
            ([f"run.folder={other}", "run.resume=required"], "no whole checkpoint in"),
            ([f"run.folder={other}", f"run.weights={tmp_path}"], f"{tmp_path}"),
            ([f"run.folder={tiny_shards}"], "contains manifest.json, which no run wrote"),
            (["metrics.address=127.0.0.1", f"metrics.port={taken.getsockname()[1]}"], "metrics.port"),
        ):
            code, said = trial(path, *(word for change in changes for word in ("--set", change)))
            assert code == 2 and message in said and "lambert: ready" not in said, said
    assert not other.exists()


@pytest.mark.parametrize(
    ("run", "options", "message"),
    [
        ({"ranks": 16}, [], "2 rank(s) were started but run.ranks is 16"),
        ({}, ["--hostfile", "HOSTS"], "has 8 slots, but 2 ranks were started: start the ranks with that host file"),
    ],
)
def test_too_few_ranks_are_refused(
    tiny_shards: Path, tmp_path: Path, run: dict[str, Any], options: list[str], message: str
) -> None:
    """deepspeed starts one node alone where it does not find its host file."""
    (tmp_path / "hosts").write_text("node-0 slots=8\n")
    path = write_config(tmp_path, tiny_shards, 4, run=run)
    words = [str(tmp_path / "hosts") if word == "HOSTS" else word for word in options]
    forked = ranks.fork(2, "trainer/preflight.py", "--config", str(path), *words)
    forked[0].process.join(60)
    forked[1].kill()  # as a launcher does: it would wait for rank 0
    (code, output), _ = ranks.finish(forked)
    assert (code, message in output) == (2, True), output
