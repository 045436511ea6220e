"""Question answering: windows, characters to pieces and back, the loss over a window's own places, SQuAD's metrics."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from tests.helpers.finetune_toys import CLS, FIRST, SEP, answers, learn, tiny, vocabulary, without_gradient
from trainer.errors import TrainerError
from trainer.finetune.characters import whole_characters
from trainer.finetune.question_answering import AnswerTask, best_span, most_context, windows
from trainer.finetune.questions import Question
from trainer.finetune.squad import best_thresholds, exact_match, f1, normalise, squad_metrics
from trainer.finetune.task import Unit, collate

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = f"{' '.join(LETTERS)} {' '.join(f'##{letter}' for letter in LETTERS)} . , ' 京 陳 ᄒ ##ᅡ ##ᆫ ß ##ß"


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return vocabulary(tmp_path_factory.mktemp("answer") / "letters", PIECES)


def asked(question: str, context: str, answer: str | None = None, number: int = 0) -> Question:
    gold = () if answer is None else ((answer, context.index(answer)),)
    return Question(number, f"q{number}", question, context, gold, "here")


def perfect(units: list[Unit]) -> list[np.ndarray[Any, Any]]:
    """Scores that say what the targets say."""
    made = []
    for (example,) in units:
        scores = np.zeros((len(example.places), 2), np.float32)
        scores[[int(target) for target in example.targets], [0, 1]] = 5
        made.append(scores)
    return made


# ---- metrics -------------------------------------------------------------------------------------------------


def test_texts_are_compared_as_the_official_script_does() -> None:
    assert normalise("The  Cat's, (a) dog!") == "cats dog"
    assert normalise("An anthem\u00a0— theatre") == "anthem — theatre"  # words that begin like articles, and a dash
    assert exact_match("the Cat", ["dog", "cat."]) == 1 and exact_match("cats", ["cat"]) == 0
    assert f1("the cat sat", ["cat", "dog"]) == pytest.approx(2 / 3)  # 1 of 2, 1 of 1
    assert f1("cat cat sat", ["cat cat cat dog"]) == pytest.approx(2 * 2 / (3 + 4))  # as often as in both
    assert f1("b c", ["x", "b c d", "b"]) == pytest.approx(0.8)
    assert (f1("", []), exact_match("", []), f1("x", []), exact_match("x", [])) == (1, 1, 0, 0)
    assert (f1("", ["x"]), exact_match("", ["the"])) == (0, 1)  # a gold answer of only an article counts as none


def test_metrics_are_means_over_both_kinds_of_questions() -> None:
    metrics = squad_metrics(["a cat", "cat sat", "", "x"], [["cat"], ["cat"], [], []])
    assert metrics["exact_match"] == 0.5 and metrics["f1"] == pytest.approx((1 + 2 / 3 + 1 + 0) / 4)
    assert metrics["f1.answered"] == pytest.approx(5 / 6) and metrics["exact_match.answered"] == 0.5
    assert metrics["f1.unanswerable"] == metrics["exact_match.unanswerable"] == 0.5
    assert set(squad_metrics(["cat"], [["cat"]])) == {"f1", "exact_match"}


def test_the_best_threshold_takes_equal_margins_together() -> None:
    said, golds = ["cat", "dog", "dog sat", "x"], [["cat"], [], ["dog"], []]
    found = best_thresholds(said, [-3.0, 1.0, 1.0, 2.0], golds)
    # None answered: 2 of 4 right. Up to -3: 3. Up to 1, "dog" and "dog sat" together: 2 + 2/3. All: 1 + 2/3.
    assert found["best_f1"] == found["best_exact_match"] == 0.75
    assert found["best_f1_threshold"] == found["best_exact_match_threshold"] == -3.0
    assert best_thresholds(["dog sat", "dog"], [1.0, 1.0], [["dog"], []])["best_f1"] == 0.5  # none: 1 of 2. Both: 2/3
    nothing = best_thresholds(["x", "y"], [0.5, 0.25], [[], []])
    assert nothing["best_f1"] == 1 and nothing["best_f1_threshold"] < 0.25


# ---- windows -------------------------------------------------------------------------------------------------


def test_windows_are_those_of_google_research_bert() -> None:
    assert windows(800, 360, 128) == [(0, 360), (128, 488), (256, 616), (384, 744), (512, 800)]
    assert windows(360, 360, 128) == [(0, 360)] and windows(0, 9, 4) == [(0, 0)]
    assert windows(10, 6, 128) == [(0, 6), (3, 9), (6, 10)]  # not 128 apart, which would part every sixth from its next
    assert windows(3, 1, 128) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize(("pieces", "room", "stride"), [(800, 360, 128), (20, 6, 2), (11, 4, 2), (5, 9, 3), (0, 4, 2)])
def test_each_piece_belongs_to_the_window_with_most_context(pieces: int, room: int, stride: int) -> None:
    spans = windows(pieces, room, stride)
    owners = []
    for piece in range(pieces):  # google-research/bert's rule, in its own words: _check_is_max_context
        best, owner = None, None
        for number, (start, stop) in enumerate(spans):
            if start <= piece < stop:
                context = min(piece - start, stop - 1 - piece) + 0.01 * (stop - start)
                if best is None or context > best:
                    best, owner = context, number
        owners.append(owner)
    assert most_context(spans, pieces).tolist() == owners


def test_features_by_hand(letters: Tokenizer) -> None:
    """7 tokens hold a question of 1 and 3 of the context, in windows of 2 apart."""
    a, b, c, d, e = range(FIRST, FIRST + 5)
    task = AnswerTask(unanswerable=True, longest_question=1)
    made = task.units(asked("e d", "a b c d", "c d"), letters, 7, training=True)
    assert [unit[0].tokens for unit in made] == [(CLS, e, SEP, a, b, c, SEP), (CLS, e, SEP, c, d, SEP)]
    assert made[1][0].segments == (0, 0, 0, 1, 1, 1) and made[1][0].places == (0, 3, 4)
    assert [unit[0].targets for unit in made] == [(0, 0), (1, 2)]  # the first window has half of it: none
    assert [task.count(unit) for unit in made] == [1, 1]
    [unit] = task.units(asked("e d", "a b"), letters, 7, training=True)
    assert unit[0].targets == (0, 0)
    with pytest.raises(TrainerError, match="here: 4 tokens leave no room"):
        task.units(asked("e", "a"), letters, 4, training=True)


ODD = [
    ("Chén Jīng, a Đe", "Jīng"),
    ("at ch\u0065\u0301n b", "ch\u0065\u0301n"),  # an accent of its own: a character that vanishes
    ("b陳京c d", "京"),
    ("b陳京c d", "陳京"),
    ("a \u00a0\u2003 bc\u200bd\u3000 e", "bc\u200bd"),  # odd spaces, and one of no width inside
    ("İstanbul is big", "İstanbul"),  # two characters in lower case
    ("a 한 b", "한"),  # three pieces in one character
    ("Straße 'x'", "Straße"),
    ("a\tb\r\nc", "b\r\nc"),
    ("x \U0001d11e y z", "y"),  # behind a character of two UTF-16 units
]


@pytest.mark.parametrize(("context", "answer"), ODD)
def test_an_answer_comes_back_as_its_very_characters(letters: Tokenizer, context: str, answer: str) -> None:
    task, record = AnswerTask(), asked("q", context, answer)
    units = task.units(record, letters, 64, training=True)
    assert units[0][0].targets != (0, 0)
    assert [one.text for one in task.found([record], units, perfect(units))] == [answer]
    assert task.score([record], units, perfect(units)) == {"f1": 1.0, "exact_match": 1.0}


SCRIPTS = [  # context, answer
    ("Café de Flore was opened by André", "Café"),
    ("Café de Flore was opened by André", "André"),
    ("in Việt Nam, Huế", "Việt"),  # two marks on one letter
    ("in Việt Nam, Huế", "Huế"),
    ("שָׁלוֹם עוֹלָמָ", "שָׁלוֹם"),
    ("שָׁלוֹם עוֹלָמָ", "עוֹלָמָ"),
    ("قَالَ مَرْحَبًا", "قَالَ"),
    ("قَالَ مَرْحَبًا", "مَرْحَبًا"),
    ("कुलु में नमस्ते", "कुलु"),
    ("कुलु में नमस्ते", "में"),
    ("ไม่ ไม้", "ไม้"),
    ("한국 사람", "한국"),
    ("한국 사람", "사람"),
    ("কো নো", "কো"),  # its vowel sign is one code point or two, which the tokenizer keeps
    ("ന്\u200d അവന്\u200d", "ന്\u200d"),  # Malayalam's old way to write a final consonant
    ("പാക്\u200c ക", "പാക്\u200c"),
    ("کتاب\u200cها", "کتاب"),  # a plural: the joiner between is neither's
    ("q\u0307\u0323x q\u0307\u0323", "q\u0307\u0323"),  # a letter that is composed nowhere
    ("\u0301ab c", "\u0301ab"),  # marks without a letter before them
    ("c \u0301\u0302ab", "\u0301\u0302ab"),
    ("c \u0301ab", "c"),
    ("a☎\ufe0f b", "a☎\ufe0f"),
]


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize(("context", "answer"), SCRIPTS)
def test_an_answer_keeps_the_marks_that_the_tokenizer_strips(
    tmp_path: Path, context: str, answer: str, form: Literal["NFC", "NFD"]
) -> None:
    bare = unicodedata.normalize("NFD", "".join(context for context, _ in SCRIPTS)).lower()
    characters = sorted({c for c in bare if unicodedata.category(c) not in ("Mn", "Cf") and c.strip()})
    tokenizer = vocabulary(tmp_path / "all", " ".join([*characters, *(f"##{c}" for c in characters)]))
    context, answer = unicodedata.normalize(form, context), unicodedata.normalize(form, answer)
    task, record = AnswerTask(), asked("q", context, answer)
    units = task.units(record, tokenizer, 64, training=True)
    assert units[0][0].targets != (0, 0) and tokenizer.token_to_id("[UNK]") not in units[0][0].tokens[3:]
    assert [one.text for one in task.found([record], units, perfect(units))] == [answer]


@pytest.mark.parametrize("context", ["한국어 각", "কো নো কে", "Việt Huế", "ĝâ Ǖb", "שָׁלוֹם", "ᬓ\u1b43ᬓ"])
def test_every_span_is_the_same_of_a_composed_and_a_decomposed_text(context: str) -> None:
    """No span separates what one code point is in the composed text; nor does an unknown word, or kept accents."""
    composed, decomposed = (unicodedata.normalize(form, context) for form in ("NFC", "NFD"))
    kept = [c for c in unicodedata.normalize("NFD", context).lower() if unicodedata.category(c) != "Mn" and c != " "]
    for pieces in (kept, kept[:2]):
        names = dict.fromkeys(["[UNK]", *pieces, *(f"##{piece}" for piece in pieces)])
        encoder = Tokenizer(WordPiece({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
        encoder.normalizer, encoder.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
        spans = []
        for text in (composed, decomposed):
            found = encoder.encode(text)
            own = whole_characters(text, np.array(found.offsets, np.int64))
            ends = [(a, b) for a in range(len(own)) for b in range(a, len(own))]
            cut = [unicodedata.normalize("NFC", text[own[a, 0] : own[b, 1]]) for a, b in ends]
            spans.append((found.ids, cut))
        assert spans[0] == spans[1]


def test_the_trainer_that_ours_is_compared_with_gets_the_answers_tokens(letters: Tokenizer) -> None:
    """Our targets count a window's places, transformers' class counts tokens."""
    from tests.tools.finetune_against_transformers import Features

    task = AnswerTask(stride=2)
    units = task.units(asked("a b", "c d e f g h", "e f"), letters, 9, training=True)
    shown = Features(units, task).rows
    found = [row["input_ids"][row["start_positions"] : row["end_positions"] + 1] for row in shown]
    answer = letters.encode("e f", add_special_tokens=False).ids
    assert answer in found and all(tokens in (answer, [letters.token_to_id("[CLS]")]) for tokens in found)


def test_an_answer_that_is_no_piece_cannot_be_learnt(letters: Tokenizer) -> None:
    record = asked("q", "a \u200b b", "\u200b")
    with pytest.raises(TrainerError, match="here: the vocabulary has no piece for its answer"):
        AnswerTask().units(record, letters, 64, training=True)
    assert AnswerTask().units(record, letters, 64, training=False)[0][0].targets == (0, 0)
    empty = asked("q", "\u200b")
    units = AnswerTask(unanswerable=True).units(empty, letters, 64, training=True)
    assert units[0][0].tokens[-2:] == (SEP, SEP) and units[0][0].places == (0,)
    assert [one.text for one in AnswerTask().found([empty], units, perfect(units))] == [""]


# ---- answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [1, 3, 30])
def test_the_best_span_is_that_of_trying_all(longest: int) -> None:
    draw = np.random.default_rng(longest)
    for pieces in (1, 2, 7, 40):
        scores, begins = draw.normal(size=(pieces, 2)), draw.random(pieces) < 0.6
        begins[draw.integers(pieces)] = True
        every = [(a, b) for a in range(pieces) for b in range(a, min(a + longest, pieces)) if begins[a]]
        first, last = max(every, key=lambda span: scores[span[0], 0] + scores[span[1], 1])
        assert best_span(scores, begins, longest) == (scores[first, 0] + scores[last, 1], first, last)
    assert best_span(scores, np.zeros(40, bool), longest)[0] == -np.inf


def test_a_window_speaks_only_for_pieces_that_it_shows_best_and_nothing_must_beat_the_span(letters: Tokenizer) -> None:
    """Context a b c d e f in windows a b c d, c d e f: c is shown best by the first, d by the second."""
    record = asked("q", "a b c d e f", "e")
    task = AnswerTask(unanswerable=True, stride=2)
    units = task.units(record, letters, 8, training=False)
    first, second = (np.zeros((5, 2), np.float32) for _ in range(2))
    second[1, 0] = 9  # c, in the window that shows it at its edge
    first[3, 0], first[4, 1] = 2, 2  # c to d, where it counts
    first[0], second[0] = (3, 2), (1, 2)  # nothing, at least 3
    assert task.found([record], units, [first, second]) == [("c d", 3 - 4)]
    for threshold, said in ((0.0, "c d"), (-1.0, "c d"), (-1.5, "")):
        task = AnswerTask(unanswerable=True, stride=2, threshold=threshold)
        [row] = task.predictions([record], units, [first, second])
        assert row == {"id": "q0", "prediction": said, "span": "c d", "margin": -1.0}
        metrics = task.score([record], units, [first, second])
        assert metrics["exact_match"] == 0 and metrics["best_f1"] == 0
    assert AnswerTask(stride=2).predictions([record], units, [first, second]) == [{"id": "q0", "prediction": "c d"}]


# ---- learning ------------------------------------------------------------------------------------------------


def test_the_loss_is_over_a_windows_own_places_and_repeats_bit_for_bit(letters: Tokenizer) -> None:
    task = AnswerTask(unanswerable=True, stride=2)
    records = [asked("q r", "a b c d e f", "c"), asked("q", "d e", "d e"), asked("q", "d")]
    units = [unit for record in records for unit in task.units(record, letters, 9, training=True)]
    batch = collate(units, range(len(units)), task.dtype)
    scores = torch.randn(len(batch.places), 2, generator=torch.Generator().manual_seed(1), requires_grad=True)
    wanted, at = torch.zeros(()), 0
    for (example,) in units:
        own, at = scores[at : at + len(example.places)], at + len(example.places)
        first, last = (int(target) for target in example.targets)
        wanted = wanted - (own[:, 0].log_softmax(0)[first] + own[:, 1].log_softmax(0)[last]) / 2
    loss = task.loss(scores, batch)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    [plain], [own], [again] = (torch.autograd.grad(one, scores) for one in (wanted, loss, task.loss(scores, batch)))
    torch.testing.assert_close(own, plain)
    assert torch.equal(own, again) and len(units) == sum(map(task.count, units)) == 4
    assert without_gradient(tiny(task, letters.get_vocab_size()), units) == []


@pytest.mark.slow
def test_a_tiny_model_learns_to_answer_and_not_to(letters: Tokenizer) -> None:
    """The answer is the letter after the x; without an x, the question has no answer."""
    draw, task, records = random.Random(0), AnswerTask(unanswerable=True, stride=3), []
    for number in range(84):
        words = draw.sample("bcdefgh", 6)  # "a" is an article
        place = draw.choice((0, 1, 3, 4))  # of one window, with the answer; at 2, the second would show that alone
        if number % 3:
            words[place] = "x"
        records.append(asked("q", " ".join(words), words[place + 1] if number % 3 else None, number))
    units = [[unit for unit in task.units(record, letters, 9, training=True)] for record in records]
    seen, held_out = ([unit for own in part for unit in own] for part in (units[:60], units[60:]))
    assert len(held_out) == 2 * 24  # of 6 pieces in windows of 5
    model = tiny(task, letters.get_vocab_size())
    before = task.score(records[60:], held_out, answers(model, held_out))["f1"]
    learn(model, seen, 60)
    metrics = task.score(records[60:], held_out, answers(model, held_out))
    assert before < 0.5 and metrics["f1"] > 0.9
    assert metrics["f1.answered"] > 0.9 and metrics["f1.unanswerable"] > 0.9 and metrics["best_f1"] >= metrics["f1"]


# ---- files ---------------------------------------------------------------------------------------------------

OFFICIAL = {
    "version": "v2.0",
    "data": [
        {
            "title": "T",
            "paragraphs": [
                {
                    "context": "Chén was\u2028here.",
                    "qas": [
                        {"id": "1", "question": "Who?", "answers": [{"text": "Chén", "answer_start": 0}]},
                        {"id": "2", "question": "Why?", "answers": [], "is_impossible": True},
                        {"id": "3", "question": "When?"},
                    ],
                }
            ],
        }
    ],
}
LINE = {"id": "1", "question": "Who?", "context": "Chén was\u2028here."}
ANSWER = {"answers": {"text": ["Chén"], "answer_start": [0]}}


def write(folder: Path, text: str, name: str = "train.json") -> Path:
    (folder / name).write_text(text, "utf-8")
    return folder / name


@pytest.mark.parametrize("indent", [None, 2])
def test_the_official_file_and_json_lines_say_the_same(tmp_path: Path, indent: int | None) -> None:
    task = AnswerTask(unanswerable=True)
    official = task.read(write(tmp_path, json.dumps(OFFICIAL, indent=indent)))
    rows = [LINE | ANSWER, LINE | {"id": "2", "question": "Why?", "answers": []}, LINE | {"id": 3, "question": "When?"}]
    lines = task.read(write(tmp_path, "\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "train.jsonl"))
    for one, other in zip(official, lines, strict=True):
        assert (one.number, one.key, one.question) == (other.number, other.key, other.question)
        assert one.answers == other.answers and one.context == other.context == LINE["context"]
    assert [one.answers for one in official] == [(("Chén", 0),), (), None]
    assert lines[1].where.endswith("train.jsonl, line 2") and official[1].where.endswith("question 2")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1: not JSON"),
        ('{\n"data": [\n}', "line 3: not JSON"),
        (json.dumps(LINE | ANSWER) + "\n{", "line 2: not JSON"),
        (json.dumps({"data": [{"paragraphs": 3}]}), 'data[0]: "paragraphs" must be a list of objects'),
        (
            json.dumps(LINE | {"answers": [{"text": "was", "answer_start": 4}]}),
            "is not at 4, where the context has ' wa'",
        ),
        (json.dumps(LINE | {"answers": [{"text": "was"}]}), "answer_start is None; it must be a whole number"),
        (json.dumps(LINE | {"answers": [{"text": " ", "answer_start": 4}]}), "an answer is ' '"),
        (json.dumps(LINE | {"answers": {"text": ["Chén"], "answer_start": []}}), "1 answer texts, but 0 answer_start"),
        (json.dumps(LINE | ANSWER | {"is_impossible": True}), "is_impossible is True, with 1 answers"),
        (json.dumps(LINE | {"question": None}), 'line 1: "question" is None'),
        (json.dumps(LINE | ANSWER) + "\n" + json.dumps(LINE | ANSWER), "line 2: id 1 appears twice"),
        (json.dumps(LINE | {"answers": []}), "line 1: no answer; use the task squad2"),
    ],
)
def test_bad_files_are_refused_by_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TrainerError) as refused:
        AnswerTask().read(write(tmp_path, text))
    assert said in str(refused.value) and "train.json" in str(refused.value)


def test_questions_whose_answers_nobody_knows_are_answered_but_not_judged(letters: Tokenizer, tmp_path: Path) -> None:
    task = AnswerTask()
    [record] = task.read(write(tmp_path, json.dumps(LINE)))
    units = task.units(record, letters, 64, training=False)
    assert [task.count(unit) for unit in units] == [0]
    scores = np.arange(2 * len(units[0][0].places), dtype=np.float32).reshape(-1, 2)
    assert task.predictions([record], units, [scores]) == [{"id": "1", "prediction": "."}]
    with pytest.raises(TrainerError, match="no question with an answer"):
        task.score([record], units, [scores])
