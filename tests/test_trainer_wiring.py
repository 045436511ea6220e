"""The connections between parts of the trainer: dropout sites, waits for data, exported seconds and ranks."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from data_prep.manifest import load_manifest
from kernels import dropout
from tests.helpers.raw_samples import order_of
from tests.test_trainer_model import TINY, keys_of
from trainer.checkpoint.train_state import TrainState
from trainer.convert.folder import random_batch
from trainer.data.loader import Loader
from trainer.data.order import Order
from trainer.data.reader import Reader, Step
from trainer.engine.stopwatch import Stopwatch
from trainer.model.bert import Bert
from trainer.monitor.exporter import Exporter
from trainer.monitor.metrics import Metrics, MetricsConfig, Subject
from trainer.monitor.metrics_log import TIME_STATES
from trainer.ranks.world import World

CPU = torch.device("cpu")


def test_each_dropout_and_head_has_a_site_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two with the same site would drop the same places."""
    sites: list[int] = []
    drop = dropout.apply

    def apply(x: Tensor, keys: Tensor | None, site: int | Tensor, p: float) -> Tensor:
        if keys is not None:
            sites.extend(torch.as_tensor(site).flatten().tolist())
        return drop(x, keys, site, p)

    monkeypatch.setattr(dropout, "apply", apply)
    batch = random_batch(TINY, 1)
    Bert(TINY)(batch, keys_of(batch))
    assert len(sites) == len(set(sites)) == 1 + TINY.layers * (TINY.heads + 2)


def test_a_wait_for_a_slow_disk_is_reported(tiny_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait is reported for data that was ready before it was requested."""
    read = Reader.step

    def slow(self: Reader, order: Order, position: int, *cut: int) -> Step:
        time.sleep(0.2 if position == 0 else 0.0)
        return read(self, order, position, *cut)

    monkeypatch.setattr(Reader, "step", slow)
    loader = Loader(tiny_shards, load_manifest(tiny_shards), 0, 1)
    with closing(loader.steps(order_of(tiny_shards), 0, 8, 1)) as steps:
        assert next(steps).wait_seconds > 0.15
        time.sleep(0.3)
        assert next(steps).wait_seconds == 0.0


def read(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"lambert_{name}", {"run": "tests", **labels})


def test_seconds_are_exported_once_however_often_they_are_told() -> None:
    """The exporter is given the total of the process so far."""
    exporter = Exporter("tests", None, "", World(0, 1, 0, 1, CPU))
    for seconds in (1.0, 3.0):
        exporter.publish([{"event": "time", "spent": dict.fromkeys(TIME_STATES, seconds)}])
    assert [read(exporter.registry, "time_seconds_total", state=state) for state in TIME_STATES] == [3.0] * len(
        TIME_STATES
    )


def test_a_node_tells_of_its_own_ranks(tmp_path: Path) -> None:
    """This is the second of two nodes, with two ranks each."""
    subject = Subject(
        "tests", tmp_path, TINY, target_steps=1, remaining=lambda state: (0, 0.0), checkpoint_steps=1, baselines=()
    )
    metrics = Metrics(MetricsConfig(port=None), subject, World(2, 4, 0, 2, CPU), Stopwatch(CPU))
    metrics.describe(TrainState(), {})
    found = [read(metrics.exporter.registry, "memory_peak_bytes", rank=str(rank)) is not None for rank in range(4)]
    assert found == [False, False, True, True]


def test_a_node_tells_what_its_ranks_said_of_their_gpus(tmp_path: Path) -> None:
    """The node's first rank cannot query them: each rank may see only its own."""
    subject = Subject(
        "tests", tmp_path, TINY, target_steps=1, remaining=lambda state: (0, 0.0), checkpoint_steps=1, baselines=()
    )
    metrics = Metrics(MetricsConfig(port=None), subject, World(2, 4, 0, 2, CPU), Stopwatch(CPU))
    devices = [{"node": "n", "device": "H200", "gpu_uuid": f"GPU-{rank}"} for rank in range(4)]
    metrics.describe(TrainState(), {}, devices)
    for rank, device in enumerate(devices):
        labels = {"rank": str(rank), **device}
        assert read(metrics.exporter.registry, "rank_info", **labels) == (1.0 if rank >= 2 else None)
