"""Token tagging, as for named entities: a label for each word of a sentence, predicted from the word's first piece.

Two formats are read. CoNLL-2003's own has one word per line, in columns separated by blanks, the word first and its tag
last; an empty line separates sentences, ``-DOCSTART-`` documents; lines of one column are words without tags. JSON
lines look like {"tokens": ["EU", …], "ner_tags": ["B-ORG", …]}, without ner_tags if they are unknown. Tags are O,
B-TYPE and I-TYPE. A file in the scheme of 2003 (IOB1: B- only if an entity follows another of its type) is converted to
BIO, in which each entity begins with B-, and the conversion is reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from kernels.cross_entropy import cross_entropy
from trainer.console import Tell, say, silent
from trainer.errors import TrainerError
from trainer.finetune.entities import entities, entity_metrics
from trainer.finetune.formats import JSON_LINES
from trainer.finetune.label_counts import LabelCounts, count, says_nothing
from trainer.finetune.lines import json_objects, read_lines
from trainer.finetune.task import TaskBatch, Unit, pack

OUTSIDE = "O"
TAG = re.compile(r"O|[BI]-\S+")
BLANKS = re.compile(r"[ \t]+")  # not all white space: a word may contain other kinds, such as U+00A0


@dataclass(frozen=True)
class Sentence:
    """The words of a sentence and their tags, in BIO."""

    number: int  # in its file, from 0
    words: tuple[str, ...]
    tags: tuple[str, ...]  # one per word, "" if unknown; empty if all are unknown
    lines: Sequence[int]  # each word's line in the file


@dataclass(frozen=True)
class TagTask:
    """Predict a label for each word, scored by whole entities."""

    labels: tuple[str, ...]  # O first
    tell: Tell = say  # receives reports about a file
    no_label: tuple[str, ...] = ()  # tags that mean no label

    name = "ner"
    measure = "f1"
    pooled = False
    drops = True
    hidden_head = False
    dtype = torch.int64
    export_class = "BertForTokenClassification"

    @classmethod
    def of(cls, training: Path, tell: Tell = say, no_label: tuple[str, ...] = ()) -> TagTask:
        """Make the task: its labels are O, and B- and I- of each type in the training file. TrainerError without types.

        A small file may lack an I- tag that other files have: no entity of that type has two words in it.
        """
        sentences = read_sentences(training, silent, no_label)
        tags = {tag for sentence in sentences for tag in sentence.tags} - {OUTSIDE, ""}
        if not tags:
            raise TrainerError(f"{training}: no word has a tag other than O; there is nothing to learn from")
        kinds = sorted({tag[2:] for tag in tags})
        return cls((OUTSIDE, *(f"{first}-{kind}" for first in "BI" for kind in kinds)), tell, no_label)

    @property
    def outputs(self) -> int:
        """The number of outputs: one per label."""
        return len(self.labels)

    def read(self, path: Path) -> list[Sentence]:
        """Read a file's sentences. TrainerError for a tag that is not one of the labels."""
        sentences = read_sentences(path, self.tell, self.no_label)
        for sentence in sentences:
            for word, tag, line in zip(sentence.words, sentence.tags, sentence.lines, strict=False):
                if tag and tag not in self.labels:
                    known = ", ".join(self.labels)
                    raise TrainerError(
                        f"{path}, line {line}: {word!r} has the tag {tag}; the training file has {known}"
                    )
        return sentences

    def classes(self, records: Sequence[Sentence]) -> LabelCounts:
        """Count the words with each label."""
        words = ((tag or None for tag in r.tags) if r.tags else (None for _ in r.words) for r in records)
        return count(self.labels, (tag for tags in words for tag in tags))

    def units(self, record: Sentence, tokenizer: Tokenizer, longest: int, training: bool) -> list[Unit]:
        """Windows of whole words, none for a sentence without a visible character; each word is predicted once.

        In training, only words with a label are.

        A word with more pieces than fit in a window keeps its first ones. A word without pieces (of control characters,
        say) is not predicted, and counts as outside all entities.
        """
        encoding = tokenizer.encode(list(record.words), is_pretokenized=True, add_special_tokens=False)
        pieces: list[list[int]] = [[] for _ in record.words]
        for piece, word in zip(encoding.ids, encoding.word_ids, strict=True):
            assert word is not None  # only control tokens belong to no word
            pieces[word].append(piece)
        known = [bool(tag) for tag in record.tags] or [False] * len(record.words)
        asked = known if training else [True] * len(known)
        units: list[Unit] = []
        for words in _windows(pieces, longest - 2):
            own = [pieces[word][: longest - 2] for word in words]
            starts = np.cumsum([1, *map(len, own)]).tolist()  # after [CLS]
            example = replace(
                pack(tokenizer, [piece for word in own for piece in word]),
                places=tuple(start for start, word in zip(starts, words, strict=False) if asked[word]),
                targets=tuple(self.labels.index(record.tags[word]) for word in words if known[word]),
                origin=(record.number, [word for word in words if asked[word]]),
            )
            units.append((example,))
        return units

    def loss(self, answers: Tensor, batch: TaskBatch) -> Tensor:
        """() fp32: the sum of the words' cross-entropies."""
        return cross_entropy(answers, batch.targets)[0]

    def count(self, unit: Unit) -> int:
        """Number of words with a label."""
        return sum(len(example.targets) for example in unit)

    def score(
        self, records: Sequence[Sentence], units: Sequence[Unit], answers: Sequence[NDArray[np.float32]]
    ) -> dict[str, float]:
        """F1, precision and recall of entities, overall and by type (``f1.PER``), and the accuracy over words."""
        both = zip(records, self.tags(records, units, answers), strict=True)
        known = [(record.tags, tags) for record, tags in both if record.tags]
        if not known:
            raise TrainerError(f"{self.name}: there is no sentence with tags to evaluate on")
        words = [(own, other) for a, b in known for own, other in zip(a, b, strict=True) if own]
        gold = [[own or OUTSIDE for own in a] for a, _ in known]
        said = [[other if own else OUTSIDE for own, other in zip(a, b, strict=True)] for a, b in known]
        return entity_metrics(gold, said) | {"accuracy": sum(own == other for own, other in words) / len(words)}

    def tags(
        self, records: Sequence[Sentence], units: Sequence[Unit], answers: Sequence[NDArray[np.float32]]
    ) -> list[list[str]]:
        """The predicted tag of every word of the records."""
        said = {record.number: [OUTSIDE] * len(record.words) for record in records}
        for unit, rows in zip(units, answers, strict=True):  # rows (words, labels)
            number, words = unit[0].origin
            for word, label in zip(words, rows.argmax(1).tolist(), strict=True):
                said[number][word] = self.labels[label]
        return [said[record.number] for record in records]

    def predictions(
        self, records: Sequence[Sentence], units: Sequence[Unit], answers: Sequence[NDArray[np.float32]]
    ) -> list[dict[str, Any]]:
        """The words of each sentence, and their predicted tags."""
        said = self.tags(records, units, answers)
        return [{"tokens": list(r.words), "ner_tags": tags} for r, tags in zip(records, said, strict=True)]


