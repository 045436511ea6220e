"""Metrics: what reaches the JSON lines and the exporter, and what may never."""

from __future__ import annotations

import json
import math
import re
import resource
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from prometheus_client import Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from ranks import free_port

from trainer.batch import GlobalCounts
from trainer.engine import StepResult
from trainer.errors import TrainerError
from trainer.loader import StepBatch
from trainer.metrics import NODE_SERIES, RUN_SERIES, Exporter, Metrics, MetricsConfig, model_flops
from trainer.model import ModelConfig
from trainer.report import read_lines
from trainer.saving import Saved
from trainer.state import TrainState
from trainer.world import World

LARGE = ModelConfig(layers=24, hidden=1024, heads=16, intermediate=4096)
TINY = ModelConfig(layers=1, hidden=8, heads=2, intermediate=16, max_positions=8, vocab_size=50)
ALONE = World(0, 1, 0, 1, torch.device("cpu"))
QUIET = MetricsConfig(port=None, log_every_steps=10, print_seconds=1e9)
WHOLE = Saved(7, Path("step-00000007"), "", 1000, 0.5, 1.5, 1.7e9, "busy")
COUNTS = GlobalCounts(targets=40, pairs=8, tokens=300, squares=12_000)


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one, inside this process."""
    folder = tmp_path_factory.mktemp("group")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def metrics(folder: Path, config: MetricsConfig = QUIET) -> Metrics:
    return Metrics(config, folder, TINY, 1000, ALONE)


def result(mlm: float = 100.0, norm: float = 2.0, applied: bool = True) -> StepResult:
    """What a step of the engine gives: 10 of 40 masked tokens and 6 of 8 pairs were right."""
    sums = torch.tensor([mlm, 4.0, 10.0, 6.0], dtype=torch.float64)
    return StepResult(sums, torch.tensor(norm), torch.tensor([0.5, 1.0, 3.0]), applied, 64.0)


def train(metrics: Metrics, steps: int, state: TrainState | None = None, **kwargs: Any) -> TrainState:
    """The state after ``steps`` more steps, all of them alike."""
    state, counts = state or TrainState(), kwargs.pop("counts", COUNTS)
    for _ in range(steps):
        batch = StepBatch(state.position, 8, (), counts, wait_seconds=0.25)
        given = result(**kwargs)
        state = state.after(batch, given.applied)
        metrics.step(state, batch, given, 1e-3)
    return state


def scrape(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample that Prometheus would read, by name and labels."""
    text = generate_latest(metrics.exporter.registry).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return scrape(metrics)[f"lambert_{name}", frozenset(labels.items())]


