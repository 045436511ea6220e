"""A stop while a rank waits for data: every rank ends at the same step boundary, at once, with one checkpoint."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from data_prep.manifest import load_manifest
from tests.helpers import ranks
from tests.helpers.file_server import Server
from tests.helpers.runs import lines, wait_for, write_config
from trainer.data.order import Order
from trainer.exits import STOPPED
from trainer.run.lock import hold

pytestmark = pytest.mark.slow

STEPS = 10
BEFORE = 4  # steps of 30 samples that two windows of 64 are enough for


def third_window(shards: Path) -> str:
    """The name of the first shard that a run of `write_config` lacks at step ``BEFORE``, if its window is one shard."""
    order = Order(tuple(shard.samples for shard in load_manifest(shards).shards), 5, 1)
    [number] = order.window_at(128)[0]
    return f"shard-0000{number}.tar"


def start(folder: Path, shards: Path, every: int, **places: str) -> list[ranks.Forked]:
    """Start two ranks. A download may take 5,000 s, so only the stop ends one that hangs."""
    config = write_config(
        folder,
        shards,
        STEPS,
        cache={"folder": str(folder / "cache"), "gigabytes": 0},
        run={"shuffle_window": 1, "timeout_seconds": 100_000},
        checkpoint={"every_steps": every},
        evaluation={"every_steps": BEFORE} if "heldout" in places else {},
        metrics={"port": None, "log_every_steps": 1},
    )
    sets = [word for name, place in places.items() for word in ("--set", f"phases.0.{name}={place}")]
    return ranks.fork(2, "trainer/__main__.py", "--config", str(config), *sets)


@pytest.mark.parametrize(
    ("use", "fault", "every"), [("train", "hang", 3), ("train", "busy", BEFORE), ("heldout", "hang", 3)]
)
def test_a_stop_does_not_wait_for_a_server(
    server: Server, own_shards: Path, tmp_path: Path, use: str, fault: str, every: int
) -> None:
    """ "hang": within an answer; "busy": between attempts, of which there are 15 s, and at whose end an error."""
    local = Path(shutil.copytree(own_shards, tmp_path / "local"))
    name = third_window(own_shards) if use == "train" else "shard-00003.tar"
    server.faults[name] = [fault] * 99
    places = {"train": str(local), "heldout": str(local), use: server.address}
    if use == "train":
        del places["heldout"]
    forked = start(tmp_path, own_shards, every, **places)
    run = tmp_path / "run"
    wait_for(lambda: name in server.gets and len(lines(run, "step")) == BEFORE, *forked)
    time.sleep(0.5)  # now both of them wait: one for the server, the other for the shard's lock
    forked[1].send_signal(signal.SIGTERM)
    ended = ranks.finish(forked, timeout=60)
    assert [code for code, _ in ended] == [75, 75], ended
    assert f"stopped at step {BEFORE} and saved" in ended[0][1]
    assert json.loads((run / "ended.json").read_text()) == {"how": "stopped", "step": BEFORE}
    assert [record["step"] for record in lines(run, "checkpoint")] == sorted({every, BEFORE})
    assert lines(run, "heldout") == []

    server.faults.clear()
    ended = ranks.finish(start(tmp_path, own_shards, every, **places))
    assert [code for code, _ in ended] == [0, 0], ended
    assert f"resumed from {run / f'step-{BEFORE:08d}'}" in ended[0][1]
    (tmp_path / "straight").mkdir()
    straight = ranks.finish(start(tmp_path / "straight", local, every, **{key: str(local) for key in places}))
    assert [code for code, _ in straight] == [0, 0], straight
    numbers = [
        [(line["step"], line["loss"], line["position"]) for line in lines(folder / "run", "step")]
        for folder in (tmp_path, tmp_path / "straight")
    ]
    assert numbers[0] == numbers[1] and len(numbers[0]) == STEPS
    losses = [
        [(line["step"], line["mlm_loss"]) for line in lines(folder / "run", "heldout")]
        for folder in (tmp_path, tmp_path / "straight")
    ]
    assert losses[0] == losses[1] and (use == "train" or losses[0][0][0] == BEFORE)


WAITING = """
import sys
from concurrent.futures import Future
from trainer.ranks.stop import Stop
from trainer.ranks.world import from_launcher, join, leave
world = from_launcher("cpu")
join(world, 300)
stop = Stop(world, 1)
there, late = Future(), Future()
there.set_result(None)
if world.rank != 1:
    late.set_result(None)
assert stop.wait(there) and not stop.decided
print("ready", flush=True)
assert not stop.wait(late) and stop.asked == (world.rank == 2)
assert stop.decided and stop.broke_off
assert stop.wait(there)  # what is there is not lost
leave(75)
"""


def test_a_rank_that_has_its_data_stops_those_that_wait(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    forked = ranks.fork(3, str(tmp_path / "waiting.py"))
    wait_for(lambda: all("ready" in rank.log.read_text() for rank in forked), *forked)
    forked[2].send_signal(signal.SIGUSR1)
    ended = ranks.finish(forked, timeout=60)
    assert [code for code, _ in ended] == [75] * 3, ended


def test_a_stop_while_another_run_holds_the_folder_is_kept(tiny_shards: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny_shards, 100_000, metrics={"port": None, "log_every_steps": 1})
    folder = tmp_path / "run"
    folder.mkdir()
    lock = hold(folder, 0, print)
    assert lock is not None
    with lock:
        [rank] = ranks.fork(1, "trainer/__main__.py", "--config", str(config))
        wait_for(lambda: _catches(rank.pid, signal.SIGTERM), rank, timeout=60)
        rank.send_signal(signal.SIGTERM)
    [(code, said)] = ranks.finish([rank])
    assert code == STOPPED, said
    assert lines(folder, "end")[-1]["how"] == "stopped"


def _catches(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{process}/status").read_text()
    [caught] = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(caught >> (number - 1) & 1)
