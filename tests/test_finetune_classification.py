"""Sentence tasks: their published files and a user's own, how texts are truncated, and the metrics."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from data_prep.draws import bits
from data_prep.tokenizer import load_tokenizer
from tests.helpers.finetune_inputs import PIECES, tokenizer_folder
from trainer.errors import TrainerError
from trainer.finetune import task_metrics
from trainer.finetune.classification import Columns, SentenceRecord, cut
from trainer.finetune.options import parse
from trainer.finetune.task import Task, collate
from trainer.finetune.tasks import TASKS, Wish, known


def refuse(text: str) -> None:
    raise AssertionError(text)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def task(name: str, path: Path, **wish: object) -> Task:
    return known(name).make(Wish(path, **wish), refuse)  # type: ignore[arg-type]


def read(name: str, path: Path) -> list[SentenceRecord]:
    return task(name, path).read(path)


# ---- published files -------------------------------------------------------------------------------------------

STS = "main-captions|MSRvid|2012test|0001"
STSB = "index|genre|filename|year|old_index|source1|source2|sentence1|sentence2|score"
SNLI = {"gold_label": "neutral", "sentence1": "A b.", "sentence2": "C d."}
SICK = "pair_ID|sentence_A|sentence_B|entailment_label|relatedness_score|entailment_AB|SemEval_set"
MNLI = "index|promptID|pairID|genre|sentence1_binary_parse|sentence2_binary_parse|sentence1_parse|sentence2_parse"
PUBLISHED: list[tuple[str, str, list[str], SentenceRecord]] = [  # | stands for a tab
    ("cola", "train.tsv", ['gj04|1||It "is.', "gj04|0|*|Is it."], SentenceRecord(1, 'It "is.', None, 1.0)),
    ("cola", "test.tsv", ["index|sentence", "0|Bill fell."], SentenceRecord(2, "Bill fell.", None, None)),
    ("sst2", "dev.tsv", ["sentence|label", "so , so |0"], SentenceRecord(2, "so , so ", None, 0.0)),
    (
        *("mrpc", "msr_paraphrase_train.txt"),
        ["\ufeffQuality|#1 ID|#2 ID|#1 String|#2 String", '1|7|8|A "x|"B'],
        SentenceRecord(2, 'A "x', '"B', 1.0),
    ),
    (
        *("qqp", "train.tsv"),
        ["id|qid1|qid2|question1|question2|is_duplicate", "1|2|3|Why?|How?|1"],
        SentenceRecord(2, "Why?", "How?", 1.0),
    ),
    ("stsb", "train.tsv", [STSB, "0|g|f|y|1|n|n|A.|B.|3.750"], SentenceRecord(2, "A.", "B.", 3.75)),
    ("stsb", "sts-dev.csv", [f'{STS}|5.000|A "m.|C.', f"{STS}|0.4|X|Y|x|x"], SentenceRecord(1, 'A "m.', "C.", 5.0)),
    (
        *("mnli", "dev_matched.tsv"),
        [f"{MNLI}|sentence1|sentence2|label1|gold_label", "0|1|2|3|4|5|6|7|A.|B.|neutral|entailment"],
        SentenceRecord(2, "A.", "B.", 1.0),
    ),
    (
        *("qnli", "dev.tsv"),
        ["index|question|sentence|label", "0|Who?|He.|not_entailment"],
        SentenceRecord(2, "Who?", "He.", 1.0),
    ),
    ("rte", "dev.tsv", ["index|sentence1|sentence2|label", "0|A.|B.|entailment"], SentenceRecord(2, "A.", "B.", 0.0)),
    ("rte", "dev.tsv", ["sentence1|sentence2|label", "A.|B.|entailment"], SentenceRecord(2, "A.", "B.", 0.0)),
    ("snli", "snli_1.0_dev.jsonl", [json.dumps(SNLI)], SentenceRecord(1, "A b.", "C d.", 2.0)),
    (
        *("sick-entailment", "SICK.txt#SemEval_set=TRIAL"),
        [SICK, "1|A|B|NEUTRAL|4.5|x|TRAIN", "2|C|D|ENTAILMENT|3.2|x|TRIAL"],
        SentenceRecord(3, "C", "D", 1.0),
    ),
    ("sick-relatedness", "SICK.txt", [SICK, "1|A|B|NEUTRAL|4.5|x|TRAIN"], SentenceRecord(2, "A", "B", 4.5)),
]


@pytest.mark.parametrize(("name", "file", "lines", "wanted"), PUBLISHED, ids=[f"{n}-{f}" for n, f, *_ in PUBLISHED])
def test_published_files_are_read_as_they_are(
    name: str, file: str, lines: list[str], wanted: SentenceRecord, tmp_path: Path
) -> None:
    write(tmp_path / file.split("#")[0], *(line.replace("|", "\t") for line in lines))
    records = read(name, tmp_path / file)
    assert records[0] == wanted
    assert len(records) == (1 if "#" in file else len(lines) - (wanted.line - 1))


def test_records_without_an_agreed_label_are_left_out_and_counted(tmp_path: Path) -> None:
    reported: list[str] = []
    path = write(tmp_path / "dev.jsonl", json.dumps(SNLI), json.dumps(SNLI | {"gold_label": "-"}), json.dumps(SNLI))
    assert len(known("snli").make(Wish(path), reported.append).read(path)) == 2
    assert (
        len(reported) == 1 and "of 3 records, skipped 1 that have no label that the annotators agreed on" in reported[0]
    )


def test_cut_off_lines_are_left_out_of_qqp_and_refused_elsewhere(tmp_path: Path) -> None:
    reported: list[str] = []
    path = write(tmp_path / "train.tsv", "sentence1\tsentence2\tlabel", "A\tB\t1", "A", "C\tD\t0")
    assert len(known("qqp").make(Wish(path), reported.append).read(path)) == 2
    assert "skipped 1 that are too short" in reported[0]
    with pytest.raises(TrainerError, match=r"train.tsv, line 3: no value in column sentence2"):
        read("mrpc", path)


def test_an_unknown_label_is_refused_by_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "dev.tsv", "sentence1\tsentence2\tlabel", "A\tB\tentailment", "A\tB\tentails")
    with pytest.raises(
        TrainerError, match=r"dev.tsv, line 3: label is 'entails', which is not one of entailment, not_"
    ):
        read("rte", path)
    train = write(tmp_path / "train.tsv", "sentence\tlabel", "A\tyes", "B\tno")
    dev = write(tmp_path / "own.tsv", "sentence\tlabel", "A\tmaybe")
    with pytest.raises(TrainerError, match=r"own.tsv, line 2: label is 'maybe', which is not one of no, yes"):
        task("sentence", train).read(dev)


@pytest.mark.parametrize("score", ["nan", "high", "1,5"])
def test_a_score_that_is_no_number_is_refused(score: str, tmp_path: Path) -> None:
    path = write(tmp_path / "dev.tsv", "sentence1\tsentence2\tlabel", f"A\tB\t{score}")
    with pytest.raises(TrainerError, match="line 2: label is '.*', which is not a number"):
        read("stsb", path)


# ---- a user's own ----------------------------------------------------------------------------------------------


def test_own_columns_in_every_format(tmp_path: Path) -> None:
    tsv = write(tmp_path / "a.tsv", "id\tbody\tkind", "1\tone\t10", "2\ttwo\t9")
    table = write(tmp_path / "a.csv", "body,id,kind", '"one",1,10', '"a ""b"",', 'two",2,9')
    lines = write(tmp_path / "a.jsonl", '{"body": "one", "kind": 10}', "", '{"body": "two", "kind": 9, "id": null}')
    for path, second in ((tsv, "two"), (table, 'a "b",\ntwo'), (lines, "two")):
        made = task("sentence", path, columns=Columns(("body",), "kind"))
        assert made.labels == ("9", "10")  # as numbers, not as texts
        assert [(r.first, r.target) for r in made.read(path)] == [("one", 1.0), (second, 0.0)]
        assert made.read(path)[1].line == (4 if path == table else 3 if path == tsv else 3)


def test_columns_that_are_not_there_are_named_with_those_that_are(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "id\tbody", "1\tone")
    with pytest.raises(
        TrainerError, match=r"has no columns sentence1, sentence2, only body, id: name them with --text-co"
    ):
        read("rte", path)


def test_a_tab_too_many_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "sentence\tlabel", "one\t1", "t\two\t0")
    with pytest.raises(TrainerError, match=r"line 3: 3 fields, but the first line has 2: is there an extra tab"):
        read("sst2", path)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.xlsx", "sentence", "unsupported file extension; use one of .tsv"),
        ("a.tsv", "", "has no row"),
        ("a.tsv", "sentence\tlabel\tsentence\nA\t1\tB\n", "line 1: column sentence appears twice"),
        ("a.jsonl", "[1]\n", "line 1: expected a JSON object"),
        ("a.jsonl", '{"sentence": "half \\ud83d"}\n', r"line 1: not JSON \(half a character, .ud83d"),
        ("a.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("a.csv", 'sentence,label\n"x,1\n', "not valid CSV"),
        ("gone.tsv", None, "gone.tsv cannot be read"),
    ],
)
def test_files_that_cannot_be_read(name: str, text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(TrainerError, match=said):
        read("sst2", tmp_path / name)


def test_one_label_alone_is_no_task(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "sentence\tlabel", "A\t1", "B\t1", "C\t ")  # a blank is no label
    with pytest.raises(
        TrainerError, match=r"has 1 label\(s\) in column label: name the right column with --label-column"
    ):
        task("sentence", path)


def test_numbers_are_asked_for_by_regression(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "sentence\tlabel", "A\t1", "B\t2.5")
    made = task("sentence", path, regression=True)
    assert made.labels == () and made.outputs == 1 and made.measure == "pearson"
    assert task("sentence", path, regression=True, measure="spearman").measure == "spearman"
    with pytest.raises(TrainerError, match="--measure f1 is not a metric of sentence: use one of pearson, spearman"):
        task("sentence", path, regression=True, measure="f1")


def test_a_folder_of_data_has_its_files_under_their_own_names(tmp_path: Path) -> None:
    write(tmp_path / "train.tsv", "x")
    write(tmp_path / "dev_matched.tsv", "x")
    write(tmp_path / "dev_mismatched.tsv", "x")
    write(tmp_path / "SICK.txt", "x")
    common = ["--model", "m", "--out", "o", "--data", str(tmp_path)]
    options = parse(["--task", "mnli", *common])
    assert (options.dev.name, [path.name for path in options.also]) == ("dev_matched.tsv", ["dev_mismatched.tsv"])
    assert options.test is None
    assert parse(["--task", "sick-entailment", *common]).dev.name == "SICK.txt#SemEval_set=TRIAL"
    with pytest.raises(TrainerError, match=r"--dev is not given, and .* contains none of dev.tsv, dev.jsonl"):
        parse(["--task", "rte", *common])
    own = parse(["--task", "rte", *common, "--dev", "x.csv", "--text-columns", "a,b", "--label-column", "c"])
    assert own.wish.columns == Columns(("a", "b"), "c") and own.dev == Path("x.csv")
    with pytest.raises(TrainerError, match="--label-column is given alone"):
        parse(["--task", "rte", *common, "--dev", "x.csv", "--label-column", "c"])
    with pytest.raises(TrainerError, match="--task nli is not known: name one of cola, "):
        parse(["--task", "nli", *common])


# ---- tokens ----------------------------------------------------------------------------------------------------


def google_cuts(first: list[int], second: list[int], longest: int) -> tuple[list[int], list[int]]:
    """google-research/bert's run_classifier.py, _truncate_seq_pair, in its own words."""
    first, second = list(first), list(second)
    while len(first) + len(second) > longest - 3:
        if len(first) > len(second):
            first.pop()
        else:
            second.pop()
    return first, second


