"""A run's history: read as it grows, and the time until each step."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.journals import invented, journal, step
from trainer.errors import TrainerError
from trainer.monitor.history import Follower, read_history

SOON = 0.0  # a time that has passed


def test_a_history_that_grows_is_that_of_the_whole_file(tmp_path: Path) -> None:
    """However the file was cut when it was read."""
    path, rng = tmp_path / "metrics.jsonl", random.Random(1)
    for seed in range(40):
        whole = invented(random.Random(seed)).encode()
        path.write_bytes(b"")
        follower = Follower(tmp_path)
        for end in sorted(rng.choices(range(len(whole)), k=4)) + [len(whole)]:
            path.write_bytes(whole[:end])  # the same file
            assert follower.read(math.inf)
        np.testing.assert_equal(vars(follower.history()), vars(read_history(tmp_path)), err_msg=f"seed {seed}")


def test_a_reader_stops_in_time_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(journal([step(number) for number in range(1, 20_000)]))
    follower, reads = Follower(tmp_path), 0
    assert not follower.read(SOON) and 0 < follower.place < follower.size // 1000
    while not follower.read(time.monotonic() + 0.01):
        assert follower.place < follower.size
        reads += 1
    assert reads > 2 and follower.place == follower.size
    assert len(follower.history().steps["step"]) == 19_999
    assert follower.read(SOON), "the whole file has been read, although the time is over"


def test_a_file_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    path, follower = tmp_path / "metrics.jsonl", Follower(tmp_path)
    path.write_text(journal([step(1), step(2), step(3)]))
    follower.read(math.inf)
    (tmp_path / "new").write_text(journal([step(1), step(2), step(3), step(4, mlm_loss=2.0)]))
    (tmp_path / "new").rename(path)
    follower.read(math.inf)
    assert follower.history().steps["mlm_loss"][-1] == 2.0 and not follower.history().restarts
    path.write_text(journal([step(1)]))
    follower.read(math.inf)
    assert follower.history().steps["step"].tolist() == [1]


def test_an_invalid_record_is_an_error_each_time(tmp_path: Path) -> None:
    path, follower = tmp_path / "metrics.jsonl", Follower(tmp_path)
    with pytest.raises(TrainerError, match=r"no metrics\.jsonl in"):
        follower.read(math.inf)
    path.write_text(journal([step(1), {"event": "step", "step": 2}, step(3)]))
    for _ in range(2):
        with pytest.raises(TrainerError, match="contains an invalid record"):
            follower.read(math.inf)


@pytest.mark.parametrize(
    "record",
    [
        step(4, tokens="many"),
        step(4, time=1e308),
        step(4, time=math.nan),
        {"event": "time", "step": 3, "spent": {"productive": math.inf}},
        {"event": "heldout", "step": 3, "mlm_loss": 4.0, "nsp_loss": []},
    ],
)
def test_a_damaged_record_is_an_error_each_time(tmp_path: Path, record: dict[str, Any]) -> None:
    """It leaves no half of a row, and no time that cannot be written as a duration."""
    (tmp_path / "metrics.jsonl").write_text(journal([*map(step, (1, 2, 3)), record, step(4)]))
    follower = Follower(tmp_path)
    for _ in range(3):
        with pytest.raises(TrainerError, match="contains an invalid record"):
            follower.read(math.inf)
    with pytest.raises(TrainerError, match="contains an invalid record"):
        read_history(tmp_path)
    assert follower.history().steps["step"].tolist() == [1, 2, 3]


def test_the_clock_counts_all_attempts_and_ranks(tmp_path: Path) -> None:
    """Two ranks for 100 s, killed after step 20; four ranks from step 10 on, whose time before the kill counts, too."""

    def spent(at: int, seconds: float) -> dict[str, Any]:
        return {"event": "time", "time": 1.0, "step": at, "spent": {"productive": seconds - 1, "start": 1.0}}

    def begin(ranks: str, restarts: int) -> list[dict[str, Any]]:
        start = {"event": "start", "time": 0.0, "step": 0, "ranks": ranks}
        return [{"event": "attempt", "time": 0.0, "restarts": restarts}, start]

    records = [*begin("2", 0), *map(step, range(1, 11)), spent(10, 60.0), *map(step, range(11, 21)), spent(20, 100.0)]
    records += [*begin("4", 1), *(step(n, restarts=1) for n in range(11, 31)), spent(20, 40.0), spent(30, 50.0)]
    (tmp_path / "metrics.jsonl").write_text(journal(records))
    clock = {key: column.tolist() for key, column in read_history(tmp_path).clock.items()}
    assert clock == {"step": [10, 20, 30], "seconds": [60, 140, 150], "rank_seconds": [120, 360, 400]}
