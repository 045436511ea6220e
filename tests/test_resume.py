"""Runs that are killed twenty times, or moved to other ranks, or on uneven shards equal the undisturbed run."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from data_prep.build import build
from data_prep.manifest import load_manifest
from data_prep.settings import make_settings
from tests.helpers import ranks
from tests.helpers.trainer_on_ranks import Aim
from trainer.data.order import Order
from trainer.monitor.metrics_log import read_lines

pytestmark = pytest.mark.slow

STEPS = (33, 21)  # of two phases
BATCHES = (40, 50)
EVERY = 3  # steps from one checkpoint to the next
NUMBERS = ("loss", "mlm_loss", "nsp_loss", "gradient_norm", "learning_rate", "position", "phase", "tokens", "samples")


@pytest.fixture(scope="module")
def config(tiny_shards: Path) -> dict[str, Any]:
    """Two phases over the tiny shards, dropout 0.1; several micro-batches a step, and epochs that end inside steps."""
    phase = {"train": str(tiny_shards), "sequence_length": 32, "learning_rate": 0.005}
    return {
        "run": {"name": "test", "folder": "", "seed": 5, "shuffle_window": 2},
        "model": {
            **{"layers": 1, "hidden": 16, "heads": 2, "intermediate": 32, "max_positions": 32},
            "vocab_size": load_manifest(tiny_shards).tokenizer.vocab_size,
            **{"dropout": 0.1, "attention_dropout": 0.1},
        },
        "phases": [
            {**phase, "name": "first", "steps": STEPS[0], "global_batch": BATCHES[0], "micro_batch": 7},
            {**phase, "name": "second", "steps": STEPS[1], "global_batch": BATCHES[1], "accumulation": 2},
        ],
        "checkpoint": {"every_steps": EVERY, "keep": 2},
        "metrics": {"port": None, "log_every_steps": 1},
    }


class Life:
    """One start of a run, to its end."""

    def __init__(self, config: dict[str, Any], root: Path, size: int, number: int, stage: int, *aims: Aim) -> None:
        self.root, self.run, self.notes = root, root / "run", root / f"notes-{number:02d}"
        self.notes.mkdir(parents=True)
        path = root / "run.yaml"
        path.write_text(yaml.safe_dump(config))
        plan = json.dumps([asdict(aim) for aim in aims])
        options = ("--config", str(path), "--set", f"run.folder={self.run}", "--set", f"engine.zero_stage={stage}")
        self.ranks = ranks.fork(size, "tests/helpers/trainer_on_ranks.py", str(self.notes), plan, *options)

    def end(self) -> list[int]:
        """Wait for all ranks to end by themselves; their exit codes."""
        ended = ranks.finish(self.ranks, timeout=120)
        self.output = "\n".join(output for _, output in ended)
        return [code for code, _ in ended]

    def signals(self) -> list[dict[str, Any]]:
        """The recorded signals: where each aim was met."""
        path = self.notes / "signals.jsonl"
        return read_lines(path) if path.exists() else []

    def samples(self) -> dict[int, list[list[int]]]:
        """[number, checksum] of the samples of each step that all ranks began, in order of their numbers."""
        read = [{r["step"]: r["samples"] for r in read_lines(p)} for p in sorted(self.notes.glob("samples-*"))]
        whole = set.intersection(*(set(steps) for steps in read)) if read else set()
        return {step: sorted(sample for steps in read for sample in steps[step]) for step in whole}


def lines(run: Path, event: str = "step") -> list[dict[str, Any]]:
    """The metrics' lines of one event, from all lives."""
    path = run / "metrics.jsonl"
    return [record for record in read_lines(path) if record["event"] == event] if path.exists() else []


def wholes(run: Path) -> list[str]:
    """The finished checkpoints on disk."""
    return sorted(path.parent.name for path in run.glob("step-*/checkpoint.json"))


def straight(config: dict[str, Any], root: Path, size: int, stage: int) -> Life:
    life = Life(config, root, size, 0, stage)
    assert life.end() == [0] * size, life.output
    assert len(life.samples()) == len(lines(life.run)) == sum(STEPS)
    return life


# ---- killed --------------------------------------------------------------------------------------------------

KILLS = 20


