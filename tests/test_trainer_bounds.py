"""Impossible values of the right type are refused in one line that names the key, before anything starts."""

from __future__ import annotations

import dataclasses
import math
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.bounds import ABOVE_0, LARGEST_BATCH, MOST_STEPS, outside
from trainer.data.order import Order, deal, largest_window
from trainer.engine.engine import deepspeed_config
from trainer.engine.schedule import BatchStage, Phase, batch_at, batch_of, batch_problems, learning_rate, resolve
from trainer.errors import TrainerError
from trainer.run.config import Config, load
from trainer.strict_yaml import DEEPEST_YAML, LARGEST_YAML_BYTES, parse_yaml

SIZES = (8192,) * 40  # of shards
RANKS = 8
VALID: dict[str, Any] = {
    "run": {"name": "r", "folder": "runs/r"},
    "model": {},
    "phases": [
        {
            "name": "a",
            "train": "shards",
            "heldout": "held",
            "sequence_length": 128,
            "steps": 100,
            "learning_rate": 1e-4,
            "global_batch": 64,
            "micro_batch": 8,
            "batch_warmup": [{"steps": 2, "global_batch": 32}],
            "pass_over": [{"position": 64, "samples": 32}],
        }
    ],
}


def leaves(cls: type = Config, where: str = "") -> Iterator[tuple[str, Any]]:
    """Each key of a configuration that has a plain value, and its type."""
    for name, kind in get_type_hints(cls).items():
        if get_origin(kind) is tuple and dataclasses.is_dataclass(get_args(kind)[0]):
            yield from leaves(get_args(kind)[0], f"{where}{name}.0.")
        elif dataclasses.is_dataclass(kind):
            yield from leaves(kind, f"{where}{name}.")  # type: ignore[arg-type]
        elif get_origin(kind) in (Union, types.UnionType):
            yield where + name, next(each for each in get_args(kind) if each is not type(None))
        else:
            yield where + name, kind


KEYS = dict(leaves())
NUMBERS = [key for key, kind in KEYS.items() if kind in (int, float)]


def with_values(values: dict[str, Any]) -> str:
    tree = yaml.safe_load(yaml.safe_dump(VALID))
    for path, value in values.items():
        *parents, last = path.split(".")
        at = tree
        for part in parents:
            at = at[int(part)] if isinstance(at, list) else at.setdefault(part, {})
        at[last] = value
    return yaml.safe_dump(tree)


def judged(folder: Path, values: dict[str, Any]) -> Config | list[str]:
    """The configuration, or the problems that it has."""
    path = folder / "run.yaml"
    path.write_text(with_values(values), encoding="utf-8")
    try:
        return load(path)
    except TrainerError as error:
        head, *problems = str(error).split("\n  - ")
        assert problems, head
        return problems


