"""Multiple choice: SWAG's own file and a user's, pairs cut as BERT's authors do, a softmax over a record's choices."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.helpers.finetune_toys import CLS, FIRST, SEP, answers, learn, tiny, vocabulary, without_gradient
from trainer.errors import TrainerError
from trainer.finetune.multiple_choice import ChoiceRecord, Choices, ChoiceTask
from trainer.finetune.task import collate

HEADER = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label\n"
SWAG = HEADER + '0,v,1,"a, b c","a, b",c,gold,d,e,d e,"e, d",2\n1,v,1,a c,a,c,gen,d,e,a,b,0\n'
OWN = Choices("text", ("options",), label="right")
COLUMNS = Choices("text", ("one", "two"))


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return vocabulary(tmp_path_factory.mktemp("choose") / "letters", "a b c d e x y z ,")


def write(folder: Path, text: str, name: str = "train.csv") -> Path:
    (folder / name).write_text(text, "utf-8")
    return folder / name


# ---- features ------------------------------------------------------------------------------------------------


def test_swags_file_as_published(letters: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path, SWAG)
    task = ChoiceTask.of(path)
    first, second = task.read(path)
    assert first == ChoiceRecord(2, "a, b", ("c d", "c e", "c d e", "c e, d"), 2) and second.target == 0
    a, b, c, d, e = range(FIRST, FIRST + 5)
    comma = FIRST + 8
    [unit] = task.units(first, letters, 64, training=True)
    assert [example.tokens for example in unit] == [
        (CLS, a, comma, b, SEP, c, d, SEP),
        (CLS, a, comma, b, SEP, c, e, SEP),
        (CLS, a, comma, b, SEP, c, d, e, SEP),
        (CLS, a, comma, b, SEP, c, e, comma, d, SEP),
    ]
    assert unit[2].segments == (0, 0, 0, 0, 0, 1, 1, 1, 1)
    assert [example.targets for example in unit] == [(2,), (), (), ()] and task.count(unit) == 1


def test_the_longer_of_context_and_choice_is_cut_first(letters: Tokenizer) -> None:
    """This follows google-research/bert's _truncate_seq_pair: for a tie, the choice loses its last token."""
    task = ChoiceTask(COLUMNS, 2)
    [unit] = task.units(ChoiceRecord(1, "a b c d e", ("x", "x y z a b"), 0), letters, 8, training=True)
    a, b, c, d = range(FIRST, FIRST + 4)
    x, y = FIRST + 5, FIRST + 6
    assert unit[0].tokens == (CLS, a, b, c, d, SEP, x, SEP)
    assert unit[1].tokens == (CLS, a, b, c, SEP, x, y, SEP)


# ---- files ---------------------------------------------------------------------------------------------------


def test_a_users_own_columns_in_three_formats(tmp_path: Path) -> None:
    wanted = [("a b", ("c", "d, e", "e"), 1), ("b", ("x", "y", "z"), None)]
    rows = [{"text": "a b", "options": ["c", "d, e", "e"], "right": 1}, {"text": "b", "options": ["x", "y", "z"]}]
    lines = write(tmp_path, "\n".join(map(json.dumps, rows)), "train.jsonl")
    task = ChoiceTask.of(lines, OWN)
    assert [(r.context, r.choices, r.target) for r in task.read(lines)] == wanted
    columns = Choices("text", ("p", "q", "r"))
    for name, text in (("a.tsv", "text\tp\tq\tr\tlabel\na b\tc\td, e\te\t1\n"), ("a.csv", "p,q,r,text\nx,y,z,b\n")):
        read = ChoiceTask.of(write(tmp_path, text, name), columns).read(tmp_path / name)
        assert [(r.context, r.choices, r.target) for r in read] == [wanted[name == "a.csv"]]


