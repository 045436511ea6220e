"""Questions about contexts: SQuAD's official JSON, or JSON lines with one question each.

A line is {"id": …, "context": …, "question": …, "answers": {"text": […], "answer_start": […]}}; answers may also be
written as SQuAD does, [{"text": …, "answer_start": …}, …]. An empty list means that the context has no answer, and so
does SQuAD 2.0's "is_impossible"; without "answers" the answer is unknown. ``answer_start`` counts characters (Unicode
code points) from 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import TrainerError
from trainer.finetune.lines import json_objects, loads, read_text

Answer = tuple[str, int]  # text, and where it begins in the context


@dataclass(frozen=True)
class Question:
    """A question about a context."""

    number: int  # in its file, from 0
    key: str
    question: str
    context: str
    answers: tuple[Answer, ...] | None  # empty: the context does not answer it; None: unknown
    where: str  # its file and location, for error messages


def read_questions(path: Path) -> list[Question]:
    """Read a file's questions. TrainerError names the line or question of an answer that is not where it should be."""
    questions: list[Question] = []
    keys: set[str] = set()
    for where, row in _rows(path):
        number = len(questions)
        key = str(row.get("id", number))
        if key in keys:
            raise TrainerError(f"{where}: id {key} appears twice; give each question its own")
        keys.add(key)
        context = _text(row, "context", where)
        questions.append(
            Question(number, key, _text(row, "question", where), context, _answers(row, context, where), where)
        )
    if not questions:
        raise TrainerError(f"{path} has no questions")
    return questions


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each question with its context, and its location for error messages."""
    try:
        whole = loads(read_text(path))
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":  # JSON lines have more data after their first object
            raise TrainerError(f"{path}, line {error.lineno}: not JSON ({error})") from None
        whole = None
    except ValueError as error:
        raise TrainerError(f"{path}: not JSON ({error})") from None
    if isinstance(whole, dict) and "data" in whole:
        yield from _official(path, whole)
    else:
        yield from ((f"{path}, line {line}", row) for line, row in json_objects(path))


def _official(path: Path, whole: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, article in enumerate(_list(whole, "data", str(path))):
        for place, paragraph in enumerate(_list(article, "paragraphs", f"{path}, data[{number}]")):
            where = f"{path}, data[{number}].paragraphs[{place}]"
            for row in _list(paragraph, "qas", where):
                own = f"{where}, question {row.get('id', '')}"
                yield own, row | {"context": _text(paragraph, "context", where)}


def _answers(row: dict[str, Any], context: str, where: str) -> tuple[Answer, ...] | None:
    if "answers" not in row:
        return None
    found = row["answers"]
    if isinstance(found, dict):  # two parallel lists
        texts, starts = _list(found, "text", where, object), _list(found, "answer_start", where, object)
        if len(texts) != len(starts):
            raise TrainerError(
                f"{where}: {len(texts)} answer texts, but {len(starts)} answer_start; each answer needs both"
            )
        found = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    answers = [_answer(answer, context, where) for answer in _list({"answers": found}, "answers", where)]
    if row.get("is_impossible", not answers) is bool(answers):
        raise TrainerError(
            f"{where}: is_impossible is {row['is_impossible']}, with {len(answers)} answers; correct one of them"
        )
    return tuple(answers)


def _answer(answer: dict[str, Any], context: str, where: str) -> Answer:
    text, start = _text(answer, "text", where), answer.get("answer_start")
    if not text.strip():
        raise TrainerError(f"{where}: an answer is {text!r}; leave it out if the context has none")
    if not isinstance(start, int) or start < 0:
        raise TrainerError(f"{where}: answer_start is {start!r}; it must be a whole number, 0 or more")
    if not context.startswith(text, start):
        there = context[start : start + len(text)]
        remedy = "answer_start counts characters of the context, from 0"
        raise TrainerError(f"{where}: the answer {text!r} is not at {start}, where the context has {there!r}; {remedy}")
    return text, start


def _text(row: dict[str, Any], name: str, where: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise TrainerError(f'{where}: "{name}" is {value!r}; it must be a string')
    return value


def _list(row: dict[str, Any], name: str, where: str, of: type = dict) -> list[Any]:
    value = row.get(name)
    if not isinstance(value, list) or not all(isinstance(one, of) for one in value):
        raise TrainerError(f'{where}: "{name}" must be a list{" of objects" if of is dict else ""}')
    return value
