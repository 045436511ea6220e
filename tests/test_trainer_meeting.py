"""The meeting: missing ranks are named, differences are named, and an earlier attempt's ranks are not met."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers import ranks
from tests.helpers.runs import wait_for, write_config
from trainer.errors import TrainerError
from trainer.ranks.meeting import Account, Meeting, differences, meet, numbers, refusals
from trainer.ranks.world import World, nccl_reason
from trainer.run import rank_agreement
from trainer.run.config import load
from trainer.run.phases import open_phases
from trainer.run.rank_agreement import code, facts

pytestmark = pytest.mark.slow

SAME = {"torch": "2.13.0", "the configuration": "abc"}
MEET = """
import sys, trainer.ranks.meeting
from trainer.ranks.world import from_launcher, join, leave
from trainer.errors import LostError, TrainerError
world = from_launcher("cpu")
trainer.ranks.meeting.SAY_SECONDS = 1
try:
    print(join(world, int(sys.argv[1]), {"torch": sys.argv[2]}), flush=True)
except TrainerError as error:
    print(f"error: {error}", flush=True)
    leave(3 if isinstance(error, LostError) else 2)
leave(0)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ranks.Forked]]:
    """Starts one rank of two that meets the other and ends; what is left of them at the end is killed."""
    port, begun = ranks.free_port(), list[ranks.Forked]()
    (tmp_path / "meet.py").write_text(MEET)

    def begin(rank: int, seconds: int, version: str = "1", **settings: str) -> ranks.Forked:
        begun.append(ranks.fork_one(rank, 2, port, str(tmp_path / "meet.py"), str(seconds), version, **settings))
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()


def accounts(*facts: dict[str, str], gpus: tuple[str, ...] = ()) -> list[Account]:
    """Accounts of two ranks per node."""
    return [Account(f"node-{rank // 2}", gpus[rank] if gpus else "", each, {}) for rank, each in enumerate(facts)]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [([3], "rank 3"), ([0, 1], "ranks 0 and 1"), ([0, 1, 2, 3, 7, 9, 10], "ranks 0 to 3, 7, 9 and 10")],
)
def test_ranks_are_named_in_runs(ranks: list[int], said: str) -> None:
    assert numbers(ranks) == said


def test_what_differs_is_said_with_ranks_and_hosts() -> None:
    other = SAME | {"torch": "2.11.0", "the configuration": "x" * 100}
    assert refusals(accounts(SAME, SAME, SAME)) == []
    assert refusals(accounts(SAME, SAME, other, other)) == [
        f"the configuration is abc on ranks 0 and 1 (node-0), {'x' * 47}… on ranks 2 and 3 (node-1): "
        "make it the same on all ranks",
        "torch is 2.13.0 on ranks 0 and 1 (node-0), 2.11.0 on ranks 2 and 3 (node-1): make it the same on all ranks",
    ]
    assert differences("facts", accounts(SAME, {"torch": "2.13.0"}, SAME)) == [
        "the configuration is abc on ranks 0, 2 (node-0 and 1 more), not set on rank 1 (node-0)"
    ]


def test_two_ranks_on_one_gpu_are_refused() -> None:
    found = refusals(accounts(SAME, SAME, SAME, SAME, gpus=("a", "b", "a", "a")))
    assert found == ["ranks 2 and 3 (node-1) share one GPU: start at most one rank for each GPU of the node"]


def test_ranks_dealt_out_one_by_one_are_refused() -> None:
    """Otherwise reports about a node would name the wrong ranks."""
    dealt = [Account(f"node-{rank % 2}", "", SAME, {}) for rank in range(4)]
    remedy = "place them in blocks (mpirun --map-by slot, srun -m block)"
    assert refusals(dealt) == [f"node-0 has ranks 0, 2: {remedy}", f"node-1 has ranks 1, 3: {remedy}"]


def test_what_nccl_says_of_its_own_failure_is_kept() -> None:
    error = RuntimeError("NCCL error in: x.cpp:1, unhandled system error\nLast error:\nBootstrap : no socket\n found")
    assert nccl_reason(error) == "; Bootstrap : no socket found"
    assert nccl_reason(RuntimeError("gloo")) == ""


def test_a_rank_that_comes_late_is_waited_for(start: Callable[..., ranks.Forked]) -> None:
    """This holds even if rank 0 is late, and its host does not answer yet."""
    for late in (1, 0):
        early = start(1 - late, 60)
        time.sleep(3)
        assert early.returncode is None
        assert [code for code, _ in ranks.finish([early, start(late, 60)])] == [0, 0]


def test_a_rank_that_does_not_come_is_named(start: Callable[..., ranks.Forked]) -> None:
    [(code, output)] = ranks.finish([start(0, 2)])
    waiting, error = output.strip().splitlines()
    assert code == 3 and waiting.startswith("lambert: waiting for rank 1 of 2 at 127.0.0.1:")
    assert error.startswith("error: after 2 s rank 1 of 2 have not come to 127.0.0.1:")
    [(code, output)] = ranks.finish([start(1, 3)])
    assert code == 3 and output.splitlines()[-1].startswith("error: rank 1 cannot meet the other ranks at 127.0.0.1:")


def test_ranks_of_two_runs_are_refused_on_both(start: Callable[..., ranks.Forked]) -> None:
    (first, first_output), (second, silent) = ranks.finish([start(0, 60, "2.13.0"), start(1, 60, "2.11.0")])
    assert (first, second) == (2, 2)
    host = os.uname().nodename
    assert first_output == (
        f"error: torch is 2.13.0 on rank 0 ({host}), 2.11.0 on rank 1 ({host}): make it the same on all ranks\n"
    )
    assert silent == "error: \n"


