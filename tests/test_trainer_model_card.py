"""The model card says what the run recorded, and nothing else."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from data_prep.manifest import manifest_hash
from tests.helpers.runs import write_config
from trainer.checkpoint.reading import Checkpoint
from trainer.checkpoint.train_state import TrainState
from trainer.convert.model_card import write_card
from trainer.errors import TrainerError
from trainer.model.bert import Bert, ModelConfig
from trainer.run.config import load, to_tree

pytestmark = pytest.mark.slow

DAY = 1_795_000_000.0  # 2026-11-18
SPENT = {"start": 100.0, "productive": 3400.0, "evaluation": 100.0}


@pytest.fixture
def found(tiny_shards: Path, tmp_path: Path) -> Checkpoint:
    """Step 15 of a run of two phases of 10 steps, which went on to step 20 in a second attempt."""
    tree = to_tree(load(write_config(tmp_path, tiny_shards, 10), ["optimizer.name=adam"]))
    grows = [{"steps": 2, "global_batch": 10}, {"steps": 3, "global_batch": 20}]
    tree["phases"] = [{**tree["phases"][0], "batch_warmup": grows}]
    tree["phases"].append(
        {
            **tree["phases"][0],
            "batch_warmup": [],
            "name": "second",
            "train": str(tmp_path / "gone"),
            "sequence_length": 16,
        }
    )
    phases = [{"shards": manifest_hash(tiny_shards), "global_batch": 30}, {"shards": "f" * 64, "global_batch": 60}]
    state = asdict(TrainState(step=15, phase=1, phase_step=5, samples=600, tokens=18_000, skipped=2, restarts=1))
    record = {"config": tree, "state": state, "identity": {"phases": phases}, "precision": "fp16"}
    shapes = {name: w.shape for name, w in Bert(ModelConfig(**tree["model"])).state_dict().items()}
    return Checkpoint(tmp_path / "run" / "step-00000015", shapes, {}, record)


def write_log(folder: Path) -> None:
    """Two attempts, of 4 ranks and of 2, for an hour each."""
    step = {"event": "step", "phase": 0, "samples": 1, "applied": True, "tokens": 300, "seconds": 0.5, "mlm_loss": 5.0}
    lines: list[dict[str, Any]] = []
    for attempt, (ranks, steps) in enumerate(((4, (1, 12)), (2, (11, 20)))):
        at = {"time": DAY + 86_400 * attempt}
        facts = {"run": "r", "config": "abc", "ranks": str(ranks), "device": "cuda", "hardware": "NVIDIA H200"}
        lines += [
            {"event": "attempt", **at},
            {"event": "start", **at, "step": 0, **facts, "torch": "2.13", "apex": "absent"},
        ]
        lines += [{**step, "step": number, "restarts": attempt, "learning_rate": 1e-3} for number in steps]
        lines += [
            {"event": "heldout", **at, "step": number, "mlm_loss": 3 + attempt, "mlm_accuracy": 0.25}
            for number in steps
        ]
        lines += [{"event": "time", **at, "step": steps[1], "spent": SPENT}]
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def card(found: Checkpoint, folder: Path, *stated: str | None) -> tuple[dict[str, Any], str]:
    """The front matter, and the rest."""
    folder.mkdir()
    write_card(folder, [found], *(stated or (None, None)))
    return parts(folder)


def parts(folder: Path) -> tuple[dict[str, Any], str]:
    """The front matter of a written card, and the rest."""
    front, rest = (folder / "README.md").read_text().removeprefix("---\n").split("\n---\n", 1)
    return yaml.safe_load(front), rest


def test_a_phase_that_ends_by_time_is_told_by_its_minutes(found: Checkpoint, tmp_path: Path) -> None:
    """Its evaluations name their phase, since nobody knows at which step it ends."""
    first, second = found.record["config"]["phases"]
    first |= {"minutes": 20.0, "warmup_minutes": 2.5, "steps": 0, "batch_warmup": []}
    write_log(found.folder.parent)
    path = found.folder.parent / "metrics.jsonl"
    reported = [json.loads(line) for line in path.read_text().splitlines()]
    reported = [line | ({"phase": int(line["step"] > 11)} if line["event"] == "heldout" else {}) for line in reported]
    path.write_text("".join(json.dumps(line) + "\n" for line in reported))
    _, text = card(found, tmp_path / "out")
    assert "| only | 32 | 20 minutes | 30 | 0.01 | 2.5 minutes | polynomial, power 1 |" in text
    assert "| second | 16 | 5 of 10 |" in text
    assert "| only | 11 |" in text and "| second | 12 |" in text


def test_settings_of_a_phase_that_are_not_the_usual_ones_are_named(found: Checkpoint, tmp_path: Path) -> None:
    write_log(found.folder.parent)
    assert "- phase" not in card(found, tmp_path / "plain")[1]
    found.record["config"]["phases"][0] |= {"spread_positions": 128, "nsp_weight": 0.5, "masks": "dynamic"}
    found.record["config"]["model"] |= {"layer_norm": "before", "decoder_prior": "unigram"}
    _, text = card(found, tmp_path / "out")
    assert "- phase only: masks dynamic, spread_positions 128, nsp_weight 0.5\n- optimizer" in text
    assert "LayerNorm before each sublayer; decoder prior unigram" in text
    found.record["config"]["run"]["weights"] = "bert"  # they had their own bias
    assert "decoder prior" not in card(found, tmp_path / "weights")[1]


def test_an_average_names_its_steps_and_claims_no_metrics(found: Checkpoint, tmp_path: Path) -> None:
    write_log(found.folder.parent)
    (tmp_path / "out").mkdir()
    older = [replace(found, record={**found.record, "state": found.record["state"] | {"step": n}}) for n in (14, 1300)]
    write_card(tmp_path / "out", [found, *older], None, None)
    _, text = parts(tmp_path / "out")
    assert "this is the mean of steps 1,300, 14 and 15, after 600 sequences" in text
    assert "measured with the weights of single steps, not with their mean" in text
    assert "These weights are from step" not in text
    assert "Nothing is known about this model except what is stated above" in text


def test_it_tells_data_recipe_metrics_and_time(found: Checkpoint, tiny_shards: Path, tmp_path: Path) -> None:
    write_log(found.folder.parent)
    front, text = card(found, tmp_path / "out", "apache-2.0", "en")
    assert front == {
        **{"license": "apache-2.0", "language": "en", "library_name": "transformers", "pipeline_tag": "fill-mask"},
        "tags": ["bert"],
    }
    manifest = json.loads((tiny_shards / "manifest.json").read_text())
    assert f"{manifest['counts']['samples']:,} samples with {manifest['counts']['tokens']:,} tokens" in text
    assert (
        f"- `corpus.txt`: {manifest['corpus']['tokens']:,} tokens, sha256 `{manifest['corpus']['files'][0]['sha256']}`"
        in text
    )
    assert manifest["tokenizer"]["sha256"] in text and "masks: 15% of the tokens, by token, 4 at most, static" in text
    assert (
        f"**second**, sequences of up to 16 tokens: shards whose manifest has sha256 `{'f' * 64}`; it was not" in text
    )
    assert "| only | 32 | 10 of 10 | 10 → 20 → 30 | 0.01 | 0 | polynomial, power 1 |" in text
    assert "| second | 16 | 5 of 10 | 60 | 0.01 | 0 | polynomial, power 1 |" in text
    assert "optimizer: adam (beta1 0.9" in text and "precision fp16" in text and "2 steps skipped, 1 restart" in text
    assert "step 15, after 600 sequences and 18,000 tokens" in text
    assert (
        "| only | 1 | 2026-11-18 | 3.0000 | 25.0% |" in text
    )  # the second phase's first steps are of the lost attempt
    assert "| second | 11 | 2026-11-19 | 4.0000 | 25.0% |" in text and "These weights are from step 15." in text
    assert "2 rank(s) on NVIDIA H200 in the last of 2 attempt(s), from 2026-11-18 to 2026-11-19: 6 GPU-hours" in text
    assert "(start 0.167, productive 5.67, evaluation 0.167)" in text
    assert "- torch 2.13" in text and "apex" not in text and "It was not" not in text
    data = (tmp_path / "out" / "learning.png").read_bytes()
    assert data.startswith(b"\x89PNG") and struct.unpack(">II", data[16:24])[0] == 1600
    model = ModelConfig(**found.record["config"]["model"])
    with torch.device("meta"):
        count = sum(p.numel() for p in Bert(model).parameters()) - (model.vocab_rows - model.vocab_size) * 17
    assert f"{count:,} parameters" in text


def test_what_was_not_recorded_is_left_out(found: Checkpoint, tmp_path: Path) -> None:
    front, text = card(found, tmp_path / "out")
    assert front["license"] is None and "language" not in front
    assert "license: # state it before you publish" in (tmp_path / "out" / "README.md").read_text()
    assert re.findall(r"^## (.+)$", text, re.M) == ["Data", "Recipe", "Limits"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["README.md"]
    assert "Nothing is known about this model except what is stated above" in text


def test_tasks_that_no_manifest_tells_are_not_named(found: Checkpoint, tmp_path: Path) -> None:
    assert "Pre-trained, from " in card(found, tmp_path / "out")[1]  # the second phase's is not at hand
    config = found.record["config"]
    known = found.record | {"config": config | {"phases": config["phases"][:1]}}
    text = card(replace(found, record=known), tmp_path / "known")[1]
    assert "Pre-trained on masked language modelling and next-sentence prediction, from " in text


def test_whatever_is_stated_is_text_in_the_front_matter(found: Checkpoint, tmp_path: Path) -> None:
    for number, stated in enumerate((("my licence: none", "no"), ("# 'a' \"b\"\n---\n" + "é " * 60, "- en"))):
        front, _ = card(found, tmp_path / str(number), *stated)
        assert (front["license"], front["language"]) == stated and front["tags"] == ["bert"]
    assert card(found, tmp_path / "unstated", None, "no")[0]["license"] is None


def test_a_file_that_is_no_metrics_log_is_one_line(found: Checkpoint, tmp_path: Path) -> None:
    found.folder.parent.mkdir()
    (found.folder.parent / "metrics.jsonl").write_text('{"event": "heldout", "loss": 1}\n')
    with pytest.raises(TrainerError, match=r"metrics.jsonl contains an invalid record \(KeyError\('step'\)\)"):
        card(found, tmp_path / "out")
