"""The supervisor: how it treats its ranks and what it reports, with small programs and with the trainer.

Measured on one node of two ranks over gloo, the trainer in its steps, a checkpoint every 10 of them:

    what                                exit code  ended.json  processes left  steps lost
    SIGTERM, also as process 1, twice   75         stopped     0               0
    SIGINT (Ctrl-C)                     75         stopped     0               0
    SIGTERM to one rank                 75         stopped     0               0
    SIGTERM while the ranks start       75         none        0               0
    SIGKILL of a rank                   137        none        0               those since the last checkpoint
    SIGKILL of a rank while they start  137        none        0, after 15 s   0
    SIGKILL of the supervisor           killed     stopped     0               0
    SIGKILL of it as process 1          killed     none        0               those since the last checkpoint (1)
    a configuration that is refused     2          none        0               0, said once

    (1) The kernel kills all processes of a container with its process 1.
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from deploy.node import LaunchError, Node, read_node
from deploy.reasons import End, describe, judge, leave_message
from tests.helpers import ranks
from tests.helpers.runs import lines, write_config
from tests.test_launcher_stops import container

pytestmark = pytest.mark.slow

TIMEOUT = 120
STEPS = 40
KILL, TERM = -signal.SIGKILL, -signal.SIGTERM
SUPERVISOR = ("-m", "deploy.launch")
IN_A_HURRY = ("-c", "from deploy import launch; launch.NOTICE = launch.LAST = launch.ORPHANS = 0.3; launch.main()")

# A rank of these tests: it runs the argument of its number.
PROGRAM = """
import os, signal, sys, time
from data_prep.streams import write_whole_lines
write_whole_lines()  # both ranks print into one log
def say(text):
    print(text, file=sys.stderr, flush=True)
    with open(os.environ["LAMBERT_LAST_WORDS"], "w") as file:
        print(text, file=file)
def hear():
    heard = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    print("ready", flush=True)
    while not heard:
        time.sleep(0.01)
    time.sleep(0.5)
    sys.exit(75 if len(heard) == 1 else 1)