def test_pairs_are_cut_as_google_cuts_them() -> None:
    for a in range(0, 12):
        for b in range(0, 12):
            for longest in range(4, 20):
                first, second = list(range(a)), list(range(100, 100 + b))
                assert cut(first, second, longest) == google_cuts(first, second, longest), (a, b, longest)
    assert cut(list(range(9)), None, 6) == ([0, 1, 2, 3], None)


def test_tokens_are_those_of_bert(tmp_path: Path) -> None:
    encoder = load_tokenizer(tokenizer_folder(tmp_path)).encoder
    path = write(tmp_path / "dev.tsv", "sentence1\tsentence2\tlabel", "BAMES ba [SEP]\tgo me, dení\t0")
    made = task("mrpc", path)
    [[[example]]] = [made.units(record, encoder, 20, False) for record in made.read(path)]
    said = " ".join(PIECES[token] for token in example.tokens)
    assert said == "[CLS] bame ##s [UNK] [UNK] [UNK] [UNK] [SEP] [UNK] [UNK] , deni [SEP]"
    assert example.segments == (0,) * 8 + (1,) * 5 and example.targets == (0.0,)


# ---- metrics ---------------------------------------------------------------------------------------------------


def classes(kind: int, count: int, most: int) -> NDArray[np.int64]:
    return (bits(31, kind, np.arange(count)) % np.uint64(most)).astype(np.int64)


