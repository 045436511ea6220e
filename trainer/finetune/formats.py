"""Files of records: TSV, CSV and JSON lines as rows of named columns, each with its line.

TSV is as the tasks' authors publish it: fields between tabs, no quoting, for a lone quotation mark is text there.
CSV has quoting. A file is chosen by its ending; ``.txt`` is TSV. ``FILE#column=value`` names only the rows of a file
that has all parts of a data set in one, as SICK.txt#SemEval_set=TRAIN.
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
TSV, CSV, LINES = (".tsv", ".txt"), (".csv",), (".jsonl", ".json", ".ndjson")


@dataclass(frozen=True)
class Row:
    """One record of a file."""

    line: int  # where it ends in the file, from 1 on
    values: dict[str, str | None]  # by column; a column that the row is too short for is absent, JSON's null is None


def split_name(path: Path) -> tuple[Path, str, str]:
    """A file, and the column and the value of the rows that are meant; both empty for all of them."""
    name, _, part = path.name.partition("#")
    column, _, value = part.partition("=")
    return path.parent / name, column, value


def read_rows(path: Path, headless: Sequence[str] = (), wanted: Sequence[Sequence[str]] = ()) -> list[Row]:
    """All rows of a file.

    ``headless``: the columns' names for a file that has none; it has none if its first line holds no set of columns
    among ``wanted``. Raises TrainerError, with the line, for what cannot be read.
    """
    file, column, value = split_name(path)
    if file.suffix in LINES:
        rows = [Row(line, {k: _text(v) for k, v in record.items()}) for line, record in json_objects(file)]
    elif file.suffix in TSV + CSV:
        rows = list(_named(file, _fields(file), headless, wanted))
    else:
        raise TrainerError(f"{file}: its ending says no format that is known: {' '.join(TSV + CSV + LINES)}")
    if column:
        rows = [row for row in rows if row.values.get(column) == value]
    if not rows:
        raise TrainerError(f"{path} holds no row{f' whose {column} is {value}' if column else ''}")
    return rows


def _fields(file: Path) -> Iterator[tuple[int, Fields]]:
    """The fields of each line; those of a .csv, too, are parted by tabs if its first line holds one, as STS-B's are."""
    lines = read_lines(file)
    if file.suffix in TSV or "\t" in lines[0]:
        yield from ((number, line.split("\t")) for number, line in enumerate(lines, 1) if line)
        return
    reader = csv.reader(io.StringIO(read_text(file), newline=""), strict=True)
    try:
        yield from ((reader.line_num, fields) for fields in reader if fields)
    except csv.Error as error:
        raise TrainerError(f"{file}, line {reader.line_num}: no CSV ({error})") from None


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
        raise TrainerError(
            f"{file}, line {first[0]}: the column {twice[0]} stands there twice: rename the one not meant"
        )
    for number, fields in rows:
        if len(fields) > len(names) and names != list(headless):
            seen = f"{len(fields)} fields, the first line has {len(names)}"
            raise TrainerError(f"{file}, line {number}: {seen}: is there a tab or a comma too many in a text?")
        yield Row(number, dict(zip(names, fields, strict=False)))


def _text(value: Any) -> str | None:
    """A JSON value as a column of TSV has it."""
    return value if value is None or isinstance(value, str) else json.dumps(value)
