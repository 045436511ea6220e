"""Record files: TSV, CSV and JSON lines as rows of named columns, each with its line number.

TSV is read as the tasks' authors publish it: tab-separated, without quoting, because a lone quotation mark is text.
CSV has quoting. The extension decides the format; ``.txt`` is TSV. If one file contains all parts of a data set,
``FILE#column=value`` selects the rows of one part, as in SICK.txt#SemEval_set=TRAIN.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import TrainerError
from trainer.finetune.lines import json_objects, read_lines, read_text

Fields = list[str]
TSV, CSV, JSON_LINES = (".tsv", ".txt"), (".csv",), (".jsonl", ".json", ".ndjson")


@dataclass(frozen=True)
class Row:
    """One record of a file."""

    line: int  # the line it ends on, from 1
    values: dict[str, str | None]  # by column; absent if the row is too short, None for JSON's null


def split_name(path: Path) -> tuple[Path, str, str]:
    """Split a name into the file, and the column and value that select rows; both empty for all rows."""
    name, _, part = path.name.partition("#")
    column, _, value = part.partition("=")
    return path.parent / name, column, value


def read_rows(path: Path, headless: Sequence[str] = (), wanted: Sequence[Sequence[str]] = ()) -> list[Row]:
    """Read all rows of a file.

    ``headless``: column names for a file without a header, that is, whose first line contains none of the column sets
    in ``wanted``. Raises TrainerError, with the line, for anything that cannot be read.
    """
    file, column, value = split_name(path)
    if file.suffix in JSON_LINES:
        rows = [Row(line, {k: _text(v) for k, v in record.items()}) for line, record in json_objects(file)]
    elif file.suffix in TSV + CSV:
        rows = list(_named(file, _fields(file), headless, wanted))
    else:
        raise TrainerError(f"{file}: unsupported file extension; use one of {' '.join(TSV + CSV + JSON_LINES)}")
    if column:
        rows = [row for row in rows if row.values.get(column) == value]
    if not rows:
        raise TrainerError(f"{path} has no row{f' whose {column} is {value}' if column else ''}")
    return rows


def _fields(file: Path) -> Iterator[tuple[int, Fields]]:
    """The fields of each line. A .csv whose first line contains a tab is tab-separated too, as STS-B's files are."""
    lines = read_lines(file)
    if file.suffix in TSV or "\t" in lines[0]:
        yield from ((number, line.split("\t")) for number, line in enumerate(lines, 1) if line)
        return
    reader = csv.reader(io.StringIO(read_text(file), newline=""), strict=True)
    try:
        yield from ((reader.line_num, fields) for fields in reader if fields)
    except csv.Error as error:
        raise TrainerError(f"{file}, line {reader.line_num}: not valid CSV ({error})") from None


def _named(
    file: Path, rows: Iterator[tuple[int, Fields]], headless: Sequence[str], wanted: Sequence[Sequence[str]]
) -> Iterator[Row]:
    first = next(rows, None)
    if first is None:
        return
    names = [name.strip() for name in first[1]]
    if headless and not any(set(columns) <= set(names) for columns in wanted):
        names = list(headless)
        yield Row(first[0], dict(zip(names, first[1], strict=False)))
    if twice := [name for name in names if name and names.count(name) > 1]:
        raise TrainerError(f"{file}, line {first[0]}: column {twice[0]} appears twice: rename one of them")
    for number, fields in rows:
        if len(fields) > len(names) and names != list(headless):
            seen = f"{len(fields)} fields, but the first line has {len(names)}"
            raise TrainerError(f"{file}, line {number}: {seen}: is there an extra tab or comma in a text?")
        yield Row(number, dict(zip(names, fields, strict=False)))


def _text(value: Any) -> str | None:
    """A JSON value as a TSV column would contain it."""
    return value if value is None or isinstance(value, str) else json.dumps(value)
