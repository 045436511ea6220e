"""The profile of a run: the parts of kernels, a GPU's trace, the advice, and the command on two CPU ranks."""

from __future__ import annotations

import ast
import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import ranks
from tests.helpers.layout_rules import dotted
from tests.helpers.ranks import ROOT
from tests.helpers.runs import write_config
from trainer.checkpoint.train_state import TrainState
from trainer.engine.schedule import Phase
from trainer.errors import PassingError, TrainerError
from trainer.profile import __main__ as command
from trainer.profile import marks, parts
from trainer.profile.advice import Setting, advise
from trainer.profile.breakdown import (
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    REDUCE,
    REST,
    Breakdown,
    break_down,
    covered,
    uncovered,
)
from trainer.profile.events import Recording, read_trace, recording_of, spans_of_marks
from trainer.profile.parts import PARTS, kernel_part
from trainer.profile.report import RankTimes, lines
from trainer.profile.steps import Size, Steps, Timing
from trainer.profile.timeline import draw, merged

TRACE = ROOT / "tests/helpers/gpu_trace.json"  # three steps on one of two GPUs, the first to warm up
COMMAND = str(ROOT / "trainer/profile/__main__.py")

# ---- kernels and their parts ---------------------------------------------------------------------------------


def own_kernels() -> list[str]:
    """The names of all Triton kernels that are launched."""
    functions = [
        node
        for path in sorted((ROOT / "kernels").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and "triton.jit" in map(dotted, node.decorator_list)
    ]
    return [function.name for function in functions if function.name.endswith("_kernel")]


def test_the_kernels_are_found() -> None:
    assert len(own_kernels()) > 20 and "_lamb_closed_kernel" in own_kernels()


@pytest.mark.parametrize("name", own_kernels())
def test_each_kernel_of_ours_has_a_part(name: str) -> None:
    part = kernel_part(name)
    assert part is not None and part in {*PARTS, parts.LOSS}
    says = part.lower().replace("-", "_") in name.replace("layer_norm", "layernorm")
    assert says or part in (parts.OPTIMIZER, parts.SUMS, parts.ACCUMULATION)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNT", parts.PRODUCTS),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, __half>", parts.PRODUCTS),
        ("sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64", parts.PRODUCTS),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", parts.ATTENTION),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::Half, float>", parts.LAYER_NORM),
        ("ncclDevKernel_ReduceScatter_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", parts.REDUCTION),
        ("void multi_tensor_apply_kernel<TensorListMetadata<4>, LAMBStage1Functor<float> >", parts.OPTIMIZER),
        ("autograd::engine::evaluate_function: AddmmBackward0", parts.PRODUCTS),
        ("aten::linear", parts.PRODUCTS),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >", None),
        ("aten::add", None),
    ],
)
def test_names_of_other_libraries_have_their_parts(name: str, part: str | None) -> None:
    assert kernel_part(name) == part


# ---- a trace of a GPU ----------------------------------------------------------------------------------------


@pytest.fixture
def tree() -> dict[str, Any]:
    return read_trace(TRACE, cuda=True)


@pytest.fixture
def recording(tree: dict[str, Any]) -> Recording:
    return recording_of(tree, cuda=True)