def plan(config: Config) -> None:
    """Everything a run works out before its first step: batches, rates, the first step's samples and their cut."""
    for phase in config.phases:
        order = Order(SIZES, config.run.seed, config.run.shuffle_window)
        assert largest_window(SIZES, order.window) <= sum(SIZES)
        global_batch, micro_batches = batch_of(phase, RANKS)
        runs = resolve(phase, global_batch, order.samples)
        if batch_problems(phase, RANKS, order.samples) + runs.problems():
            continue
        for step in (1, max(1, runs.warmup_steps), runs.steps // 2 + 1, runs.steps):
            assert 0 <= learning_rate(runs, step) <= 200
            assert batch_at(runs, step, RANKS)[0] <= global_batch
        picks = order.take(0, global_batch)
        parts = deal(np.full(len(picks), phase.sequence_length), RANKS * micro_batches)
        assert sum(map(len, parts)) == global_batch
    deepspeed_config(config.engine, "fp32", RANKS, 10**6)


EXTREMES = st.one_of(
    st.sampled_from(
        [0, -1, 1, 2, -0.0, 2**31, 2**32, 2**63, -(2**63), 2**64, 4_000_000_000, 10**30, -(10**30), 10**400]
    ),
    st.sampled_from([1e308, -1e308, 5e-324, 1e-45, math.nan, math.inf, -math.inf, True, False, None]),
    st.sampled_from(["", "a" * 10_000, "a\0b", "a\nb", "\ud800", "1e999", "1e308", "-0", "9" * 3000, "2026-02-30"]),
    st.sampled_from([[], {}, {"x": 1}, [[[[]]]], [1] * 2000]),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
)


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.dictionaries(st.sampled_from(sorted(KEYS)), EXTREMES, min_size=1, max_size=4))
def test_extreme_values_are_accepted_and_planned_at_once_or_refused_by_name(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    began = time.process_time()
    found = judged(tmp_path, values)
    if isinstance(found, Config):
        began = time.process_time()
        plan(found)
        assert time.process_time() - began < 1
        return
    names = {path.rpartition(".")[2] for path in values}
    for problem in found:
        assert "\n" not in problem and len(problem) < 500
        assert any(name in problem for name in names), (values, problem)


@pytest.mark.parametrize("value", [10**30, -(10**30), 10**400, 1e308, -1e308, math.nan, True])
@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_has_a_range(tmp_path: Path, key: str, value: float) -> None:
    found = judged(tmp_path, {key: value})
    assert isinstance(found, list) and any(key in problem for problem in found), found


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model.gelu": "9" * 3000}, "model.gelu is '99999"),
        ({"model.layers": 2**63}, "model.layers is 9223372036854775808: must be 1,000 or less"),
        ({"run.shuffle_window": 2**63}, "run.shuffle_window is 9223372036854775808: must be 1,048,576 or less"),
        ({"optimizer.weight_decay": 1e308}, "optimizer.weight_decay is 1e+308: must be 10 or less"),
        ({"optimizer.epsilon": 2**31}, "optimizer.epsilon is 2147483648.0: must be 1 or less"),
        ({"optimizer.epsilon": 1e-45}, "optimizer.epsilon is 1e-45: must be 1e-30 or more"),
        ({"phases.0.steps": 10**30}, f"phases.0.steps is {10**30}: must be 1,000,000,000 or less"),
        ({"phases.0.steps": 10**400}, "phases.0.steps is about 2^1328: must be 1,000,000,000 or less"),
        ({"phases.0.global_batch": 4 * 10**9}, "phases.0.global_batch is 4000000000: must be 524,288 or less"),
        (
            {"phases.0.warmup_power": 1e6, "phases.0.warmup_steps": 9},
            "phases.0.warmup_power is 1000000.0: must be 20 or less",
        ),
        ({"metrics.print_seconds": -1}, "metrics.print_seconds is -1.0: must be 0 or more"),
        ({"run.folder": "a\0b"}, r"run.folder is 'a\x00b': must have 4,096 characters at most, and no line ends or"),
        ({"run.name": "\ud800"}, r"run.name is '\ud800': must have"),
        ({"run.name": "a" * 5000}, "run.name is 'aaaaaaa"),
        ({"cache.folder": "a\nb"}, r"cache.folder is 'a\nb': must have"),
        ({"metrics.address": "\u00e9" * 70}, "metrics.address is 'éééé"),
        ({"metrics.address": ""}, "metrics.address is '': must be an IP address of this node, or 0.0.0.0 for all"),
        ({"phases": [1] * 2000}, "phases has 2,000 items: must be 1,000 at most"),
        ({"engine.kernels": "k" * 10**5}, "engine.kernels: 'kkkkkkk"),
        (
            {"model.layers": 1000, "model.hidden": 2**16, "model.heads": 1},
            "model.layers, hidden, intermediate, vocab_size come to 17,584,",
        ),
        (
            {"evaluation.micro_batch": 2**18, "phases.0.sequence_length": 2**13, "model.max_positions": 2**13},
            "evaluation.micro_batch is 262144: one of phases.0 may have 2,147,483,648 tokens: must be under",
        ),
    ],
    ids=lambda each: ",".join(each) if isinstance(each, dict) else "",
)
def test_what_cannot_be_is_said_as_a_line(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    found = judged(tmp_path, values)
    assert isinstance(found, list) and len(found) == 1
    assert found[0].startswith(message) and len(found[0]) < 300


def test_all_that_is_out_of_range_is_said_at_once(tmp_path: Path) -> None:
    values = {"model.layers": 10**30, "optimizer.epsilon": 0, "phases.0.samples": 10**30, "run.ranks": 10**30}
    found = judged(tmp_path, values)
    assert isinstance(found, list)
    assert [problem.split(" is ")[0].split(":")[0] for problem in found] == [
        *("run.ranks", "model.layers", "phases.0.steps, samples, epochs, minutes"),
        *("phases.0.samples", "optimizer.epsilon"),
    ]


def test_a_range_is_said_by_the_side_that_was_left() -> None:
    @dataclasses.dataclass
    class Some:
        a: float = 0
        b: float | None = None

    assert outside(Some(), a=(0, 1), b=(1, 2)) == []
    assert outside(Some(-0.0), a=(0, 1)) == []
    assert outside(Some(), a=(ABOVE_0, 1)) == ["a is 0: must be above 0"]
    assert outside(Some(2, 0), a=(0, 1), b=(1, 2)) == ["a is 2: must be 1 or less", "b is 0: must be 1 or more"]
    assert outside(Some(math.nan), a=(0, 1)) == ["a is nan: must be 0 or more"]


def test_a_batch_fits_its_ranks_and_shards() -> None:
    phase = Phase("a", "s", 128, 5, 1e-4, micro_batch=2**10, accumulation=2**9)
    assert batch_problems(phase, 1, 10**6) == []
    [most] = batch_problems(phase, 2, 10**6)
    assert most.startswith("micro_batch, accumulation: they give 1,048,576 sequences per step on 2 rank(s): must be ")
    [parts] = batch_problems(Phase("a", "s", 128, 5, 1e-4, 2**17, accumulation=2**16), 4, 10**6)
    assert parts.startswith("accumulation: it gives 262,144 micro-batches per step on 4 rank(s): must be 131,072 or le")
    [tokens] = batch_problems(Phase("a", "s", 2**16, 5, 1e-4, 2**15, accumulation=1), 1, 10**6)
    assert tokens.startswith("micro_batch: one may have 2,147,483,648 tokens on 1 rank(s): must be under 2,147,483,648")
    small = Phase("a", "s", 2**16, 5, 1e-4, 2**15 + 2, 2**15, batch_warmup=(BatchStage(1, 2**15),))
    [tokens] = batch_problems(small, 1, 10**6)  # in its first step; the others have two micro-batches of half the size
    assert tokens.startswith("micro_batch: one may have 2,147,483,648 tokens on 1 rank(s): must be under 2,147,483,648")
    [passes] = batch_problems(Phase("a", "s", 128, 5, 1e-4, 1000, accumulation=1), 1, 9)
    assert passes.startswith(
        "global_batch: a step takes 1,000 sequences, but the shards contain only 9, and a step may use each at "
    )
    assert LARGEST_BATCH >= 8 * 65_536 and MOST_STEPS * LARGEST_BATCH < 2**63


# ---- YAML ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: !!int seven", "'seven' is not a valid int"),
        ("a: !!bool maybe", "'maybe' is not a valid bool"),
        ("a: !!float ''", "'' is not a valid float"),
        (f"a: {'9' * 5000}", "9' is not a valid int"),
        ("a: [" * 20_000, f"nested more than {DEEPEST_YAML} levels deep"),
        ("[" * 20_000, f"nested more than {DEEPEST_YAML} levels deep"),
        ("- " * 20_000, f"nested more than {DEEPEST_YAML} levels deep"),
        ('a: "\\UFFFFFFFF"', "too large"),
        ('a: "\\U00110000"', "not in range(0x110000)"),
        ("a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("a: !!set {b}", "could not determine a constructor"),
        ("a: !!binary Zm9v", "could not determine a constructor"),
        ("1: 2", "the key 1 is a int: write it in quotes"),
        ("on: 2", "the key True is a bool: write it in quotes"),
        ("[a]: 2", "the key ['a'] is a list: write it in quotes"),
        ("{a: 1, b: 2, a: 3}", "the key 'a' is repeated"),
        ("a: &a {<<: *a}", "found unconstructable recursive node"),
        ("a: &a [*a]", "found unconstructable recursive node"),
        ("a: {<<: 5}", "<< merges mappings, as in `<<: *name`"),
        ("a: {<<: [{b: 1}, 5]}", "<< merges mappings, as in `<<: *name`"),
        ("a: 1\n---\nb: 2", "but found another document"),
        ("a: \x07", "special characters are not allowed"),
    ],
)
def test_yaml_that_is_none_of_ours_is_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_yaml(text)
    assert message in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 500


