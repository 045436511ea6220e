"""Fine-tuning end to end: any cut and killed runs give the same result; sweeps; the files that a command leaves."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.finetune_command import (
    MINUS_KILL,
    Inputs,
    finetune,
    losses,
    make_inputs,
    result,
    run_folder,
    weights,
)
from tests.helpers.finetune_inputs import TINY, bert_folder, write_classes
from trainer.data.order import Order
from trainer.exits import DONE, REFUSED, STOPPED
from trainer.finetune.data import Cut, read_training, take
from trainer.finetune.pretrained import needed_weights, read_pretrained
from trainer.finetune.save import write_model
from trainer.finetune.task import TaskModel
from trainer.finetune.tasks import Wish, known
from trainer.monitor.metrics_log import read_lines

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("finetune"))


@pytest.fixture(scope="session")
def whole(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs that nothing interrupts, on 1 and on 2 ranks."""
    outs = {size: tmp_path_factory.mktemp("whole") / f"on-{size}" for size in (1, 2)}
    for size, out in outs.items():
        ended = finetune(inputs, out, "--head", "mlp", size=size)
        assert [code for code, _ in ended] == [DONE] * size, ended
    return outs


def test_a_tiny_model_learns_and_its_best_evaluation_is_kept(whole: dict[int, Path]) -> None:
    found = result(whole[1])
    assert found["how"] == "done" and found["figures"]["accuracy"] > 0.75  # 0.57 say 0
    evaluations = {one["step"]: one["figures"]["accuracy"] for one in found["evaluations"]}
    assert list(evaluations) == [6, 12, 18, 24, 30]
    best = max(evaluations, key=lambda step: evaluations[step])  # the first of equals
    assert (found["step"], found["figures"]["accuracy"]) == (best, evaluations[best])
    by_step = losses(whole[1])
    assert by_step[30] < 0.75 * by_step[3]
    left = {path.name for path in run_folder(whole[1]).iterdir()}
    assert left == {"metrics.jsonl", "result.json", "weights.safetensors"}


def test_two_ranks_and_other_micro_batches_do_the_same(inputs: Inputs, whole: dict[int, Path], tmp_path: Path) -> None:
    [(code, said)] = finetune(inputs, tmp_path / "out", "--head", "mlp", "--micro-batch", "5")
    assert code == DONE, said
    alone = losses(whole[1])
    for other in (losses(whole[2]), losses(tmp_path / "out")):
        assert other.keys() == alone.keys()
        assert all(other[step] == pytest.approx(alone[step], abs=1e-4) for step in alone)
    assert [one["figures"] for one in result(whole[2])["evaluations"]] == [
        one["figures"] for one in result(whole[1])["evaluations"]
    ]


def damage(checkpoint: Path) -> None:
    """Change a byte of a checkpoint, whose size stays."""
    [part] = checkpoint.glob("*.safetensors")
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.unlink()  # it may have a second name
    part.write_bytes(content)


@pytest.mark.parametrize("size", [1, 2])
def test_killed_and_resumed_equals_never_killed(
    size: int, inputs: Inputs, whole: dict[int, Path], tmp_path: Path
) -> None:
    out, more = tmp_path / "out", ("--head", "mlp", "--save-every", "5")
    killed = finetune(inputs, out, *more, size=size, aim=f"{signal.SIGKILL}:13")
    assert MINUS_KILL in [code for code, _ in killed], killed
    assert not (run_folder(out) / "result.json").exists()
    if size == 1:
        damage(max(run_folder(out).glob("step-*")))
    ended = finetune(inputs, out, *more, size=size)
    assert [code for code, _ in ended] == [DONE] * size and "resumed at step " in ended[0][1], ended
    assert ("skipped: " in ended[0][1]) == (size == 1)
    assert result(whole[size])["step"] > 13  # so these weights are of steps that were taken after the kill
    ours, theirs = weights(out), weights(whole[size])
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert result(out)["evaluations"] == result(whole[size])["evaluations"]
    later = {step: loss for step, loss in losses(out).items() if step >= 18}  # whole windows of the second attempt
    assert later and later.items() <= losses(whole[size]).items()