def _windows(pieces: list[list[int]], room: int) -> Iterator[list[int]]:
    """Group words, by number, into windows of ``room`` pieces; a longer word is alone, one without any is left out."""
    words: list[int] = []
    used = 0
    for word, own in enumerate(pieces):
        if words and used + len(own) > room:
            yield words
            words, used = [], 0
        if own:
            words.append(word)
            used += len(own)
    if words:
        yield words


# ---- files ---------------------------------------------------------------------------------------------------


def read_sentences(path: Path, tell: Tell = say, no_label: Sequence[str] = ()) -> list[Sentence]:
    """Read a file's sentences, tagged in BIO; ``tell`` reports a conversion. TrainerError names file and line.

    A tag in ``no_label`` means that the word has no label.
    """
    read = _json_sentences if path.suffix in JSON_LINES else _conll_sentences
    sentences = []
    for sentence in read(path):
        tags = tuple("" if says_nothing(tag, no_label) else tag for tag in sentence.tags)
        for tag, line in zip(tags, sentence.lines, strict=False):
            if tag and not TAG.fullmatch(tag):
                remedy = f"convert the tags to BIO or, if it means no label, pass --no-label {tag}"
                raise TrainerError(f"{path}, line {line}: tag {tag!r} is none of O, B-TYPE and I-TYPE; {remedy}")
        sentences.append(replace(sentence, tags=tags if any(tags) else ()))
    if not sentences:
        raise TrainerError(f"{path} has no sentences; write one line per word: the word, a space and its tag")
    return _in_bio(path, sentences, tell)


