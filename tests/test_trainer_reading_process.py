"""The process that reads for a GPU: the thread's batches, its errors in one line, and no orphan."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields
from itertools import islice
from pathlib import Path

import pytest
import torch

from data_prep.manifest import load_manifest
from tests.helpers.file_server import BATCH, Server, content, loader_of, read
from tests.helpers.raw_samples import masks_of, order_of
from tests.helpers.runs import wait_for
from trainer.data import reading_process
from trainer.data.loader import Loader
from trainer.data.reader import Reader
from trainer.data.reading_process import ReadingProcess
from trainer.data.spread import Spread
from trainer.errors import PassingError, TrainerError
from trainer.model.batch import MicroBatch


@pytest.fixture(autouse=True)
def no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory needs a GPU."""
    monkeypatch.setattr(MicroBatch, "pin", lambda batch, device: batch)


@pytest.fixture
def process(own_shards: Path) -> Iterator[ReadingProcess]:
    with closing(started(own_shards)) as one:
        yield one


def started(folder: Path, global_batch: int = 8, remedy: str = "build it again") -> ReadingProcess:
    reader = Reader(folder, load_manifest(folder), 0, 1, None, None, remedy)
    return ReadingProcess(reader, order_of(folder), global_batch, 1)


def equal(a: MicroBatch, b: MicroBatch) -> bool:
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)]
    return all(torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def is_gone(pid: int) -> bool:
    """Whether the process has ended, even if nobody has reaped it yet."""
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def pid_of(process: ReadingProcess) -> int:
    return int(process._process.pid)


@pytest.mark.parametrize("new_masks", [False, True])
def test_it_reads_what_a_thread_reads(tiny_shards: Path, new_masks: bool) -> None:
    manifest, order = load_manifest(tiny_shards), order_of(tiny_shards)
    masks = masks_of(tiny_shards) if new_masks else None
    batches = []
    for device in ("cpu", "cuda"):
        loader = Loader(tiny_shards, manifest, 1, 2, masks, device=torch.device(device), spread=Spread(96, seed=7))
        with closing(loader.steps(order, order.samples - 30, 20, 3)) as steps:
            batches.append(list(islice(steps, 4)))
    for ours, theirs in zip(*batches, strict=True):
        assert (ours.position, ours.samples, ours.counts) == (theirs.position, theirs.samples, theirs.counts)
        assert len(ours.micro_batches) == 3
        assert all(equal(a, b) for a, b in zip(ours.micro_batches, theirs.micro_batches, strict=True))


def test_it_reads_remote_shards_as_a_thread_does(server: Server, cache: Path) -> None:
    loaders = [loader_of(server, cache) for _ in range(2)]
    steps = 2 * sum(shard.samples for shard in loaders[0].manifest.shards) // BATCH
    loaders[1].device = torch.device("cuda")
    assert content(read(loaders[0], 0, steps)) == content(read(loaders[1], 0, steps))


def test_nobody_talks_to_a_closed_process(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader, left = loader_of(server, cache), list[str]()
    loader.device, close = torch.device("cuda"), ReadingProcess.close

    def closing_process(process: ReadingProcess) -> None:
        left.extend(thread.name for thread in threading.enumerate() if thread.name.startswith("loader"))
        close(process)

    monkeypatch.setattr(ReadingProcess, "close", closing_process)
    read(loader, 0, 1)
    assert left == []


def test_it_imports_no_torch(process: ReadingProcess) -> None:
    process.ask(0)
    process.take()
    assert "libtorch" not in Path(f"/proc/{pid_of(process)}/maps").read_text()


def test_damage_is_reported_as_by_a_thread(own_shards: Path, process: ReadingProcess) -> None:
    [shard, *_] = sorted(own_shards.glob("*.tar"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2 :: 7] = bytes(len(content[len(content) // 2 :: 7]))
    shard.write_bytes(content)
    said = []
    with pytest.raises(TrainerError) as ours:
        for position in range(0, order_of(own_shards).samples, 8):
            process.ask(position)
            process.take()
    said.append(str(ours.value))
    reader = Reader(own_shards, load_manifest(own_shards), 0, 1, None, None, "build it again")
    with pytest.raises(TrainerError) as theirs:
        for position in range(0, order_of(own_shards).samples, 8):
            reader.step(order_of(own_shards), position, 8, 1)
    assert str(ours.value) == str(theirs.value) and shard.name in str(ours.value) and "\n" not in str(ours.value)


def test_a_shortage_of_memory_is_reported_as_by_a_thread(own_shards: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with closing(started(own_shards, 4000)) as process:
        process.ask(0)
        process.take()
        resource.prlimit(pid_of(process), resource.RLIMIT_AS, (1, 1))
        process.ask(4000)
        with pytest.raises(MemoryError):
            process.take()
    assert capfd.readouterr().err == ""


def test_a_fault_of_ours_shows_its_traceback(own_shards: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = "the process that reads the shards ended with code 1: see its traceback"
    with closing(started(own_shards)) as process, pytest.raises(PassingError, match=said):
        process._channel.send("no position")
        process.take()
    assert "Traceback" in capfd.readouterr().err


def test_a_killed_process_is_one_line_that_says_to_try_again(process: ReadingProcess) -> None:
    os.kill(pid_of(process), signal.SIGKILL)
    said = "the process that reads the shards was killed: the machine may have run out of memory"
    with pytest.raises(PassingError, match=said):
        for _ in range(2):
            process.ask(0)
            process.take()


def test_a_process_that_cannot_start_is_one_line(own_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as patch, pytest.raises(PassingError, match="too many processes: raise ulimit -u"):
        patch.setattr(subprocess, "Popen", refuse)
        started(own_shards)
    monkeypatch.setattr(reading_process, "_START", "raise SystemExit(7)")
    with pytest.raises(PassingError, match="the process that reads the shards ended with code 7"):
        started(own_shards, remedy="a message larger than a socket's buffer" * 2**15)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_the_rank_decides_when_to_stop(process: ReadingProcess, number: signal.Signals) -> None:
    os.kill(pid_of(process), number)  # it has just started, and imports its modules
    for position in (0, 8):
        process.ask(position)
        assert process.take().micro_batches[0].samples.tolist()
        os.kill(pid_of(process), number)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_it_closes_shards_that_may_be_removed(process: ReadingProcess) -> None:
    def opened() -> bool:
        handles = subprocess.run(["ls", "-l", f"/proc/{pid_of(process)}/fd"], capture_output=True, text=True)
        return ".tar" in handles.stdout

    process.ask(0)
    process.take()
    assert opened()
    process.forget()
    wait_for(lambda: not opened(), timeout=10)


def test_closing_ends_it_at_once(process: ReadingProcess) -> None:
    process.ask(0)
    process.take()
    os.kill(pid_of(process), signal.SIGSTOP)  # as if its disk did not answer
    began = time.monotonic()
    process.close()
    assert is_gone(pid_of(process)) and time.monotonic() - began < 1


@pytest.mark.parametrize(
    ("global_batch", "damaged", "wait"),
    [(8, False, 0.5), (4000, False, 0.5), (4000, True, 0.0)],
)
def test_it_ends_silently_whatever_it_was_doing(
    own_shards: Path, capfd: pytest.CaptureFixture[str], global_batch: int, damaged: bool, wait: float
) -> None:
    process = started(own_shards, global_batch)
    process.ask(0)
    process.take()
    if damaged:
        for shard in own_shards.glob("*.tar"):
            os.truncate(shard, 0)
    process.ask(8)
    time.sleep(wait)  # it has answered, waits for room to send the rest, or is still reading
    process._channel.close()
    assert process._process.wait(10) == 0 and capfd.readouterr().err == ""


def test_it_ends_with_its_rank(own_shards: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom tests.test_trainer_reading_process import started\n"
        "process = started(Path(sys.argv[1]))\nprocess.ask(0)\nprocess.take()\n"
        "print(process._process.pid, flush=True)\ntime.sleep(60)\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", code, str(own_shards)], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    reader = int(rank.stdout.readline())
    os.kill(reader, 0)
    rank.kill()
    rank.wait()
    rank.stdout.close()
    wait_for(lambda: is_gone(reader), timeout=10)
