"""Runs whose number of nodes may change: launches that recover. Each node is a launcher on this host, with one rank."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.roster import AFTER_FAILURE
from tests import test_deploy_launch
from tests.helpers import ranks
from tests.helpers.runs import kept_steps, lines, wait_for, write_config
from tests.test_deploy_launch import Launched
from trainer.errors import TrainerError
from trainer.monitor.metrics_log import read_lines
from trainer.run.config import load
from trainer.run.start import require_any_size

pytestmark = pytest.mark.slow

launch = test_deploy_launch.launch  # the fixture
PLACE = {"PET_NNODES": "1:2", "PET_MASTER_ADDR": "127.0.0.1", "PET_NPROC_PER_NODE": "1", "LAMBERT_SECRET": "secret"}


# ---- launches ------------------------------------------------------------------------------------------------


def pair(launch: Callable[..., Launched], *programs: str, port: int | None = None) -> list[Launched]:
    """Two nodes, of which one is enough, each with a rank that runs a program; or only node 0."""
    place = PLACE | {"PET_MASTER_PORT": str(port or ranks.free_port())}
    return [
        launch("-m", "program", program, **place, PET_NODE_RANK=str(number)) for number, program in enumerate(programs)
    ]


def test_a_stop_of_one_node_leaves_the_other_and_a_stop_of_node_0_ends_both(launch: Callable[..., Launched]) -> None:
    first, second = pair(launch, "hear()", "hear()")
    first.says("ready")
    second.says("ready")
    assert len(first.pids()) == 2  # the launcher and its rank: the office is no process that could be killed alone
    second.signal(signal.SIGTERM)
    code, output = second.end()
    assert code == 75 and output[-1].startswith("lambert: stopped at a step boundary and saved")
    first.says("ready", times=2)
    first.says("lambert: node 0 of 1: rank 0 of 1")
    first.signal(signal.SIGTERM)
    assert first.end()[0] == 75 and first.message.read_text() == output[-1]
    first, second = pair(launch, "hear()", "hear()")
    first.says("ready")
    second.says("ready")
    second.signal(signal.SIGTERM)
    time.sleep(0.25)  # node 0's rank is saving, because node 1 leaves
    first.signal(signal.SIGTERM)
    assert [first.end()[0], second.end()[0]] == [75, 75]


def test_node_0_is_killed_and_returns(launch: Callable[..., Launched]) -> None:
    port = ranks.free_port()
    first, second = pair(launch, "hear()", "hear()", port=port)
    first.says("ready")
    second.says("ready")
    first.signal(signal.SIGKILL)
    second.says("lambert: lost node 0's launcher: it closed the connection")
    lost = time.monotonic()
    [first] = pair(launch, "hear()", port=port)
    first.says("ready")
    second.says("ready", times=2)
    assert time.monotonic() < lost + AFTER_FAILURE  # its rank saved and ended: it was not killed
    for each in (first, second):
        each.signal(signal.SIGTERM)
    assert [first.end()[0], second.end()[0]] == [75, 75]


def test_what_is_refused_is_not_tried_again(launch: Callable[..., Launched]) -> None:
    first, second = pair(launch, "time.sleep(1); sys.exit(3)", "say('the key x is unknown'); sys.exit(2)")
    code, output = second.end()
    assert (code, output[-1]) == (2, "the key x is unknown")
    code, output = first.end()
    assert code == 2 and sum("attempt" in line for line in output) == 1
    assert output[-1] == "lambert: the run ended with exit code 2 on node 1: see the last lines there"


def test_a_stop_while_it_waits_and_a_port_in_use(launch: Callable[..., Launched]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ["--nnodes", "2:3", "--node-rank", "0", "--master-port"]
        run = launch(*words, port, **PLACE)
        assert run.end() == (2, [f"lambert: error: port {port}: Address already in use: set another --master-port"])
    run = launch(*words, str(ranks.free_port()), **PLACE)
    run.says("lambert: nodes here: 0; the run takes 2 to 3")
    run.signal(signal.SIGTERM)
    code, output = run.end()
    assert code == 75 and output[-1] == "lambert: stopped while it waited for other nodes"


def test_a_lost_node_is_done_without_and_taken_back(tiny_shards: Path, tmp_path: Path) -> None:
    """2 → 1 → 2 nodes, the second killed with all its processes; then SIGTERM to both: each sample once, in order."""
    config = write_config(tmp_path, tiny_shards, 1_000_000, run={"device": "cpu"}, metrics={"log_every_steps": 1})
    place = PLACE | {"PET_MASTER_PORT": str(ranks.free_port()), "TMPDIR": str(tmp_path)}

    def node(number: int) -> ranks.Forked:
        words = ["tests/helpers/forked_launch.py", "--config", str(config)]
        return ranks.fork_one(0, 1, 0, *words, **place, PET_NODE_RANK=str(number))

    def steps_on(sizes: list[str]) -> bool:
        """Whether the last attempt has taken steps, and the attempts so far had these numbers of ranks."""
        events = [line for line in read_lines(log) if line["event"] in ("start", "step")] if log.exists() else []
        starts = [line["ranks"] for line in events if line["event"] == "start"]
        return starts == sizes and sum(line["event"] == "step" for line in events[-12:]) == 12

    log = tmp_path / "run" / "metrics.jsonl"
    nodes = [node(0), node(1)]
    try:
        wait_for(lambda: steps_on(["2"]), *nodes)
        for pid in ranks.family(nodes[1].pid):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: steps_on(["2", "1"]), nodes[0])
        nodes[1] = node(1)
        wait_for(lambda: steps_on(["2", "1", "2"]), *nodes)
        for each in nodes:
            each.send_signal(signal.SIGTERM)
    finally:
        ended = ranks.finish(nodes)
    assert [code for code, _ in ended] == [75, 75], ended[0][1]
    assert [line["restarts"] for line in lines(tmp_path / "run", "attempt")] == [0, 1, 2]
    assert lines(tmp_path / "run", "start")[2]["rolled_back"] == 0  # it saved before it took the node back
    kept = kept_steps(tmp_path / "run")
    assert [line["position"] for line in kept] == [30 * (number + 1) for number in range(len(kept))]
    assert [line["step"] for line in kept] == list(range(1, len(kept) + 1))
    assert [line["step"] for line in lines(tmp_path / "run", "checkpoint")].count(kept[-1]["step"]) == 1


# ---- what the trainer refuses --------------------------------------------------------------------------------


def test_a_run_that_could_not_restart_on_fewer_ranks_is_refused_at_once(tiny_shards: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path, tiny_shards, 10)
    require_any_size(load(path))
    wrong = ["run.ranks=2", "run.resume=never", "phases.0.micro_batch=null", "phases.0.accumulation=2"]
    with pytest.raises(TrainerError) as caught:
        require_any_size(load(path, wrong))
    assert str(caught.value) == (
        "with --nnodes MIN:MAX the run may restart on other ranks: run.ranks is 2: remove it; run.resume is never: set "
        "it to auto; phases.0 has accumulation: set global_batch and micro_batch in its place"
    )
