"""Changes since a checkpoint are reported in one line on resume, and recorded in the metrics log."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ranks
from tests.helpers.finetune_command import finetune, make_inputs, run_folder
from tests.helpers.runs import change_record, lines, write_config
from trainer.checkpoint.changed_settings import NEXT_RATE, Setup, differing, since, spelled
from trainer.checkpoint.reading import named
from trainer.checkpoint.train_state import TrainState
from trainer.exits import DONE, STOPPED
from trainer.monitor.metrics_log import read_lines

HALF = TrainState(attempts=40, step=40, phase_step=40)


def phase(name: str, **changed: Any) -> dict[str, Any]:
    values = {"name": name, "train": "shards", "sequence_length": 32, "steps": 50, "learning_rate": 0.01}
    return (
        values | {"global_batch": None, "micro_batch": 8, "accumulation": 2, "power": 1.0, "warmup_steps": 5} | changed
    )


def setup(**changed: Any) -> Setup:
    config: dict[str, Any] = {
        "run": {"folder": "here", "timeout_seconds": 600},
        "model": {"dropout": 0.1},
        "phases": [phase("a"), phase("b", learning_rate=0.001)],
        "optimizer": {"weight_decay": 0.01, "beta2": 0.999},
        "engine": {"zero_stage": 1, "precision": "auto", "checkpointing": "none"},
        "metrics": {"port": None},
    }
    values: dict[str, Any] = {
        "config": config,
        "identity": {"phases": [{"global_batch": 32}] * 2},
        "precision": "fp32",
        "ranks": 2,
    }
    return Setup(**copy.deepcopy(values) | changed)


def changed(path: str, value: Any) -> Setup:
    """The setup with another value in its configuration."""
    own = setup()
    *parents, last = path.split(".")
    at: Any = own.config
    for name in parents:
        at = at[int(name)] if isinstance(at, list) else at[name]
    at[last] = value
    return own


def test_nothing_changed() -> None:
    assert since(setup(), setup(), HALF) == {}
    assert since(setup(), changed("run.timeout_seconds", 60), HALF) == {}
    assert since(setup(), changed("engine.precision", "fp32"), HALF) == {}  # which "auto" was
    assert since(Setup(**json.loads(json.dumps(vars(setup())))), setup(), HALF) == {}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("phases.0.steps", 500, f"phases.0.steps was 50, now 500; {NEXT_RATE} was 0.002, now 0.0092"),
        ("phases.0.learning_rate", 0.1, f"phases.0.learning_rate was 0.01, now 0.1; {NEXT_RATE} was 0.002, now 0.02"),
        (
            "phases.0.warmup_steps",
            45,
            f"phases.0.warmup_steps was 5, now 45; {NEXT_RATE} was 0.002, now 0.009111111111",
        ),
        ("phases.0.steps", 40, "phases.0.steps was 50, now 40"),  # over: the next step is another phase's
        ("phases.1.learning_rate", 0.002, "phases.1.learning_rate was 0.001, now 0.002"),
        ("phases.0.heldout", "there", ""),  # a key that the checkpoint's version did not know
        ("optimizer.weight_decay", 0.0, "optimizer.weight_decay was 0.01, now 0"),
        ("engine.checkpointing", "full", "engine.checkpointing was none, now full"),
        ("model.dropout", 0.0, "model.dropout was 0.1, now 0"),
        ("engine.zero_stage", 2, "engine.zero_stage was 1, now 2"),
    ],
)
def test_each_change_is_reported_with_the_rate_that_it_leads_to(path: str, value: Any, said: str) -> None:
    assert spelled(since(setup(), changed(path, value), HALF)) == said


def test_ranks_precision_batches_and_phases_are_reported() -> None:
    assert spelled(since(setup(), setup(ranks=4, precision="bf16"), HALF)) == (
        "ranks was 2, now 4; engine.precision was fp32, now bf16"
    )
    other = setup(identity={"phases": [{"global_batch": 32}, {"global_batch": 64}]})  # of more ranks, say
    assert spelled(since(setup(), other, HALF)) == "phases.1.global_batch was 32, now 64"
    one = setup(identity={"phases": [{"global_batch": 32}]})
    del one.config["phases"][1]
    assert spelled(since(one, setup(), HALF)) == "phases.1 was null, now b"
    assert spelled(since(setup(), one, HALF)) == "phases.1 was b, now null"


def test_phases_that_are_over_count_no_more() -> None:
    later = TrainState(attempts=60, step=60, phase=1, phase_step=10)
    assert since(setup(), changed("phases.0.train", "moved"), later) == {}
    assert list(since(setup(), changed("phases.1.steps", 70), later)) == ["phases.1.steps", NEXT_RATE]
    over = TrainState(attempts=50, step=50, phase_step=50)
    assert since(setup(), changed("phases.0.steps", 100), over)[NEXT_RATE] == (0.0, 0.005)


def test_trees_differ_by_leaf() -> None:
    before, now = {"a": {"b": 1, "c": [1, {"d": 2}]}, "e": 1}, {"a": {"b": 1, "c": [1, {"d": 3}]}, "f": 1}
    assert differing(before, now) == {"a.c.1.d": (2, 3)}
    assert differing({"a": None}, {"a": [1]}) == {"a": (None, [1])} and differing((1, 2), [1, 2]) == {}


@pytest.mark.slow
def test_a_lengthened_run_says_how_its_rate_jumps(tiny_shards: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny_shards, 8, checkpoint={"every_steps": 4})

    def start(script: str, *overrides: str) -> tuple[int, str]:
        words = [word for override in overrides for word in ("--set", override)]
        return ranks.finish(ranks.fork(1, script, "--config", str(config), *words))[0]

    assert start("trainer/__main__.py")[0] == DONE
    run, more = tmp_path / "run", ("phases.0.steps=80", "optimizer.weight_decay=0.1", "run.ranks=1")
    line = "changed since that checkpoint: phases.0.steps was 8, now 80; "
    line += f"optimizer.weight_decay was 0.01, now 0.1; {NEXT_RATE} was 0, now 0.009"
    code, said = start("trainer/preflight.py", *more)
    assert code == DONE and f"lambert: {line}\n" in said, said
    code, said = start("trainer/__main__.py", *more, "phases.0.steps=12")
    line = line.replace("now 80", "now 12").replace("now 0.009", "now 0.003333333333")
    assert code == DONE and said.count("changed since") == 1 and f"lambert: {line}\n" in said, said
    [record] = lines(run, "changed")
    assert record["step"] == 8 and record["settings"]["phases.0.steps"] == [8, 12]
    assert record["settings"][NEXT_RATE] == [0.0, pytest.approx(0.01 / 3)]
    code, said = start("trainer/__main__.py", *more, "phases.0.steps=12")
    assert code == DONE and "changed since" not in said and len(lines(run, "changed")) == 1, said


@pytest.mark.slow
def test_a_fine_tuning_says_what_changed(tmp_path: Path) -> None:
    inputs, out = make_inputs(tmp_path), tmp_path / "out"
    [(code, said)] = finetune(inputs, out, "--save-every", "5", aim="15:12")
    assert code == STOPPED, said
    for step in named(run_folder(out)):  # an older version's default, which has no effect here
        change_record(step, lambda tree: tree["record"]["config"]["model"].update(decoder_prior="zero"))
    more = ("--precision", "bf16", "--micro-batch", "4")
    [(code, said)] = finetune(inputs, out, "--save-every", "5", *more)
    line = "changed since that checkpoint: micro_batch was null, now 4; precision was fp32, now bf16"
    assert code == DONE and f"{line}\n" in said, said
    [record] = [line for line in read_lines(run_folder(out) / "metrics.jsonl") if line["event"] == "changed"]
    assert record["settings"] == {"micro_batch": [None, 4], "precision": ["fp32", "bf16"]}
    [(code, said)] = finetune(inputs, out, "--warmup", "0.5")
    assert (
        "results of another recipe: name another --out, or restore what changed (recipe.warmup was 0.1, now 0.5)"
        in said
    )
