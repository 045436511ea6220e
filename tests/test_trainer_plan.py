"""The planner: bytes that autograd and engines really keep, measured times, and plans of whole runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from kernels import backend
from kernels.dropout import token_keys
from tests.helpers import ranks
from tests.helpers.engine_on_ranks import MODEL
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.ranks import ROOT
from tests.helpers.runs import write_config
from trainer.bench.model import MODEL_SIZES, TOKENS, micro_batch
from trainer.bench.plan import full
from trainer.errors import TrainerError
from trainer.model.bert import Bert, ModelConfig
from trainer.model.checkpointing import Checkpointing
from trainer.model.flops import peak_flops
from trainer.plan import estimate, goodput
from trainer.plan.__main__ import main
from trainer.plan.cards import CARDS, Card, Rate, add_rates, choose, doubts, interpolated, read_rates
from trainer.plan.lengths import Lengths
from trainer.plan.memory import (
    CONTEXT_BYTES,
    GIB,
    OUTSIDE,
    Load,
    Setting,
    kept,
    layer_bytes,
    pass_bytes,
    peak,
    reserved,
    resident,
    sizes,
)
from trainer.plan.speed import CHECKPOINTING_FACTOR, assumed, launch_bound, read_network, step_time

Planned = Callable[[str], tuple[int, str, str]]
LARGE, SHAPE = MODEL_SIZES["large"], {"hidden": 16, "heads": 2, "intermediate": 40, "max_positions": 32}


# ---- memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "lengths", "dtype"),
    [
        ({"layers": 1}, [8, 5], torch.float16),
        ({"layers": 3, "layer_norm": "before"}, [9], torch.bfloat16),
        ({"layers": 2, "hidden": 24, "heads": 3}, [3, 3, 11], torch.float16),
        ({"layers": 1, "layer_norm": "before"}, [7, 7], torch.float32),  # attention for long sequences
    ],
)
def test_activations_are_what_autograd_keeps(changes: dict[str, Any], lengths: list[int], dtype: torch.dtype) -> None:
    model = ModelConfig(**{**SHAPE, "vocab_size": 70, **changes})
    bert, batch = Bert(model).to(dtype), micro_batch(lengths, model)
    keys = token_keys(0, 1, batch.samples, batch.positions, batch.cu_seqlens)
    weights = {p.untyped_storage().data_ptr() for p in bert.parameters()}
    seen: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with backend.using("triton"), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = bert(batch, keys)  # keeps the graph, and with it each address, until they are added up
        load = Load(sum(lengths), batch.masked.numel(), len(lengths))
        assert sum(seen.values()) == sum(kept(model, load, dtype.itemsize))
    del output


@pytest.mark.slow
def test_the_peak_of_a_pass_is_what_the_plan_says() -> None:
    """The peak is in backward's first MLP. Only partial sums and scalars are not planned."""
    changes: dict[str, Any] = {**SHAPE, "layers": 1, "vocab_size": 20, "intermediate": 80}
    model = ModelConfig(**changes)
    bert, batch = Bert(model).half(), micro_batch([31], model)
    keys = token_keys(0, 1, batch.samples, batch.positions, batch.cu_seqlens)

    def run() -> None:
        output = bert(batch, keys)
        torch.autograd.backward(output.mlm_loss + output.nsp_loss)
        bert.zero_grad()

    with backend.using("triton"):
        for collects in (False, True):
            with LiveBytes([*bert.parameters(), batch.samples, batch.is_next], collects) as live:
                run()
    load = Load(31, batch.masked.numel(), 1)
    planned = pass_bytes(model, Setting(1, "fp16", 1), load)
    assert sum(kept(model, load, 2)) < planned == pytest.approx(live.peak, rel=0.015)


@pytest.mark.slow
def test_engines_keep_what_the_plan_says(tmp_path: Path) -> None:
    size, plans, out = 2, ["fp16:1:2", "bf16:2:2", "bf16:1:2"], tmp_path / "bytes.json"
    ended = ranks.finish(ranks.fork(size, "tests/helpers/plan_on_ranks.py", str(out), *plans), timeout=120)
    assert {code for code, _ in ended} == {0}, "\n".join(text for _, text in ended)
    found = json.loads(out.read_text())
    for plan in plans:
        precision, stage, micro_batches = plan.split(":")
        setting = Setting(int(stage), precision, size)  # type: ignore[arg-type]
        planned = resident(MODEL, setting, micro_batches != "1")
        own = sum(bytes_ for kind, bytes_ in planned.items() if kind not in OUTSIDE)
        scattered = planned["gradients"] // 3  # gloo reduces in place, NCCL into a share
        assert found[plan] == own - scattered, plan