exec(sys.argv[1 + int(os.environ["LOCAL_RANK"])])
"""
SLEEP = "time.sleep(300)"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(300)"


class Launched:
    """A supervisor, its ranks, and all that they start, known by a mark in their environment."""

    def __init__(self, folder: Path, command: list[str], environ: Mapping[str, str]) -> None:
        self.mark, self.log, self.message = uuid.uuid4().hex, folder / "log", folder / "message"
        own = {"LAMBERT_TEST": self.mark, "PYTHONPATH": f"{ranks.ROOT}:{folder}", "OMP_NUM_THREADS": "1"}
        own["TMPDIR"] = str(folder)  # a supervisor that is killed leaves its temporary folder behind
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PET_")}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ranks.ROOT,
                env={**inherited, "CUDA_VISIBLE_DEVICES": "", **own, **environ},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def pids(self, words: str = "") -> list[int]:
        """Its processes that have ``words`` in their command, the oldest first."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended
                if f"LAMBERT_TEST={self.mark}".encode() in (path / "environ").read_bytes():
                    command = (path / "cmdline").read_text(errors="replace").replace("\0", " ")
                    found += [int(path.name)] if words in command else []
        return sorted(found)

    def signal(self, *numbers: int) -> None:
        """Send signals to the supervisor, also if it is process 1 of a container: below ``unshare`` then."""
        pid = [pid for pid in self.pids("launch") if b"unshare" not in Path(f"/proc/{pid}/cmdline").read_bytes()][0]
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):  # the first of them was enough
                os.kill(pid, number)
            time.sleep(0.05)  # or the kernel makes one of two

    def wait(self, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not done():
            assert time.monotonic() < deadline and self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)

    def says(self, text: str, times: int = 1) -> None:
        self.wait(lambda: self.log.read_text().count(text) >= times)

    def end(self) -> tuple[int, list[str]]:
        """Its exit code and lines; asserts that no process is left after it has ended by itself."""
        code = self.process.wait(TIMEOUT)
        assert self.pids() == [], self.log.read_text()
        return code, self.log.read_text().splitlines()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Starts a supervisor in its own folder; at the end, whatever is left of it is killed."""
    started: list[Launched] = []

    def begin(*words: str, by: tuple[str, ...] = SUPERVISOR, first: bool = False, **environ: str) -> Launched:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        (folder / "program.py").write_text(PROGRAM)
        command = [*(container() if first else []), sys.executable, *by]
        started.append(Launched(folder, [*command, "--termination-log", str(folder / "message"), *words], environ))
        return started[-1]

    yield begin
    for each in started:
        for pid in each.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        each.process.wait(TIMEOUT)


def of(*programs: str) -> list[str]:
    """The words that start a rank for each program."""
    return ["--nproc-per-node", str(len(programs)), "-m", "program", *programs]


# ---- what it says of its ranks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "asked", "code", "speaker"),
    [
        ([(0, 0), (1, 0)], False, 0, None),
        ([(0, 0), (1, 0)], True, 0, None),  # it came too late
        ([(1, 2), (0, 2)], False, 2, 1),
        ([(1, 3), (0, 2)], False, 2, 0),
        ([(1, 1), (0, 2)], False, 1, 1),  # the refusal may follow from the failure
        ([(1, KILL), (0, 2)], False, 137, 1),
        ([(0, 3), (1, KILL)], False, 137, 1),
        ([(0, 2), (1, -signal.SIGABRT)], False, 2, 0),  # as NCCL's watchdog does to those that are left
        ([(0, 3), (1, 1), (2, 3)], False, 1, 1),
        ([(0, 3), (1, 3)], False, 3, 0),
        ([(0, 75), (1, 75)], True, 75, 0),
        ([(0, 75), (1, 75)], False, 75, 0),  # on another node
        ([(0, 75), (1, 3)], True, 3, 1),
        ([(0, 75), (1, KILL)], True, 137, 1),
        ([(0, 130)], False, 130, 0),
        ([(0, TERM)], False, 143, 0),  # not by us
    ],
)
def test_the_exit_code_is_the_one_that_tells_most(
    ends: list[tuple[int, int]], asked: bool, code: int, speaker: int | None
) -> None:
    """Each case lists (rank, exit code) in the order in which the ranks ended."""
    found, end = judge([End(rank, code, at) for at, (rank, code) in enumerate(ends)], asked)
    assert (found, end.rank if end else None) == (code, speaker)


@pytest.mark.parametrize(
    ("ends", "asked", "code", "speaker"),
    [
        ([(0, 1), (1, TERM)], False, 1, 0),
        ([(0, 3), (1, KILL)], False, 3, 0),
        ([(0, TERM), (1, TERM)], True, 75, 0),
        ([(0, 3), (1, TERM)], True, 75, 1),  # it lost one that was still starting
        ([(0, 75), (1, KILL)], True, 75, 0),
        ([(0, KILL), (1, KILL)], True, 1, 0),
    ],
)
def test_signals_of_its_own_do_not_speak(ends: list[tuple[int, int]], asked: bool, code: int, speaker: int) -> None:
    found, end = judge([End(rank, code, at, ours=code < 0) for at, (rank, code) in enumerate(ends)], asked)
    assert end is not None and (found, end.rank) == (code, speaker)


def test_of_ends_seen_together_a_refusal_speaks_and_of_refusals_the_one_with_words() -> None:
    ends = [End(0, 1, 5.0), End(1, 2, 5.0), End(2, 2, 5.2, words="trainer: rank 2: error: the disk is full")]
    assert judge(ends, asked=False) == (2, ends[2])


def test_a_reason_is_one_line() -> None:
    assert describe(End(1, KILL, 0)).startswith("lambert: rank 1 was killed by SIGKILL (perhaps out of memory")
    assert describe(End(1, -signal.SIGBUS, 0)).startswith(
        "lambert: rank 1 was killed by SIGBUS (perhaps /dev/shm is full"
    )
    assert describe(End(1, -40, 0)) == "lambert: rank 1 was killed by signal 40"
    assert describe(End(1, 7, 0)) == "lambert: rank 1 ended with exit code 7: see its own lines"
    assert describe(End(0, 2, 0)) == "lambert: rank 0 ended with exit code 2: see its own lines"
    assert describe(End(0, 2, 0), alone=False).endswith("2: see its own lines or another node's")
    assert describe(End(1, 7, 0, words="because")) == "because"


def test_the_message_has_the_room_that_kubernetes_gives(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    leave_message("é" * 3000 + "\n", tmp_path / "message")
    assert (tmp_path / "message").read_text() == "é" * 2048
    leave_message("x" + "é" * 3000, tmp_path / "message")
    assert (tmp_path / "message").read_text() == "x" + "é" * 2047  # no half of a character
    leave_message("because", tmp_path / "nowhere" / "message")
    assert "cannot write the termination log" in capfd.readouterr().err


# ---- its place -----------------------------------------------------------------------------------------------


def no_gpus() -> int:
    return 0


def test_torchruns_variables_say_the_place() -> None:
    environ = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "pod-0.svc"}
    node = read_node({}, environ, no_gpus)
    assert str(node) == "node 1 of 2: ranks 8 to 15 of 16, rendezvous at pod-0.svc:29500"
    assert node.environment(3) == {
        **{"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"},
        **{"MASTER_ADDR": "pod-0.svc", "MASTER_PORT": "29500"},
    }
    given = {"--node-rank": "0", "--nproc-per-node": "1", "--master-port": "1234"}
    assert read_node(given, environ, no_gpus) == Node(0, 2, 1, "pod-0.svc", 1234)
    assert read_node(given, environ | {"PET_MAX_RESTARTS": "torchrun's"}, no_gpus) == Node(0, 2, 1, "pod-0.svc", 1234)
    given |= {"--nnodes": "2:4", "--max-restarts": "5"}
    environ["LAMBERT_SECRET"] = "secret"
    assert read_node(given, environ, no_gpus) == Node(0, 4, 1, "pod-0.svc", 1234, least=2, restarts=5)


@pytest.mark.parametrize(
    ("asked", "gpus", "count"), [("", 4, 4), ("auto", 0, 1), ("gpu", 2, 2), ("cpu", 4, len(os.sched_getaffinity(0)))]
)
def test_ranks_are_counted(asked: str, gpus: int, count: int) -> None:
    """One node meets on its own loopback, whatever the variables of several say."""
    environ = {"PET_NPROC_PER_NODE": asked, "PET_MASTER_ADDR": "pod-0.svc", "PET_NNODES": "1", "PET_NODE_RANK": "0"}
    node = read_node({}, environ, lambda: gpus)
    assert (node.nodes, node.ranks, node.address) == (1, count, "127.0.0.1")


@pytest.mark.parametrize(
    ("environ", "problems"),
    [
        ({"PET_NNODES": "two"}, ["PET_NNODES is 'two': make it a whole number from 1 to 100000"]),
        ({"PET_NNODES": "9" * 5000}, [f"PET_NNODES is '{'9' * 80}': make it a whole number from 1 to 100000"]),
        (
            {"PET_NPROC_PER_NODE": "1000000000"},
            ["PET_NPROC_PER_NODE is '1000000000': make it a whole number from 1 to 4096, or auto, gpu, cpu"],
        ),
        ({"PET_NNODES": "4:2"}, ["PET_NNODES is '4:2': make it MIN:MAX, two whole numbers from 1 to 100000"]),
        ({"PET_NNODES": "0:4"}, ["PET_NNODES is '0:4': make it MIN:MAX, two whole numbers from 1 to 100000"]),
        (
            {"PET_NNODES": "1:2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "x"},
            [
                "1:2 nodes, but LAMBERT_SECRET is not set: set one for all nodes; without it, anyone who reaches node "
                "0's port could stop the run"
            ],
        ),
        ({"PET_NODE_RANK": "1"}, ["PET_NODE_RANK is 1: make it less than --nnodes, 1"]),
        ({"PET_MASTER_PORT": "70000"}, ["PET_MASTER_PORT is '70000': make it a whole number from 1 to 65535"]),
        (
            {"PET_NPROC_PER_NODE": "0", "PET_NODE_RANK": "-1"},
            [
                "PET_NODE_RANK is '-1': make it a whole number from 0 to 100000",
                "PET_NPROC_PER_NODE is '0': make it a whole number from 1 to 4096, or auto, gpu, cpu",
            ],
        ),
        (
            {"PET_NNODES": "2"},
            [
                "2 nodes, but this node's number is not set: set --node-rank or PET_NODE_RANK",
                "2 nodes, but node 0's address is not set: set --master-addr or PET_MASTER_ADDR",
            ],
        ),
        (
            {"PET_NPROC_PER_NODE": "gpu"},
            ["one rank per GPU was requested, but PyTorch sees no GPU: set a number of ranks"],
        ),
    ],
)
def test_contradictions_take_a_line_each(environ: dict[str, str], problems: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        read_node({}, environ, no_gpus)
    assert str(caught.value).splitlines() == [f"lambert: error: {problem}" for problem in problems]
    assert caught.value.code == 2


# ---- what it does to its ranks -------------------------------------------------------------------------------


def test_a_rank_is_told_its_place_and_hears_all_signals(launch: Callable[..., Launched], tmp_path: Path) -> None:
    names = "('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT', 'OMP_NUM_THREADS')"
    tell = f"print(*(os.environ[name] for name in {names}), "
    tell += "signal.pthread_sigmask(signal.SIG_BLOCK, []), os.environ['LAMBERT_LAST_WORDS'][:-10], flush=True)"
    place = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "here", "PET_MASTER_PORT": "77"}
    code, output = launch(*of(tell, tell), **place, OMP_NUM_THREADS="5", TMPDIR=str(tmp_path)).end()
    assert (code, output[:1] + sorted(output[1:])) == (
        0,
        [
            "lambert: node 1 of 2: ranks 2 to 3 of 4, rendezvous at here:77",
            f"2 4 0 2 here 77 5 set() {tmp_path}/lambert-",
            f"3 4 1 2 here 77 5 set() {tmp_path}/lambert-",
        ],
    )
    assert [path.name for path in tmp_path.iterdir()] == ["0"]  # the test's own folder


def test_what_is_refused_starts_nothing(launch: Callable[..., Launched]) -> None:
    run = launch(*of(SLEEP), PET_NNODES="two")
    assert run.end() == (2, ["lambert: error: PET_NNODES is 'two': make it a whole number from 1 to 100000"])
    assert run.message.read_text() == "lambert: error: PET_NNODES is 'two': make it a whole number from 1 to 100000"
    code, output = launch("--grace-seconds", "never", *of(SLEEP)).end()
    assert code == 2 and len(output) == 1
    assert output[0] == "lambert: error: argument --grace-seconds: 'never' is not a positive number of seconds"
    nowhere = "import tempfile; tempfile._candidate_tempdir_list = lambda: ['/proc']; "
    code, output = launch(*of(SLEEP), by=("-c", nowhere + IN_A_HURRY[1])).end()
    assert code == 2 and len(output) == 1 and output[0].endswith(": set TMPDIR to a writable folder")


LOST = "time.sleep(0.3); say('trainer: rank 1: lost contact'); sys.exit(3)"


@pytest.mark.parametrize(
    ("programs", "code", "said"),
    [
        (["", "time.sleep(1)"], 0, []),  # one that is done waits for the others, as long as they take
        (["say('the key x is unknown'); sys.exit(2)", SLEEP], 2, ["the key x is unknown"]),
        (["sys.exit(2)"], 2, ["lambert: rank 0 ended with exit code 2: see its own lines"]),  # as argparse does
        (["sys.exit(1)", LOST], 1, ["lambert: rank 0 ended with exit code 1: see its own lines"]),
        (["os.kill(os.getpid(), 9)", LOST], 137, ["lambert: rank 0 was killed by SIGKILL (perhaps out of memory: "]),
        (["os.kill(os.getpid(), 11)", SLEEP], 139, ["lambert: rank 0 was killed by SIGSEGV"]),
        (["time.sleep(0.5); sys.exit(3)", DEAF], 3, ["lambert: rank 0 lost contact with another rank: see "]),
        (["sys.exit(75)", "time.sleep(1); sys.exit(75)"], 75, ["lambert: stopped at a step boundary and saved: "]),
    ],
)
def test_ends_of_ranks(launch: Callable[..., Launched], programs: list[str], code: int, said: list[str]) -> None:
    """The last line repeats the reason that ended the run, unless it is the only line."""
    run = launch(*of(*programs), by=IN_A_HURRY)
    returned, output = run.end()
    assert returned == code, output
    own = [line for line in output[1:] if line not in ("ready", "trainer: rank 1: lost contact")]
    assert [line[: len(start)] for line, start in zip(own, said, strict=True)] == said
    assert run.message.exists() == bool(said)
    assert not said or run.message.read_text() == output[-1] == own[-1]


@pytest.mark.parametrize("first", [False, True])
def test_a_stop_is_passed_on_once(launch: Callable[..., Launched], first: bool) -> None:
    """A rank here ends with 1 if it gets the signal twice. ``first``: the supervisor is process 1 of a container."""
    run = launch(*of("hear()", "hear()"), first=first)
    run.says("ready", times=2)
    run.signal(signal.SIGTERM, signal.SIGTERM, signal.SIGINT)
    code, output = run.end()
    assert code == 75, output
    assert output[-2:] == ["lambert: SIGTERM: stopping", run.message.read_text()]


def test_a_log_that_is_gone_changes_no_end(launch: Callable[..., Launched]) -> None:
    """The log's disk is full, or its reader has left: lines are lost, but the stop and the exit codes are the same."""
    full = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 2); "
    run = launch(*of("hear()", "hear()"), by=("-c", full + IN_A_HURRY[1]))
    run.says("ready", times=2)
    run.signal(signal.SIGTERM)
    assert run.end() == (75, ["ready", "ready"])
    assert run.message.read_text() == "lambert: stopped at a step boundary and saved: run the same command to continue"
    run = launch("--config", "nowhere", by=("-c", full + "os.dup2(2, 1); " + IN_A_HURRY[1]))
    assert run.end() == (2, [])
    assert "no configuration at nowhere" in run.message.read_text()  # the rank said it to its supervisor, too


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_other_signals_ask_for_the_same(launch: Callable[..., Launched], number: signal.Signals) -> None:
    heard = f"import signal; signal.signal({int(number)}, signal.SIG_DFL); "  # under nohup it would stay ignored
    run = launch(*of("hear()"), by=("-c", heard + IN_A_HURRY[1]))
    run.says("ready")
    run.signal(number)
    assert run.end()[0] == 75


