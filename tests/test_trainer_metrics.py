"""Metrics: what reaches the JSON lines and the exporter, and what may never."""

from __future__ import annotations

import json
import math
import re
import resource
import socket
import threading
import time
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

from tests.helpers.ranks import free_port
from tests.helpers.status_server import status_server
from trainer.checkpoint.saving import Saved
from trainer.checkpoint.train_state import TrainState
from trainer.data.collate import filler
from trainer.data.loader import StepBatch
from trainer.engine.engine import StepResult
from trainer.engine.stopwatch import Stopwatch
from trainer.errors import NotFiniteError, TrainerError
from trainer.model.batch import GlobalCounts
from trainer.model.bert import ModelConfig
from trainer.model.flops import model_flops, peak_flops
from trainer.monitor.exporter import NODE_SERIES, RUN_SERIES, STATES, Exporter
from trainer.monitor.guard import GuardConfig, Setback
from trainer.monitor.metrics import Metrics, MetricsConfig, Subject
from trainer.monitor.metrics_log import STEP_PARTS, TIME_STATES, read_lines
from trainer.monitor.plateau import BLOCK, LEARNING, PATIENCE, Baseline
from trainer.ranks.world import StatusServer, World

LARGE = ModelConfig(layers=24, hidden=1024, heads=16, intermediate=4096)
TINY = ModelConfig(layers=1, hidden=8, heads=2, intermediate=16, max_positions=8, vocab_size=50)
ALONE = World(0, 1, 0, 1, torch.device("cpu"))
QUIET = MetricsConfig(port=None, log_every_steps=10, print_seconds=1e9)
WHOLE = Saved(7, "step-00000007", "", 1000, 0.5, 1.5, 1.7e9, "busy")
COUNTS = GlobalCounts(targets=40, pairs=8, tokens=300, squares=12_000)


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one, inside this process."""
    folder = tmp_path_factory.mktemp("group")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def metrics(folder: Path, config: MetricsConfig = QUIET, server: StatusServer | None = None) -> Metrics:
    subject = Subject(
        "tests",
        folder,
        TINY,
        target_steps=1000,
        remaining=lambda state: (8000 - state.samples, 0.0),
        checkpoint_steps=50,
        baselines=(Baseline(2.5, warmup_steps=50),),
        clipping=5.0,
        status_server=server,
    )
    return Metrics(config, subject, ALONE, Stopwatch(ALONE.device))


def result(mlm: float = 100.0, norm: float = 2.0, applied: bool = True, variance: float = 0.75) -> StepResult:
    """The result of an engine's step: 10 of 40 masked tokens and 6 of 8 pairs were right; D is 1."""
    moments = [300 * math.sqrt(1 - variance), 300.0, 300.0]  # 300 tokens, with a mean square of 1
    sums = torch.tensor([mlm, 4.0, 10.0, 6.0, *moments], dtype=torch.float64)
    return StepResult(sums, torch.tensor(norm), torch.tensor([0.5, 1.0, 3.0]), applied, 64.0)


def train(metrics: Metrics, steps: int, state: TrainState | None = None, **kwargs: Any) -> TrainState:
    """The state after ``steps`` more steps, all of them alike."""
    state, counts = state or TrainState(), kwargs.pop("counts", COUNTS)
    wait, left_out = kwargs.pop("wait", 0.25), kwargs.pop("left_out", 0)
    for _ in range(steps):
        micro_batch = replace(filler(2, 3), tokens=torch.zeros(counts.tokens, dtype=torch.int64))
        batch = StepBatch(state.position, 8, (micro_batch,), counts, wait, left_out)
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
    return scrape(metrics)[f"lambert_{name}", frozenset({"run": "tests", **labels}.items())]