def test_a_setting_that_one_rank_lacks_is_named_by_the_first(start: Callable[..., ranks.Forked]) -> None:
    (first, first_output), (second, silent) = ranks.finish([start(0, 60, GLOO_TEST="a b 'c'"), start(1, 60)])
    host = os.uname().nodename
    assert (first, second, silent) == (0, 0, "[]\n")
    assert first_output.strip() == str([f"GLOO_TEST is a b 'c' on rank 0 ({host}), not set on rank 1 ({host})"])


def test_an_earlier_attempt_that_holds_the_place_is_not_joined() -> None:
    """A pod that is back meets the old rank 0, which is about to end: it waits for the new one."""
    port, account, short = ranks.free_port(), Account("node", "", {}, {}), timedelta(seconds=3)
    place = Meeting(0, 1, "127.0.0.1", port, served=False)
    old, _ = meet(place, account, short)
    with pytest.raises(TrainerError, match="another run, or an earlier attempt of this one, is using it"):
        meet(Meeting(1, 2, "127.0.0.1", port, served=False), account, short)
    assert isinstance(old, dist.Store)


def test_the_code_is_told_apart_by_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("data_prep", "kernels", "trainer"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "a.py").write_text("x = 1\n")
    monkeypatch.setattr("trainer.run.rank_agreement.ROOT", tmp_path)
    before = code()
    (tmp_path / "kernels" / "a.py").write_text("x = 2\n")
    changed = code()
    (tmp_path / "kernels" / "a.py").rename(tmp_path / "kernels" / "b.py")
    assert len({before, changed, code()}) == 3


@pytest.mark.parametrize(("package", "refused"), [("webdataset", 0), ("deepspeed", 1)])
def test_only_packages_that_a_run_uses_must_be_the_same(
    tiny_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, refused: int
) -> None:
    """A node that lacks an optional package meets one that has it."""
    config = load(write_config(tmp_path, tiny_shards, 4))
    world = World(0, 1, 0, 1, torch.device("cpu"))
    has = facts(open_phases(config, world), world)

    def version_without(name: str) -> str:
        if name == package:
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(rank_agreement, "version", version_without)
    lacks = facts(open_phases(config, world), world)
    assert len(refusals(accounts(has, lacks))) == refused


def test_runs_that_differ_in_their_configuration_are_refused_before_they_train(
    tiny_shards: Path, tmp_path: Path
) -> None:
    """Ranks 0 and 1 are given files that differ in the seed."""
    port, processes = ranks.free_port(), []
    for rank in range(2):
        folder = tmp_path / str(rank)
        folder.mkdir()
        config: dict[str, Any] = {"run": {"seed": rank, "folder": str(tmp_path / "run")}}
        path = write_config(folder, tiny_shards, 4, **config)
        processes.append(ranks.fork_one(rank, 2, port, "trainer/__main__.py", "--config", str(path)))
    (first, first_output), (second, silent) = ranks.finish(processes)
    assert (first, second) == (2, 2)
    assert "error: the configuration is " in first_output and "make it the same on all ranks" in first_output
    assert "error" not in silent and not (tmp_path / "run").exists()


def test_a_rank_that_is_lost_is_reported_with_step_and_operation(tiny_shards: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path, tiny_shards, 1_000_000)
    forked = ranks.fork(2, "trainer/__main__.py", "--config", str(path))
    wait_for(lambda: "loss" in forked[0].log.read_text(), *forked)
    forked[1].kill()
    (code, output), _ = ranks.finish(forked)
    assert code == 3
    [line] = [line for line in output.splitlines() if "lost contact" in line]
    assert "(after step " in line and " in trainer/" in line, line


def test_a_rank_that_stands_still_is_waited_for_as_long_as_the_configuration_says(
    tiny_shards: Path, tmp_path: Path
) -> None:
    """This also applies to DeepSpeed's own groups, which would wait for half an hour."""
    path = write_config(tmp_path, tiny_shards, 1_000_000, run={"timeout_seconds": 5}, metrics={"log_every_steps": 1000})
    forked = ranks.fork(2, "trainer/__main__.py", "--config", str(path))
    wait_for(lambda: (tmp_path / "run" / "step-00000010" / "checkpoint.json").exists(), *forked)
    forked[1].send_signal(signal.SIGSTOP)
    try:
        code, output = ranks.finish(forked[:1], timeout=60)[0]
    finally:
        forked[1].kill()
    assert code == 3
    [line] = [line for line in output.splitlines() if "lost contact" in line]
    assert re.search(r"rank 0: .*\(after step \d+, \w+ in trainer/[\w/]+\.py, \w+: .*(?i:timed out)", line), line


def test_torchruns_store_outlives_an_attempt(tmp_path: Path) -> None:
    """Ranks of a second attempt find the accounts and the verdict of the first one there."""
    once = tmp_path / "once"
    (tmp_path / "again.py").write_text(
        MEET.replace("leave(0)", "import pathlib, os\nonce = pathlib.Path(sys.argv[3] + os.environ['RANK'])")
        + "first = not once.exists()\nonce.touch()\nimport torch\ntorch.distributed.barrier()\n"  # so that both have
        + "leave(1 if first else 0)\n"
    )
    words = ["--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.2", "--master-port"]
    script = [str(ranks.free_port()), str(tmp_path / "again.py"), "30", "1", str(once)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, *script],
        cwd=ranks.ROOT,
        env=ranks.environment(0, 1, 0),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[]") == 4