def lines(folder: Path) -> list[dict[str, Any]]:
    """The JSON lines, read as strictly as any other language would."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


# ---- operations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "gigaflop"), [(128, 240.5), (512, 1019.9)])
def test_operations_of_bert_large(length: int, gigaflop: float) -> None:
    counts = GlobalCounts(targets=20 * length * 15 // 100, pairs=20, tokens=20 * length, squares=20 * length**2)
    assert model_flops(LARGE, StepBatch(0, 20, (), counts)) / 20 / 1e9 == pytest.approx(gigaflop, abs=0.05)


def test_operations_count_real_lengths_and_the_real_width() -> None:
    def flops(model: ModelConfig, *lengths: int) -> float:
        counts = GlobalCounts(0, len(lengths), sum(lengths), sum(n * n for n in lengths))
        return model_flops(model, StepBatch(0, len(lengths), (), counts))

    assert flops(LARGE, 100, 28) == pytest.approx(flops(LARGE, 100) + flops(LARGE, 28))
    assert flops(LARGE, 64, 64) < flops(LARGE, 128)
    narrow = 6 * (4 * 8 * 8 + 2 * 8 * 16) * 5 + 12 * 8 * 25  # 4 H² of attention, 2 H I of the perceptron
    assert flops(TINY, 5) == narrow


# ---- what is written -----------------------------------------------------------------------------------------


def test_a_step_is_written_as_means_over_the_global_batch(tmp_path: Path) -> None:
    train(metrics(tmp_path), 10)
    steps = lines(tmp_path)
    assert [line["step"] for line in steps] == list(range(1, 11))
    first = steps[0]
    assert (first["mlm_loss"], first["nsp_loss"], first["loss"]) == (100 / 40, 4 / 8, 3.0)
    assert (first["mlm_accuracy"], first["nsp_accuracy"]) == (10 / 40, 6 / 8)
    assert (first["position"], first["samples"], first["tokens"]) == (8, 8, 300)
    assert (first["learning_rate"], first["gradient_norm"], first["loss_scale"]) == (1e-3, 2.0, 64.0)
    assert (first["trust_min"], first["trust_mean"], first["trust_max"]) == (0.5, 1.5, 3.0)
    assert first["applied"] and first["wait_seconds"] == 0.25 and first["seconds"] > 0


def test_data_without_pairs_have_no_figures_of_a_second_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told, single = metrics(tmp_path, replace(QUIET, print_seconds=0)), replace(COUNTS, pairs=0)
    state = train(told, 5)
    state = train(told, 5, state, counts=single)  # a window over two phases
    assert value(told, "accuracy_ratio", task="nsp", split="train") == 0.75
    told.heldout(state, {"mlm_loss": 3.5, "mlm_accuracy": 0.3})
    train(told, 10, state, counts=single)
    assert {labels for name, labels in scrape(told) if name in ("lambert_loss", "lambert_accuracy_ratio")} == {
        frozenset({"task": "mlm", "split": split}.items()) for split in ("train", "heldout")
    }
    steps = [line for line in lines(tmp_path) if line["event"] == "step"]
    assert ["nsp_loss" in line or "nsp_accuracy" in line for line in steps] == 5 * [True] + 15 * [False]
    assert [steps[0]["loss"], steps[-1]["loss"], steps[-1]["mlm_loss"]] == [3.0, 2.5, 2.5]
    shown = capsys.readouterr().out.splitlines()
    assert "nsp 0.500 (75.0%)" in shown[0] and "mlm 2.500 (25.0%)" in shown[-1]
    assert not [line for line in shown[1:] if "nsp" in line]


def test_ranks_talk_only_when_it_is_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talks: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", talks.append)
    told = metrics(tmp_path)
    state = train(told, 9)
    assert not talks and not lines(tmp_path)
    train(told, 12, state)
    assert len(talks) == 2 and len(lines(tmp_path)) == 20
    told.flush()
    told.flush()
    assert len(talks) == 3 and len(lines(tmp_path)) == 21


def test_a_skipped_step_is_counted_as_skipped_alone(tmp_path: Path) -> None:
    told = metrics(tmp_path)
    state = train(told, 3)
    state = train(told, 2, state, mlm=math.nan, norm=math.inf, applied=False)
    train(told, 5, state)
    assert (value(told, "steps_total"), value(told, "skipped_steps_total")) == (8, 2)
    assert (value(told, "samples_total"), value(told, "tokens_total")) == (64, 2400)
    assert (value(told, "step"), value(told, "step_duration_seconds_count")) == (8, 10)
    skipped = lines(tmp_path)[3]
    assert skipped["applied"] is False and skipped["gradient_norm"] is skipped["mlm_loss"] is None


@pytest.mark.parametrize("broken", [{"mlm": math.nan}, {"mlm": math.inf}, {"norm": math.nan}, {"norm": math.inf}])
def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, broken: dict[str, float]) -> None:
    told = metrics(tmp_path)
    state = train(told, 4)
    state = train(told, 1, state, **broken)
    with pytest.raises(TrainerError, match=r"^step 5: loss .* training diverged; lower the learning rate .*"):
        train(told, 5, state)
    assert len(lines(tmp_path)) == 10  # what led there is on disk


# ---- what is exported ----------------------------------------------------------------------------------------


def test_figures_are_those_of_the_last_logged_steps(tmp_path: Path) -> None:
    told = metrics(tmp_path)
    state = train(told, 10)
    train(told, 10, state, mlm=60.0)
    assert value(told, "loss", task="mlm", split="train") == pytest.approx(1.5)
    assert value(told, "loss", task="nsp", split="train") == pytest.approx(0.5)
    assert value(told, "accuracy_ratio", task="nsp", split="train") == pytest.approx(0.75)
    assert value(told, "trust_ratio", statistic="max") == 3
    assert value(told, "data_wait_seconds_total", rank="0") == pytest.approx(5.0)
    assert value(told, "model_flops_total") == 20 * model_flops(TINY, StepBatch(0, 8, (), COUNTS))
    assert (value(told, "target_steps"), value(told, "loss_scale"), value(told, "gradient_norm")) == (1000, 64, 2)


def test_a_resumed_run_shows_its_progress_before_its_first_step(tmp_path: Path) -> None:
    told = metrics(tmp_path)
    assert value(told, "step") == 0
    told.describe(TrainState(attempts=9, step=8, phase=1, restarts=2), {"device": "cpu", "precision": "fp32"})
    assert [value(told, name) for name in ("step", "phase", "restarts")] == [8, 1, 2]
    assert value(told, "last_step_timestamp_seconds") > 1.6e9  # an age against 0 would be 50 years
    assert value(told, "run_info", device="cpu", precision="fp32") == 1
    assert lines(tmp_path)[0]["event"] == "start"


def test_heldout_figures_and_checkpoints_are_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told, state = metrics(tmp_path), TrainState(step=7)
    figures = {"mlm_loss": 3.5, "mlm_accuracy": 0.3, "nsp_loss": 0.6, "nsp_accuracy": 0.7}
    told.heldout(state, figures)
    assert value(told, "loss", task="mlm", split="heldout") == 3.5
    assert value(told, "accuracy_ratio", task="nsp", split="heldout") == 0.7
    told.checkpoint(WHOLE)
    assert (value(told, "checkpoint_size_bytes"), value(told, "checkpoint_duration_seconds")) == (1000, 1.5)
    assert value(told, "checkpoint_last_success_timestamp_seconds") == 1.7e9
    assert [line["event"] for line in lines(tmp_path)] == ["heldout", "checkpoint"]
    assert lines(tmp_path)[0]["step"] == 7 and lines(tmp_path)[0]["mlm_loss"] == 3.5
    figures = {"step": 7, "seconds": 1.5, "stall_seconds": 0.5, "bytes": 1000, "time": 1.7e9}
    assert lines(tmp_path)[1] == {"event": "checkpoint", **figures}
    assert "step 7/1000  held-out mlm_loss 3.500" in capsys.readouterr().out


def test_a_checkpoint_that_failed_is_counted_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = metrics(tmp_path)
    told.checkpoint(WHOLE)
    told.checkpoint(replace(WHOLE, step=8, failure="rank 3: no room", ended=1.8e9, leftover=""))
    assert value(told, "checkpoint_failures_total") == 1 and value(told, "checkpoint_stall_seconds_total") == 1.0
    assert value(told, "checkpoint_last_success_timestamp_seconds") == 1.7e9
    assert (lines(tmp_path)[1]["event"], lines(tmp_path)[1]["reason"]) == ("checkpoint_failed", "rank 3: no room")
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == [
        "lambert: step 7/1000  older checkpoints could not be removed: busy",
        "lambert: step 8/1000  no checkpoint: rank 3: no room",
    ]


def test_a_full_disk_costs_lines_and_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = metrics(tmp_path)
    state = train(told, 10)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 100, unlimited[1]))
    try:
        state = train(told, 20, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    train(told, 10, state)
    assert capsys.readouterr().out.count("metrics.jsonl loses lines until it can be written again: ") == 1
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [*range(1, 11), *range(31, 41)]


def test_the_number_of_series_does_not_grow(tmp_path: Path) -> None:
    told = metrics(tmp_path)
    state = train(told, 10)
    early = set(scrape(told))
    train(told, 190, state)
    assert set(scrape(told)) == early


def test_evaluations_and_checkpoints_belong_to_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 100.0, 103.0, 200.0, 202.0])  # start, step, after evaluation, step, after saving, step
    monkeypatch.setattr("trainer.metrics.time.perf_counter", lambda: next(clock))
    told = metrics(tmp_path, replace(QUIET, log_every_steps=1000))
    state = train(told, 1)
    told.heldout(state, dict.fromkeys(("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"), 0.0))
    state = train(told, 1, state)
    told.start_clock()
    train(told, 1, state)
    monkeypatch.undo()
    told.flush()
    assert [line["seconds"] for line in lines(tmp_path) if line["event"] == "step"] == [1.0, 3.0, 2.0]


def test_names_keep_prometheus_rules() -> None:
    for name, (kind, labels, text) in (RUN_SERIES | NODE_SERIES).items():
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name), name
        assert not name.endswith(("_total", "_count", "_sum", "_bucket", "_info", "_created")), name
        assert not re.search(r"_(ms|milliseconds|minutes|hours|kb|mb|gb|percent)(_|$)", f"{name}_"), name
        assert not re.search(r"(duration|wait|timestamp)(?!.*_seconds$)", name), name  # base units, at the end
        assert not re.search(r"(size|memory)(?!.*_bytes$)", name), name
        assert text.endswith(".") and set(labels) <= {"task", "split", "statistic", "rank"}, name
        counts = name in ("steps", "samples", "tokens", "model_flops", "skipped_steps", "data_wait_seconds")
        counts |= name in ("checkpoint_stall_seconds", "checkpoint_failures")
        assert (kind is Counter) == counts, name


def test_counters_are_exposed_as_totals_with_help(tmp_path: Path) -> None:
    text = generate_latest(metrics(tmp_path).exporter.registry).decode()
    for name, (kind, _, help_text) in (RUN_SERIES | NODE_SERIES).items():
        exposed = f"lambert_{name}" + {"Counter": "_total", "Info": "_info"}.get(kind.__name__, "")
        assert f"# HELP {exposed} {help_text}" in text
        assert f"# TYPE {exposed} " in text


# ---- one exporter a node -------------------------------------------------------------------------------------


def test_series_belong_to_the_run_or_to_a_node() -> None:
    cpu = torch.device("cpu")
    assert set(Exporter(QUIET, World(0, 4, 0, 2, cpu)).series) == set(RUN_SERIES) | set(NODE_SERIES)
    assert set(Exporter(QUIET, World(2, 4, 0, 2, cpu)).series) == set(NODE_SERIES)
    assert set(Exporter(QUIET, World(1, 4, 1, 2, cpu)).series) == set()


def test_it_is_served_and_a_taken_port_is_one_line(tmp_path: Path) -> None:
    config = replace(QUIET, port=free_port(), address="127.0.0.1")
    told = metrics(tmp_path, config)
    train(told, 10)
    with urllib.request.urlopen(f"http://127.0.0.1:{config.port}/metrics", timeout=5) as page:
        assert "lambert_step 10.0" in page.read().decode().splitlines()
    with pytest.raises(TrainerError, match=f"metrics.port {config.port} on 127.0.0.1 cannot be opened") as error:
        metrics(tmp_path, config)
    assert "\n" not in str(error.value) and "set another metrics.port" in str(error.value)
    Exporter(config, World(1, 2, 1, 2, torch.device("cpu")))  # the node's other rank opens no port


def test_a_line_that_a_kill_cut_short_takes_no_other_with_it(tmp_path: Path) -> None:
    train(metrics(tmp_path), 10)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    again = metrics(tmp_path)
    again.describe(TrainState(step=9), {"run": "again"})
    whole = path.read_text(encoding="utf-8").splitlines()
    assert len(whole) == 11
    with pytest.raises(ValueError):
        json.loads(whole[9])
    assert json.loads(whole[10])["event"] == "start"