def answers(count: int, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Gold labels, and predictions of which a third are random other classes."""
    gold = classes(1, count, most)
    return gold, np.where(classes(2, count, 3) == 0, classes(3, count, most), gold)


def numbers(kind: int, count: int) -> NDArray[np.float64]:
    return (bits(37, kind, np.arange(count)) % np.uint64(26)).astype(np.float64) / 5


@pytest.mark.parametrize(  # of scikit-learn 1.9.1: accuracy_score; f1_score of class 1, macro; matthews_corrcoef
    ("most", "wanted"),
    [
        (2, (0.7938144329896907, 0.8148148148148148, 0.7911283376399656, 0.58501340680631)),
        (3, (0.7216494845360825, 0.6666666666666666, 0.7193732193732193, 0.5891194517310246)),
        (5, (0.7319587628865979, 0.7222222222222222, 0.7256565656565657, 0.665466690327705)),
    ],
)
def test_metrics_of_classes_are_scikit_learns(most: int, wanted: tuple[float, ...]) -> None:
    pair = answers(97, most)
    ours = [task_metrics.TASK_METRICS[name](*pair) for name in ("accuracy", "f1", "macro_f1", "matthews")]
    assert ours == pytest.approx(wanted, abs=1e-14)


def test_correlations_are_scipys() -> None:
    gold = numbers(1, 53)
    said = np.round((gold + numbers(2, 53)) * 2) / 2  # many are equal
    assert task_metrics.pearson(gold, said) == pytest.approx(0.7245758420019432, abs=1e-14)  # SciPy 1.17.1: pearsonr
    assert task_metrics.spearman(gold, said) == pytest.approx(0.7187147590362793, abs=1e-14)  # spearmanr
    assert task_metrics.spearman(gold, gold**3) == pytest.approx(1.0, abs=1e-14)


def test_metrics_of_what_does_not_vary() -> None:
    gold, said = np.array([0, 1, 1, 0]), np.zeros(4, np.int64)
    assert (task_metrics.f1(gold, said), task_metrics.matthews(gold, said)) == (0.0, 0.0)  # as in scikit-learn
    assert task_metrics.macro_f1(gold, said) == pytest.approx(1 / 3)
    assert np.isnan(task_metrics.pearson(gold.astype(float), said.astype(float)))  # as in SciPy


def test_scores_and_predictions_belong_to_their_records(tmp_path: Path) -> None:
    lines = ["A\tB\tneutral", "A\tB\tentailment", "A\tB\t"]
    path = write(tmp_path / "dev.tsv", "sentence1\tsentence2\tlabel", *lines)
    made = task("mnli", path)
    records = made.read(path)
    said = [np.array([row], np.float32) for row in ([0.0, 0.0, 2.0], [3.0, 0.0, 0.0], [0.0, 0.0, 1.0])]
    assert made.score(records, [], said) == {"accuracy": 0.5}  # the last one is not known
    rows = made.predictions(records, [], said)
    assert [row["prediction"] for row in rows] == ["neutral", "contradiction", "neutral"]
    assert [row.get("label") for row in rows] == ["neutral", "entailment", None]
    assert rows[0]["probability"] == pytest.approx(np.exp(2) / (np.exp(2) + 2), abs=1e-6)


def test_the_loss_of_numbers_is_each_records_own_squared_error(tmp_path: Path) -> None:
    """The losses are summed, because the counts divide them later."""
    path = write(tmp_path / "dev.tsv", "sentence1\tsentence2\tlabel", "A\tB\t2", "A\tB\t5")
    made, encoder = task("stsb", path), load_tokenizer(tokenizer_folder(tmp_path)).encoder
    units = [unit for record in made.read(path) for unit in made.units(record, encoder, 20, True)]
    loss = made.loss(torch.tensor([[1.0], [3.0]]), collate(units, [0, 1], made.dtype))
    assert float(loss) == (1 - 2) ** 2 + (3 - 5) ** 2


def test_every_task_has_a_recipe_that_bert_can_take() -> None:
    assert {"cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "snli"} <= TASKS.keys()
    assert all(entry.recipe.length <= 512 for entry in TASKS.values())