def lines(folder: Path, event: str = "") -> list[dict[str, Any]]:
    """The JSON lines of an event, by default all, read as strictly as any other language would."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (folder / "metrics.jsonl").read_text()
    found = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    return [line for line in found if event in ("", line["event"])]


# ---- operations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "gigaflop"), [(128, 240.5), (512, 1019.9)])
def test_operations_of_bert_large(length: int, gigaflop: float) -> None:
    counts = GlobalCounts(targets=20 * length * 15 // 100, pairs=20, tokens=20 * length, squares=20 * length**2)
    assert model_flops(LARGE, counts) / 20 / 1e9 == pytest.approx(gigaflop, abs=0.05)


def test_operations_count_real_lengths_and_the_real_width() -> None:
    def flops(model: ModelConfig, *lengths: int) -> float:
        return model_flops(model, GlobalCounts(0, len(lengths), sum(lengths), sum(n * n for n in lengths)))

    assert flops(LARGE, 100, 28) == pytest.approx(flops(LARGE, 100) + flops(LARGE, 28))
    assert flops(LARGE, 64, 64) < flops(LARGE, 128)
    narrow = 6 * (4 * 8 * 8 + 2 * 8 * 16) * 5 + 12 * 8 * 25  # 4 H² of attention, 2 H I of the perceptron
    assert flops(TINY, 5) == narrow


# ---- what is written -----------------------------------------------------------------------------------------


def test_a_step_is_written_as_means_over_the_global_batch(tmp_path: Path) -> None:
    train(metrics(tmp_path), 10)
    steps = lines(tmp_path, "step")
    assert [line["step"] for line in steps] == list(range(1, 11))
    first = steps[0]
    assert (first["mlm_loss"], first["nsp_loss"], first["loss"]) == (100 / 40, 4 / 8, 3.0)
    assert (first["mlm_accuracy"], first["nsp_accuracy"]) == (10 / 40, 6 / 8)
    assert (first["position"], first["samples"], first["tokens"]) == (8, 8, 300)
    assert (first["learning_rate"], first["gradient_norm"], first["loss_scale"]) == (1e-3, 2.0, 64.0)
    assert (first["trust_min"], first["trust_mean"], first["trust_max"]) == (0.5, 1.5, 3.0)
    assert (first["batch"], first["targets"], first["flops"]) == (8, 40, model_flops(TINY, COUNTS))
    assert first["applied"] and not first["clipped"] and first["wait_seconds"] == 0.25 and first["seconds"] > 0


def test_data_without_pairs_have_no_metrics_of_a_second_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, single = metrics(tmp_path, replace(QUIET, print_seconds=0)), replace(COUNTS, pairs=0)
    state = train(run, 5)
    state = train(run, 5, state, counts=single)  # a window over two phases
    assert value(run, "accuracy_ratio", task="nsp", split="train") == 0.75
    run.heldout(state, {"mlm_loss": 3.5, "mlm_accuracy": 0.3})
    train(run, 10, state, counts=single)
    assert {labels for name, labels in scrape(run) if name in ("lambert_loss", "lambert_accuracy_ratio")} == {
        frozenset({"run": "tests", "task": "mlm", "split": split}.items()) for split in ("train", "heldout")
    }
    steps = lines(tmp_path, "step")
    assert ["nsp_loss" in line or "nsp_accuracy" in line for line in steps] == 5 * [True] + 15 * [False]
    assert [steps[0]["loss"], steps[-1]["loss"], steps[-1]["mlm_loss"]] == [3.0, 2.5, 2.5]
    shown = capsys.readouterr().out.splitlines()
    assert "nsp 0.500 (75.0%)" in shown[0] and "mlm 2.500 (25.0%)" in shown[-1]
    assert not [line for line in shown[1:] if "nsp" in line]


def test_ranks_talk_only_when_it_is_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talks: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", talks.append)
    run = metrics(tmp_path)
    state = train(run, 9)
    assert not talks and not lines(tmp_path, "step")
    train(run, 12, state)
    assert len(talks) == 2 and len(lines(tmp_path, "step")) == 20
    run.flush()
    run.flush()
    assert len(talks) == 3 and len(lines(tmp_path, "step")) == 21


def test_a_skipped_step_is_counted_as_skipped_alone(tmp_path: Path) -> None:
    run = metrics(tmp_path)
    state = train(run, 3)
    state = train(run, 2, state, mlm=math.nan, norm=math.inf, applied=False)
    train(run, 5, state)
    assert (value(run, "steps_total"), value(run, "skipped_steps_total")) == (8, 2)
    assert (value(run, "samples_total"), value(run, "tokens_total", kind="valid")) == (64, 2400)
    assert value(run, "targets_total") == 320 and value(run, "nonfinite_total", where="loss") == 0
    assert (value(run, "step"), value(run, "step_duration_seconds_count")) == (8, 10)
    skipped = lines(tmp_path, "step")[3]
    assert skipped["applied"] is False and skipped["gradient_norm"] is skipped["mlm_loss"] is None


def test_a_plateau_is_told_once_and_again_when_it_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """100 nats over 40 targets are the unigram loss; the steps of the warm-up do not count."""
    running, patience = metrics(tmp_path), BLOCK * PATIENCE["collapsed"]
    running.describe(TrainState(), {})
    assert value(running, "plateau") == 0.0
    state = train(running, 50 + patience - 10, variance=0.08)
    assert (value(running, "unigram_loss"), value(running, "plateau")) == (2.5, 0.0)
    assert value(running, "token_variance_ratio") == pytest.approx(0.08)
    state = train(running, 500, state, variance=0.08)
    assert value(running, "plateau") == 1.0
    state = train(running, 20, state, variance=0.08, applied=False)
    state = train(running, 3 * BLOCK * LEARNING, state, mlm=80.0)
    assert value(running, "plateau") == 0.0
    run = [line for line in capsys.readouterr().out.splitlines() if "plateau" in line]
    assert [line.split("  ")[1].split(":")[0] for line in run] == [
        "warning",
        "left the unigram plateau (MLM loss 2.00, word frequencies alone 2.50, variance over tokens 75.0%)",
    ]
    events = [(line["step"], line["on"], line["sign"]) for line in lines(tmp_path, "plateau")]
    assert events == [(50 + patience, True, "collapsed"), (50 + patience - 10 + 500 + BLOCK * LEARNING + 10, False, "")]


def test_a_resumed_run_does_not_warn_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = train(metrics(tmp_path), 400, variance=0.08)
    assert capsys.readouterr().out.count("warning") == 1
    resumed = metrics(tmp_path)
    resumed.describe(state, {})
    assert value(resumed, "plateau") == 1.0  # at once
    train(resumed, 400, state, variance=0.08)
    assert "warning" not in capsys.readouterr().out
    fresh = metrics(tmp_path)  # without a checkpoint it starts again
    fresh.describe(TrainState(), {})
    assert value(fresh, "plateau") == 0.0
    train(fresh, 400, variance=0.08)
    assert capsys.readouterr().out.count("warning") == 1


@pytest.mark.parametrize("broken", [{"mlm": math.nan}, {"mlm": math.inf}, {"norm": math.nan}, {"norm": math.inf}])
def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, broken: dict[str, float]) -> None:
    run = metrics(tmp_path)
    state = train(run, 4)
    state = train(run, 1, state, **broken)
    with pytest.raises(TrainerError, match=r"^step 5: loss .* training diverged; lower the learning rate .*"):
        train(run, 5, state)
    assert len(lines(tmp_path, "step")) == 10  # what led there is on disk
    where = "loss" if "mlm" in broken else "gradient"
    assert value(run, "nonfinite_total", where=where) == 1 and value(run, "steps_total") == 10


def test_what_the_guard_does_is_logged_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = metrics(tmp_path)
    run.subject.guard.config = GuardConfig(spike="rollback", spike_steps=10)
    state = train(run, 25)
    with pytest.raises(Setback, match="step 26: loss"):
        train(run, 5, train(run, 1, state, mlm=400.0))
    [line] = lines(tmp_path, "guard")
    assert (line["sign"], line["action"], line["step"]) == ("spike", "rollback", 30)
    assert line["gap"] == {"position": 8 * 24, "samples": 16}
    assert value(run, "guard_actions_total", action="rollback") == 1
    assert capsys.readouterr().out.count("warning: guard: step 26: loss") == 1
    run.went_back(TrainState(attempts=20, step=20, position=160, samples=160))
    assert lines(tmp_path, "rollback")[0].items() >= {"step": 20, "rolled_back": 10}.items()
    assert value(run, "rolled_back_steps") == 10 and value(run, "step") == value(run, "checkpoint_step") == 20
    train(run, 10, TrainState(attempts=20, step=20, position=160, samples=160), left_out=16, wait=0.0)
    assert value(run, "left_out_samples_total") == 160
    assert run.spent["rework"] > 0


# ---- what is exported ----------------------------------------------------------------------------------------


def test_metrics_are_those_of_the_last_logged_steps(tmp_path: Path) -> None:
    run = metrics(tmp_path)
    state = train(run, 10)
    train(run, 10, state, mlm=60.0)
    assert value(run, "loss", task="mlm", split="train") == pytest.approx(1.5)
    assert value(run, "loss", task="nsp", split="train") == pytest.approx(0.5)
    assert value(run, "accuracy_ratio", task="nsp", split="train") == pytest.approx(0.75)
    assert value(run, "trust_ratio", statistic="max") == 3
    assert value(run, "model_flops_total") == 20 * model_flops(TINY, COUNTS)
    assert (value(run, "target_steps"), value(run, "loss_scale"), value(run, "gradient_norm")) == (1000, 64, 2)


def test_a_resumed_run_shows_its_progress_before_its_first_step(tmp_path: Path) -> None:
    run = metrics(tmp_path)
    assert not any(name == "lambert_step" for name, _ in scrape(run))  # not 0: it is not known yet
    run.describe(TrainState(attempts=9, step=8, phase=1, restarts=2), {"device": "cpu", "precision": "fp32"})
    assert [value(run, name) for name in ("step", "phase", "restarts")] == [8, 1, 0]
    again = metrics(tmp_path)  # a loop of those that die before they step must show, too
    assert value(again, "restarts") == 1 == lines(tmp_path, "attempt")[1]["restarts"]
    assert value(run, "last_step_timestamp_seconds") > 1.6e9  # an age against 0 would be 50 years
    assert value(run, "run_info", device="cpu", precision="fp32") == 1
    assert [line["event"] for line in lines(tmp_path)[:2]] == ["attempt", "start"]
    assert lines(tmp_path, "start")[0]["hardware"] == "cpu"  # of a GPU, its model
    assert value(run, "checkpoint_step") == 8


def test_heldout_metrics_and_checkpoints_are_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, state = metrics(tmp_path), TrainState(step=7)
    values = {"mlm_loss": 3.5, "mlm_accuracy": 0.3, "nsp_loss": 0.6, "nsp_accuracy": 0.7, "mask_loss": 4.5}
    run.heldout(state, values)
    assert value(run, "loss", task="mask", split="heldout") == 4.5  # on the positions of [MASK] alone
    assert value(run, "loss", task="mlm", split="heldout") == 3.5
    assert value(run, "accuracy_ratio", task="nsp", split="heldout") == 0.7
    run.checkpoint(WHOLE)
    assert (value(run, "checkpoint_size_bytes"), value(run, "checkpoint_duration_seconds")) == (1000, 1.5)
    assert value(run, "checkpoint_last_success_timestamp_seconds") == 1.7e9
    [_, heldout, checkpoint] = lines(tmp_path)
    assert (heldout["event"], heldout["step"], heldout["mlm_loss"]) == ("heldout", 7, 3.5)
    values = {"step": 7, "seconds": 1.5, "stall_seconds": 0.5, "bytes": 1000, "time": 1.7e9}
    assert checkpoint == {"event": "checkpoint", **values}
    assert "step 7/1000  held-out mlm_loss 3.500" in capsys.readouterr().out


def test_the_time_left_is_that_of_the_samples_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps of 8 samples took 4 s each: the other 8,000 samples take 4,000 s, and another phase 100 s."""
    run = metrics(tmp_path, replace(QUIET, log_every_steps=2, print_seconds=0))
    run.subject = replace(run.subject, target_steps=12, remaining=lambda state: (8016 - state.samples, 100.0))
    clock = iter([4.0, 8.0, 8.0])
    run._clock = 0.0
    monkeypatch.setattr("trainer.monitor.metrics.time.perf_counter", lambda: next(clock))
    train(run, 2)
    assert "left 68:20" in capsys.readouterr().out