def test_a_gpu_step_is_broken_down_by_part(recording: Recording) -> None:
    found = break_down(recording)
    assert found.step == pytest.approx(2.0)
    expected = {
        parts.PRODUCTS: {FORWARD: 0.2, BACKWARD: 0.4},
        parts.ATTENTION: {FORWARD: 0.05, BACKWARD: 0.1},
        parts.LAYER_NORM: {FORWARD: 0.03, BACKWARD: 0.05},
        parts.GELU: {FORWARD: 0.04, BACKWARD: 0.06},
        parts.EMBEDDING: {FORWARD: 0.06, BACKWARD: 0.03},
        parts.SUMS: {BACKWARD: 0.01},
        parts.HEADS: {FORWARD: 0.12, BACKWARD: 0.2},  # with their own matrix products
        parts.OTHER: {FORWARD: 0.01},
        parts.ACCUMULATION: {REDUCE: 0.04},
        parts.REDUCTION: {REDUCE: 0.09, OPTIMIZER: 0.12},
        parts.OPTIMIZER: {OPTIMIZER: 0.08},
        parts.COPIES: {FORWARD: 0.02, OPTIMIZER: 0.005, REST: 0.005},
    }
    assert set(found.spent) == set(expected)
    for part, row in expected.items():
        assert found.spent[part] == pytest.approx(row), part
    assert found.hidden == pytest.approx(0.01)  # the reduction begins while gradients are still accumulated
    assert found.pieces == 23


def test_busy_and_idle_add_up_to_the_step(recording: Recording) -> None:
    found = break_down(recording)
    assert found.idle[DATA] == pytest.approx(0.1)
    assert found.idle[FORWARD] == pytest.approx(0.02)
    assert found.idle[OPTIMIZER] == pytest.approx(0.065)  # the host waited for the norm, then launched
    assert found.busy + sum(found.idle.values()) == pytest.approx(found.step)
    assert found.own == pytest.approx(0.1 + 0.55 + 0.85)  # data, forward and backward


def test_work_belongs_to_what_the_host_did_when_it_was_launched(recording: Recording) -> None:
    """A kernel runs long after its launch: the first of backward starts after the host has reached the optimizer."""
    [backward] = [work for work in recording.work if work.name == "_attention_block_backward_kernel"][:1]
    assert backward.doing == marks.LAYERS
    at = [mark for mark in recording.marks if mark.at <= backward.begin][-1]
    assert at.name == marks.OPTIMIZER


def test_a_kernel_without_a_launch_counts_by_its_own_time(tree: dict[str, Any]) -> None:
    events = [event for event in tree["traceEvents"] if event.get("cat") not in ("cuda_runtime", "cuda_driver")]
    found = break_down(recording_of({"traceEvents": events}, cuda=True))
    assert found.busy == pytest.approx(break_down(recording_of(tree, cuda=True)).busy)


def test_the_trace_gets_a_row_of_the_hosts_parts(tree: dict[str, Any], recording: Recording) -> None:
    name, *spans = spans_of_marks(tree, recording)
    assert name["args"]["name"] == "Lambert: the step's parts"
    assert [span["name"] for span in spans[:4]] == ["data", "forward", "heads", "backward"]
    assert spans[1]["dur"] == pytest.approx(150)
    first = next(event for event in tree["traceEvents"] if event.get("name") == "lambert: data")
    assert spans[0]["ts"] == first["ts"] and spans[0]["pid"] == first["pid"]


def without(tree: dict[str, Any], category: str) -> dict[str, Any]:
    return {"traceEvents": [event for event in tree["traceEvents"] if event.get("cat") != category]}


@pytest.mark.parametrize(
    ("category", "said"),
    [("kernel", "recorded no kernel of the GPU: start"), ("user_annotation", "recorded none of the steps")],
)
def test_a_trace_that_lacks_something_is_refused(
    tree: dict[str, Any], category: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(without(tree, category)))
    with pytest.raises(TrainerError, match=said):
        read_trace(path, cuda=True)


def test_a_trace_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text('{"traceEvents": [')
    with pytest.raises(TrainerError, match="wrote no JSON"):
        read_trace(tmp_path / "trace.json", cuda=True)


stretches = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12)