def test_a_stop_while_ranks_start_or_are_counted(launch: Callable[..., Launched]) -> None:
    run = launch(*of(SLEEP, SLEEP), first=True)
    run.says("lambert: node 0")
    run.signal(signal.SIGTERM)
    code, output = run.end()
    assert code == 75 and "was stopped during startup" in output[-1]
    run = launch("-m", "program", SLEEP)
    run.wait(lambda: run.pids("device_count"))
    run.signal(signal.SIGTERM)
    assert run.end() == (75, ["lambert: SIGTERM: stopping", "lambert: stopped before any rank was started"])


def test_a_scheduler_may_tell_the_ranks_first(launch: Callable[..., Launched]) -> None:
    run = launch(*of("print('ready', flush=True); " + SLEEP, SLEEP))
    run.says("ready")
    os.kill(run.pids("program")[1], signal.SIGTERM)
    run.wait(lambda: len(run.pids("program")) == 2)
    run.signal(signal.SIGTERM)
    code, output = run.end()
    assert code == 75 and "was stopped during startup" in output[-1]


def test_a_grace_is_as_long_as_asked_for(launch: Callable[..., Launched]) -> None:
    run = launch("--grace-seconds", "2", *of(DEAF, "hear()"))
    run.says("ready", times=2)
    run.signal(signal.SIGTERM)
    assert run.end()[0] == 75  # the other one has saved
    run = launch("--grace-seconds=0.5", *of(DEAF))
    run.says("ready")
    run.signal(signal.SIGTERM)
    code, output = run.end()
    assert code == 1 and output[-1].startswith("lambert: rank 0 did not end within its time after SIGTERM")