def plan(epoch: int) -> list[Aim]:
    """Twenty kills, drawn from a seed, in the order of their steps."""
    draw = random.Random(7)
    first, total, batch = STEPS[0], sum(STEPS), BATCHES[0]
    straddling = [step for step in range(first) if step * batch // epoch != ((step + 1) * batch - 1) // epoch]
    aims = [(step, "window") for step in (*draw.sample(straddling, 3), first - 1, first, first)]
    aims += [(EVERY * draw.randrange(1, total // EVERY - 1), "save") for _ in range(4)] + [(first, "save")]
    aims += [(draw.randrange(1, total - 6), "outside") for _ in range(4)]
    aims += [(draw.randrange(total - 6), "window") for _ in range(KILLS - len(aims))]
    # of one step, the save comes before the next step's window
    return [
        Aim(signal.SIGKILL, draw.randrange(2), step, place, everyone)
        for (step, place), everyone in zip(sorted(aims), draw.choices((True, False), k=KILLS), strict=True)
    ]


def shoot(life: Life, aim: Aim) -> None:
    """Send SIGKILL from outside, a moment after the run's own lines show that it got there."""
    deadline = time.monotonic() + 60
    while (lines(life.run) or [{"step": 0}])[-1]["step"] < aim.step:
        assert time.monotonic() < deadline and life.ranks[0].returncode is None, life.end()
        time.sleep(0.002)
    time.sleep(random.Random(aim.step).uniform(0, 0.02))
    for rank in life.ranks if aim.all else [life.ranks[aim.rank]]:
        rank.kill()


def test_twenty_kills_change_nothing(config: dict[str, Any], tiny_shards: Path, tmp_path: Path) -> None:
    """Runs under ZeRO 1; stages 2 and 3 are tested below and in test_trainer_checkpoint.py."""
    whole = straight(config, tmp_path / "straight", 2, 1)
    order = Order(tuple(shard.samples for shard in load_manifest(tiny_shards).shards), 5, 2)
    landed: Counter[str] = Counter()
    lives = []
    for number, aim in enumerate(plan(order.samples)):
        saved = wholes(tmp_path / "run")
        before = len(lines(tmp_path / "run"))
        life = Life(config, tmp_path, 2, number, 1, *([aim] if aim.place != "outside" else []))
        if aim.place == "outside":
            shoot(life, aim)
        codes = life.end()
        lives.append(life)
        assert -signal.SIGKILL in codes and set(codes) <= {-signal.SIGKILL, 3}, life.output
        assert not (life.run / "ended.json").exists()
        assert_came_back(life, saved, before)
        landed.update(kinds(life, order.samples))
    last = Life(config, tmp_path, 2, KILLS, 1)
    assert last.end() == [0, 0], last.output
    assert_same_steps([*lives, last], whole)
    assert_same_weights(last.run, whole.run)
    assert min(landed[kind] for kind in ("window", "save", "epoch", "phase", "one", "all")) > 0, landed


def kinds(life: Life, epoch: int) -> set[str]:
    """The event that each kill interrupted, judged by the disk if possible, else by the note written just before."""
    found = {"all" if all(rank.returncode == -signal.SIGKILL for rank in life.ranks) else "one"}
    if list(life.run.glob(".step-*.tmp")):
        found.add("save")
    for note in life.signals():
        step, inside = note["at"]["step"], note["at"]["micro_batch"] > 0
        if inside and lines(life.run)[-1]["step"] <= step:
            found.add("window")
            first = step * BATCHES[0]
            found |= {"epoch"} if step < STEPS[0] and first // epoch != (first + BATCHES[0] - 1) // epoch else set()
            found |= {"phase"} if step == STEPS[0] else set()
    return found


def assert_came_back(life: Life, saved: list[str], before: int) -> None:
    """Assert that it resumed from the newest whole checkpoint, in the step after it."""
    first = int(saved[-1].removeprefix("step-")) if saved else 0
    assert not saved or f"resumed from {life.run / saved[-1]} at step {first}" in life.output, life.output
    taken = [record["step"] for record in lines(life.run)[before:]]
    assert taken == list(range(first + 1, first + 1 + len(taken)))


def assert_same_steps(lives: list[Life], whole: Life) -> None:
    """Assert that every step of any life has the same numbers, bit for bit, and the same samples."""
    expected = {record["step"]: [record[name] for name in NUMBERS] for record in lines(whole.run)}
    taken = lines(lives[-1].run)
    assert {record["step"] for record in taken} == set(expected)
    assert all([record[name] for name in NUMBERS] == expected[record["step"]] for record in taken)
    samples = whole.samples()
    begun = [life.samples() for life in lives]
    assert {step for life in begun for step in life} == set(samples)
    assert all(life[step] == samples[step] for life in begun for step in life)


def assert_same_weights(ours: Path, theirs: Path) -> None:
    """Assert that weights and moments are equal, bit for bit."""
    name = f"step-{sum(STEPS):08d}"
    parts = sorted(path.name for path in (ours / name).glob("part-*"))
    assert parts == sorted(path.name for path in (theirs / name).glob("part-*")) and parts
    for part in parts:
        mine, other = load_file(ours / name / part), load_file(theirs / name / part)
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[key], other[key]) for key in other)


# ---- moved ---------------------------------------------------------------------------------------------------


def test_other_ranks_and_stages_go_on_with_the_same_samples(config: dict[str, Any], tmp_path: Path) -> None:
    """Two ranks, then one, four and three, under ZeRO 3, 0, 3 and 2: stopped by one rank's SIGTERM, once in a save."""
    whole = straight(config, tmp_path / "straight", 2, 1)
    lives = []
    for number, (size, stage, stop) in enumerate([(2, 3, 13), (1, 0, 24), (4, 3, 36), (3, 2, sum(STEPS))]):
        places = ((stop, "window"), (stop + 1, "save")) if number < 3 else ()
        aims = [Aim(signal.SIGTERM, size - 1, *place) for place in places]
        life = Life(config, tmp_path, size, number, stage, *aims)
        assert set(life.end()) == {75 if aims else 0}, life.output
        ended = json.loads((life.run / "ended.json").read_text())
        assert ended["how"] == ("stopped" if aims else "done")
        asked = [note["at"]["step"] for note in life.signals()]  # the one in the step, and the one in the save
        assert asked == ([ended["step"] - 1, ended["step"]] if aims else [])
        assert wholes(life.run)[-1] == f"step-{ended['step']:08d}" and not list(life.run.glob(".step-*.tmp"))
        saved = [record["step"] for record in lines(life.run, "checkpoint")]
        assert saved.count(ended["step"]) == 1
        lives.append(life)

    samples, expected = whole.samples(), lines(whole.run)
    begun = [life.samples() for life in lives]
    assert sorted(step for life in begun for step in life) == sorted(samples)  # nothing was trained on twice
    assert all(life[step] == samples[step] for life in begun for step in life)
    taken = lines(lives[-1].run)
    assert [[r["step"], r["position"], r["tokens"]] for r in taken] == [
        [r["step"], r["position"], r["tokens"]] for r in expected
    ]
    for ours, theirs in list(zip(taken, expected, strict=True))[:50]:
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


# ---- a growing batch -----------------------------------------------------------------------------------------

GROWTH = [{"steps": 6, "global_batch": 16}, {"steps": 5, "global_batch": 30}]  # it grows after steps 6 and 11
GROWN = [16] * 6 + [30] * 5 + [BATCHES[0]] * (STEPS[0] - 11) + [BATCHES[1]] * STEPS[1]


@pytest.fixture(scope="module")
def growing(config: dict[str, Any]) -> dict[str, Any]:
    first, second = config["phases"]
    return {**config, "phases": [{**first, "micro_batch": 5, "batch_warmup": GROWTH}, second]}


@pytest.fixture(scope="module")
def unbroken(growing: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Life:
    """A run with a growing batch that nobody stops."""
    whole = straight(growing, tmp_path_factory.mktemp("unbroken"), 2, 1)
    taken, samples = lines(whole.run), whole.samples()
    assert [record["batch"] for record in taken] == GROWN
    assert [record["samples"] for record in taken] == list(accumulate(GROWN))
    read = [number for step in sorted(samples) for number, _ in samples[step]]
    assert read == list(range(sum(GROWN)))  # both phases read the same shards: every sample once, none left out
    return whole


def test_stops_and_kills_around_its_growth_change_nothing(
    growing: dict[str, Any], unbroken: Life, tmp_path: Path
) -> None:
    """Stopped a step before the batch grows, as it does, and a step later; then killed around the next growth."""
    stops = [Aim(signal.SIGTERM, 1, step - 1, "window") for step in (5, 6, 7)]
    kills = [Aim(signal.SIGKILL, 0, 10, "window"), Aim(signal.SIGKILL, 1, 11, "window", True)]
    kills += [Aim(signal.SIGKILL, 0, 12, "save", True), Aim(signal.SIGKILL, 0, 13, "window")]
    lives = [Life(growing, tmp_path, 2, 0, 1, stops[0])]
    lives[0].end()
    for number, aim in enumerate([*stops[1:], *kills], 1):
        lives.append(Life(growing, tmp_path, 2, number, 1, aim))
        assert set(lives[-1].end()) & {75, -signal.SIGKILL}, lives[-1].output
    lives.append(Life(growing, tmp_path, 2, len(lives), 1))
    assert lives[-1].end() == [0, 0], lives[-1].output
    for step, life in zip((5, 6, 7), lives[1:], strict=False):
        assert f"at step {step}\n" in life.output
    assert_same_steps(lives, unbroken)
    assert_same_weights(lives[-1].run, unbroken.run)


def test_other_ranks_take_the_same_growing_batches(growing: dict[str, Any], unbroken: Life, tmp_path: Path) -> None:
    lives = []
    for number, (size, stage, stop) in enumerate([(3, 2, 6), (1, 0, 11), (2, 3, sum(STEPS))]):
        aims = [Aim(signal.SIGTERM, size - 1, stop - 1, "window")] if number < 2 else []
        lives.append(Life(growing, tmp_path, size, number, stage, *aims))
        assert set(lives[-1].end()) == {75 if aims else 0}, lives[-1].output
        assert json.loads((lives[-1].run / "ended.json").read_text())["step"] == stop
    samples, begun = unbroken.samples(), [life.samples() for life in lives]
    assert sorted(step for life in begun for step in life) == sorted(samples)
    assert all(life[step] == samples[step] for life in begun for step in life)
    taken, expected = lines(lives[-1].run), lines(unbroken.run)
    assert [record["batch"] for record in taken] == GROWN
    for ours, theirs in list(zip(taken, expected, strict=True))[:50]:
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


# ---- shards that do not suit the ranks -----------------------------------------------------------------------


@pytest.mark.parametrize(("in_shard", "shards", "sizes", "stage"), [(10, 3, (2, 4), 3), (64, 1, (1, 2), 1)])
def test_all_ranks_take_the_same_steps_and_read_each_sample_once(
    config: dict[str, Any],
    tiny_shards: Path,
    tmp_path: Path,
    in_shard: int,
    shards: int,
    sizes: tuple[int, ...],
    stage: int,
) -> None:
    """24 samples in three shards, the last one short, or in one: on more ranks than shards, evaluated, too."""
    first, second, third, *_ = (tiny_shards.parent / "corpus.txt").read_text().split("\n\n")
    (tmp_path / "corpus.txt").write_text("\n\n".join([first, second, "\n".join(third.splitlines()[:9])]) + "\n")
    settings = make_settings(32, samples_per_shard=in_shard)
    build([tmp_path / "corpus.txt"], tiny_shards.parent / "tokenizer", tmp_path / "shards", settings, processes=1)
    counts = [shard.samples for shard in load_manifest(tmp_path / "shards").shards]
    epoch = sum(counts)
    assert len(counts) == shards and epoch % 16
    folder = str(tmp_path / "shards")
    phase = {
        **config["phases"][0],
        "train": folder,
        "heldout": folder,
        "steps": 6,
        "global_batch": 16,
        "micro_batch": 4,
    }
    evaluation = {"every_steps": 2, "micro_batch": 4}
    for size in sizes:
        life = Life({**config, "phases": [phase], "evaluation": evaluation}, tmp_path / str(size), size, 0, stage)
        assert life.end() == [0] * size, life.output
        steps = life.samples()  # that all ranks took
        in_order = [sample for step in sorted(steps) for sample in steps[step]]
        assert sorted(steps) == list(range(6)) and [number for number, _ in in_order] == list(range(6 * 16))
        assert all(len(read_lines(path)) == 6 for path in life.notes.glob("samples-*"))
        epochs = [Counter(crc for _, crc in in_order[e * epoch : (e + 1) * epoch]) for e in range(6 * 16 // epoch)]
        assert len(epochs) > 2 and all(read == epochs[0] for read in epochs)
        assert sum(count > 1 for count in epochs[0].values()) < 2  # equal samples are rare
        assert [record["step"] for record in lines(life.run, "heldout")] == [2, 4, 6]