def test_a_checkpoint_that_failed_is_counted_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = metrics(tmp_path)
    run.checkpoint(WHOLE)
    run.checkpoint(replace(WHOLE, step=8, failure="rank 3: no room", ended=1.8e9, leftover=""))
    assert value(run, "checkpoint_failures_total") == 1 and value(run, "checkpoint_stall_seconds_total") == 1.0
    assert value(run, "checkpoint_last_success_timestamp_seconds") == 1.7e9
    assert lines(tmp_path, "checkpoint_failed")[0]["reason"] == "rank 3: no room"
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == [
        "lambert: step 7/1000  warning: left behind: busy",
        "lambert: step 8/1000  no checkpoint: rank 3: no room",
    ]


def test_a_full_disk_costs_lines_and_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = metrics(tmp_path)
    state = train(run, 10)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 100, unlimited[1]))
    try:
        state = train(run, 20, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    train(run, 10, state)
    assert capsys.readouterr().out.count("metrics.jsonl: losing lines until it can be written again: ") == 1
    steps = [line["step"] for line in read_lines(tmp_path / "metrics.jsonl") if line["event"] == "step"]
    assert steps == [*range(1, 11), *range(31, 41)]


def test_the_number_of_series_does_not_grow(tmp_path: Path) -> None:
    run = metrics(tmp_path)
    state = train(run, 10)
    early = set(scrape(run))
    train(run, 190, state)
    assert set(scrape(run)) == early


def test_every_second_is_spent_on_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock at each call: made, started, a step, evaluated, a step that is known, saved, one that overflowed."""
    write_steps(tmp_path, 2)
    clock = iter([0.0, 5.0, 6.0, 100.0, 103.0, 200.0, 202.0])
    monkeypatch.setattr("trainer.monitor.metrics.time.perf_counter", lambda: next(clock))
    run = metrics(tmp_path, replace(QUIET, log_every_steps=1000))
    run.describe(TrainState(step=1), {})
    state = train(run, 1, TrainState(step=1))
    run.heldout(state, dict.fromkeys(("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"), 0.0))
    state = train(run, 1, state)
    run.spend("checkpoint")
    train(run, 1, state, applied=False)
    monkeypatch.undo()
    run.flush()
    assert [line["seconds"] for line in lines(tmp_path, "step")[2:]] == [1.0, 3.0, 2.0]
    spent = {"start": 5, "rework": 0.75, "productive": 2.75, "skipped": 1.75, "data": 0.75}
    spent |= {"evaluation": 94, "checkpoint": 97}
    assert (
        lines(tmp_path, "time")[-1]["spent"] == spent and sum(spent.values()) == 202 and set(spent) == set(TIME_STATES)
    )
    assert {state: value(run, "time_seconds_total", state=state) for state in TIME_STATES} == spent
    assert value(run, "rolled_back_steps") == 1 == lines(tmp_path, "start")[0]["rolled_back"]


def write_steps(folder: Path, steps: int) -> None:
    """A metrics log of an earlier start."""
    text = "".join(json.dumps({"event": "step", "step": step + 1}) + "\n" for step in range(steps))
    (folder / "metrics.jsonl").write_text(text)


def test_what_ranks_tell_is_a_step_on_the_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "trainer.monitor.metrics.time.perf_counter", iter(range(1000)).__next__
    )  # a step takes a second
    run = metrics(tmp_path)
    run.describe(TrainState(), {})
    assert value(run, "step_part_seconds_total", rank="0", part="reduce") == 0  # counters are there before they count
    monkeypatch.setattr(run.watch, "read", lambda: {"forward": 10.0, "backward": 20.0, "reduce": 5.0, "optimizer": 1.0})
    train(run, 10)
    note = lines(tmp_path, "ranks")[0]
    assert note["parts"] == {"data": 0.25, "forward": 1.0, "backward": 2.0, "reduce": 0.5, "optimizer": 0.1}
    assert note["compute"] == pytest.approx([3.35] * 3) and note["slowest"] == 0 and note["step"] == 10
    exported = {part: value(run, "step_part_seconds_total", rank="0", part=part) for part in STEP_PARTS}
    assert exported == {part: 10 * seconds for part, seconds in note["parts"].items()}
    assert value(run, "memory_peak_bytes", rank="0") == note["memory_peak_bytes"] > 1e7
    facts = {"node": socket.gethostname(), "device": "cpu", "gpu_uuid": ""}
    assert value(run, "rank_info", rank="0", **facts) == 1


def test_tokens_that_nobody_needs_are_counted_apart(tmp_path: Path) -> None:
    run = metrics(tmp_path)
    batch = StepBatch(0, 8, (filler(2, 3), filler(2, 3)), COUNTS)
    batch = replace(batch, counts=replace(COUNTS, tokens=0))
    state = TrainState()
    for _ in range(10):
        state = state.after(batch, True)
        run.step(state, batch, result(), 1e-3)
    assert value(run, "tokens_total", kind="padding") == 60 and value(run, "tokens_total", kind="valid") == 0


def test_clipped_steps_are_counted(tmp_path: Path) -> None:
    run = metrics(tmp_path)
    state = train(run, 4, norm=5.5)
    state = train(run, 4, state, norm=4.5)
    train(run, 2, state, norm=math.inf, applied=False)
    assert value(run, "clipped_steps_total") == 4
    assert [line["clipped"] for line in lines(tmp_path, "step")] == 4 * [True] + 6 * [False]


@pytest.mark.parametrize("how", STATES[2:])
def test_an_end_is_reported_and_read_before_the_endpoint_goes(tmp_path: Path, how: str) -> None:
    port = free_port()
    run = metrics(tmp_path, replace(QUIET, port=port, address="127.0.0.1", linger_seconds=60.0))
    run.describe(TrainState(), {})
    assert value(run, "run_state", state="training") == 1 and value(run, "ended_timestamp_seconds") == 0
    seen: list[str] = []

    def prometheus() -> None:
        while not any(f'state="{how}"}} 1.0' in page for page in seen):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
                seen.append(page.read().decode())
            time.sleep(0.05)

    thread = threading.Thread(target=prometheus)
    thread.start()
    while not seen:
        time.sleep(0.01)
    run.end(how, NotFiniteError("the gradients are not finite") if how == "failed" else None)
    run.linger()
    thread.join(timeout=5)
    assert not thread.is_alive()
    assert value(run, "ended_timestamp_seconds") == lines(tmp_path, "end")[0]["time"] > 1.6e9
    assert [value(run, "run_state", state=state) for state in STATES] == [state == how for state in STATES]
    assert value(run, "nonfinite_total", where="gradient") == (how == "failed")


def test_a_train_job_gets_the_progress_and_the_end(tmp_path: Path) -> None:
    with status_server(tmp_path / "server") as received:
        run = metrics(tmp_path, server=received.address)
        run.describe(TrainState(), {})
        received.wait(lambda got: len(got.posts) == 1)
        train(run, 20)  # the thread pauses, so the first ten are never posted
        run.end("stopped")
        run.linger()
    start, end = received.posts
    assert (start["progressPercentage"], end["progressPercentage"]) == (0, 2)  # 160 of 8,000 samples
    assert {"name": "step", "value": "20"} in end["metrics"]


def test_nobody_is_waited_for_who_never_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = metrics(tmp_path)
    monkeypatch.setattr(threading.Event, "wait", lambda *arguments: pytest.fail("waited"))
    run.end("done")
    run.linger()
    assert lines(tmp_path, "end")[0]["how"] == "done"


def test_peaks_are_those_of_the_longest_name_that_fits() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12 and peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA A1000 Laptop GPU") == peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb") == 0


def test_a_stated_peak_is_of_all_devices(tmp_path: Path) -> None:
    assert value(metrics(tmp_path), "peak_flops") == 0
    assert value(metrics(tmp_path, replace(QUIET, device_teraflops=2.5)), "peak_flops") == 2.5e12


def test_names_keep_prometheus_rules() -> None:
    for name, (kind, labels, text) in (RUN_SERIES | NODE_SERIES).items():
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name), name
        assert not name.endswith(("_total", "_count", "_sum", "_bucket", "_info", "_created")), name
        assert not re.search(r"_(ms|milliseconds|minutes|hours|kb|mb|gb|percent)(_|$)", f"{name}_"), name
        assert not re.search(r"(duration|wait|timestamp)(?!.*_seconds$)", name), name  # base units, at the end
        assert not re.search(r"(size|memory)(?!.*_bytes$)", name), name
        known = {"task", "split", "statistic", "rank", "part", "state", "where", "kind", "action"}
        assert text.endswith(".") and set(labels) <= known, name
        counts = name in ("steps", "samples", "tokens", "targets", "model_flops", "nonfinite", "time_seconds")
        counts |= name in ("skipped_steps", "clipped_steps", "step_part_seconds", "guard_actions", "left_out_samples")
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

    def series(rank: int, local_rank: int) -> set[str]:
        return set(Exporter("tests", None, "", World(rank, 4, local_rank, 2, cpu)).series)

    assert series(0, 0) == set(RUN_SERIES) | set(NODE_SERIES)
    assert series(2, 0) == set(NODE_SERIES)
    assert series(1, 1) == set()


def test_it_is_served_and_a_taken_port_is_one_line(tmp_path: Path) -> None:
    config = replace(QUIET, port=free_port(), address="127.0.0.1")
    run = metrics(tmp_path, config)
    train(run, 10)
    with urllib.request.urlopen(f"http://127.0.0.1:{config.port}/metrics", timeout=5) as page:
        assert 'lambert_step{run="tests"} 10.0' in page.read().decode().splitlines()
    with pytest.raises(TrainerError, match=f"metrics.port {config.port} on 127.0.0.1 cannot be opened") as error:
        metrics(tmp_path, config)
    assert "\n" not in str(error.value) and "set another metrics.port" in str(error.value)
    Exporter("tests", config.port, "127.0.0.1", World(1, 2, 1, 2, torch.device("cpu")))  # opens no port


def test_a_line_that_a_kill_cut_short_takes_no_other_with_it(tmp_path: Path) -> None:
    train(metrics(tmp_path), 10)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    again = metrics(tmp_path)
    again.describe(TrainState(step=9), {"run": "again"})
    whole = path.read_text(encoding="utf-8").splitlines()
    with pytest.raises(ValueError):
        json.loads(whole[-3])
    assert json.loads(whole[-1])["event"] == "start"
