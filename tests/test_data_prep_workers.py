"""Workers on one machine and over MPI: results stay in order, errors reach the caller, and every signal ends them."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from data_prep.errors import DataError, KilledError
from data_prep.workers import Stopped, show_progress, start_workers, stop_on_sigterm
from tests.helpers.mpi_command import TASKS, crash, fill, refuse, square
from tests.helpers.ranks import ROOT

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, str(ROOT / "tests/helpers/mpi_command.py")]
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
needs_mpi = pytest.mark.skipif(MPIRUN is None or not importlib.util.find_spec("mpi4py"), reason="no mpirun and mpi4py")
PATIENCE = 60  # seconds, of a slow machine


def environment() -> dict[str, str]:
    """The environment of a root user in a container with few cores, with variables that workers must ignore."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TOKENIZERS_PARALLELISM": "true",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }


def start(*line: str) -> subprocess.Popen[str]:
    """A command in a process group of its own, as from a terminal: what a shell starts with & has SIGINT ignored."""
    pipe, heed = subprocess.PIPE, partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(
        line, env=environment(), stdout=pipe, stderr=pipe, text=True, start_new_session=True, preexec_fn=heed
    )


def start_ranks(size: int, *arguments: str, runner: tuple[str, ...] = ("-m", "mpi4py")) -> subprocess.Popen[str]:
    """The test's command under ``mpirun``."""
    assert MPIRUN is not None
    return start(MPIRUN, "-n", str(size), COMMAND[0], *runner, COMMAND[1], *arguments)


def finish_ranks(*line: str, runner: tuple[str, ...] = ("-m", "mpi4py")) -> tuple[int, str, list[str]]:
    """:func:`finish` for three ranks; tries again if mpirun itself crashed, as it rarely does at the end."""
    ended = finish(start_ranks(3, *line, runner=runner))
    return finish(start_ranks(3, *line, runner=runner)) if ended[0] == -signal.SIGSEGV else ended


def finish(run: subprocess.Popen[str]) -> tuple[int, str, list[str]]:
    """(exit code, stdout, lines of stderr that are the command's own)."""
    try:
        out, err = run.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        raise
    return run.returncode, out, [line for line in err.splitlines() if "error" in line]


