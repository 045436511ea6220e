"""The stopwatch: parts follow one another, and a reading takes them all."""

from __future__ import annotations

import pytest
import torch

from trainer.engine.stopwatch import Stopwatch


def test_each_part_ends_where_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 7.0, 8.0, 20.0, 22.0])
    monkeypatch.setattr("trainer.engine.stopwatch.time.perf_counter", lambda: next(clock))
    watch = Stopwatch(torch.device("cpu"))
    assert watch.read() == {}
    for part in ("forward", "backward", "forward", "backward", ""):
        watch.begin(part)
    assert watch.read() == {"forward": 1.0 + 4.0, "backward": 2.0 + 1.0}
    watch.begin("forward")  # what lay between belongs to no part
    watch.begin("")
    assert watch.read() == {"forward": 2.0}
    assert watch.read() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_times_the_work_and_not_the_calls() -> None:
    watch = Stopwatch(torch.device("cuda"))
    large = torch.ones(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begun.record()
    watch.begin("forward")
    for _ in range(5):
        large = large @ large
    watch.begin("backward")
    watch.begin("")
    ended.record()
    parts = watch.read()
    ended.synchronize()
    assert 0.9 < 1000 * parts["forward"] / begun.elapsed_time(ended) <= 1.0
    assert parts["backward"] < parts["forward"] / 10
