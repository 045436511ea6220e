"""Whatever is inferred from the data is reported: classes and their counts, and which records have no label."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from numpy import eye, float32

from tests.helpers.finetune_command import ON_RANKS
from tests.helpers.finetune_inputs import bert_folder, sentences
from tests.helpers.finetune_toys import vocabulary
from tests.helpers.ranks import finish, fork
from trainer.errors import TrainerError
from trainer.exits import DONE, REFUSED
from trainer.finetune.__main__ import make_job
from trainer.finetune.classification import Columns
from trainer.finetune.label_counts import NONE, says_nothing
from trainer.finetune.options import parse
from trainer.finetune.question_answering import AnswerTask
from trainer.finetune.task import Task
from trainer.finetune.tasks import Wish, known


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


def texts(labels: list[Any]) -> list[dict[str, Any]]:
    return [
        {"sentence": " ".join(words), "label": label}
        for words, label in zip(sentences(len(labels)), labels, strict=True)
    ]


def made(path: Path, name: str = "sentence", *no_label: str, reported: list[str] | None = None, **wish: Any) -> Task:
    heard = list[str]() if reported is None else reported
    return known(name).make(Wish(path, no_label=no_label, **wish), heard.append)


# ---- values that mean no label ---------------------------------------------------------------------------------


def test_values_that_mean_no_label() -> None:
    assert says_nothing(None, ()) and says_nothing(" ", ()) and not says_nothing("-1", ())
    assert says_nothing("-1", ("-1",)) and says_nothing("-1.0", ("-1",)) and says_nothing("-1", ("?", "-1.0"))
    assert not says_nothing("1", ("-1",)) and says_nothing("?", ("?",)) and not says_nothing("x", ("?",))
    assert says_nothing("nan", ("nan",)) and not says_nothing("NaN", ("x",))


def test_a_sentence_tasks_classes_are_counted_and_a_value_can_mean_none(tmp_path: Path) -> None:
    path = lines(tmp_path / "train.jsonl", texts([0, 1, 2, -1, 1, None]))
    task = made(path)
    assert task.classes(task.read(path)) == {"-1": 1, "0": 1, "1": 2, "2": 1, NONE: 1}
    task = made(path, "sentence", "-1")
    assert task.labels == ("0", "1", "2")
    assert [record.target for record in task.read(path)] == [0, 1, 2, None, 1, None]
    assert task.classes(task.read(path)) == {"0": 1, "1": 2, "2": 1, NONE: 2}


def test_published_tasks_and_numbers_know_it_too(tmp_path: Path) -> None:
    path = lines(tmp_path / "test.jsonl", texts([0, -1]))
    with pytest.raises(TrainerError, match="line 2: label is '-1', .* if it means no label, pass --no-label -1"):
        made(path, "sst2").read(path)
    task = made(path, "sst2", "-1")
    assert task.classes(task.read(path)) == {"0": 1, "1": 0, NONE: 1}
    path = lines(tmp_path / "numbers.jsonl", texts([2.5, -1.0, 0.25]))
    task = made(path, "sentence", "-1", regression=True)
    assert task.classes(task.read(path)) == {"numbers": 2, "lowest": 0.25, "highest": 2.5, NONE: 1}


def test_columns_that_were_chosen_among_several_are_reported(tmp_path: Path) -> None:
    row = {"sentence1": "a", "sentence2": "b", "sentence": "c"}
    path, reported = lines(tmp_path / "train.jsonl", [row | {"label": label} for label in (0, 1)]), list[str]()
    task = made(path, reported=reported)
    assert [record.first for record in task.read(path)] == ["a", "a"]
    said = "using columns sentence1, sentence2, label, not sentence, label: choose others with --text-columns"
    assert len(reported) == 1 and said in reported[0]
    made(path, reported=reported, columns=Columns(("sentence",), "label")).read(path)
    assert len(reported) == 1


# ---- tags, choices and questions -------------------------------------------------------------------------------


def test_words_without_a_tag_are_neither_learnt_nor_scored(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text("a B-X\nb _\nc O\n\na _\nb _\n\na O\nb B-X\nc I-X\n")
    with pytest.raises(TrainerError, match="line 2: tag '_' is none of O, B-TYPE and I-TYPE; .* pass --no-label _"):
        made(path, "ner")
    task = made(path, "ner", "_")
    records = task.read(path)
    assert task.labels == ("O", "B-X", "I-X") and [record.tags for record in records][:2] == [("B-X", "", "O"), ()]
    assert task.classes(records) == {"O": 2, "B-X": 2, "I-X": 1, NONE: 3}
    tokenizer = vocabulary(tmp_path / "words", "a b c")
    [(example,)] = task.units(records[0], tokenizer, 9, training=True)
    assert example.places == (1, 3) and example.targets == (1, 0)
    units = [unit for record in records for unit in task.units(record, tokenizer, 9, training=False)]
    assert [len(unit[0].places) for unit in units] == [3, 2, 3] and list(map(task.count, units)) == [2, 0, 3]
    right = [eye(3, dtype=float32)[rows] for rows in ([1, 2, 0], [0, 0], [0, 1, 2])]  # b is said to be I-X
    metrics = task.score(records, units, right)
    assert metrics["accuracy"] == metrics["f1"] == 1.0 and task.score(records[1:], units[1:], right[1:])["f1"] == 1.0
    assert task.predictions(records, units, right)[0]["ner_tags"] == ["B-X", "I-X", "O"]  # said, though nobody knows


def test_a_file_of_words_alone_has_no_tags(tmp_path: Path) -> None:
    train, test = tmp_path / "train.txt", tmp_path / "test.txt"
    train.write_text("a B-X\nb O\n")
    test.write_text("-DOCSTART-\n\na\nb\n\nb\n")
    task = made(train, "ner")
    records = task.read(test)
    assert [(record.words, record.tags) for record in records] == [(("a", "b"), ()), (("b",), ())]
    assert task.classes(records) == {"O": 0, "B-X": 0, "I-X": 0, NONE: 3}


def test_the_right_choices_are_counted(tmp_path: Path) -> None:
    columns = Columns(("text", "choices"), "right")
    rows = [{"text": "a", "choices": ["b", "c", "d"], "right": right} for right in (0, 2, 2, -1)]
    path = lines(tmp_path / "train.jsonl", rows)
    with pytest.raises(
        TrainerError, match="line 4: right is '-1'; it must be a choice's number, 0 to 2; .* --no-label -1"
    ):
        made(path, "swag", columns=columns).read(path)
    task = made(path, "swag", "-1", columns=columns)
    assert task.classes(task.read(path)) == {"0": 1, "1": 0, "2": 2, NONE: 1}


def test_questions_are_counted_and_have_no_labels(tmp_path: Path) -> None:
    row = {"context": "a b", "question": "q"}
    answers: list[dict[str, Any]] = [{"answers": []}, {"answers": [{"text": "a", "answer_start": 0}]}, {}]
    path = lines(tmp_path / "train.jsonl", [row | answer | {"id": n} for n, answer in enumerate(answers)])
    task = AnswerTask(unanswerable=True)
    assert task.classes(task.read(path)) == {"answered": 1, "unanswerable": 1, NONE: 1}
    with pytest.raises(TrainerError, match="--no-label is for labels"):
        made(path, "squad", "-1")


# ---- the command -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT, 32 texts of three classes and of -1, and a test file of -1 alone."""
    made = tmp_path_factory.mktemp("labels")
    bert_folder(made)
    for name, count in (("train", 32), ("dev", 16)):
        lines(made / f"{name}.jsonl", texts([(0, 1, 2, -1)[number % 4] for number in range(count)]))
    lines(made / "test.jsonl", texts([-1] * 5))
    return made


