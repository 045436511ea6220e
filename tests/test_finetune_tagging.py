"""Token tagging: words to pieces and back, CoNLL's files, and entities as seqeval counts them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.helpers.finetune_toys import CLS, FIRST, SEP, UNK, answers, learn, tiny, vocabulary, without_gradient
from trainer.errors import TrainerError
from trainer.finetune.entities import entities, entity_metrics
from trainer.finetune.tagging import Sentence, TagTask, _windows
from trainer.finetune.task import collate

# Made with seqeval 1.2.2 (scikit-learn 1.9.1, numpy 2.4.6):
# [(row, seqeval.metrics.sequence_labeling.get_entities(row.split())) for row in rows]
SEQEVAL = [
    ("I-PER I-PER O", [("PER", 0, 1)]),
    ("O I-PER I-PER", [("PER", 1, 2)]),
    ("B-PER I-LOC I-LOC", [("PER", 0, 0), ("LOC", 1, 2)]),
    ("B-PER B-PER I-PER", [("PER", 0, 0), ("PER", 1, 2)]),
    ("I-PER B-PER O I-PER", [("PER", 0, 0), ("PER", 1, 1), ("PER", 3, 3)]),
    ("B-LOC I-PER B-LOC", [("LOC", 0, 0), ("PER", 1, 1), ("LOC", 2, 2)]),
    ("O O", []),
    ("I-LOC", [("LOC", 0, 0)]),
    ("B-PER O I-PER", [("PER", 0, 0), ("PER", 2, 2)]),
    ("I-PER I-LOC I-PER", [("PER", 0, 0), ("LOC", 1, 1), ("PER", 2, 2)]),
    ("B-MISC I-MISC B-LOC I-LOC", [("MISC", 0, 1), ("LOC", 2, 3)]),
    ("B-PER I-PER I-PER B-LOC", [("PER", 0, 2), ("LOC", 3, 3)]),
]
# precision_score, recall_score, f1_score and classification_report of the same version, gold against said.
GOLD = ["B-PER I-PER O B-LOC", "O B-ORG I-ORG O", "B-LOC O", "O O B-MISC"]
SAID = ["I-PER I-PER O B-LOC", "O B-ORG O I-ORG", "B-PER O", "O O O"]
METRICS = {"f1": 0.4, "precision": 0.4, "recall": 0.4, "f1.PER": 2 / 3, "precision.PER": 0.5, "recall.PER": 1.0}
METRICS |= {"f1.LOC": 2 / 3, "precision.LOC": 1.0, "recall.LOC": 0.5}
METRICS |= {f"{name}.{kind}": 0.0 for name in ("f1", "precision", "recall") for kind in ("ORG", "MISC")}

CONLL = "-DOCSTART- -X- -X- O\n\nEU NNP I-NP {}\nrejects VBZ I-VP O\n\nPeter NNP I-NP {}\nBlackburn NNP I-NP {}\n\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return vocabulary(tmp_path_factory.mktemp("tag") / "words", "eu re ##ject ##s u . n peter black ##burn")


def task(*labels: str) -> TagTask:
    return TagTask(("O", *labels), print)


def sentence(words: str, tags: str) -> Sentence:
    return Sentence(7, tuple(words.split(" ")), tuple(tags.split()), range(1, 99))


def write(folder: Path, text: str, name: str = "train.txt") -> Path:
    (folder / name).write_text(text, "utf-8", newline="")
    return folder / name


# ---- entities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tags", "found"), SEQEVAL)
def test_entities_are_seqevals(tags: str, found: list[tuple[str, int, int]]) -> None:
    assert entities(tags.split()) == found


def test_metrics_are_seqevals() -> None:
    metrics = entity_metrics([row.split() for row in GOLD], [row.split() for row in SAID])
    assert metrics == pytest.approx(METRICS, abs=1e-15)


# ---- features ------------------------------------------------------------------------------------------------


def test_a_words_label_stands_on_its_first_piece(tokenizer: Tokenizer) -> None:
    record = sentence("EU rejects U.N. \u200b ☃ Blackburn", "B-ORG O B-ORG O O B-PER")
    [(example,)] = task("B-ORG", "B-PER").units(record, tokenizer, 64, training=True)
    eu, re, ject, s, u, dot, n, _, black, burn = range(FIRST, FIRST + 10)
    assert example.tokens == (CLS, eu, re, ject, s, u, dot, n, dot, UNK, black, burn, SEP)
    assert example.segments == (0,) * 13
    assert example.places == (1, 2, 5, 9, 10)  # none of the zero-width space, which yields no piece
    assert example.targets == (1, 0, 1, 0, 2)
    assert example.origin == (7, [0, 1, 2, 4, 5])


def test_case_is_kept_where_the_vocabulary_has_it(tmp_path: Path) -> None:
    cased = vocabulary(tmp_path / "cased", "EU eu É", cased=True)
    [(example,)] = task().units(sentence("EU eu Eu É", "O O O O"), cased, 64, training=True)
    assert example.tokens == (CLS, FIRST, FIRST + 1, UNK, FIRST + 2, SEP)


def test_a_long_sentence_is_cut_between_words_and_each_is_asked_for_once(tokenizer: Tokenizer) -> None:
    record = sentence("eu rejects \u200b u.n.u.n. peter blackburn eu", "B-A O O I-A B-B I-B O")
    made = task("B-A", "B-B", "I-A", "I-B").units(record, tokenizer, 6, training=True)
    assert [unit[0].origin[1] for unit in made] == [[0, 1], [3], [4, 5, 6]]  # of 4, 8 and 4 pieces
    assert [unit[0].places for unit in made] == [(1, 2), (1,), (1, 2, 4)]
    assert [unit[0].targets for unit in made] == [(1, 0), (3,), (2, 4, 0)]
    assert all(len(unit[0].tokens) == 6 for unit in made)


def test_a_window_has_as_many_pieces_as_there_is_room_for_and_no_more() -> None:
    assert list(_windows([[1, 2], [3, 4]], 4)) == [[0, 1]]
    assert list(_windows([[1, 2], [3, 4, 5]], 4)) == [[0], [1]]


def test_a_sentence_of_nothing_visible_is_outside(tokenizer: Tokenizer) -> None:
    seen, unseen = sentence("eu", "B-A"), Sentence(8, ("\u200b",), ("O",), (9,))
    kind = task("B-A")
    assert kind.units(unseen, tokenizer, 8, training=True) == []
    made = kind.units(seen, tokenizer, 8, training=True)
    assert kind.tags([unseen, seen], made, [np.array([[0, 1]], np.float32)]) == [["O"], ["B-A"]]
    assert kind.score([unseen, seen], made, [np.array([[1, 0]], np.float32)])["accuracy"] == 0.5


# ---- files ---------------------------------------------------------------------------------------------------


def test_conlls_own_files_are_read_and_brought_to_bio(tmp_path: Path) -> None:
    reported: list[str] = []
    iob1 = write(tmp_path, CONLL.format("I-ORG", "I-PER", "B-PER") + "New\u00a0York NNP I-NP I-LOC\r\n", "iob1.txt")
    kind = TagTask.of(iob1, reported.append)
    assert kind.labels == ("O", "B-LOC", "B-ORG", "B-PER", "I-LOC", "I-ORG", "I-PER") and not reported
    assert kind.read(write(tmp_path, CONLL.format("I-ORG", "I-PER", "I-PER")))[1].tags == ("B-PER", "I-PER")
    with pytest.raises(TrainerError, match="has the tag B-MISC"):
        kind.read(write(tmp_path, CONLL.format("I-ORG", "I-PER", "I-MISC")))
    records = kind.read(iob1)
    assert [record.tags for record in records] == [("B-ORG", "O"), ("B-PER", "B-PER"), ("B-LOC",)]
    assert [record.number for record in records] == [0, 1, 2]
    assert [list(record.lines) for record in records] == [[3, 4], [6, 7], [9]]
    assert len(reported) == 3 and str(iob1) in reported[2] and "IOB1" in reported[2]


def test_bio_is_left_as_it_is_and_json_lines_say_the_same(tmp_path: Path) -> None:
    reported: list[str] = []
    bio = write(tmp_path, CONLL.format("B-ORG", "B-PER", "I-PER"))
    first = TagTask.of(bio, reported.append).read(bio)
    rows = [{"tokens": record.words, "ner_tags": record.tags} for record in first]
    lines = write(tmp_path, "\n".join(map(json.dumps, rows)), "train.jsonl")
    second = TagTask.of(lines, reported.append).read(lines)
    assert [(r.words, r.tags) for r in first] == [(r.words, r.tags) for r in second]
    assert first[1].words == ("Peter", "Blackburn") and first[1].tags == ("B-PER", "I-PER") and not reported


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.txt", "EU B-A\nrejects\n", "line 2: 1 columns instead of 2"),
        ("a.txt", "EU X B-A\nrejects O\n", "line 2: 2 columns instead of 3"),
        ("a.txt", "EU S-A\n", "line 1: tag 'S-A' is none of O, B-TYPE and I-TYPE"),
        ("a.txt", "EU B-A\n\nof O\nPeter I-A\n", "line 4: an I- begins an entity here, and a B- does at line 1"),
        ("a.txt", "\n-DOCSTART- O\n", "has no sentences"),
        ("a.txt", "EU O\n", "no word has a tag other than O"),
        ("a.jsonl", '{"tokens": ["EU"], "ner_tags": ["B-A"]}\n{"tokens": ["EU"]\n', "line 2: not JSON"),
        ("a.jsonl", '{"tokens": ["EU"], "ner_tags": [3]}\n', 'line 1: "ner_tags" must be a list of strings'),
        ("a.jsonl", '\n{"tokens": ["EU", "x"], "ner_tags": ["B-A"]}\n', "line 2: 2 tokens and 1 ner_tags"),
        ("a.jsonl", "[]\n", "line 1: expected a JSON object, got list"),
    ],
)
def test_bad_files_are_refused_by_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(TrainerError) as refused:
        TagTask.of(write(tmp_path, text, name))
    assert said in str(refused.value) and name in str(refused.value)


def test_text_that_is_not_utf8_is_refused_by_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"EU O\n\xe9t\xe9 O\n")
    with pytest.raises(TrainerError, match=r"a\.txt, line 2: not UTF-8"):
        TagTask.of(tmp_path / "a.txt")


def test_a_label_that_training_does_not_know_is_refused(tmp_path: Path) -> None:
    dev = write(tmp_path, "in O\nParis B-LOC\n", "dev.txt")
    with pytest.raises(TrainerError, match=r"dev\.txt, line 2: 'Paris' has the tag B-LOC; .* O, B-PER"):
        task("B-PER").read(dev)


# ---- learning ------------------------------------------------------------------------------------------------


def test_the_loss_is_the_words_cross_entropies(tokenizer: Tokenizer) -> None:
    kind = task("B-A", "B-B")
    records = [sentence("eu rejects peter", "B-A O B-B"), sentence("blackburn", "B-B")]
    units = [unit for record in records for unit in kind.units(record, tokenizer, 64, training=True)]
    scores = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    wanted = -sum(row.log_softmax(0)[label] for row, label in zip(scores, (1, 0, 2, 2), strict=True))
    assert kind.loss(scores, collate(units, [0, 1], kind.dtype)).item() == pytest.approx(float(wanted), rel=1e-6)
    assert [kind.count(unit) for unit in units] == [3, 1]
    assert without_gradient(tiny(kind, tokenizer.get_vocab_size()), units) == []


@pytest.mark.slow
def test_a_tiny_model_learns_who_follows_whom(tokenizer: Tokenizer) -> None:
    """Peter is a person, and so is the word next to him; EU is a person nowhere else."""
    kind, draw = task("B-PER", "I-PER"), random.Random(0)
    rows = []
    for number in range(68):
        words: list[str] = []
        tags: list[str] = []
        while len(words) < 6:
            peter, other = draw.random() < 0.4, draw.choice(["eu", "n", "u"])
            words += ["peter", other] if peter else [other]
            tags += ["B-PER", "I-PER"] if peter else ["O"]
        rows.append(Sentence(number, tuple(words), tuple(tags), (1,) * len(words)))
    model = tiny(kind, tokenizer.get_vocab_size())
    units = [unit for record in rows[:48] for unit in kind.units(record, tokenizer, 64, training=True)]
    held_out = [unit for record in rows[48:] for unit in kind.units(record, tokenizer, 64, training=False)]
    before = kind.score(rows[48:], held_out, answers(model, held_out))["f1"]
    learn(model, units, 50)
    metrics = kind.score(rows[48:], held_out, said := answers(model, held_out))
    assert before < 0.5 and metrics["f1"] > 0.95 and metrics["f1.PER"] == metrics["f1"]
    assert kind.predictions(rows[48:], held_out, said)[0]["tokens"] == list(rows[48].words)


def test_sentences_without_tags_are_asked_but_not_judged(tokenizer: Tokenizer, tmp_path: Path) -> None:
    kind = task("B-A")
    [record] = kind.read(write(tmp_path, '{"tokens": ["eu", "u.n."]}', "test.jsonl"))
    units = kind.units(record, tokenizer, 64, training=False)
    said = [np.array([[0, 1], [1, 0]], np.float32)]
    assert kind.count(units[0]) == 0
    assert kind.predictions([record], units, said) == [{"tokens": ["eu", "u.n."], "ner_tags": ["B-A", "O"]}]
    with pytest.raises(TrainerError, match="no sentence with tags"):
        kind.score([record], units, said)