@pytest.mark.parametrize(
    ("columns", "name", "text", "said"),
    [
        (COLUMNS, "a.csv", "text,one,two,label\na,b,c,0\na,b,,1\n", "line 3: column two is empty"),
        (
            COLUMNS,
            "a.tsv",
            "text\tone\tlabel\na\tb\t0\n",
            "line 2: no value in column two; the row has text, one, label",
        ),
        (
            COLUMNS,
            "a.csv",
            "text,one,two,label\na,b,c,2\n",
            "line 2: label is '2'; it must be a choice's number, 0 to 1",
        ),
        (COLUMNS, "a.csv", "text,one,two,label\na,b,c,-1\n", "line 2: label is '-1'"),
        (
            OWN,
            "a.jsonl",
            '{"text": "a", "options": ["b"], "right": 0}\n',
            "line 1: 1 choice(s); at least two are needed",
        ),
        (OWN, "a.jsonl", '{"text": "a", "options": "b", "right": 0}\n', "line 1: column options must be a JSON list"),
        (
            OWN,
            "a.jsonl",
            '{"text": "a", "options": ["b", "c"], "right": 0}\n\n{"text": "a", "options": ["b", "c", "d"], "right": 0}',
            "line 3: 3 choices instead of 2; each record must have the same number",
        ),
    ],
)
def test_bad_files_are_refused_by_line(tmp_path: Path, columns: Choices, name: str, text: str, said: str) -> None:
    with pytest.raises(TrainerError) as refused:
        ChoiceTask.of(write(tmp_path, text, name), columns)
    assert said in str(refused.value) and name in str(refused.value)


def test_another_number_of_choices_than_in_training_is_refused(tmp_path: Path) -> None:
    dev = write(tmp_path, '{"text": "a", "options": ["b", "c"], "right": 0}\n', "dev.jsonl")
    with pytest.raises(TrainerError, match=r"dev\.jsonl, line 1: 2 choices instead of 3"):
        ChoiceTask(OWN, 3).read(dev)


# ---- learning ------------------------------------------------------------------------------------------------


def test_the_loss_is_the_softmax_over_a_records_choices(letters: Tokenizer) -> None:
    task = ChoiceTask(COLUMNS, 3)
    records = [ChoiceRecord(1, "a", ("b", "c d", "e"), 2), ChoiceRecord(2, "a b c", ("x", "y", "z"), 0)]
    units = [unit for record in records for unit in task.units(record, letters, 64, training=True)]
    scores = torch.randn(6, 1, generator=torch.Generator().manual_seed(1))
    wanted = -(scores[:3, 0].log_softmax(0)[2] + scores[3:, 0].log_softmax(0)[0])
    assert task.loss(scores, collate(units, [0, 1], task.dtype)).item() == pytest.approx(wanted.item(), rel=1e-6)
    unreached = without_gradient(tiny(task, letters.get_vocab_size()), units)
    assert set(unreached) <= {"head_bias"}  # the same for all choices: a softmax sees it by its rounding alone


@pytest.mark.slow
def test_a_tiny_model_learns_to_choose(letters: Tokenizer) -> None:
    """The right continuation is the one with an x, wherever it stands."""
    draw, task, records = random.Random(0), ChoiceTask(COLUMNS, 3), []
    for number in range(64):
        middles = draw.sample("xyz", 3)
        choices = tuple(f"{draw.choice('de')} {middle} {draw.choice('de')}" for middle in middles)
        records.append(ChoiceRecord(number, draw.choice("abc"), choices, middles.index("x")))
    units = [unit for record in records for unit in task.units(record, letters, 64, training=True)]
    model = tiny(task, letters.get_vocab_size())
    before = task.score(records[40:], units[40:], answers(model, units[40:]))["accuracy"]
    learn(model, units[:40], 60)
    said = answers(model, units[40:])
    assert before < 0.9 < task.score(records[40:], units[40:], said)["accuracy"]
    rows = task.predictions(records[40:], units[40:], said)
    assert rows[0]["index"] == 0 and rows[0]["label"] == records[40].target and 1 / 3 < rows[0]["probability"] <= 1


def test_the_largest_score_chooses() -> None:
    task = ChoiceTask(COLUMNS, 2)
    records = [
        ChoiceRecord(1, "a", ("b", "c"), 1),
        ChoiceRecord(2, "a", ("b", "c"), 1),
        ChoiceRecord(3, "a", ("b", "c"), None),
    ]
    said = [np.array([[0], [2]], np.float32), np.array([[1], [0]], np.float32), np.array([[1], [0]], np.float32)]
    assert task.score(records, [], said) == {"accuracy": 0.5}
    rows = task.predictions(records, [], said)
    assert rows[0] == {"index": 0, "prediction": 1, "probability": round(1 / (1 + np.exp(-2)), 6), "label": 1}
    assert rows[2] == {"index": 2, "prediction": 0, "probability": 0.731059}
    with pytest.raises(TrainerError, match="no record with a label"):
        task.score(records[2:], [], said[2:])