def test_a_stop_saves_and_the_same_command_goes_on(inputs: Inputs, whole: dict[int, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    stopped = finetune(inputs, out, "--head", "mlp", size=2, aim=f"{signal.SIGTERM}:14")
    assert [code for code, _ in stopped] == [STOPPED] * 2
    assert "stopped and saved: run the same command to continue" in stopped[0][1]
    assert (run_folder(out) / "step-00000020").is_dir()  # ranks agree every 10 steps
    reported: list[str] = []
    given = read_pretrained(run_folder(out), inputs.model, reported.append)  # a run's folder can be started from
    needed_weights(given, known("sst2").make(Wish(inputs.data / "train.tsv"), reported.append), reported.append)
    assert given.model == replace(TINY, decoder_prior="zero")  # it has no decoder, so it says nothing of a prior
    assert reported == ["not used from the model: another head"]
    ended = finetune(inputs, out, "--head", "mlp", size=2)
    assert [code for code, _ in ended] == [DONE] * 2 and "resumed at step 20" in ended[0][1]
    assert result(out)["evaluations"] == result(whole[2])["evaluations"]
    assert all(torch.equal(tensor, weights(whole[2])[name]) for name, tensor in weights(out).items())


@pytest.mark.parametrize("layer_norm", ["after", "before"])
def test_its_steps_are_those_of_transformers_and_pytorchs_adamw(
    layer_norm: Any, inputs: Inputs, tmp_path: Path
) -> None:
    """The same losses without dropout, in the same order, at the same rates, with clipping: eleven steps of 16."""
    from transformers import AutoModelForSequenceClassification

    bare = replace(TINY, dropout=0.0, attention_dropout=0.0, layer_norm=layer_norm)
    plain = replace(inputs, model=bert_folder(tmp_path, bare))
    more = ("--rates", "2e-3", "--epochs", "2", "--clip", "1")
    finetune(plain, tmp_path / "out", *more, aim=f"{signal.SIGKILL}:12")  # the rest is not needed here
    [log] = (tmp_path / "out").glob("rate-*/metrics.jsonl")
    ours = [line for line in read_lines(log) if line["event"] == "step"]

    task = known("sst2").make(Wish(inputs.data / "train.tsv"), lambda text: None)
    given = read_pretrained(plain.model, None, lambda text: None)
    start = TaskModel(bare, task, seed=1)
    start.load_state_dict(needed_weights(given, task, lambda text: None), strict=False)
    write_model(tmp_path / "start", start.state_dict(), bare, task, given.tokenizer, lambda text: None)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "start", local_files_only=True).train()
    groups = {True: list[torch.nn.Parameter](), False: list[torch.nn.Parameter]()}
    for tensor in theirs.parameters():
        groups[tensor.ndim > 1].append(tensor)
    adamw = torch.optim.AdamW([{"params": p, "weight_decay": 0.01 * decays} for decays, p in groups.items()], eps=1e-6)
    table = read_training(inputs.data / "train.tsv", task, given.tokenizer.encoder, 24)
    for step in range(11):
        [batch], _ = take(table, Order((96,), 1, 1), 16 * step, 16, Cut(1, 0, 1))
        present = torch.arange(batch.max_seqlen) < batch.cu_seqlens.diff()[:, None]
        tokens = torch.zeros(present.shape, dtype=torch.int64).masked_scatter(present, batch.tokens)
        loss = theirs(input_ids=tokens, attention_mask=present.long(), labels=batch.targets).loss
        assert ours[step]["loss"] == pytest.approx(float(loss.detach()), abs=1e-5), step
        rate = 2e-3 * (1.0 if step == 0 else 1 - step / 12)  # warm-up of one step, then linear decay
        assert ours[step]["rate"] == pytest.approx(rate)
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()


def test_patience_ends_a_run_early(inputs: Inputs, tmp_path: Path) -> None:
    [(code, said)] = finetune(
        inputs, tmp_path, "--head", "mlp", "--rates", "1e-9", "--patience", "2", "--eval-every", "4"
    )
    assert code == DONE, said
    found = result(tmp_path, rate=1e-9)
    assert [one["step"] for one in found["evaluations"]] == [4, 6, 8]  # the first, and two that are no better
    assert found["steps"] == 8


# ---- sweeps ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def swept(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Two rates with two seeds, of which the higher rate diverges; scored on a test file; and what it said."""
    out = tmp_path_factory.mktemp("swept")
    test = write_classes(out / "test.tsv", 40, first=20_000)
    more = ["--rates", "1e-2,1e2", "--seeds", "1,2", "--test", str(test), "--also", str(inputs.data / "dev.tsv")]
    more += ["--predict", str(out / "said.tsv")]
    [(code, said)] = finetune(inputs, out, *more, aim="poison:100")
    assert code == DONE, said
    return out, said


def test_a_run_that_diverges_is_named_and_the_sweep_goes_on(swept: tuple[Path, str]) -> None:
    out, said = swept
    warned = [line for line in said.splitlines() if "warning" in line]
    assert len(warned) == 2 and all("diverged run: diverged after step 2: the gradients" in line for line in warned)
    assert said.count("engines alive: 0") == 4  # a sweep of many runs needs the memory of one
    tree = json.loads((out / "results.json").read_text())
    assert [run["how"] for run in tree["runs"]] == ["done", "done", "diverged", "diverged"]
    good, bad = tree["settings"]
    assert (bad["median"], bad["best"], bad["diverged"], bad["values"]) == (None, None, 2, [None, None])
    values = [run["figures"]["accuracy"] for run in tree["runs"][:2]]
    assert good["median"] == pytest.approx(sum(values) / 2) and good["best"] == max(values)
    assert tree["chosen"]["dev"]["accuracy"] == max(values)
    assert (out / "results.png").read_bytes()[:4] == b"\x89PNG"


def test_test_is_scored_by_the_best_run_and_its_predictions_are_written(swept: tuple[Path, str]) -> None:
    out, said = swept
    rows = [line.split("\t") for line in (out / "said.tsv").read_text().splitlines()]
    assert rows[0] == ["index", "prediction", "probability", "label"] and len(rows) == 41
    tree = json.loads((out / "results.json").read_text())
    assert list(tree["also"].values()) == [tree["chosen"]["dev"]]  # another file, here the same one once more
    right = sum(row[1] == row[3] for row in rows[1:]) / 40
    assert tree["test"] == {"accuracy": right}
    assert f"test: accuracy {right:.4f}" in said
    gold = [line.split("\t")[1] for line in (out / "test.tsv").read_text().splitlines()[1:]]
    assert [row[3] for row in rows[1:]] == gold


def test_the_exported_model_says_what_was_predicted(swept: tuple[Path, str]) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    out, said = swept
    assert "model: BertForSequenceClassification, whose answers in transformers differ from ours by at most" in said
    model = AutoModelForSequenceClassification.from_pretrained(out / "model", local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(out / "model", local_files_only=True)
    texts = [line.split("\t")[0] for line in (out / "test.tsv").read_text().splitlines()[1:]]
    with torch.no_grad():
        shares = model(**tokenizer(texts, return_tensors="pt", padding=True)).logits.softmax(-1)
    rows = [line.split("\t") for line in (out / "said.tsv").read_text().splitlines()[1:]]
    assert [model.config.id2label[int(place)] for place in shares.argmax(-1)] == [row[1] for row in rows]
    assert shares.max(-1).values.tolist() == pytest.approx([float(row[2]) for row in rows], abs=2e-6)


def test_the_model_card_says_what_was_done_and_its_lines_of_code_run(swept: tuple[Path, str]) -> None:
    import yaml

    out, _ = swept
    _, front, card = (out / "model" / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front)["pipeline_tag"] == "text-classification"
    tree, settings = (json.loads((out / f"{name}.json").read_text()) for name in ("results", "settings"))
    assert all(sha256 in card for sha256 in (settings["model"], settings["train"][0], settings["dev"][0]))
    dev, test = tree["chosen"]["dev"]["accuracy"], tree["test"]["accuracy"]
    assert [line for line in card.splitlines() if line.startswith(("| dev", "| test"))] == [
        *[f"| dev.tsv | {dev:.4f} |"] * 2,
        f"| test.tsv | {test:.4f} |",
    ]
    assert "of 4 run(s)" in card and "1 rank(s) on CPUs, fp32" in card and str(out) not in card
    code = card.split("```python\n")[1].split("```")[0].strip().replace('model="…"', f"model={str(out / 'model')!r}")
    first, text = code.splitlines()[0], (out / "test.tsv").read_text().splitlines()[1].split("\t")[0]
    names: dict[str, Any] = {}
    exec(first, names)
    [answer] = eval(code.splitlines()[-1].replace("…", text), names)
    assert answer["label"] == (out / "said.tsv").read_text().splitlines()[1].split("\t")[1]


def test_runs_that_have_ended_are_not_run_again(inputs: Inputs, swept: tuple[Path, str]) -> None:
    out, _ = swept
    before = {path: path.stat().st_mtime_ns for path in out.glob("rate-*/*")}
    seen = json.loads((out / "results.json").read_text())
    more = ["--rates", "1e-2,1e2", "--seeds", "1,2", "--test", str(out / "test.tsv")]
    more += ["--also", str(inputs.data / "dev.tsv")]
    [(code, said)] = finetune(inputs, out, *more)
    assert code == DONE and said.count("already finished: ") == 4 and "loss" not in said, said
    assert {path: path.stat().st_mtime_ns for path in out.glob("rate-*/*")} == before
    predicted = seen.pop("predictions")
    assert predicted == str(out / "said.tsv")
    assert json.loads((out / "results.json").read_text()) == seen
    [(code, said)] = finetune(inputs, out, "--weight-decay", "0.1")
    assert code == REFUSED and "has results of another recipe: name another --out" in said, said
    worse = min((1, 2), key=lambda seed: (result(out, seed)["figures"]["accuracy"], -seed))
    [(code, said)] = finetune(inputs, out, "--seeds", str(worse))  # whose weights went for the other's
    assert code == REFUSED and "has no weights any more, since another seed of its setting did better" in said, said


def test_nothing_of_a_users_is_written_over(inputs: Inputs, tmp_path: Path) -> None:
    """Refused before any training: a foreign model in the output folder, or an existing file for predictions."""
    mine, note = tmp_path / "mine", tmp_path / "note.tsv"
    shutil.copytree(inputs.model, mine / "model")
    note.write_text("mine")
    for out, more, said in (
        (mine, [], f"{mine} contains model, which fine-tuning did not write: name another --out"),
        (tmp_path / "out", ["--predict", str(note)], f"--predict {note} already exists: name another file"),
        (note, [], f"--out {note} is a file: name a folder"),
    ):
        [(code, output)] = finetune(inputs, out, *more)
        assert code == REFUSED and said in output and "step" not in output, output
    assert note.read_text() == "mine" and [path.name for path in mine.iterdir()] == ["model"]


def test_a_rate_at_which_nothing_is_learnt_is_named_before_the_first_evaluation(inputs: Inputs, tmp_path: Path) -> None:
    [(code, said)] = finetune(inputs, tmp_path / "out", "--rates", "30")
    assert code == REFUSED and "diverged run: diverged after step" in said, said
    assert "the first step's was" in said and "lower the rate, or lengthen the warm-up" in said
    assert "no setting has a median" in said.strip().splitlines()[-1] or "no setting has a median" in said
    assert result(tmp_path / "out", rate=30)["evaluations"] == []
