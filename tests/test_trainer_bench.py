"""The comparison of the planner with a GPU, without one: its rows, its failures, and its limit on memory."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.bench import plan as bench
from trainer.engine.stopwatch import Stopwatch
from trainer.model.bert import Bert
from trainer.plan.cards import CARDS, choose, read_rates
from trainer.plan.memory import GIB
from trainer.ranks.world import World, read_world

FITS = 1_000  # sequences for which the engine below has memory


class Engine:
    """An engine that computes nothing."""

    def __init__(self, config: Any, model: Bert, optimizer: Any, world: World, seed: int) -> None:
        self.model, self.watch = model, Stopwatch(world.device)

    def step(self, batches: list[Any], *rest: Any) -> None:
        sequences = len(batches[0].samples)
        if sequences == 8:
            raise RuntimeError("planted\nfault")
        if sequences > FITS:
            raise torch.cuda.OutOfMemoryError("planted")

    def close(self) -> None: ...


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> bench.Bench:
    """The comparison on a GPU of 40 GiB whose peaks are 3 GiB."""
    monkeypatch.setattr(bench, "Engine", Engine)
    found = bench.Bench("base", 1, choose(read_rates(CARDS), "h200"), read_world({}, "cpu"))
    found.cuda = True
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "set_per_process_memory_fraction"):
        monkeypatch.setattr(torch.cuda, name, lambda *given: None)
    for name in ("max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 3 * GIB)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # takes a second among all that the tests have imported
    properties = SimpleNamespace(total_memory=40 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return found


def test_a_row_that_fails_does_not_end_the_table(measured: bench.Bench, capsys: pytest.CaptureFixture[str]) -> None:
    errors = [measured.row("cheap", 16, sequences) for sequences in (8, FITS + 1, 4)]
    assert [error is None for error in errors] == [True, True, False]
    fault, memory, good = capsys.readouterr().out.splitlines()
    assert "RuntimeError: planted fault: planned" in fault and "out of memory: planned" in memory
    assert "| base | 1 | cheap | 16 | 4 | 3.00 | 3.00 | 0.17 | -94.3% |" in good
    lines = bench.summary(errors).splitlines()
    assert lines[1] == "1 rows measured, 2 failed"
    assert lines[2].startswith("memory: 0 of 1 within 5%; worst: -9") and lines[2].endswith(" base, 1, cheap, 16, 4")


@pytest.mark.parametrize(
    ("most", "said"), [(FITS, "holds"), (FITS - 100, "does not hold"), (FITS + 1, "does not hold")]
)
def test_a_limit_is_held_if_the_most_runs_and_a_tenth_more_does_not(
    most: int, said: str, measured: bench.Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "largest", lambda *given: most)
    monkeypatch.setattr(bench, "LIMIT_LENGTH", 4)
    measured.limited(2 * GIB)
    assert capsys.readouterr().out.splitlines()[-1] == f"{said}: 100 % runs and 110 % does not"


def test_each_kind_meets_each_length_and_each_size() -> None:
    found = [
        (kind, length, sequences * length // 1024)
        for turn in range(4)
        for kind, length, sequences in bench.shapes([96, 128, 384, 512], [8192, 32_768, 65_536], None, turn)
    ]
    kinds = 3
    assert len(found) == 48 and len(set(found)) == 12 * kinds
    assert {kind for kind, *_ in found[:12]} == {"none", "cheap", "full"}
