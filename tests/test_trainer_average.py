"""Averages of checkpoints: the mean by hand, what is refused, and that evaluation and export use exactly that mean."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import BertForPreTraining

import trainer.evaluate
from data_prep.manifest import load_manifest
from data_prep.tokenizer import load_tokenizer
from tests.helpers import ranks
from tests.helpers.runs import change_record, write_config
from trainer import export, weights
from trainer.checkpoint.average import average, select
from trainer.checkpoint.reading import Pieces, find, load_weights, model_of
from trainer.checkpoint.trained_tokenizer import token_counts
from trainer.convert.folder import padded_logits, random_batch
from trainer.convert.hugging_face import to_hugging_face
from trainer.data.loader import Loader
from trainer.errors import TrainerError
from trainer.model.bert import Bert
from trainer.run.evaluation import evaluate_context

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with a checkpoint of each step: steps 1 and 2 in the first phase, 3 to 6 in the second."""
    folder = tmp_path_factory.mktemp("averaged")
    path = write_config(folder, tiny_shards, 2, checkpoint={"every_steps": 1, "keep": 9})
    tree: dict[str, Any] = yaml.safe_load(path.read_text())
    tree["phases"].append(tree["phases"][0] | {"name": "second", "steps": 4})
    path.write_text(yaml.safe_dump(tree))
    ended = ranks.finish(ranks.fork(2, "trainer/__main__.py", "--config", str(path)))
    assert [code for code, _ in ended] == [0, 0], ended
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def mean_of(run: Path, *steps: int) -> dict[str, Tensor]:
    """The mean of these steps' weights, by hand."""
    all_ = [load_weights(find(run / f"step-{step:08d}")) for step in steps]
    return {name: torch.stack([each[name].double() for each in all_]).mean(0).float() for name in all_[0]}


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def flip(folder: Path) -> None:
    """Damage one bit of a part, in the weights or the moments."""
    part = next(folder.glob("part-00001-*"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)


def test_the_mean_is_taken_in_fp64_and_one_checkpoint_keeps_its_bits(trained: Path) -> None:
    reported: list[str] = []
    chosen = select(trained, 4, reported.append)
    assert [found.folder.name[-1] for found in chosen] == list("6543") and not reported
    mean = average(chosen)
    assert equal(mean, mean_of(trained, 3, 4, 5, 6)) and not equal(mean, load_weights(chosen[0]))
    assert {tensor.dtype for tensor in mean.values()} == {torch.float32}
    assert equal(average(select(trained, None, reported.append)), load_weights(chosen[0]))


def test_damaged_checkpoints_are_skipped_and_named(run: Path) -> None:
    reported: list[str] = []
    flip(run / "step-00000006")  # its size is right
    next((run / "step-00000004").glob("part-*")).unlink()
    chosen = select(run, 2, reported.append)
    assert equal(average(chosen), mean_of(run, 3, 5))
    assert [line.partition(" is damaged")[0] for line in reported] == [
        f"warning: not used: checkpoint {run / name}" for name in ("step-00000006", "step-00000004")
    ]
    with pytest.raises(TrainerError, match=r"needs 5 .* has 4: .* at 5 or more; .*step-00000006 is damaged"):
        select(run, 5, reported.append)
    with pytest.raises(TrainerError, match="step-00000006 is damaged: the sha256"):
        select(run, None, reported.append)


def test_a_record_that_no_run_resumes_from_is_skipped_too(run: Path) -> None:
    reported: list[str] = []
    change_record(run / "step-00000006", lambda tree: tree["record"]["state"].update(position=-5))
    assert equal(average(select(run, 2, reported.append)), mean_of(run, 4, 5))
    assert reported == [f"warning: not used: checkpoint {run}/step-00000006 is damaged: position in its record is -5"]


def other_seed(run: Path) -> None:
    change_record(run / "step-00000005", lambda tree: tree["record"]["identity"].update(seed=6))


def other_shape(run: Path) -> None:
    change_record(run / "step-00000004", lambda tree: tree["shapes"].update(mlm_bias=[2, 8]))


@pytest.mark.parametrize(
    ("change", "path", "count", "message"),
    [
        (None, ".", 7, "--average 7 needs 7 intact checkpoints, but {run} has 6: use a smaller number, or train with"),
        (None, "tokenizer", 2, "no intact checkpoint in {run}/tokenizer: name a run's folder"),
        (None, "step-00000006", 2, "{run}/step-00000006 is a single checkpoint, so it has no average: name its run's"),
        (
            None,
            ".",
            5,
            "{run}/step-00000002 is from a different run or phase than step-00000006 (phase was only, now seco",
        ),
        (
            other_seed,
            ".",
            2,
            "{run}/step-00000005 is from a different run or phase than step-00000006 (seed was 6, now 5)",
        ),
        (other_shape, ".", 3, "checkpoint {run}/step-00000004 comes from another model: 1 parameters differ, first ml"),
    ],
)
def test_what_cannot_be_averaged_is_one_line(
    run: Path,
    change: Callable[[Path], None] | None,
    path: str,
    count: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if change is not None:
        change(run)
    out = run.parent / "out"
    assert export.main(["--checkpoint", str(run / path), "--out", str(out), "--average", str(count)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("trainer.export: error: ") and message.format(run=run) in line
    assert not out.exists()


@pytest.mark.parametrize("count", ["1", "0", "-3", "two", "2.5"])
def test_fewer_than_two_is_no_average(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        weights.main(["run", "out", f"--average={count}"])
    [line] = capsys.readouterr().err.splitlines()
    assert f"argument --average: {count} is not a number of checkpoints: it must be 2 or more" in line


def test_a_mean_that_is_not_finite_is_refused(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, whole = select(trained, 2, print), Pieces.whole
    monkeypatch.setattr(Pieces, "whole", lambda pieces, name: whole(pieces, name) / (name != "nsp_bias"))
    with pytest.raises(TrainerError, match=f"the mean of steps 5 and 6 of {trained}: nsp_bias contains NaN or inf"):
        average(chosen)


# ---- the commands --------------------------------------------------------------------------------------------


def test_an_export_is_the_mean_and_says_so(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, mean = tmp_path / "bert", mean_of(trained, 4, 5, 6)
    assert export.main(["--checkpoint", str(trained), "--average", "3", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{out}: the mean of steps 4, 5 and 6 of {trained}\ntransformers finds every name")
    assert "this is the mean of steps 4, 5 and 6, after" in (out / "README.md").read_text()
    model, fillers = model_of(find(trained)), load_tokenizer(out).fillers
    assert equal(load_file(out / "model.safetensors"), to_hugging_face(mean, model, fillers))
    ours, batch = Bert(model, fillers=fillers), random_batch(model, 7)
    ours.load_state_dict(mean)
    theirs = BertForPreTraining.from_pretrained(out).eval()
    with torch.no_grad():
        for logits, wanted in zip(padded_logits(theirs, batch), ours.logits(batch), strict=True):
            torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)


def test_an_evaluation_is_of_the_mean(trained: Path, tiny_shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = str(tiny_shards)
    command = ["--checkpoint", str(trained), "--heldout", shards, "--train", shards]
    reported = []
    for more in ([], ["--average", "3"]):
        assert trainer.evaluate.main([*command, *more]) == 0
        reported.append(capsys.readouterr())
    assert f"trainer.evaluate: weights: step 6 of {trained}\n" in reported[0].err
    assert f"trainer.evaluate: weights: the mean of steps 4, 5 and 6 of {trained}\n" in reported[1].err
    newest, ours = (json.loads(each.out) for each in reported)
    manifest = load_manifest(tiny_shards)
    model = Bert(model_of(find(trained)), fillers=load_tokenizer(trained / "tokenizer").fillers)
    model.load_state_dict(mean_of(trained, 4, 5, 6))
    loader = Loader(tiny_shards, manifest, 0, 1)
    by_hand = evaluate_context(model, loader, token_counts(tiny_shards, manifest), CPU, 64)
    assert ours == pytest.approx(by_hand, rel=1e-9)
    assert abs(ours["mlm_loss"] - newest["mlm_loss"]) > 1e-4


def test_plain_weights_are_the_mean(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plain.safetensors"
    assert weights.main([str(trained), str(out), "--average", "2"]) == 0
    assert capsys.readouterr().out == f"{out}: the mean of steps 5 and 6 of {trained}\n"
    assert equal(load_file(out), mean_of(trained, 5, 6))
