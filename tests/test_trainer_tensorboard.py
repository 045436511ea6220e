"""The event files, read back by TensorBoard's own reader, which checks every length and checksum."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.errors import TrainerError
from trainer.monitor.tensorboard import EventFiles, scalars

PARTS = {"data": 0.01, "forward": 0.1, "backward": 0.2, "reduce": 0.05, "optimizer": 0.04}
TRAIN = {"loss": 5.5, "mlm_loss": 5.0, "nsp_loss": 0.5, "mlm_accuracy": 0.25, "nsp_accuracy": 0.75}
OPTIMIZER = {"learning_rate": 1e-3, "gradient_norm": 2.0, "loss_scale": 2.0**32, "trust_min": 0.1}


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


def test_tensorboard_reads_every_number(tmp_path: Path) -> None:
    files = EventFiles(tmp_path / "run" / "tensorboard", 0)
    at = {"time": 1.7e9, "step": 300}
    ranks = {"compute": [0.1, 0.2, 0.4], "slowest": 3, "memory_peak_bytes": 2.0**36, "parts": PARTS}
    files.write([step(1), step(300), {"event": "start", "time": 1.7e9, "step": 0}])
    files.write([{"event": "ranks", **at, **ranks}, {"event": "time", **at, "spent": {"start": 1.0}}])
    files.write([{"event": "heldout", **at, "mlm_loss": 4.5, "nsp_accuracy": 0.5}])
    files.write([{"event": "checkpoint", **at, "seconds": 1.5, "stall_seconds": 0.5, "bytes": 1000}])
    files.write([{"event": "checkpoint_failed", **at, "stall_seconds": 0.5, "reason": "no room"}])
    files.write([{"event": "end", "time": 1.7e9, "how": "done"}])
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


def test_steps_that_a_restart_repeats_are_shown_once(tmp_path: Path) -> None:
    first = EventFiles(tmp_path, 0)
    first.write([step(n, mlm_loss=5.0) for n in range(1, 10)])
    first.write([{"event": "heldout", "time": 1.7e9, "step": 6, "mlm_loss": 5.5}])
    first.write([{"event": "heldout", "time": 1.7e9, "step": 8, "mlm_loss": 9.9}])
    with first.path.open("ab") as file:
        file.write(b"\x10\x00\x00\x00\x00\x00\x00\x00half")  # killed while it wrote
    second = EventFiles(tmp_path, 6)
    second.write([step(n, mlm_loss=6.0) for n in range(7, 10)])
    third = EventFiles(tmp_path, 8)
    third.write([step(n, mlm_loss=7.0) for n in range(9, 12)])
    assert len({first.path, second.path, third.path}) == 3
    shown = read(tmp_path)
    assert shown["train/mlm_loss"] == [*((n, 5.0) for n in range(1, 7)), (7, 6.0), (8, 6.0), (9, 7.0), (10, 7), (11, 7)]
    assert shown["heldout/mlm_loss"] == [(6, 5.5)]


def test_steps_that_a_rollback_repeats_are_shown_once(tmp_path: Path) -> None:
    files = EventFiles(tmp_path, 0)
    files.write([step(n, mlm_loss=9.0) for n in range(1, 10)])
    files.write([{"event": "rollback", "time": 1.7e9, "step": 6, "rolled_back": 3}, step(7, mlm_loss=5.0)])
    assert read(tmp_path)["train/mlm_loss"] == [*((n, 9.0) for n in range(1, 7)), (7, 5.0)]


def test_a_skipped_step_and_a_missing_number_have_no_point(tmp_path: Path) -> None:
    assert scalars(step(3, applied=False, gradient_norm=None)) == {}
    points = scalars(step(3, gradient_norm=None, seconds=0.0))
    assert "optimizer/gradient_norm" not in points and "speed/tokens_per_second" not in points
    assert points["optimizer/loss_scale"] == 2.0**32


def test_numbers_beyond_a_float_are_infinite(tmp_path: Path) -> None:
    files = EventFiles(tmp_path, 0)
    files.write([step(1, mlm_loss=1e300, nsp_loss=-1e300, gradient_norm=float("inf"), loss=float("nan"))])
    shown = read(tmp_path)
    assert shown["train/mlm_loss"] == [(1, float("inf"))] == shown["optimizer/gradient_norm"]
    assert shown["train/nsp_loss"] == [(1, float("-inf"))]
    assert shown["train/loss"][0][1] != shown["train/loss"][0][1]


@pytest.mark.parametrize(("room", "together", "whole"), [(0, 1, 0), (60, 1, 0), (1500, 1, 4), (1500, 10, 0)])
def test_a_full_disk_costs_events_and_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], room: int, together: int, whole: int
) -> None:
    """This holds if none or half of the file's header fits, and if more is cut than is written next."""
    files = EventFiles(tmp_path, 0)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, unlimited[1]))
    try:
        for number in range(1, 11, together):
            files.write([step(n) for n in range(number, number + together)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    files.write([step(11)])
    [said] = capsys.readouterr().out.splitlines()
    assert said.startswith(f"lambert: {files.path}: losing events until it can be written again: ")
    assert [number for number, _ in read(tmp_path)["train/loss"]] == [*range(1, whole + 1), 11]
    never_full = EventFiles(tmp_path / "other", 0)
    never_full.write([step(number) for number in (*range(1, whole + 1), 11)])
    assert files.path.read_bytes() == never_full.path.read_bytes()


def test_without_the_package_the_way_out_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with pytest.raises(TrainerError, match="^metrics.tensorboard: .*: pip install tensorboard, or set"):
        EventFiles(tmp_path / "new", 0)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(
        TrainerError,
        match="metrics.tensorboard: cannot create an event file in .*board .*: make the folder wri",
    ):
        EventFiles(tmp_path / "tensorboard", 0)
    (tmp_path / "events.out.tfevents.old").write_text("")
    with pytest.raises(TrainerError, match="use it only for Lambert, or set metrics.tensorboard to false"):
        EventFiles(tmp_path, 0)