def test_checkpointing_keeps_what_its_own_test_counts() -> None:
    """The numbers of docs/performance.md. One layer at a time is computed again, so its bytes come back."""
    keep = {kind: layer_bytes(LARGE, 2, kind) for kind in get_args(Checkpointing)}
    assert keep == {"none": 32_848, "cheap": 22_608, "full": 2_048}
    load = Load(TOKENS, round(0.15 * TOKENS), TOKENS // 128)
    for kind, size in keep.items():
        setting = Setting(1, "fp16", 1, checkpointing=kind)
        most, least = TOKENS * (24 * size + 45_000), TOKENS * (23 * size + keep["none"])
        assert least < pass_bytes(LARGE, setting, load) < most


def test_bert_large_takes_what_was_measured() -> None:
    """docs/performance.md: forward and backward of 32,768 tokens without an optimizer take 25 GiB on an H200."""
    load = Load(TOKENS, round(0.15 * TOKENS), TOKENS // 128)
    assert (sum(kept(LARGE, load, 2)) + 2 * sizes(LARGE).parameters) / GIB == pytest.approx(25, abs=0.5)


RESERVED = [  # GiB, from docs/lab.md, 2026-11-29: model, ZeRO stage, checkpointing, sequences, their length
    ("base", 1, "none", 682, 96, 21.18),
    ("base", 1, "cheap", 128, 512, 15.98),
    ("base", 1, "full", 512, 128, 5.71),
    ("base", 2, "full", 256, 128, 3.93),
    ("base", 1, "full", 16, 512, 2.80),
    ("large", 2, "none", 128, 512, 56.01),
    ("large", 2, "full", 85, 96, 7.57),
]


@pytest.mark.parametrize(("size", "stage", "kind", "sequences", "length", "gib"), RESERVED)
def test_the_peak_is_what_a_gpu_reserved(
    size: str, stage: int, kind: Checkpointing, sequences: int, length: int, gib: float
) -> None:
    tokens, model = sequences * length, MODEL_SIZES[size]
    setting = Setting(stage, "fp16", 1, checkpointing=kind)
    found = peak(model, setting, Load(tokens, round(0.15 * tokens), sequences), True)
    assert reserved(found) / GIB == pytest.approx(gib, rel=0.05)


def test_what_fits_ran_and_a_tenth_more_did_not() -> None:
    """docs/lab.md, 2026-11-29: with PyTorch limited to 16 GiB, 356 sequences ran and 374 did not."""
    card, base = Card("limit", 16 + CONTEXT_BYTES / GIB, ()), MODEL_SIZES["base"]
    most = estimate.largest(base, Setting(1, "fp16", 1), full(128), 2**16, card)
    assert most <= 356 and 1.1 * most >= 374


def test_the_peak_is_at_the_end_of_forward_unless_little_is_kept() -> None:
    setting = Setting(1, "fp16", 2)
    small, large = (peak(LARGE, setting, Load(n, round(0.15 * n), 1), True) for n in (16, TOKENS))
    gradients = 2 * sizes(LARGE).parameters - small["activations"] - small["logits"]
    assert small["workspace"] > gradients > 0
    assert large["workspace"] < 0.03 * (large["activations"] + large["logits"])
    assert sum(large.values()) - reserved(large) == large["NCCL"] + large["context"]


def test_more_ranks_and_stages_take_less() -> None:
    stages = [sum(resident(LARGE, Setting(stage, "fp16", 8), True).values()) for stage in (1, 2, 3)]
    assert stages == sorted(stages, reverse=True) and stages[0] > 1.2 * stages[1]
    alone, many = (sum(resident(LARGE, Setting(2, "fp16", size), True).values()) for size in (2, 64))
    assert many < alone
    offloaded = resident(LARGE, Setting(2, "fp16", 8, offloads=True), True)
    assert offloaded["masters"] == offloaded["moments"] == 0


# ---- time ----------------------------------------------------------------------------------------------------


TIMES = [  # ms on H200s with LAMB: model, the rest of the setting, micro-batches, their sequences, their length
    # docs/performance.md
    ("large", Setting(1, "fp16", 2), 8, 256, 128, 8 * 130.6),
    ("large", Setting(1, "fp16", 2), 1, 256, 128, 141.4),
    # docs/lab.md, 2026-11-29; the planner's rates are from another machine and other shapes
    ("base", Setting(1, "fp16", 1), 2, 682, 96, 161.9),
    ("base", Setting(1, "fp16", 1, checkpointing="cheap"), 2, 128, 512, 196.6),
    ("base", Setting(2, "fp16", 1, checkpointing="full"), 2, 682, 96, 229.9),
    ("large", Setting(1, "fp16", 1, checkpointing="full"), 2, 341, 96, 359.9),
    ("large", Setting(2, "fp16", 1, checkpointing="cheap"), 2, 256, 128, 287.6),
    ("large", Setting(2, "fp16", 1), 2, 128, 512, 578.2),
]


@pytest.mark.parametrize(("size", "setting", "micro_batches", "sequences", "length", "milliseconds"), TIMES)
def test_a_step_takes_what_was_measured(
    size: str, setting: Setting, micro_batches: int, sequences: int, length: int, milliseconds: float
) -> None:
    card, model, batch = choose(read_rates(CARDS), "h200"), MODEL_SIZES[size], setting.ranks * micro_batches * sequences
    found = step_time(model, setting, "lamb", full(length), batch, micro_batches, card, assumed(setting.ranks, 1))
    assert 1000 * sum(found.values()) == pytest.approx(milliseconds, rel=0.1)
    assert not launch_bound(model, setting, card, found["compute"] / micro_batches)


def rate(hidden: int, length: int, tflops: float, tokens: int = TOKENS) -> Rate:
    return Rate("NVIDIA X1", 40.0, 12, hidden, length, tokens, 100.0, tflops, "2026-01-01", "a test")


def test_rates_between_the_measured_ones() -> None:
    rates = [rate(512, 128, 200), rate(2048, 128, 400), rate(2048, 512, 300)]
    for hidden, length, found in (
        (2048, 128, 400),
        (2048, 320, 350),
        (1024, 128, 300),  # halfway in the logarithm
        (512, 512, 150),  # as for the width with more lengths
        (64, 128, 200),
        (2048, 4096, 300),
    ):
        assert interpolated(rates, hidden, length, TOKENS) == pytest.approx(found)
    more = [*rates, rate(512, 128, 100, TOKENS // 4)]  # a step of T / 2 takes 2 / 3 of one of T
    for tokens, found in ((TOKENS // 4, 100), (TOKENS // 2, 150), (TOKENS, 200), (4 * TOKENS, 200), (1, 100)):
        assert interpolated(more, 512, 128, tokens) == pytest.approx(found)
    card = Card("NVIDIA X1", 40.0, tuple(rates))
    assert not doubts(card, 1024, 130, 32_768)
    assert ["hidden", "length", "micro-batches"] == [line.split()[0] for line in doubts(card, 64, 900, 100)]


def test_few_tokens_take_the_time_of_the_kernels_launches() -> None:
    one = (rate(512, 128, 200),)  # 100 ms for 12 layers
    for rates, least in ((one, 0.0), ((*one, rate(512, 64, 100, TOKENS // 4)), 0.2)):
        card = Card("NVIDIA X1", 40.0, rates)
        assert card.least_seconds(LARGE.layers) == pytest.approx(least)
        assert replace(card, tflops=9.0).least_seconds(LARGE.layers) == 0
        work = full(128), 2, 2, card, assumed(1, 1)
        found = step_time(LARGE, Setting(1, "fp16", 1), "lamb", *work)["compute"]
        assert found == pytest.approx(2 * least) if least else found < 0.01
        for kind, factor in CHECKPOINTING_FACTOR.items():
            setting = Setting(1, "fp16", 1, checkpointing=kind)
            assert not launch_bound(LARGE, setting, card, 2.01 * factor * least)
            assert launch_bound(LARGE, setting, card, 1.99 * factor * least) == (least > 0)


REFUSED_RATES = [
    (json.dumps([asdict(rate(0, 1, 1))]), "hidden is 0"),
    (json.dumps([asdict(rate(10**30, 1, 1))]), "hidden is 1000"),  # numpy cannot interpolate it
]


def test_a_table_of_rates_is_kept_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    add_rates(path, [rate(512, 128, 200)])
    add_rates(path, [rate(512, 128, 210), rate(512, 512, 190)])
    assert [row.tflops for row in read_rates(path)] == [210, 190]
    for name in ("a100", "", " "):
        with pytest.raises(TrainerError, match=f"--card '{name}' is not in the table: name one of NVIDIA X1"):
            choose(read_rates(path), name)
    for text, said in (("[1]", "no table"), ("{", "no table"), *REFUSED_RATES):
        path.write_text(text)
        with pytest.raises(TrainerError, match=said):
            read_rates(path)


def test_the_page_says_where_each_card_is_from() -> None:
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8").split("## The cards")[1].split("\n## ")[0]
    for row in read_rates(CARDS):
        peak_of = f"{peak_flops(row.card) / 1e12:,} TFLOP/s"
        assert f"| {row.card} | {row.memory_gib} GiB: " in page and peak_of in page
        assert row.source.removeprefix("docs/lab.md: ") in (ROOT / "docs" / "lab.md").read_text(encoding="utf-8")


def test_a_ring_costs_its_steps_and_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    timings = [
        {"collective": "reduce-scatter", "seconds": s, "bus_bytes_per_second": r} for s, r in ((6e-5, 1), (1, 4e9))
    ]
    path.write_text(json.dumps({"ranks": [{}] * 4, "collectives": timings}))
    assert read_network(path).pass_seconds(16e9, 4) == pytest.approx(3 * 2e-5 + 0.75 * 16e9 / 4e9)
    timings[0]["seconds"] = 10**400  # is no float
    for size, found in ((1, []), (4, timings)):
        path.write_text(json.dumps({"ranks": [{}] * size, "collectives": found}))
        with pytest.raises(TrainerError, match="no result of a network check"):
            read_network(path)


@pytest.mark.parametrize(("stall", "between"), [(1.0, 3600.0), (60.0, 7200.0)])
def test_no_other_interval_is_better(stall: float, between: float) -> None:
    best = goodput.best_interval(stall, between)
    assert best == pytest.approx((2 * stall * between) ** 0.5, rel=0.1)  # Young's
    most = goodput.goodput(best, stall, 100, between)
    for other in (0.5 * best, 0.8 * best, 1.25 * best, 2 * best):
        assert goodput.goodput(other, stall, 100, between) < most < 1


# ---- whole plans ---------------------------------------------------------------------------------------------


@pytest.fixture
def config(own_shards: Path, tmp_path: Path) -> Path:
    """A run over a data set whose shards are gone."""
    for pattern in ("*.tar", "*.idx.npy"):
        for path in own_shards.glob(pattern):
            path.unlink()
    return write_config(tmp_path, own_shards, 7, engine={"zero_stage": 2})


@pytest.fixture
def planned(config: Path, capsys: pytest.CaptureFixture[str]) -> Planned:
    """The exit code, the output and the errors of a plan with these options."""

    def plan(words: str) -> tuple[int, str, str]:
        return main(["--config", str(config), *words.split()]), *capsys.readouterr()

    return plan


def test_a_plan_is_printed_written_and_drawn(planned: Planned, tmp_path: Path) -> None:
    words = "--gpus 2 --card h200 --price 2 --failures 0.01 --set phases.0.micro_batch=4"
    code, printed, _ = planned(f"{words} --json {tmp_path / 'plan.json'} --picture {tmp_path / 'plan.png'}")
    assert code == 0
    assert all(len(line) <= 100 for line in printed.splitlines()), printed
    assert "ZeRO 2*" in printed and "Daly" in printed and "hidden 16" in printed
    assert "launch their kernels" in " ".join(printed.split())
    tree = json.loads((tmp_path / "plan.json").read_text())
    [phase] = tree["phases"]
    assert (phase["steps"], phase["samples"], phase["accumulation"]) == (7, 210, 4)
    assert phase["largest_micro_batch"]["2"] == 15  # a rank's share
    assert tree["cost"] == pytest.approx(2 * tree["gpu_hours"]) and 0 < tree["checkpoints"]["goodput"] < 1
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_the_largest_micro_batch_is_the_largest(planned: Planned) -> None:
    """The micro-batch that the refusal names is accepted; a larger one is not."""
    words = "--gpus 1 --memory 827MiB --tflops 100 --set phases.0.global_batch=20000 --set phases.0.micro_batch="
    code, _, said = planned(f"{words}20000")
    most = int(said.split("set micro_batch to ")[1].split()[0].replace(",", ""))
    assert code == 2 and 1 < most < 10_000 and said.count("\n") == 1
    code, printed, _ = planned(f"{words}{most}")
    assert code == 0 and max(map(len, printed.splitlines())) <= 100
    assert planned(f"{words}{most + most // 10}")[0] == 2


IMPOSSIBLE = [
    ("--gpus 1 --memory 500MiB --tflops 100", "not even one fits on any number of these GPUs"),
    ("--gpus 1 --memory 80GiB", "name a card with --card, or give both --memory and --tflops"),
    ("--gpus 1 --memory 80GiB --tflops 9 --rates /absent", "--rates is a table of cards: name one with --card"),
    ("--gpus 1 --card h9", "name one of NVIDIA H100 80GB HBM3, NVIDIA H200"),
    ("--gpus 8 --nodes 8192 --card h200 --failures 100000", "leaves 0.0% for training"),
    ("--gpus 1 --card h200 --set run.ranks=4", "run.ranks is 4, but --gpus and --nodes make 1"),
    ("--gpus 1 --card h200 --set engine.precision=fp32", "give --tflops"),
    ("--gpus 1 --card h200 --set phases.0.train=/absent", "phases.0.train: /absent holds no manifest.json"),
    ("--gpus 1 --card h200 --set model.vocab_size=99", "set model.vocab_size to the shards' size"),
    ("--gpus 1 --card h200 --network /absent", "--network /absent cannot be read"),
    ("--gpus 1 --card h200 --json /absent/plan.json", "no file can be created in the folder"),
]


@pytest.mark.parametrize(("words", "said"), IMPOSSIBLE)
def test_the_impossible_is_refused_in_one_line(words: str, said: str, planned: Planned) -> None:
    code, printed, errors = planned(words)
    assert code == 2 and said in errors and errors.count("\n") == 1 and not printed


@pytest.mark.parametrize("words", ["--tflops 1e-320", "--failures 1e-320", "--price 1e10", "--restart nan"])
def test_a_number_out_of_range_is_refused(words: str, planned: Planned, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        planned(f"--gpus 1 --card h200 {words}")
    assert "must be a number between 0.000001 and 1,000,000,000" in capsys.readouterr().err


TIGHT = "--gpus 1 --memory 890MiB --tflops 100 --set model.layers=30 --set phases.0.micro_batch=500"


def test_checkpointing_is_named_if_it_makes_room(planned: Planned) -> None:
    words = f"{TIGHT} --set phases.0.global_batch=3000"
    code, _, said = planned(words)
    kind = said.split("or set engine.checkpointing to ")[1].strip()
    assert code == 2 and planned(f"{words} --set engine.checkpointing={kind}")[0] == 0


def test_a_smaller_micro_batch_says_if_it_changes_the_batch(planned: Planned) -> None:
    code, _, said = planned(f"{TIGHT} --set phases.0.global_batch=null --set phases.0.accumulation=6")
    assert code == 2 and " and change accumulation to keep the global batch" in said


def test_a_stage_without_room_is_shown(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "largest", lambda model, setting, *rest: setting.stage)
    code, printed, _ = planned("--gpus 1 --card h200")
    assert code == 0 and "largest micro-batch         none           1           2           3" in printed


def test_a_phase_in_minutes_has_steps(planned: Planned, config: Path) -> None:
    config.write_text(config.read_text().replace("steps: 7", "minutes: 3"))
    code, printed, _ = planned("--gpus 1 --card h200")
    assert code == 0 and "training    3.0 min" in printed


def test_masked_share_and_squares_come_from_the_histogram() -> None:
    counts = np.zeros(33, np.int64)
    counts[[8, 32]] = 3, 1
    lengths = Lengths(counts, 14, True)
    found = lengths.batch(8)
    assert (found.targets, found.pairs, found.tokens, found.squares) == (28, 8, 112, 2 * (3 * 64 + 1024))
    assert replace(lengths, pairs=False).batch(8).pairs == 0
    assert 14 * 4 <= lengths.fullest(4).tokens <= 128