@given(stretches, stretches)
def test_no_moment_counts_twice(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    nothing = np.empty(0)
    cover, total, moments = (nothing, nothing), 0.0, set[int]()
    for stretch in (sorted(first), sorted(second)):
        begins = np.array([begin for begin, _ in stretch], dtype=float)
        ends = np.array([begin + length for begin, length in stretch], dtype=float)
        exposed, cover = uncovered(cover, begins, ends)
        total += exposed.sum()
        moments |= {moment for begin, length in stretch for moment in range(begin, begin + length)}
    assert total == pytest.approx(len(moments))
    assert covered(cover, np.array([0.0]), np.array([100.0])) == pytest.approx(len(moments))


# ---- the report ----------------------------------------------------------------------------------------------

TIMING = Timing(1.95, 0.01, 31_232.0, 1e9, 0)
SETTING = Setting("phases.1", True, 989e12, 1, 256, 31_232.0, 2, 2, "none", 10)


@pytest.mark.parametrize(
    ("timing", "setting", "said"),
    [
        (
            {"waited": 0.2},
            {},
            "Bound by the loader: a step waits 0.2 ms (10%) for its data: keep the shards on a faster",
        ),
        (
            {"milliseconds": 3.0},
            {},
            "Host-bound: the GPU is idle for 43% of a step, because it finishes kernels faster",
        ),
        ({"milliseconds": 3.0}, {}, "raise phases.1.micro_batch: a micro-batch has 256 sequences, 31,232 tokens and"),
        (
            {"milliseconds": 3.0},
            {"run_micro_batches": 1, "micro_batches": 1},
            "raise phases.1.micro_batch and global_batch: a micro-batch has",
        ),
        (
            {"milliseconds": 1.75},
            {},
            "Device-bound: the GPU works for 98% of a step, and the largest part of it is matrix",
        ),
        ({"milliseconds": 1.75}, {}, "a larger micro-batch would gain little"),
        (
            {"milliseconds": 1.75},
            {"checkpointing": "full"},
            "set engine.checkpointing to none or cheap if that fits",
        ),
        ({}, {"cuda": False}, "On CPUs: a rank computes for 86% of a step, 35% of it in the part 'matrix products'"),
    ],
)
def test_the_advice_names_what_to_change(
    timing: dict[str, Any], setting: dict[str, Any], said: str, recording: Recording
) -> None:
    found = break_down(recording)
    assert said in advise(found, replace(TIMING, **timing), replace(SETTING, **setting))


@pytest.mark.parametrize(
    ("longer", "said"),
    [
        (parts.REDUCTION, "Bound by the reduction over 2 ranks, which takes 20% of a step"),
        (parts.OPTIMIZER, "the optimizer takes 22%: raise phases.1.global_batch to step less often."),
    ],
)
def test_what_a_step_does_once_weighs_less_if_the_run_has_more_micro_batches(
    longer: str, said: str, recording: Recording
) -> None:
    found = break_down(recording)
    found = replace(found, spent=found.spent | {longer: {OPTIMIZER: 0.4}})
    timing, setting = replace(TIMING, milliseconds=1.75), replace(SETTING, ranks=2)
    assert said in advise(found, timing, setting)
    assert "would gain little" in advise(found, timing, replace(setting, run_micro_batches=16))


def idle_at(column: str) -> Breakdown:
    return Breakdown(10.0, {parts.PRODUCTS: {FORWARD: 5.0}}, {column: 5.0}, 0.0, 100.0, [])


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (REST, "mostly between steps: raise metrics.log_every_steps, now 1."),
        (OPTIMIZER, "mostly around the optimizer: raise phases.1.global_batch"),
    ],
)
def test_the_advice_looks_at_where_the_gpu_is_idle(column: str, said: str) -> None:
    timing = replace(TIMING, milliseconds=10.0)
    assert said in advise(idle_at(column), timing, replace(SETTING, log_every_steps=1))


