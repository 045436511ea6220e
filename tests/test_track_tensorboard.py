"""The event files, read back by TensorBoard's own reader, which checks every length and checksum."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.errors import PassingError, TrainerError
from trainer.track.about import About
from trainer.track.journal import Batch, Standing, batches
from trainer.track.points import points, scalars
from trainer.track.tensorboard import EventFiles

PARTS = {"data": 0.01, "forward": 0.1, "backward": 0.2, "reduce": 0.05, "optimizer": 0.04}
TRAIN = {"loss": 5.5, "mlm_loss": 5.0, "nsp_loss": 0.5, "mlm_accuracy": 0.25, "nsp_accuracy": 0.75, "samples": 80}
OPTIMIZER = {"learning_rate": 1e-3, "gradient_norm": 2.0, "loss_scale": 2.0**32, "trust_min": 0.1}

NOTHING = Standing()


def step(number: int, **more: Any) -> dict[str, Any]:
    about = {"event": "step", "time": 1.7e9 + number, "step": number, "applied": True, "tokens": 300, "seconds": 0.5}
    return {**about, **TRAIN, **OPTIMIZER, **more}


def single(value: float) -> float:
    """The value as 32 bits hold it."""
    return float(np.float32(value))


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag to (step, value), as TensorBoard shows them; its default is a sample of each curve."""
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


class Writer:
    """Sends records to the event files of the run in ``folder``, as a sender that starts with this standing."""

    def __init__(self, folder: Path, standing: Standing = NOTHING) -> None:
        self.files, self.journal = EventFiles(), folder / "metrics.jsonl"
        self.about = About("0", "run", folder, 0.0, {})
        self.standing = self.files.open(self.about, standing)

    def write(self, *records: dict[str, Any]) -> None:
        self.journal.parent.mkdir(exist_ok=True)
        with self.journal.open("a") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))
        self.send()

    def send(self) -> None:
        for batch in batches(self.journal, self.standing):
            self.files.send(batch)
            self.standing = batch.standing


def begun(at: int) -> dict[str, Any]:
    return {"event": "start", "time": 1.7e9, "step": at}


def test_tensorboard_reads_every_number(tmp_path: Path) -> None:
    at = {"time": 1.7e9, "step": 300}
    ranks = {"compute": [0.1, 0.2, 0.4], "slowest": 3, "memory_peak_bytes": 2.0**36, "parts": PARTS}
    Writer(tmp_path / "run").write(
        begun(0),
        step(1),
        step(300),
        {"event": "ranks", **at, **ranks},
        {"event": "time", **at, "spent": {"start": 1.0}},
        {"event": "heldout", **at, "mlm_loss": 4.5, "nsp_accuracy": 0.5},
        {"event": "checkpoint", **at, "seconds": 1.5, "stall_seconds": 0.5, "bytes": 1000},
        {"event": "checkpoint_failed", **at, "stall_seconds": 0.5, "reason": "no room"},
        {"event": "end", "time": 1.7e9, "how": "done"},
    )
    once = {f"parts/{name}": value for name, value in PARTS.items()}
    once |= {"ranks/compute_min": 0.1, "ranks/compute_mean": 0.2, "ranks/compute_max": 0.4}
    once |= {"ranks/memory_peak_bytes": 2.0**36, "heldout/mlm_loss": 4.5, "heldout/nsp_accuracy": 0.5}
    once |= {"checkpoint/seconds": 1.5, "checkpoint/stall_seconds": 0.5, "checkpoint/bytes": 1000}
    twice = {f"train/{name}": value for name, value in TRAIN.items()}
    twice |= {f"optimizer/{name}": value for name, value in OPTIMIZER.items()}
    twice |= {"speed/seconds": 0.5, "speed/tokens_per_second": 600}
    shown = read(tmp_path / "run" / "tensorboard")
    assert shown.keys() == once.keys() | twice.keys()
    for tag, value in once.items():
        assert shown[tag] == [(300, single(value))], tag
    for tag, value in twice.items():
        assert shown[tag] == [(1, single(value)), (300, single(value))], tag
    [first, _] = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload().Scalars("train/loss")
    assert first.wall_time == 1.7e9 + 1