def test_aliases_do_not_multiply() -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    merges = "a0: &a0 {k: x}\n" + "".join(
        f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}], k{i}: 1}}\n" for i in range(1, 31)
    )
    chain = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 5000))
    for text in (bomb, chain):
        began = time.process_time()
        with pytest.raises(ValueError, match="aliases expand to more than"):
            parse_yaml(text)
        assert time.process_time() - began < 5
    began = time.process_time()
    assert len(parse_yaml(merges)["a30"]) == 31
    assert time.process_time() - began < 5


def test_yaml_as_people_write_it() -> None:
    text = """
    base: &base {name: a, steps: 5, deep: {x: 1}}
    more: &more {steps: 7, rate: 1.5}
    phases:
      - *base
      - {<<: *base, name: b}
      - <<: [*more, *base]
        day: 2026-02-30
        other: 2026-02-28
        flag: yes
        none: ~
        text: =
    """
    tree = parse_yaml(text)
    first, second, third = tree["phases"]
    assert first == {"name": "a", "steps": 5, "deep": {"x": 1}} and second == first | {"name": "b"}
    assert (third["steps"], third["rate"], third["name"]) == (7, 1.5, "a")  # the first that is merged wins
    assert (third["day"], third["other"], third["flag"], third["none"], third["text"]) == (
        *("2026-02-30", "2026-02-28", True, None, "="),
    )
    second["deep"]["x"] = 2  # as --set may: nobody else's
    assert first["deep"] == third["deep"] == tree["base"]["deep"] == {"x": 1}
    assert parse_yaml("") is None


