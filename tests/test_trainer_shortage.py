"""A resource that runs out, or a disk that fails, is named; the run saves first if possible; it is never a refusal."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import zeros

from data_prep.errors import SHORTAGES, DataError
from data_prep.manifest import load_manifest
from tests.helpers import ranks
from tests.helpers.ranks import ROOT
from tests.helpers.runs import lines, wait_for, write_config
from trainer.checkpoint import reading as checkpoint
from trainer.checkpoint.train_state import TrainState
from trainer.console import silent
from trainer.data.loader import Loader
from trainer.errors import LostError, PassingError, TrainerError, exit_code, explain, shortage
from trainer.exits import FAILED, LOST, REFUSED
from trainer.monitor.guard import Finding, Setback
from trainer.run.train import Run

pytestmark = pytest.mark.slow


def fault(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def wrapped(cause: Exception) -> Exception:
    """Wrap an error as our own code often does."""
    try:
        try:
            raise cause
        except Exception:
            raise DataError("shard x cannot be read") from None
    except DataError as error:
        return error


# ---- what is one -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SHORTAGES, ids=errno.errorcode.get)
def test_a_shortage_ends_with_another_code_than_a_refusal(number: int) -> None:
    for error in (fault(number), wrapped(fault(number))):
        assert exit_code(error) == FAILED != REFUSED and SHORTAGES[number] in explain(error)
    assert shortage(SafetensorError(f"Error while serializing: I/O error: No space left (os error {number})"))


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.EAGAIN, errno.EROFS])
def test_what_a_user_must_change_is_a_refusal(number: int) -> None:
    for error in (fault(number), wrapped(fault(number)), TrainerError("wrong"), ValueError("wrong")):
        assert exit_code(error) == REFUSED and not shortage(error)
    assert not shortage(SafetensorError("Error while deserializing header: header too large"))


def test_other_ends_keep_their_codes() -> None:
    assert [exit_code(error) for error in (LostError("gone"), PassingError(""), MemoryError())] == [
        LOST,
        FAILED,
        FAILED,
    ]
    assert explain(MemoryError()).startswith("MemoryError (out of memory")


TOGETHER = """
import errno, os, sys
from trainer.errors import TrainerError, exit_code
from trainer.ranks.world import from_launcher, join, leave, together
world = from_launcher("cpu")
join(world, 30)
def act():
    match sys.argv[1 + world.rank]:
        case "refuses": raise TrainerError("a wrong name")
        case "lacks": raise OSError(errno.ENOSPC, "No space left on device")
try:
    together(act, world)
    leave(0)
except TrainerError as error:
    print(error, flush=True)
    leave(exit_code(error))