def words(folder: Path, out: Path, *more: str) -> list[str]:
    paths = ["--data", str(folder), "--model", str(folder / "bert"), "--out", str(out)]
    return ["--task", "sentence", *paths, "--epochs", "1", "--max-length", "16", "--device", "cpu", *more]


def test_classes_are_named_at_the_start_and_a_file_of_one_alone_is_a_warning(folder: Path, tmp_path: Path) -> None:
    reported: list[str] = []
    make_job(parse(words(folder, tmp_path)), reported.append)
    assert f"classes in {folder}/train.jsonl: -1 (8), 0 (8), 1 (8), 2 (8)" in reported
    warning = f"every label in {folder}/test.jsonl is -1: if it means no label, pass --no-label -1"
    assert [line for line in reported if line.startswith("warning")] == [f"warning: {warning}"]


@pytest.mark.slow
def test_a_test_file_without_labels_is_predicted_and_not_scored(folder: Path, tmp_path: Path) -> None:
    out, counts = tmp_path / "out", {"0": 8, "1": 8, "2": 8, NONE: 8}
    for more in ([], [], ["--predict", str(tmp_path / "named.jsonl")]):  # the second writes its own file again
        [(code, said)] = finish(fork(1, ON_RANKS, "-", *words(folder, out, "--no-label", "-1", *more)))
        predicted = Path(more[-1]) if more else out / "predictions-test.jsonl"
        assert code == DONE and f"test.jsonl has no labels: predictions go to {predicted}, and it is not scored" in said
        assert "classes in" in said and "warning: every label" not in said
        rows = [json.loads(line) for line in predicted.read_text().splitlines()]
        assert len(rows) == 5 and all(row["prediction"] in "012" and "label" not in row for row in rows)
        results = json.loads((out / "results.json").read_text())
        assert "test" not in results and results["predictions"] == str(predicted)
        assert results["classes"][str(folder / "train.jsonl")] == counts
        assert results["classes"][str(folder / "test.jsonl")] == {"0": 0, "1": 0, "2": 0, NONE: 5}
        assert json.loads((out / "settings.json").read_text())["classes"][str(folder / "train.jsonl")] == counts
    [(code, said)] = finish(fork(1, ON_RANKS, "-", *words(folder, out)))
    assert code == REFUSED and "results of another wish and another labels" in said