def test_the_report_adds_up_and_names_the_slowest_rank(recording: Recording) -> None:
    short = replace(SETTING, run_micro_batches=16)
    timing = replace(TIMING, skipped=1)
    found = lines("name", break_down(recording), timing, short, [RankTimes(0, "a", 1.2), RankTimes(1, "b", 1.3)])
    text = "\n".join(found)
    assert all(len(line) <= 100 for line in found)
    assert "a step    1.95 ms without the profiler, 2.00 ms with it (+2.6%)" in text
    assert "GPU busy  1.72 ms of a step, 88.2% of its time without the profiler" in text
    assert "TFLOP/s per GPU" in text
    assert "slowest rank 1 on b: 1.30 ms; fastest 0 on a: 1.20 ms" in text
    assert "rank 1 works 8% longer: the others wait for it" in text
    assert "note: a step of the run has 16 micro-batches, not 2" in text
    assert "note: 1 of the steps overflowed" in text
    start = next(at for at, line in enumerate(found) if line.startswith("GPU, ms per step"))
    end = next(at for at, line in enumerate(found) if line.startswith("a profiled step"))
    totals = [float(line.split()[-2]) for line in found[start + 1 : end + 1]]
    assert sum(totals[:-1]) == pytest.approx(totals[-1], abs=0.06)


def test_the_report_of_a_cpu_compares_with_the_profiled_step(recording: Recording) -> None:
    found = lines("name", break_down(recording), TIMING, replace(SETTING, cuda=False), [RankTimes(0, "a", 1.2)])
    assert "CPU busy  1.72 ms of a step, 86.0% of its time with the profiler" in found


def test_a_slow_profiler_is_noted(recording: Recording) -> None:
    timing = replace(TIMING, milliseconds=1.0)
    text = "\n".join(lines("name", break_down(recording), timing, SETTING, [RankTimes(0, "a", 1.2)]))
    assert "note: the profiler slowed the host down, so the idle times in the table are longer than the run's" in text


def test_steps_that_were_faster_with_the_profiler_are_doubted(recording: Recording) -> None:
    timing = replace(TIMING, milliseconds=4.0)
    text = "\n".join(lines("name", break_down(recording), timing, SETTING, [RankTimes(0, "a", 1.2)]))
    assert "note: the steps with the profiler were faster" in text and "slowest" not in text


