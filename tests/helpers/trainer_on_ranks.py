"""Runs the trainer, writes down what it trains on, and sends signals at an aim; tests run it on each rank.

    python tests/helpers/trainer_on_ranks.py NOTES AIMS TRAINER-ARGUMENTS…

NOTES is a folder. Rank R writes a line of samples-R.jsonl for each step that it begins: the samples' numbers and
checksums of their tokens, the rank's own targets, and the global batch's. AIMS is a JSON list of aims. Their
rank sends itself, or all ranks, one signal after the other, each as soon as it reaches the aim's place, and first
writes that place to a line of signals.jsonl.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import trainer.__main__ as program
from trainer.engine.engine import Engine, StepResult
from trainer.model.batch import GlobalCounts, MicroBatch
from trainer.model.bert import Bert


@dataclass(frozen=True)
class Aim:
    """A signal for ``rank``, or for all ranks, to be sent at ``place`` once it is at ``step`` or past it."""

    signal: int
    rank: int
    step: int  # optimizer steps taken
    place: str  # "window": inside a step, after a micro-batch; "save": a half-written checkpoint of it is on disk
    all: bool = False


@dataclass
class Place:
    """A point in the training."""

    step: int = -1  # optimizer steps taken
    micro_batch: int = -1  # of the current step; -1 between steps


def main() -> None:
    notes, aims, *arguments = sys.argv[1:]
    folder, rank, place = Path(notes), int(os.environ["RANK"]), Place()
    faulthandler.enable()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    follow(place, folder / f"samples-{rank}.jsonl")
    own = [aim for aim in (Aim(**tree) for tree in json.loads(aims)) if aim.rank == rank]
    sys.setswitchinterval(0.0005)
    run = Path(next(part for part in arguments if part.startswith("run.folder=")).removeprefix("run.folder="))
    threading.Thread(target=shoot, args=(own, place, run, folder), daemon=True).start()
    sys.argv = ["trainer", *arguments]
    program.main()


def follow(place: Place, path: Path) -> None:
    """Make the engine update ``place``, and write down the input of each step."""
    take, take_micro = Engine.step, Engine._micro_step

    def step(
        self: Engine[Bert], batches: Sequence[MicroBatch], counts: GlobalCounts, number: int, rate: float
    ) -> StepResult:
        samples = [sample for batch in batches if batch.masked.numel() for sample in checksums(batch)]
        own = sum(batch.labels.numel() for batch in batches)
        append(path, {"step": number, "samples": samples, "own_targets": own, "targets": counts.targets})
        place.step = number
        result = take(self, batches, counts, number, rate)
        place.step, place.micro_batch = number + 1, -1
        return result

    def micro_step(self: Engine[Bert], batch: MicroBatch, *others: Any) -> Tensor:
        place.micro_batch += 1
        return take_micro(self, batch, *others)

    Engine.step, Engine._micro_step = step, micro_step  # type: ignore[assignment, method-assign]


def checksums(batch: MicroBatch) -> Iterator[tuple[int, int]]:
    """(number, checksum of the masked tokens) of each sample."""
    bounds = batch.cu_seqlens.tolist()
    for number, start, end in zip(batch.samples.tolist(), bounds, bounds[1:], strict=False):
        yield number, zlib.crc32(batch.tokens[start:end].numpy().tobytes())


def append(path: Path, record: dict[str, Any]) -> None:
    """Append one line, in one write."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, (json.dumps(record) + "\n").encode())
    os.close(handle)


def shoot(aims: list[Aim], place: Place, run: Path, folder: Path) -> None:
    """Send each aim's signal when the training is there."""
    for aim in aims:
        while not reached(aim, place, run):
            time.sleep(0.0005)
        append(folder / "signals.jsonl", {**asdict(aim), "at": asdict(place)})
        pids = {int(path.read_text()) for path in folder.glob("pid-*")} - {os.getpid()} if aim.all else set()
        for pid in (*pids, os.getpid()):
            os.kill(pid, aim.signal)


def reached(aim: Aim, place: Place, run: Path) -> bool:
    if place.step < aim.step:
        return False
    if aim.place == "window":
        return place.micro_batch > 0
    return any(int(path.stem.removeprefix(".step-")) >= aim.step for path in run.glob(".step-*.tmp"))


if __name__ == "__main__":
    main()