def wait_for_workers(folder: Path, count: int) -> list[int]:
    """Process ids of ``count`` workers that work on ``long``."""
    wait_until(lambda: len(list(folder.glob("*.pid"))) >= count)
    return [int(path.read_text()) for path in sorted(folder.glob("*.pid"))]


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def is_gone(process: int) -> bool:
    """Ended, if perhaps not yet waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def all_gone(processes: list[int]) -> bool:
    return all(is_gone(process) for process in processes)


# ---- processes of this machine -------------------------------------------------------------------------------


def test_results_come_in_the_order_of_the_tasks() -> None:
    drawn = []

    def tasks() -> Iterator[int]:
        for number in range(TASKS):
            drawn.append(number)
            yield number

    with start_workers(2) as pool:
        results = pool.map(square, tasks())
        assert next(results)[0] == 0
        assert len(drawn) <= pool.ahead + 1 < TASKS  # a corpus does not wait in memory
        assert [number for number, _, _ in results] == [number**2 for number in range(1, TASKS)]


def test_one_process_works_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    with start_workers(1) as pool:
        results = pool.map(square, iter(range(3)))
        assert [next(results) for _ in range(3)] == [(number**2, os.getpid(), "false") for number in range(3)]
        with pytest.raises(DataError, match="^bad line 5$"):
            list(pool.map(refuse, range(TASKS)))
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    with pytest.raises(ZeroDivisionError), start_workers(1) as pool:
        list(pool.map(crash, [0]))
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_an_error_travels_with_all_that_it_says() -> None:
    with pytest.raises(DataError, match="^bad line 5$"), start_workers(2) as pool:
        list(pool.map(refuse, range(TASKS)))
    with pytest.raises(OSError) as caught, start_workers(2) as pool:
        list(pool.map(fill, [7]))
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "shard-00007.tar")


def test_a_killed_worker_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KilledError, match="run the same command again"), start_workers(2) as pool:
        list(pool.map(signal.raise_signal, [signal.SIGKILL]))


@pytest.mark.parametrize(
    ("sent", "code", "line"), [(signal.SIGTERM, 143, "error: stopped"), (signal.SIGINT, 130, "error: interrupted")]
)
@pytest.mark.parametrize("whole_group", [False, True])
def test_a_signal_ends_command_and_workers(
    tmp_path: Path, sent: signal.Signals, code: int, line: str, whole_group: bool
) -> None:
    run = start(*COMMAND, "long", str(tmp_path))
    pids = wait_for_workers(tmp_path, 2)
    (os.killpg if whole_group else os.kill)(run.pid, sent)
    assert run.communicate(timeout=PATIENCE) == ("", line + "\n")
    assert run.returncode == code
    wait_until(lambda: all_gone(pids))


def test_sigterm_is_heeded_once_and_then_ignored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_sigterm():
        pass
    assert signal.getsignal(signal.SIGTERM) is before
    cleaned = False
    try:
        with pytest.raises(Stopped), stop_on_sigterm():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)
                cleaned = True
        assert cleaned
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_workers_that_are_stopped_first_do_not_count_as_killed(tmp_path: Path) -> None:
    run = start(*COMMAND, "long", str(tmp_path))
    for pid in wait_for_workers(tmp_path, 2):
        with suppress(ProcessLookupError):  # the first one's end may have been the other's
            os.kill(pid, signal.SIGTERM)
    time.sleep(0.1)
    os.kill(run.pid, signal.SIGTERM)
    assert finish(run) == (143, "", ["error: stopped"])


def test_workers_end_with_a_command_that_is_killed(tmp_path: Path) -> None:
    run = start(*COMMAND, "long", str(tmp_path))
    pids = wait_for_workers(tmp_path, 2)
    run.kill()
    assert finish(run)[0] == -signal.SIGKILL
    wait_until(lambda: all_gone(pids))


def test_a_container_is_stopped_by_sigterm(tmp_path: Path) -> None:
    isolate = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*isolate, "true"], capture_output=True).returncode:
        pytest.skip("no right to make a process 1")
    run = start(*isolate, *COMMAND, "long", str(tmp_path))
    assert sorted(wait_for_workers(tmp_path, 2))[0] < 100  # ids of their own: the command is 1
    [first] = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(first), signal.SIGTERM)
    assert finish(run) == (143, "", ["error: stopped"])


# ---- ranks of MPI --------------------------------------------------------------------------------------------


@needs_mpi
@pytest.mark.parametrize(("size", "processes"), [(1, 2), (2, 1), (4, 3)])
def test_ranks_work_as_processes_do(size: int, processes: int) -> None:
    code, out, errors = finish(start_ranks(size, "square"))
    assert (code, errors) == (0, [])
    [line] = out.splitlines()  # from one rank alone
    record = json.loads(line)
    assert [square for square, _, _ in record["results"]] == [number**2 for number in range(TASKS)]
    pids = {pid for _, pid, _ in record["results"]}
    assert len(pids) <= processes and record["coordinator"] not in pids
    assert {threads for _, _, threads in record["results"]} == {"false"}


@needs_mpi
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("refuse", (2, "", ["error: bad line 5"])),
        ("fill", (2, "", ["error: shard-00000.tar: No space left on device"])),
        ("crash", (1, "", [])),
        ("usage", (2, "", [])),
        ("nothing", (0, "", [])),
    ],
)
def test_all_ranks_end_with_the_first(command: str, expected: tuple[int, str, list[str]]) -> None:
    assert finish_ranks(command) == expected


@needs_mpi
@pytest.mark.parametrize("runner", [(), ("-m", "mpi4py.futures")])
def test_ranks_that_do_not_know_of_each_other_are_refused(runner: tuple[str, ...]) -> None:
    code, out, [line] = finish_ranks("square", runner=runner)
    assert (code, out) == (2, "")
    assert line.endswith("one of 3 ranks; run it as mpirun -n K python -m mpi4py -m data_prep ...")


@needs_mpi
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_dies_ends_the_others(tmp_path: Path, sent: signal.Signals) -> None:
    run = start_ranks(3, "long", str(tmp_path))
    pids = wait_for_workers(tmp_path, 2)
    os.kill(pids[0], sent)
    assert finish(run)[0] == 128 + sent
    wait_until(lambda: all_gone(pids))


@needs_mpi
def test_sigterm_to_the_first_rank_ends_the_others(tmp_path: Path) -> None:
    run = start_ranks(3, "long", str(tmp_path))
    pids = wait_for_workers(tmp_path, 2)
    ranks = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
    [first] = set(ranks) - set(pids)
    os.kill(first, signal.SIGTERM)
    code, _, errors = finish(run)
    assert code == 143 and "error: stopped" in errors
    wait_until(lambda: all_gone(pids))


# ---- progress ------------------------------------------------------------------------------------------------


def lines(
    amounts: list[float],
    total: float | None,
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> list[str]:
    """The lines that a log prints if the k-th item comes at ``clock[k]``; the first is the start, the last the end."""
    times = iter(clock)
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: next(times))
        assert list(show_progress(amounts, "read", "bytes", float, total)) == amounts
    return capsys.readouterr().err.splitlines()


def test_progress_says_share_rate_and_time_to_go(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = lines([1e6, 1e6, 2e6], 1e7, [0.0, 4.0, 10.0, 12.0, 20.0], monkeypatch, capsys)
    assert said == [
        "data_prep: read 2,000,000 bytes (20 %) in 10.0 s, 200,000 a second, 40 s to go",
        "data_prep: read 4,000,000 bytes in 20.0 s, 200,000 a second",
    ]


def test_time_to_go_is_that_of_the_last_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rerun skips finished items at once: 900 in the first second, then one per second."""
    clock = [0.0, 1.0, *(10.0 * k for k in range(1, 21)), 201.0]
    said = lines([900.0, *[10.0] * 20], 2000.0, clock, monkeypatch, capsys)
    assert said[0].endswith("910 bytes (45 %) in 10.0 s, 91 a second, 12 s to go")
    assert said[-2].endswith("1,100 bytes (55 %) in 3 min 20 s, 1 a second, 15 min 00 s to go")
    assert said[-1].endswith("1,100 bytes in 3 min 21 s, 5 a second")


