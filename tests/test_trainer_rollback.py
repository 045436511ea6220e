"""The guard on two ranks: a rollback equals a run that never read the samples, and each trouble ends as documented."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from data_prep.manifest import load_manifest
from tests.helpers import ranks
from tests.helpers.runs import lines, wait_for, write_config
from trainer.checkpoint.reading import Checkpoint, find, named, read
from trainer.data.order import Order
from trainer.exits import FAILED, LOST, REFUSED

pytestmark = pytest.mark.slow

STEPS, BATCH, EVERY = 12, 30, 3
POISON = range(155, 160)  # read by step 6
GAP = {"position": 120, "samples": 60}  # steps 5 and 6


def start(folder: Path, shards: Path, kind: str, *sets: str, poison: range = POISON) -> list[ranks.Forked]:
    folder.mkdir(exist_ok=True)
    config = write_config(
        folder,
        shards,
        STEPS,
        engine={"precision": "fp32", "initial_loss_scale": 1.0},
        checkpoint={"every_steps": EVERY, "keep": 99},
        metrics={"log_every_steps": 2},
        guard={"non_finite": "rollback", "spike": "rollback", "spike_steps": 4, "spike_deviations": 20},
    )
    words = [kind, str(poison.start), str(poison.stop), "--config", str(config)]
    return ranks.fork(
        2, "tests/helpers/poisoned_on_ranks.py", *words, *(word for one in sets for word in ("--set", one))
    )


def train(folder: Path, shards: Path, kind: str, *sets: str, poison: range = POISON) -> list[tuple[int, str]]:
    """(exit code, output) of two ranks."""
    ended = ranks.finish(start(folder, shards, kind, *sets, poison=poison))
    print(*(said for _, said in ended))
    return ended


def outcome(found: Checkpoint) -> dict[str, Any]:
    """All that two runs must have in common: hashes of weights and moments, loss scale, counters and position."""
    record = found.record
    state = {key: value for key, value in record["state"].items() if key != "restarts"}
    return {"parts": found.parts, "state": state, "scale": record["loss_scale"], "optimizer": record["optimizer"]}


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in named(folder / "run"))


@pytest.mark.parametrize(("kind", "precision", "stage"), [("spike", "fp32", 1), ("inf", "fp16", 2), ("inf", "fp32", 3)])
def test_a_rollback_equals_a_run_that_passes_over_the_samples(
    tiny_shards: Path, tmp_path: Path, kind: str, precision: str, stage: int
) -> None:
    """So does a run that resumes from the checkpoint to which it went back."""
    sets = f"engine.precision={precision}", f"engine.zero_stage={stage}"
    back, straight, resumed = (tmp_path / name for name in ("back", "straight", "resumed"))
    [(code, said), (other, _)] = train(back, tiny_shards, kind, *sets)
    assert (code, other) == (0, 0) and f"{back / 'run/step-00000003'} at step 3, skipping samples 120 to 179" in said
    assert said.count(f"saved {back / 'run/step-00000003'}") == 1  # a kill while it is saved again would lose it
    [found] = lines(back / "run", "guard")
    assert (found["action"], found["gap"]) == ("rollback", GAP)
    evidence = json.loads((back / f"run/guard/step-{found['step']:08d}.json").read_text())
    assert evidence["norms_of"].startswith("moving" if precision == "fp32" else "gradient in the last step")
    [(code, _), (other, _)] = train(straight, tiny_shards, kind, *sets, f"phases.0.pass_over=[{GAP}]")
    assert (code, other) == (0, 0) and not lines(straight / "run", "guard")
    ends = [read(find(folder / "run").folder) for folder in (back, straight)]
    assert outcome(ends[0]) == outcome(ends[1])
    assert ends[0].record["state"]["position"] == STEPS * BATCH + GAP["samples"]
    losses = [{line["step"]: line["loss"] for line in lines(folder / "run", "step")} for folder in (back, straight)]
    assert losses[0] == losses[1]
    assert sum(line["left_out"] for line in lines(straight / "run", "step")) == GAP["samples"]
    if stage == 1:
        shutil.copytree(back / "run/step-00000003", resumed / "run/step-00000003")
        assert [code for code, _ in train(resumed, tiny_shards, kind, *sets)] == [0, 0]
        assert not lines(resumed / "run", "guard") and outcome(find(resumed / "run")) == outcome(ends[1])


def test_a_planted_nan_stops_both_ranks_with_the_evidence(tiny_shards: Path, tmp_path: Path) -> None:
    [(code, said), (other, rest)] = train(tmp_path, tiny_shards, "inf", "guard.non_finite=stop")
    assert (code, other) == (REFUSED, REFUSED) and "error" not in rest
    [line] = [line for line in said.splitlines() if "error" in line]
    path = tmp_path / "run/guard/step-00000005.json"
    assert "the guard stopped the run: the gradients are not finite: training diverged; lower the learning" in line
    measured = "gradient in the last step"
    assert f"samples 120 to 179 of phase only are listed in {path}; largest norms of the {measured}: mlm_bias " in line
    assert saved(tmp_path) == ["step-00000003"]
    tree, manifest = json.loads(path.read_text()), load_manifest(tiny_shards)
    order = Order(tuple(shard.samples for shard in manifest.shards), 5, 8)
    places = [(manifest.shards[shard].name, row) for shard, row in order.take(120, 60).tolist()]
    assert [(sample["shard"], sample["row"]) for sample in tree["listed"]] == places
    assert all(s["text"].startswith("[CLS]") and "[MASK]" not in s["text"] for s in tree["listed"])
    norms = tree["gradient_norms"]
    assert tree["norms_of"] == measured and norms["mlm_bias"] is None and norms["mlm_weight"] > 0


def test_trouble_that_stays_stops_the_run_and_its_restart(tiny_shards: Path, tmp_path: Path) -> None:
    endless = range(155, 10**6)
    for attempt in range(2):
        [(code, said), (other, _)] = train(
            tmp_path, tiny_shards, "inf", "guard.most_rollbacks=2", "checkpoint.every_steps=1", poison=endless
        )
        assert (code, other) == (REFUSED, REFUSED) and "it went back 2 times within 10000 steps" in said
        assert len(lines(tmp_path / "run", "rollback")) == 2, attempt
        done = [line["action"] for line in lines(tmp_path / "run", "guard")]
        assert done == ["rollback"] * 2 + ["stop"] * (attempt + 1) and said.count("going back") == 2 * (attempt == 0)
        assert saved(tmp_path) == [f"step-0000000{step}" for step in range(1, 4)]  # 4 and 5 read what is skipped


def test_a_spike_can_save_and_stop_and_the_run_resumes(tiny_shards: Path, tmp_path: Path) -> None:
    [(code, said), (other, _)] = train(tmp_path, tiny_shards, "spike", "guard.spike=stop")
    assert (code, other) == (REFUSED, REFUSED) and "step 6: loss 204.878 is " in said and "above the median 4." in said
    assert saved(tmp_path)[-1] == "step-00000006" and not (tmp_path / "run/ended.json").exists()
    assert [code for code, _ in train(tmp_path, tiny_shards, "spike", "guard.spike=stop")] == [0, 0]


def test_nothing_to_go_back_to(tiny_shards: Path, tmp_path: Path) -> None:
    [(code, said), (other, _)] = train(tmp_path, tiny_shards, "inf", "checkpoint.every_steps=100")
    assert (code, other) == (REFUSED, REFUSED) and "no checkpoint is from before the samples to skip" in said


def test_a_full_disk_ends_both_ranks_if_it_shall(tiny_shards: Path, tmp_path: Path) -> None:
    [(code, said), (other, _)] = train(tmp_path, tiny_shards, "full", "guard.failed_save=stop")
    assert (code, other) == (FAILED, FAILED) and "No space left on device" in said and "Traceback" not in said
    assert saved(tmp_path) == ["step-00000003"] and lines(tmp_path / "run", "step")[-1]["step"] < STEPS
    assert [line["sign"] for line in lines(tmp_path / "run", "guard")] == ["failed_save"]


def test_a_hang_ends_at_the_timeout(tiny_shards: Path, tmp_path: Path) -> None:
    """A launcher then ends the rank that hangs, which prints no line before that."""
    forked = start(tmp_path, tiny_shards, "hang", "run.timeout_seconds=4")
    wait_for(lambda: forked[0].returncode is not None)
    before = forked[1].log.read_text()
    forked[1].send_signal(signal.SIGTERM)
    [(code, said), (other, _)] = ranks.finish(forked, timeout=30)
    assert (code, other) == (LOST, LOST), said
    assert "rank 0: lost contact with another rank" in said and "Timed out" in said and "rank 1" not in before
    assert saved(tmp_path) == ["step-00000003"]