def test_the_timeline_is_drawn(recording: Recording, tmp_path: Path) -> None:
    draw(recording, "title", tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_neighbors_of_one_color_become_one_bar() -> None:
    row = [(0.0, 1.0, "a"), (1.1, 2.0, "a"), (2.1, 3.0, "b"), (5.0, 6.0, "b")]
    assert merged(row, 0.2) == [(0.0, 2.0, "a"), (2.1, 3.0, "b"), (5.0, 6.0, "b")]


# ---- the command ---------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path, tiny_shards: Path) -> Path:
    return write_config(tmp_path, tiny_shards, steps=3)


def profile(size: int, *arguments: str | Path) -> list[tuple[int, str]]:
    return ranks.finish(ranks.fork(size, COMMAND, *map(str, arguments)))


@pytest.mark.slow
def test_two_ranks_are_profiled_and_the_run_is_left_alone(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "nowhere")  # a run would warn of it, or report its progress
    out, before = tmp_path / "out", {path.name for path in tmp_path.iterdir()}
    given = "--config", config, "--out", out, "--steps", "2", "--micro-batches", "1", "--set", "phases.0.power=0.5"
    (code, text), (other_code, other) = profile(2, *given)
    assert (code, other_code) == (0, 0), text + other
    assert "Kubeflow" not in text
    assert {path.name for path in tmp_path.iterdir()} == before | {"out"}  # and no run's folder
    names = {"profile.txt", "timeline.png", "trace-rank-0.json.gz", "trace-rank-1.json.gz"}
    assert {path.name for path in out.iterdir()} == names
    assert "2 steps on 2 x CPU, rank 0" in text and "2 steps on" not in other
    assert "data, forward and backward: slowest rank" in text
    assert "note: a step of the run has 2 micro-batches, not 1" in text
    assert (out / "profile.txt").read_text() in text
    with gzip.open(out / "trace-rank-1.json.gz", "rt") as file:
        tree = json.load(file)
    own = recording_of(tree, cuda=False)
    assert len(own.steps) == 2
    order = [mark.name for mark in own.marks if mark.name != marks.END]
    assert order[: len(order) // 3] == [
        *(marks.DATA, marks.FORWARD, marks.HEADS, marks.BACKWARD, marks.LAYERS, marks.REDUCE),
        *(marks.OPTIMIZER, marks.AFTER),
    ]
    found = break_down(own)
    assert {parts.PRODUCTS, parts.ATTENTION, parts.LAYER_NORM, parts.GELU, parts.HEADS} <= set(found.spent)
    assert found.busy + sum(found.idle.values()) == pytest.approx(found.step)
    [(again, said)] = profile(1, "--config", config, "--out", out)
    assert again == 2 and said.splitlines()[-1].endswith(f"--out {out} is not empty: name a new folder, or remove it")


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_of_a_gpu_are_in_their_parts(tmp_path: Path, tiny_shards: Path) -> None:
    config = write_config(tmp_path, tiny_shards, steps=3, model={"hidden": 64, "intermediate": 128})
    given = "--config", str(config), "--out", str(tmp_path / "out"), "--steps", "3"
    [(code, text)] = ranks.finish(ranks.start(1, COMMAND, *given))
    assert code == 0 and "GPU busy" in text, text
    with gzip.open(tmp_path / "out/trace-rank-0.json.gz", "rt") as file:
        own = recording_of(json.load(file), cuda=True)
    expected = {
        "_attention": {marks.FORWARD, marks.LAYERS},
        "_bias_gelu": {marks.FORWARD, marks.HEADS, marks.BACKWARD, marks.LAYERS},
        "_cross_entropy": {marks.HEADS, marks.BACKWARD},
        "_accumulate": {marks.REDUCE},
        "_lamb": {marks.OPTIMIZER},
    }
    for name, places in expected.items():
        assert {work.doing for work in own.work if work.name.startswith(name)} == places, name
    found = break_down(own)
    assert found.busy + sum(found.idle.values()) == pytest.approx(found.step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--phase", "second"), "error: --phase second: the run has no such phase: name one of only"),
        (("--out", "{run}/profile"), "is inside run.folder, {run}, which a profile leaves alone: name another folder"),
        (("--out", "{config}"), "--out {config}: the folder cannot be created (File exists): name another"),
    ],
)
def test_a_wrong_phase_or_folder_gets_one_line(
    arguments: tuple[str, ...], said: str, config: Path, tmp_path: Path
) -> None:
    places = {"run": tmp_path / "run", "config": config}
    words = [word.format(**places) for word in arguments]
    words += [] if "--out" in words else ["--out", str(tmp_path / "out")]
    [(code, text)] = profile(1, "--config", config, *words)
    assert code == 2 and said.format(**places) in text.splitlines()[-1], text
    assert "Traceback" not in text and not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ["--steps", "--micro-batches"])
@pytest.mark.parametrize("value", ["0", "2000"])
def test_a_number_out_of_range_gets_one_line(
    option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["profile", "--config", "run.yaml", option, value])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"trainer.profile: error: {option} {value}: must be between 1 and 1,000;")


def test_a_gpu_without_enough_memory_gets_one_line() -> None:
    def opened() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    steps: Any = SimpleNamespace(opened=opened, state=TrainState(phase=1))
    with pytest.raises(PassingError, match=r"^CUDA out of memory: lower phases\.1\.micro_batch, or end what else"):
        Steps.measured(steps, 2, Path("trace.json"))


def test_a_step_is_cut_down_to_some_micro_batches() -> None:
    phase = Phase("only", "shards", 128, steps=10, learning_rate=1e-3, global_batch=65_536, micro_batch=256)
    data: Any = SimpleNamespace(phase=phase)
    assert Size.of(data, 2, 8) == Size(4096, 8, 128)
    assert Size.of(data, 2, 1000) == Size(65_536, 128, 128)