ORPHAN = (
    "pid = os.fork()\nif pid == 0:\n    os.setsid()\n    if os.fork() == 0: {}\n    os._exit(0)\nos.waitpid(pid, 0)\n"
)
ENDS, STAYS = ORPHAN.format("os._exit(7)"), ORPHAN.format("print('stays', flush=True); time.sleep(300)")


@pytest.mark.parametrize("first", [False, True])
def test_orphans_are_reaped_and_none_is_left(launch: Callable[..., Launched], first: bool) -> None:
    """An orphan that ends while the ranks run leaves no zombie; one that stays is killed, whatever its session."""
    run = launch(*of(ENDS + "time.sleep(0.5); hear()", STAYS), by=IN_A_HURRY, first=first)
    run.says("ready")
    run.says("stays")
    above = set(run.pids("launch"))
    run.wait(lambda: len(set(run.pids()) - above) == 2)  # rank 0, and what rank 1 left
    supervisor = max(above)
    children = {int(pid) for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()}
    assert children == set(run.pids()) - above
    run.signal(signal.SIGTERM)
    assert run.end()[0] == 75


def test_ranks_that_start_end_with_their_supervisor(launch: Callable[..., Launched]) -> None:
    run = launch(*of(SLEEP, SLEEP))
    run.wait(lambda: len(run.pids("-m program")) == 3)
    run.signal(signal.SIGKILL)
    run.process.wait()
    deadline = time.monotonic() + TIMEOUT
    while run.pids():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ---- over the trainer ----------------------------------------------------------------------------------------


