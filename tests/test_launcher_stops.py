"""A stop under each launcher, and as process 1 of a container, is saved and reported, and leaves no process behind.

What each command returned when this was measured (deepspeed 0.19.8, torch 2.13, two ranks over gloo):

    SIGTERM to …                       deepspeed      torchrun   python -m trainer
    one rank                           75             1          75
    the command                        143 (1)        1          75
    the command as process 1           ignored (2)    1          75, also while it starts
    deepspeed's launcher on a node     1
    SIGKILL to …
    one rank                           247 (3)        1 (3)
    torchrun, deepspeed's launcher     0 (1)          137 (1)

    (1) At once; the ranks notice, save and end a moment later. (2) By the kernel, because it has no handler.
    (3) Nothing is saved, and ``ended.json`` does not exist. In all other cases it says "stopped" and the step.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from data_prep.manifest import load_manifest
from tests.helpers import ranks
from tests.helpers.runs import lines, wait_for
from trainer.monitor.metrics_log import read_lines

pytestmark = pytest.mark.slow

TIMEOUT = 120
BIN = Path(sys.executable).parent
COMMANDS = {
    "deepspeed": ["deepspeed", "--num_accelerators", "2", "--master_port", "PORT", "--module", "trainer"],
    "torchrun": ["torchrun", "--nproc-per-node", "2", "--master-port", "PORT", "-m", "trainer"],
    "alone": ["python", "-m", "trainer"],
}
CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


class Started:
    """A run as a user starts it, its processes known by a mark in their environment."""

    def __init__(self, config: Path, command: list[str]) -> None:
        self.mark, self.folder = f"LAMBERT_TEST={uuid.uuid4().hex}", config.parent / "run"
        name, _, value = self.mark.partition("=")
        port = str(ranks.free_port())
        self.process = subprocess.Popen(
            [*(port if word == "PORT" else word for word in command), "--config", str(config)],
            cwd=ranks.ROOT,
            env={**os.environ, name: value, "PYTHONPATH": str(ranks.ROOT), "PATH": f"{BIN}:{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def pids(self, words: str = "") -> list[int]:
        """Its processes that have ``words`` in their command, the oldest first."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended
                if self.mark.encode() in (path / "environ").read_bytes():
                    command = (path / "cmdline").read_text(errors="replace").replace("\0", " ")
                    found += [int(path.name)] if words in command else []
        return sorted(found)

    def wait(self, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not done():
            assert time.monotonic() < deadline, self.pids()
            time.sleep(0.05)

    def training(self) -> bool:
        """Whether the run has taken some steps."""
        assert self.process.poll() is None, self.process.communicate()[0]
        path = self.folder / "metrics.jsonl"
        return path.exists() and len(read_lines(path)) > 3

    def end(self) -> tuple[int, str]:
        """Wait for all of its processes to be gone; the command's exit code and output."""
        output = self.process.communicate(timeout=TIMEOUT)[0]
        self.wait(lambda: not self.pids())
        return self.process.returncode, output


@pytest.fixture
def config(tiny_shards: Path, tmp_path: Path) -> Path:
    """The configuration of a run that never ends by itself."""
    phase = {"train": str(tiny_shards), "sequence_length": 32, "learning_rate": 1e-3, "steps": 1_000_000}
    vocab_size = load_manifest(tiny_shards).tokenizer.vocab_size
    model = {"layers": 1, "hidden": 16, "heads": 2, "intermediate": 32, "max_positions": 32, "vocab_size": vocab_size}
    tree = {
        "run": {"name": "test", "folder": str(tmp_path / "run"), "device": "cpu"},
        "model": model,
        "phases": [{**phase, "name": "only", "global_batch": 30, "micro_batch": 8}],
        "checkpoint": {"every_steps": 1_000_000},
        "metrics": {"port": None, "log_every_steps": 2},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "run.yaml"


@pytest.fixture
def start(config: Path) -> Iterator[Callable[[list[str]], Started]]:
    """Starts a command on that run; at the end, whatever is left of it is killed."""
    runs: list[Started] = []

    def begin(command: list[str]) -> Started:
        runs.append(Started(config, command))
        return runs[-1]

    yield begin
    for run in runs:
        for pid in run.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def container() -> list[str]:
    """Prefix that makes a command process 1 of its own process namespace, as in a container."""
    tried = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no process namespaces here: {tried.stderr.strip()}")
    return CONTAINER


@pytest.mark.parametrize(
    ("launcher", "first", "target", "number", "code"),
    [
        ("deepspeed", False, "bin/deepspeed", signal.SIGTERM, -signal.SIGTERM),
        ("deepspeed", False, "deepspeed.launcher.launch", signal.SIGKILL, 0),
        ("torchrun", True, "bin/torchrun", signal.SIGTERM, 1),
        ("alone", True, "-m trainer", signal.SIGTERM, 75),
    ],
)
def test_a_stop_is_saved_and_leaves_nothing_behind(
    start: Callable[[list[str]], Started], launcher: str, first: bool, target: str, number: int, code: int
) -> None:
    """``first``: the command is process 1 of its container."""
    run = start([*(container() if first else []), *COMMANDS[launcher]])
    run.wait(run.training)
    aimed = [pid for pid in run.pids(target) if not (first and pid == run.process.pid)]
    os.kill(aimed[0], number)
    returned, output = run.end()
    assert returned == code, output
    ended = json.loads((run.folder / "ended.json").read_text())
    assert ended["how"] == "stopped"
    assert [path.name for path in run.folder.glob("*step-*")] == [f"step-{ended['step']:08d}"]
    assert (run.folder / f"step-{ended['step']:08d}" / "checkpoint.json").exists()
    assert f"{ranks.ROOT}/trainer/" not in output, output  # no traceback but torchrun's own
    if number == signal.SIGKILL or launcher == "deepspeed":
        assert "the launcher has ended: stopping" in output


PIPED = """
import os, runpy, sys
pipe = os.open(sys.argv[1], os.O_WRONLY)
os.dup2(pipe, 1), os.dup2(pipe, 2)
os.close(pipe)
sys.argv = ["trainer", "--config", sys.argv[2]]
runpy.run_path("trainer/__main__.py", run_name="__main__")
"""


def test_a_stop_is_saved_though_nobody_reads_the_log_any_more(config: Path) -> None:
    """The log's reader is gone, like a killed launcher that forwarded it: each print raises BrokenPipeError."""
    pipe, folder = config.with_name("pipe"), config.parent / "run"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    [forked] = ranks.fork(1, "-c", PIPED, str(pipe), str(config))
    wait_for(lambda: len(lines(folder, "step")) > 3, forked)
    os.close(reader)
    forked.send_signal(signal.SIGTERM)
    assert ranks.finish([forked], TIMEOUT) == [(75, "")]
    assert json.loads((folder / "ended.json").read_text())["how"] == "stopped"


def test_the_first_process_ends_at_a_signal_while_it_starts(start: Callable[[list[str]], Started]) -> None:
    run = start([*container(), *COMMANDS["alone"]])

    def ask() -> bool:
        for pid in run.pids("-m trainer"):
            if pid != run.process.pid:
                os.kill(pid, signal.SIGTERM)  # until Python has begun, the kernel drops it
        return run.process.poll() is not None

    run.wait(ask)
    assert run.end()[0] == 75
    assert not run.folder.exists()


STUCK = """
import time, torch.distributed as dist
from trainer.ranks.stop import Stop
from trainer.ranks.world import from_launcher, join
world = from_launcher("cpu")
join(world, 300)
Stop(world, 1)
pair = dist.new_group([0, 1])
print("ready", flush=True)
if world.rank == 0:
    dist.barrier(pair)  # rank 1 never joins it, and it has its own connection: rank 0 learns nothing of rank 2
while True:
    time.sleep(1)
"""


def test_a_rank_that_waits_for_a_lost_one_in_c_is_ended(tmp_path: Path) -> None:
    """Every rank waits like this in NCCL, and none of Python's signal handlers ever runs."""
    (tmp_path / "stuck.py").write_text(STUCK)
    forked = ranks.fork(3, str(tmp_path / "stuck.py"))
    deadline = time.monotonic() + TIMEOUT
    while not all("ready" in rank.log.read_text() for rank in forked):
        assert time.monotonic() < deadline and [rank.returncode for rank in forked] == [None] * 3
        time.sleep(0.05)
    time.sleep(0.5)
    for rank in forked[:2]:
        rank.send_signal(signal.SIGTERM)
    time.sleep(2.5)
    assert [rank.returncode for rank in forked] == [None] * 3  # nobody is lost: they would stop at a boundary
    forked[2].kill()
    ended = ranks.finish(forked, timeout=60)
    assert [code for code, _ in ended] == [3, 3, -signal.SIGKILL]
    assert all("lost contact with another rank, which has ended" in output for _, output in ended[:2])