@pytest.mark.parametrize("total", [None, 0.0, 1e-9, 1.0, 5.0])
@pytest.mark.parametrize("amount", [0.0, 3.0])
def test_progress_is_never_silly(
    total: float | None, amount: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "\n".join(lines([amount] * 3, total, [0.0, 6.0, 12.0, 18.0, 18.0], monkeypatch, capsys))
    assert not re.search(r"nan|inf|-|e\+", said)
    assert all(int(share) <= 100 for share in re.findall(r"(\d+) %", said))
    assert ("to go" in said) == (total == 5.0 and amount > 0)
    assert ("%" in said) == bool(total)


def test_a_stage_of_nothing_is_one_plain_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lines([], 0.0, [0.0, 0.0], monkeypatch, capsys) == ["data_prep: read 0 bytes in 0.0 s"]


@pytest.mark.parametrize("columns", [40, 200])
def test_a_terminal_has_one_line_that_never_wraps(columns: int) -> None:
    code = (
        "from data_prep import workers; workers.TERMINAL_SECONDS = workers.RATE_SECONDS = 0.0\n"
        "list(workers.show_progress([10**9] * 30, 'tokenized', 'bytes', int, 31e9))"
    )
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    subprocess.run([sys.executable, "-c", code], env=environment(), stderr=slave, check=True, timeout=PATIENCE)
    output = ""
    while select.select([master], [], [], 0)[0]:
        output += os.read(master, 65536).decode()
    os.close(master)
    os.close(slave)
    assert output.endswith("\n") and output.count("\n") == 1 and output.count("\r") == 31
    assert all(len(line) == columns - 1 for line in output.rstrip("\r\n").split("\r"))
    assert ("a second" in output) == (columns == 200)