def _conll_sentences(path: Path) -> Iterator[Sentence]:
    """Read sentences with their tags as written; a file with one column has no tags."""
    number, wanted = 0, 0
    rows: list[tuple[str, str, int]] = []  # the words of this sentence so far, their tags and lines
    for line, text in enumerate([*read_lines(path), ""], 1):
        columns = BLANKS.split(text.strip(" \t"))
        if columns == [""] or columns[0] == "-DOCSTART-":
            if rows:
                words, tags, lines = zip(*rows, strict=True)
                yield Sentence(number, words, tags if wanted > 1 else (), lines)
                number, rows = number + 1, []
            continue
        wanted = wanted or len(columns)
        if len(columns) != wanted:
            seen = f"{len(columns)} columns instead of {wanted}"
            raise TrainerError(
                f"{path}, line {line}: {seen}; write the word first and its tag last, separated by spaces"
            )
        rows.append((columns[0], columns[-1], line))


def _json_sentences(path: Path) -> Iterator[Sentence]:
    for number, (line, record) in enumerate(json_objects(path)):
        where = f"{path}, line {line}"
        words = _strings(record.get("tokens"), f'{where}: "tokens"')
        tags = _strings(record["ner_tags"], f'{where}: "ner_tags"') if "ner_tags" in record else []
        if "ner_tags" in record and len(words) != len(tags):
            raise TrainerError(f"{where}: {len(words)} tokens and {len(tags)} ner_tags; write one tag per token")
        yield Sentence(number, tuple(words), tuple(tags), (line,) * len(words))


def _strings(value: Any, what: str) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise TrainerError(f"{what} must be a list of strings, one per word, and not empty")
    return value


def _in_bio(path: Path, sentences: list[Sentence], tell: Tell) -> list[Sentence]:
    """Convert sentences in BIO or IOB1 to BIO, with a B- at the start of each entity."""
    loose, strict = [], []  # lines where an I- begins an entity, and where a B- does, unlike in IOB1
    for sentence in sentences:
        for kind, first, _ in entities([tag or OUTSIDE for tag in sentence.tags]):
            after = sentence.tags[first - 1].endswith(f"-{kind}") if first else False
            if sentence.tags[first].startswith("I"):
                loose.append(sentence.lines[first])
            elif not after:
                strict.append(sentence.lines[first])
    if not loose:
        return sentences
    if strict:
        seen = f"an I- begins an entity here, and a B- does at line {strict[0]}"
        change = "write B- at each entity's start (BIO), or only after an entity of the same type (IOB1)"
        raise TrainerError(f"{path}, line {loose[0]}: {seen}; {change}")
    tell(f"{path}: tags are in IOB1; converted to BIO, with a B- at the start of each entity")
    return [replace(sentence, tags=_begun(sentence.tags)) for sentence in sentences]


def _begun(tags: tuple[str, ...]) -> tuple[str, ...]:
    firsts = {first for _, first, _ in entities([tag or OUTSIDE for tag in tags])}
    return tuple(f"B{tag[1:]}" if place in firsts else tag for place, tag in enumerate(tags))