def test_steps_that_are_repeated_are_shown_once(tmp_path: Path) -> None:
    """Whether the sender goes on through a rollback, or a restart starts one of its own after the last was killed."""
    first = Writer(tmp_path)
    first.write(begun(0), *(step(n, mlm_loss=5.0) for n in range(1, 8)))
    first.write(step(8, mlm_loss=5.0), {"event": "heldout", "time": 1.7e9, "step": 8, "mlm_loss": 9.9})
    first.write({"event": "rollback", "time": 1.7e9, "step": 6}, step(7, mlm_loss=6.0), step(8, mlm_loss=6.0))
    with (tmp_path / "tensorboard" / "events.out.tfevents.0000000001").open("ab") as file:
        file.write(b"\x10\x00\x00\x00\x00\x00\x00\x00half")  # killed while it wrote
    Writer(tmp_path, first.standing).write(begun(7), step(8, mlm_loss=7.0), step(9, mlm_loss=7.0))
    shown = read(tmp_path / "tensorboard")
    assert shown["train/mlm_loss"] == [*((n, 5.0) for n in range(1, 7)), (7, 6.0), (8, 7.0), (9, 7.0)]
    assert not shown.get("heldout/mlm_loss")


def test_what_was_written_but_not_noted_is_shown_once(tmp_path: Path) -> None:
    first = Writer(tmp_path)
    first.write(begun(0), *(step(n) for n in range(1, 6)))
    noted = first.standing
    first.write(*(step(n) for n in range(6, 9)))
    Writer(tmp_path, noted).send()
    assert [number for number, _ in read(tmp_path / "tensorboard")["train/loss"]] == [*range(1, 9)]
    assert len([*(tmp_path / "tensorboard").iterdir()]) == 2
    Writer(tmp_path, first.standing).send()
    assert len([*(tmp_path / "tensorboard").iterdir()]) == 2  # nothing new, no file


def test_files_that_were_removed_are_written_again(tmp_path: Path) -> None:
    first = Writer(tmp_path)
    first.write(begun(0), *(step(n) for n in range(1, 6)))
    next((tmp_path / "tensorboard").iterdir()).unlink()
    Writer(tmp_path, first.standing).send()
    assert [number for number, _ in read(tmp_path / "tensorboard")["train/loss"]] == [*range(1, 6)]


def test_a_skipped_step_and_a_missing_number_have_no_point() -> None:
    assert points(step(3, applied=False, gradient_norm=None)) == []
    values = scalars(step(3, gradient_norm=None, seconds=0.0))
    assert "optimizer/gradient_norm" not in values and "speed/tokens_per_second" not in values
    assert values["optimizer/loss_scale"] == 2.0**32


def test_numbers_beyond_a_float_are_infinite(tmp_path: Path) -> None:
    files = EventFiles()
    files.open(About("0", "run", tmp_path, 0.0, {}), NOTHING)
    record = step(1, mlm_loss=1e300, nsp_loss=-1e300, gradient_norm=float("inf"), loss=float("nan"))
    files.send(Batch(NOTHING, points(record)))
    shown = read(tmp_path / "tensorboard")
    assert shown["train/mlm_loss"] == [(1, float("inf"))] == shown["optimizer/gradient_norm"]
    assert shown["train/nsp_loss"] == [(1, float("-inf"))]
    assert shown["train/loss"][0][1] != shown["train/loss"][0][1]


@pytest.mark.parametrize("room", [0, 60, 1500])
def test_a_full_disk_delays_events_and_loses_none(tmp_path: Path, room: int) -> None:
    """This holds if none or half of the file's header fits, and if more is cut than is written next."""
    files, records = EventFiles(), [Batch(NOTHING, points(step(n))) for n in range(1, 11)]
    files.open(About("0", "run", tmp_path, 0.0, {}), NOTHING)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, unlimited[1]))
    try:
        with pytest.raises(PassingError, match="/events.out.tfevents.0000000001 cannot be written: File too"):
            files.send(Batch(NOTHING, [point for batch in records for point in batch.points]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    for batch in records:
        files.send(batch)
        assert [number for number, _ in read(tmp_path / "tensorboard")["train/loss"]][-1:] == [batch.points[0].step]
    assert [number for number, _ in read(tmp_path / "tensorboard")["train/loss"]] == [*range(1, 11)]


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(PassingError, match="tensorboard cannot be written: File exists"):
        Writer(tmp_path).write(begun(0), step(1))
    (tmp_path / "tensorboard").unlink()
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events.out.tfevents.old").write_text("")
    with pytest.raises(TrainerError, match="tensorboard has event files of another program: move them elsewhere"):
        Writer(tmp_path)