def test_a_configuration_may_merge(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    phase = "{name: a, train: s, sequence_length: 128, steps: 9, learning_rate: 1e-4, global_batch: 8, micro_batch: 2}"
    path.write_text(
        f"run: {{name: 2026-02-30, folder: r}}\nmodel: {{}}\nphases:\n  - &first {phase}\n  - {{<<: *first, name: b}}\n"
    )
    config = load(path, ["phases.0.steps=7", "phases.1.power=2"])
    assert config.run.name == "2026-02-30"
    assert [(each.name, each.steps, each.power) for each in config.phases] == [("a", 7, 1.0), ("b", 9, 2.0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [" * 20_000, "levels deep"),
        ("#" * (LARGEST_YAML_BYTES + 1), f"more than {LARGEST_YAML_BYTES:,} bytes"),
        ("a: !!int seven", "'seven' is not a valid int"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(TrainerError, match=f"^cannot read {path} as YAML: .*{message}") as error:
        load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.name=" + "[" * 20_000, "--set run.name: the value '[[[[["),
        ("run.name=!!int seven", "--set run.name: the value '!!int seven' is not YAML; quote it"),
        ("phases.0.steps=" + "9" * 5000, "--set phases.0.steps: the value '99999"),
        ("phases." + "9" * 5000 + ".steps=1", "--set phases.99999"),
        ("run.na\nme=1", "--set 'run.na\\nme=1': write it as section.key=value"),
        ("run.name=[" + "a" * 5000 + "]", "run.name: expected a text, found list ['aaaa"),
    ],
    ids=lambda text: text[:30],
)
def test_an_override_is_bounded_alike(tmp_path: Path, override: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(with_values({}))
    with pytest.raises(TrainerError) as error:
        load(path, [override])
    [problem] = str(error.value).split("\n  - ")[1:]
    assert problem.startswith(message) and "\n" not in problem