def numbers(folder: Path) -> list[tuple[int, float, int]]:
    return [(line["step"], line["loss"], line["position"]) for line in lines(folder / "run", "step")]


def test_a_stopped_pod_goes_on_as_two_nodes(launch: Callable[..., Launched], tiny_shards: Path, tmp_path: Path) -> None:
    """Two SIGTERMs as process 1, then one rank on each of two nodes: no step is lost, and none differs."""
    config = write_config(tmp_path, tiny_shards, STEPS)
    run = launch("--nproc-per-node", "2", "--config", str(config), first=True)
    run.wait(lambda: lines(tmp_path / "run", "step"))
    run.signal(signal.SIGTERM, signal.SIGTERM)
    code, output = run.end()
    ended = json.loads((tmp_path / "run" / "ended.json").read_text())
    assert code == 75 and ended["how"] == "stopped", output
    assert run.message.read_text() == (
        f"lambert: stopped at step {ended['step']} and saved: run the same command to continue"
    )
    assert output.count(run.message.read_text()) == 1
    assert len(numbers(tmp_path)) == ended["step"] < STEPS

    place = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    place["PET_MASTER_PORT"] = str(ranks.free_port())
    pair = [launch("--config", str(config), **place, PET_NODE_RANK=str(number)) for number in range(2)]
    assert [each.end()[0] for each in pair] == [0, 0], pair[0].log.read_text()
    (tmp_path / "straight").mkdir()
    straight = write_config(tmp_path / "straight", tiny_shards, STEPS)
    assert [code for code, _ in ranks.finish(ranks.fork(2, "trainer/__main__.py", "--config", str(straight)))] == [0, 0]
    assert numbers(tmp_path) == numbers(tmp_path / "straight") and len(numbers(tmp_path)) == STEPS


def test_ranks_save_when_their_supervisor_is_killed(
    launch: Callable[..., Launched], tiny_shards: Path, tmp_path: Path
) -> None:
    """A first start is refused, with one rank's message (on a busy machine the other prints it too)."""
    config = write_config(tmp_path, tiny_shards, 1_000_000)
    words = ["--nproc-per-node", "2", "--config", str(config)]
    refused = launch(*words, "--set", "run.sead=1")
    code, output = refused.end()
    assert code == 2 and list(dict.fromkeys(output[1:])) == refused.message.read_text().splitlines(), output
    assert output[-1] == "  - run.sead: unknown key; did you mean seed?"

    run = launch(*words)
    run.wait(lambda: lines(tmp_path / "run", "step"))
    run.signal(signal.SIGKILL)
    run.process.wait()
    deadline = time.monotonic() + TIMEOUT
    while run.pids():
        assert time.monotonic() < deadline, run.log.read_text()
        time.sleep(0.02)
    ended = json.loads((tmp_path / "run" / "ended.json").read_text())
    assert ended["how"] == "stopped" and (tmp_path / "run" / f"step-{ended['step']:08d}" / "checkpoint.json").exists()
    assert "the launcher has ended: stopping" in run.log.read_text()