"""


@pytest.mark.parametrize(
    ("does", "code", "said"),
    [
        (("is well", "lacks"), FAILED, "[Errno 28] No space left on device (the disk is full: make room)"),
        (("lacks", "refuses"), REFUSED, "a wrong name"),
        (("is well", "refuses"), REFUSED, "a wrong name"),
        (("is well", "is well"), 0, ""),
    ],
)
def test_all_ranks_end_with_one_code_and_a_refusal_comes_first(does: tuple[str, str], code: int, said: str) -> None:
    ended = ranks.finish(ranks.fork(2, "-c", TOGETHER, *does))
    assert [code for code, _ in ended] == [code, code]
    assert "".join(output.strip() for _, output in ended) == said


# ---- in the middle of a run ------------------------------------------------------------------------------------


def failing(tmp_path: Path, shards: Path, call: str, number: int, size: int = 1) -> list[tuple[int, str]]:
    """A run whose eighth step cannot be read."""
    config = write_config(tmp_path, shards, 20, checkpoint={"every_steps": 5})
    arguments = (
        "tests/helpers/failing_rank.py",
        call,
        str(number),
        "8",
        "trainer/__main__.py",
        "--config",
        str(config),
    )
    return ranks.finish(ranks.fork(size, *arguments))


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.EIO, "dmesg"), (errno.ESTALE, "network file system"), (errno.EMFILE, "ulimit -n"), (0, "out of memory")],
)
def test_the_steps_before_it_are_saved(tiny_shards: Path, tmp_path: Path, number: int, said: str) -> None:
    [(code, output)] = failing(tmp_path, tiny_shards, "pread", number)
    assert code == FAILED and "Traceback" not in output, output
    last = output.splitlines()[-1]
    assert last.startswith("trainer: rank 0: error: ") and said in last
    assert number == 0 or f"shard {tiny_shards}/shard-" in last
    found, passed = checkpoint.newest(tmp_path / "run")
    assert found is not None and found.folder.name == "step-00000007" and not passed
    assert lines(tmp_path / "run", "end")[-1]["how"] == "failed" and not (tmp_path / "run" / "ended.json").exists()
    config = tmp_path / "run.yaml"
    [(code, output)] = ranks.finish(ranks.fork(1, "trainer/__main__.py", "--config", str(config)))
    assert code == 0 and "resumed from" in output, output
    assert [line["step"] for line in lines(tmp_path / "run", "step")] == list(range(1, 21))


def test_trouble_in_the_steps_before_it_does_not_hide_it() -> None:
    """The guard judges those steps before they are saved."""
    run: Any = SimpleNamespace(boundary=TrainState(step=7), saved=5, world=SimpleNamespace(size=1), say=silent)
    run.save = Mock(side_effect=Setback(Finding("spike", "rollback", 7, "a spike")))
    Run.rescue(run, PassingError("no more data"))
    assert run.save.called


def test_ranks_that_need_one_another_keep_the_last_checkpoint(tiny_shards: Path, tmp_path: Path) -> None:
    ended = failing(tmp_path, tiny_shards, "pread", errno.EIO, size=2)
    assert {code for code, _ in ended} <= {FAILED, LOST} and FAILED in {code for code, _ in ended}, ended
    found, _ = checkpoint.newest(tmp_path / "run")
    assert found is not None and found.folder.name == "step-00000005"


def test_a_run_without_descriptors_says_so(tiny_shards: Path, tmp_path: Path) -> None:
    """A real shortage: it has used up all descriptors when it opens its held-out shards."""
    config = write_config(tmp_path, tiny_shards, 100_000, metrics={"log_every_steps": 1})
    every = ("--set", "evaluation.every_steps=150", "--set", f"phases.0.heldout={tiny_shards}")
    [rank] = processes = ranks.fork(1, "trainer/__main__.py", "--config", str(config), *every)
    wait_for(lambda: len(lines(tmp_path / "run", "step")) > 30, rank)
    open_now = max(map(int, os.listdir(f"/proc/{rank.pid}/fd"))) + 1
    psutil.Process(rank.pid).rlimit(psutil.RLIMIT_NOFILE, (open_now - 1, open_now - 1))
    [(code, output)] = ranks.finish(processes)
    assert code == FAILED and "Traceback" not in output, output
    assert "out of file descriptors: raise ulimit -n" in output.splitlines()[-1]
    assert checkpoint.newest(tmp_path / "run")[0] is not None


def test_a_checkpoint_that_cannot_be_read_now_is_not_passed_over(
    tiny_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, tiny_shards, 4, checkpoint={"every_steps": 2})
    assert [code for code, _ in ranks.finish(ranks.fork(1, "trainer/__main__.py", "--config", str(config)))] == [0]
    found, _ = checkpoint.newest(tmp_path / "run")
    assert found is not None and found.folder.name == "step-00000004"
    real = Path.open

    def fail(path: Path, *arguments: Any, **more: Any) -> Any:
        if path.parent.name == "step-00000004":
            raise fault(errno.ESTALE)
        return real(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(OSError, match="Stale file handle"):
        checkpoint.newest(tmp_path / "run")


def test_a_shard_that_cannot_be_read_now_is_named_and_not_called_damaged(
    tiny_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = Loader(tiny_shards, load_manifest(tiny_shards), 0, 1)

    def fail(*arguments: object) -> bytes:
        raise fault(errno.EIO)

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(PassingError, match=rf"shard {tiny_shards}/shard-00000.tar cannot be read .*dmesg") as caught:
        list(loader.sweep(8))
    assert "restore" not in str(caught.value)


# ---- the other commands ----------------------------------------------------------------------------------------


LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def limited(*arguments: str) -> tuple[int, str]:
    """(exit code, output) of a command whose files may not grow beyond some kB, as on a full disk."""
    [ended] = ranks.finish(ranks.fork(1, "-c", LIMITED, *arguments))
    return ended


@pytest.fixture(scope="module")
def run(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    config = write_config(folder, tiny_shards, 2)
    assert [code for code, _ in ranks.finish(ranks.fork(1, "trainer/__main__.py", "--config", str(config)))] == [0]
    return folder / "run"


Words = Callable[[Path, Path, Path], list[str]]  # of a command: given a run, shards and the folder to write to
COMMANDS: dict[str, Words] = {
    "export": lambda run, shards, out: ["trainer.export", "--checkpoint", str(run), "--out", str(out / "x")],
    "weights": lambda run, shards, out: ["trainer.weights", str(run), str(out / "x.safetensors")],
    "build": lambda run, shards, out: [
        *("data_prep", "build", "--input", str(shards.parent / "corpus.txt"), "--sequence-length", "32"),
        *("--tokenizer", str(shards.parent / "tokenizer"), "--out", str(out / "x"), "--processes", "1"),
    ],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_no_refusal(name: str, run: Path, tiny_shards: Path, tmp_path: Path) -> None:
    code, said = limited(*COMMANDS[name](run, tiny_shards, tmp_path))
    assert code == FAILED and "Traceback" not in said, said
    assert "raise ulimit -f" in said.splitlines()[-1]
    left = [path.name for path in tmp_path.iterdir()]
    assert left == (["x"] if name == "build" else [])
    if name == "build":
        assert not (tmp_path / "x" / "manifest.json").exists()
        again = subprocess.run([sys.executable, "-m", *COMMANDS[name](run, tiny_shards, tmp_path)], cwd=ROOT)
        assert again.returncode == 0


def test_safetensors_words_for_a_full_disk_are_understood(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises((SafetensorError, OSError)) as caught:
            save_file({"a": zeros(10_000)}, tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert exit_code(caught.value) == FAILED
