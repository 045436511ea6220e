"""The parts of fine-tuning, one by one: batches, the starting model, the export, and the result of a sweep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_prep.tokenizer import SPECIALS, load_tokenizer
from kernels import dropout
from tests.helpers.corpora import write_tokenizer
from tests.helpers.finetune_inputs import PIECES, TINY, bert_folder, tokenizer_folder, write_classes, write_data
from tests.helpers.unnoticed import unnoticed
from trainer.convert import weights as plain_weights
from trainer.convert.hugging_face import class_name
from trainer.data.order import Order
from trainer.errors import TrainerError
from trainer.finetune import save
from trainer.finetune.__main__ import make_job
from trainer.finetune.data import UnitTable, cut_of, take
from trainer.finetune.options import Options, Setting, parse
from trainer.finetune.predict import write_predictions
from trainer.finetune.pretrained import needed_weights, read_pretrained
from trainer.finetune.result import RunResult, SettingSummary, read_json, summarise, write_json
from trainer.finetune.sweep import choose as choose_run
from trainer.finetune.sweep_report import table
from trainer.finetune.task import Example, TaskBatch, TaskModel, Unit, collate
from trainer.model.bert import SITES, Bert, pool

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Toy:
    """A task of any kind of head."""

    export_class: str
    outputs: int
    pooled: bool
    labels: tuple[str, ...] = ()
    hidden_head: bool = False
    drops: bool = True
    name: str = "toy"
    measure: str = "accuracy"
    dtype: torch.dtype = torch.int64

    def read(self, path: Path) -> list[Any]:
        raise NotImplementedError

    def classes(self, records: Sequence[Any]) -> dict[str, float]:
        raise NotImplementedError

    def units(self, record: Any, tokenizer: Any, longest: int, training: bool) -> list[Unit]:
        raise NotImplementedError

    def loss(self, answers: Tensor, batch: TaskBatch) -> Tensor:
        return answers.sum()

    def count(self, unit: Unit) -> int:
        return sum(len(example.targets) for example in unit)

    def score(self, records: Sequence[Any], units: Sequence[Unit], answers: Sequence[Any]) -> dict[str, float]:
        raise NotImplementedError

    def predictions(
        self, records: Sequence[Any], units: Sequence[Unit], answers: Sequence[Any]
    ) -> list[dict[str, Any]]:
        raise NotImplementedError


TAGS = Toy("BertForTokenClassification", 3, False, ("O", "B-X", "I-X"))
KINDS = [
    Toy("BertForSequenceClassification", 2, True, ("no", "yes")),
    Toy("BertForSequenceClassification", 1, True),
    TAGS,
    Toy("BertForQuestionAnswering", 2, False, drops=False),
    Toy("BertForMultipleChoice", 1, True),
]


def unit(number: int) -> Unit:
    """One to three examples of different lengths, with several places and targets each."""
    made = []
    for place in range(1 + number % 3):
        length = 3 + (5 * number + place) % 7
        places = tuple(range(1, 1 + (number + place) % 3))
        tokens = tuple(5 + (number + 3 * i + place) % 10 for i in range(length))
        made.append(Example(tokens, (0, 0) + (1,) * (length - 2), places, tuple(float(p) for p in places)))
    return tuple(made)


UNITS = [unit(number) for number in range(23)]


# ---- batches ---------------------------------------------------------------------------------------------------


def same(ours: TaskBatch, theirs: TaskBatch) -> None:
    for field in fields(TaskBatch):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b, field.name


@pytest.mark.parametrize("rows", [[0], [4, 1], [2, 2, 22], list(range(23))])
def test_batches_of_a_table_are_those_of_collate(rows: list[int]) -> None:
    samples = [100 + 7 * place for place in range(len(rows))]
    made = UnitTable(UNITS, TAGS).batch(np.array(rows), np.array(samples))
    same(made, collate([UNITS[row] for row in rows], samples, torch.int64))


@pytest.mark.parametrize(("ranks", "micro_batch", "batch"), [(1, None, 8), (2, 3, 8), (5, None, 3), (3, 1, 7)])
def test_each_unit_is_read_once_an_epoch_however_it_is_cut(ranks: int, micro_batch: int | None, batch: int) -> None:
    made, order, read, position = UnitTable(UNITS, TAGS), Order((23,), 7, 1), list[int](), 0
    while position < 2 * 23:
        count = min(batch, 2 * 23 - position)
        cuts = [cut_of(batch, micro_batch, rank, ranks) for rank in range(ranks)]
        parts = [take(made, order, position, count, cut) for cut in cuts]
        assert len({len(batches) for batches, _ in parts}) == 1  # ranks stay in step
        assert len({counts for _, counts in parts}) == 1
        whole = [one for batches, _ in parts for one in batches if one.weight]
        assert parts[0][1].targets == sum(len(one.targets) for one in whole)
        numbers = sorted({int(sample) >> 16 for one in whole for sample in one.samples})
        assert numbers == list(range(position, position + count))
        assert micro_batch is None or all(len({int(s) >> 16 for s in one.samples}) <= micro_batch for one in whole)
        read += order.take(position, count)[:, 1].tolist()
        position += count
    assert sorted(read[:23]) == sorted(read[23:]) == list(range(23)) and read[:23] != read[23:]


def test_a_batch_without_weight_adds_nothing() -> None:
    model, made = TaskModel(TINY, TAGS, 0), UnitTable(UNITS, TAGS)
    loss = model(made.batch(np.array([1]), np.array([0]), 0.0)).loss
    loss.backward()
    assert loss == 0 and not any(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("task", [*KINDS, replace(KINDS[0], hidden_head=True)], ids=lambda task: task.export_class)
def test_dropout_stands_before_the_head_and_behind_its_hidden_layer(task: Toy) -> None:
    """Each dropout has its own site, keyed by the token that is read; a task may also turn the first one off."""
    model, batch = (
        TaskModel(replace(TINY, dropout=0.5), task, 0),
        UnitTable(UNITS, task).batch(np.arange(9), np.arange(9)),
    )
    keys, site = dropout.token_keys(1, 2, batch.samples, batch.positions, batch.cu_seqlens), SITES * (TINY.layers + 1)
    x, at = model.encode(batch, keys), batch.cu_seqlens[:-1].long() if task.pooled else batch.places
    rows = pool(x, batch, model.pooler_weight, model.pooler_bias) if task.pooled else x[at]
    if task.drops:
        rows = dropout.apply(rows, keys[at], site, 0.5)
    if task.hidden_head:
        rows = torch.tanh(F.linear(rows, model.head_in_weight, model.head_in_bias))
        rows = dropout.apply(rows, keys[at], site + 1, 0.5)
    torch.testing.assert_close(model.answers(batch, keys), F.linear(rows, model.head_weight, model.head_bias))


# ---- what it starts from ---------------------------------------------------------------------------------------

CLASSES = KINDS[0]


def refuse(text: str) -> None:
    raise AssertionError(text)


def options(model: Path, data: Path, *more: str) -> Options:
    return parse(["--task", "sst2", "--model", str(model), "--data", str(data), "--out", str(data), *more])


def test_the_name_of_a_folder_does_not_decide_what_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("not used", "warning:"):
        (tmp_path / name).mkdir()
        folder = bert_folder(tmp_path / name, pooler=False)
        monkeypatch.chdir(folder.parent.parent)
        read_pretrained(folder.relative_to(Path.cwd()), None, pytest.fail)
        plain_weights.load_bert(folder.relative_to(Path.cwd()), pytest.fail)


def test_a_missing_pooler_is_reported_and_drawn_from_the_seed(tmp_path: Path) -> None:
    reported: list[str] = []
    given = read_pretrained(bert_folder(tmp_path, pooler=False), None, reported.append)
    start = needed_weights(given, CLASSES, reported.append)
    assert reported == [
        "the model has no pooler: it is drawn from the seed, like the head",
        "not used from the model: MLM head, NSP head",
    ]
    assert "pooler_weight" not in start and torch.equal(start["token_table"], given.weights["token_table"])
    reported.clear()
    needed_weights(given, TAGS, reported.append)  # which has no use for one
    assert reported == ["not used from the model: MLM head, NSP head"]


def test_an_encoder_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    made = bert_folder(tmp_path)
    tensors = load_file(made / "model.safetensors")
    del tensors["bert.encoder.layer.1.output.dense.weight"]
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TrainerError, match="layer.1.output.dense.weight; is this the folder of a BERT"):
        read_pretrained(made, None, refuse)
    lacking = {name: tensor for name, tensor in Bert(TINY).state_dict().items() if "layers.1." not in name}
    plain_weights.write(lacking, TINY, tmp_path / "lacking.safetensors")
    given = read_pretrained(tmp_path / "lacking.safetensors", made, refuse)
    with pytest.raises(TrainerError, match="--model lacks 12 tensors of the encoder, layers.1.qkv_weight first"):
        needed_weights(given, CLASSES, refuse)
    plain_weights.write(Bert(TINY).state_dict(), replace(TINY, max_positions=41), tmp_path / "longer.safetensors")
    given = read_pretrained(tmp_path / "longer.safetensors", made, refuse)
    with pytest.raises(TrainerError, match=r"position_table of \(40, 32\), its configuration says \(41, 32\)"):
        needed_weights(given, CLASSES, refuse)


def test_plain_weights_are_taken_as_they_are_with_a_tokenizer_that_is_named(tmp_path: Path) -> None:
    file, own = tmp_path / "plain.safetensors", Bert(TINY, seed=8).state_dict()
    plain_weights.write(own, TINY, file)
    with pytest.raises(TrainerError, match="has no tokenizer next to it: name its folder with --tokenizer"):
        read_pretrained(file, None, refuse)
    given = read_pretrained(file, tokenizer_folder(tmp_path / "tokenizer"), refuse)
    assert given.model == TINY and all(torch.equal(tensor, own[name]) for name, tensor in given.weights.items())


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    made, other = bert_folder(tmp_path), tmp_path / "other"
    own = PIECES[len(SPECIALS) :]
    write_tokenizer(other, [*own[1:], own[0]])  # of the same size
    with pytest.raises(TrainerError, match=f"{other} is not the tokenizer that .* was trained with"):
        read_pretrained(made, other, refuse)
    plain_weights.write(
        Bert(TINY).state_dict(), TINY, tmp_path / "plain.safetensors", tokenizer=load_tokenizer(made).sha256()
    )
    read_pretrained(tmp_path / "plain.safetensors", made, refuse)
    with pytest.raises(TrainerError, match=f"{other} is not the tokenizer that .* was trained with"):
        read_pretrained(tmp_path / "plain.safetensors", other, refuse)


def test_a_vocabulary_alone_is_a_tokenizer_with_its_own_case(tmp_path: Path) -> None:
    made = bert_folder(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (made / name).unlink()
    encoded = [read_pretrained(made, None, refuse).tokenizer.encoder.encode("BAME").tokens]
    (made / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    encoded.append(read_pretrained(made, None, refuse).tokenizer.encoder.encode("BAME").tokens)
    assert encoded == [["bame"], ["[UNK]"]]
    (made / "vocab.txt").write_text("\n".join([*PIECES, "one", "more"]) + "\n")
    with pytest.raises(TrainerError, match=f"has {len(PIECES) + 2} pieces, but the model in .* only {len(PIECES)}"):
        read_pretrained(made, None, refuse)


def test_what_the_model_or_the_data_cannot_do_is_refused(tmp_path: Path) -> None:
    made, data = bert_folder(tmp_path), write_data(tmp_path / "data", 20, 10)
    with pytest.raises(TrainerError, match="--max-length is 41, but .* has 40 positions: use at most 40"):
        make_job(options(made, data, "--max-length", "41"), refuse)
    unlabelled = tmp_path / "unlabelled.tsv"
    unlabelled.write_text("sentence\nbame bani\n")
    with pytest.raises(TrainerError, match="unlabelled.tsv has no labels to train on: add them"):
        make_job(options(made, data, "--max-length", "40", "--train", str(unlabelled)), lambda text: None)
    for part in ("--dev", "--also"):  # before the training, not after it
        with pytest.raises(TrainerError, match="unlabelled.tsv has no labels to evaluate against"):
            make_job(options(made, data, "--max-length", "40", part, str(unlabelled)), lambda text: None)
    job, test = make_job(options(made, data, "--max-length", "40", "--test", str(unlabelled)), lambda text: None)
    assert len(job.training) == 20 and test is not None and not test.known


def test_another_dropout_is_another_recipe(tmp_path: Path) -> None:
    made, data = bert_folder(tmp_path), write_data(tmp_path / "data", 20, 10)
    own, _ = make_job(options(made, data, "--max-length", "40"), lambda text: None)
    other, _ = make_job(options(made, data, "--max-length", "40", "--dropout", "0.25"), lambda text: None)
    assert (other.model.dropout, other.model.attention_dropout) == (0.25, 0.25) != (own.model.dropout, 0.25)
    assert replace(other.model, dropout=own.model.dropout, attention_dropout=own.model.attention_dropout) == own.model
    assert [key for key in own.identity if own.identity[key] != other.identity[key]] == ["recipe"]
    assert "dropout" not in own.identity["recipe"]  # runs of before the option go on


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    write_classes(tmp_path / "train.tsv", 3)
    write_classes(tmp_path / "dev.tsv", 3)
    wrong = "--rates 1e-5,0 --batches 0 --epochs inf --seeds 1,99999999999999999999 --warmup 2 --clip -1".split()
    wrong += "--dropout 1 --weight-decay nan --patience 0 --timeout 9999999999 --predict a".split()
    with pytest.raises(TrainerError) as caught:
        options(tmp_path, tmp_path, *wrong)
    said = str(caught.value).split("; ")
    assert [part.split(" ")[0].rstrip(":") for part in said] == [
        *("--rates", "--batches", "--epochs", "--seeds", "--warmup"),
        *("--weight-decay", "--clip", "--patience", "--dropout", "--timeout", "--predict"),
    ]


def test_numbers_have_a_highest_value(tmp_path: Path) -> None:
    write_classes(tmp_path / "train.tsv", 3)
    write_classes(tmp_path / "dev.tsv", 3)
    names = ["--rates", "--batches", "--epochs", "--weight-decay", "--clip", "--max-length", "--eval-every"]
    names += ["--save-every", "--patience", "--micro-batch", "--timeout"]
    with pytest.raises(TrainerError) as caught:
        options(tmp_path, tmp_path, *(word for name in names for word in (name, str(10**30))))
    said = str(caught.value).split("; ")
    assert sorted(part.split(" ")[0].rstrip(":") for part in said) == sorted(names)
    assert all(part.endswith(("or less", "(thirty days) or less")) for part in said)


# ---- what it exports -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer_norm", ["after", "before"])
@pytest.mark.parametrize("task", KINDS, ids=lambda task: f"{task.export_class}-{task.outputs}")
def test_an_exported_model_is_the_trained_one(task: Toy, layer_norm: Any, tmp_path: Path) -> None:
    model = replace(TINY, layer_norm=layer_norm)
    own, reported = TaskModel(model, task, 3).state_dict(), list[str]()
    generator = torch.Generator().manual_seed(1)
    own = {name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in own.items()}
    tokenizer = load_tokenizer(tokenizer_folder(tmp_path / "tokenizer"))
    save.write_model(tmp_path / "model", own, model, task, tokenizer, reported.append)  # proven inside
    assert "whose answers in transformers differ from ours by at most" in reported[0]
    found = json.loads((tmp_path / "model" / "config.json").read_text())
    assert found["architectures"] == [class_name(task.export_class, model)]
    if task.labels:
        assert found["id2label"] == {str(number): label for number, label in enumerate(task.labels)}
    if task.export_class == "BertForSequenceClassification":
        assert found["problem_type"] == ("single_label_classification" if task.labels else "regression")
    other = own | {"head_bias": own["head_bias"] + 0.01}
    with pytest.raises(TrainerError, match="transformers' answers differ by"):
        save.prove(tmp_path / "model", other, model, task, tokenizer)
    for name in ("config.json", "tokenizer_config.json"):
        left = unnoticed(tmp_path / "model" / name, lambda: save.prove(tmp_path / "model", own, model, task, tokenizer))
        assert left == []


def test_a_hidden_head_is_kept_under_lamberts_names_and_reported(tmp_path: Path) -> None:
    task, reported = Toy("BertForSequenceClassification", 2, True, ("no", "yes"), hidden_head=True), list[str]()
    own = TaskModel(TINY, task, 3).state_dict()
    tokenizer = load_tokenizer(tokenizer_folder(tmp_path / "tokenizer"))
    save.write_model(tmp_path / "model", own, TINY, task, tokenizer, reported.append)
    assert "transformers has no class for this head" in reported[0]
    found = plain_weights.read(tmp_path / "model" / "weights.safetensors", refuse)
    assert found.model == TINY and all(torch.equal(found.tensors[name], tensor) for name, tensor in own.items())


# ---- what a sweep comes to -------------------------------------------------------------------------------------


def result(rate: float, seed: int, value: float | None, how: str = "done") -> RunResult:
    figures = {} if value is None else {"f1": value}
    return RunResult(how, seed, {"rate": rate, "batch": 16, "epochs": 3.0}, figures, 1, 2, 1.0, 1.0, ())


def test_the_best_median_is_chosen_and_its_best_run() -> None:
    results = [result(1e-5, 1, 0.7), result(1e-5, 2, 0.8), result(1e-5, 3, 0.9)]
    results += [result(5e-5, 1, 0.99), result(5e-5, 2, 0.5, "degenerate"), result(5e-5, 3, None, "diverged")]
    rows = summarise(results, "f1")
    assert rows[0] == SettingSummary(Setting(1e-5, 16, 3.0), (0.7, 0.8, 0.9), 0.8, rows[0].spread, 0.9, 0, 0)
    assert rows[0].spread == pytest.approx(0.1)
    assert (rows[1].median, rows[1].best, rows[1].diverged, rows[1].constant) == (0.5, 0.99, 1, 1)
    assert choose_run(rows, results, "f1") == results[2]
    lines = table(rows, "f1").splitlines()
    assert lines[2].split() == ["1e-05", "16", "3", "0.8000", "0.1000", "0.9000", "3", "0", "0"]


def test_a_setting_that_mostly_diverges_has_no_median() -> None:
    results = [result(1e-5, 1, 0.9), result(1e-5, 2, None, "diverged"), result(1e-5, 3, None, "diverged")]
    rows = summarise(results, "f1")
    assert rows[0].median is None
    with pytest.raises(TrainerError, match="no setting has a median: at least half of the runs of each diverged"):
        choose_run(rows, results, "f1")


def test_damaged_results_are_named(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"how": "done"})
    assert read_json(tmp_path / "a.json") == {"how": "done"}
    for content, said in (
        ("{", "is damaged .* remove its folder"),
        ("[]", "was not written by this command: remove it"),
    ):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(TrainerError, match=said):
            read_json(tmp_path / "a.json")


def test_predictions_stay_one_row_a_record(tmp_path: Path) -> None:
    rows = [{"index": 0, "text": "a\tb\nc"}, {"index": 1, "tags": ["O", "B-X"]}]
    write_predictions(tmp_path / "a.tsv", rows)
    assert (tmp_path / "a.tsv").read_text() == 'index\ttext\ttags\n0\ta b c\t\n1\t\t["O", "B-X"]\n'
    write_predictions(tmp_path / "a.jsonl", rows)
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == rows
