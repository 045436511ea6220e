"""Finds the text files of a corpus: which files are read, in which format, and which are left out.

The file extension, in upper or lower case, decides the format: see ENDINGS. ``--format`` sets it for other names, for
example wikiextractor's ``wiki_00``. Files that are left out are counted by extension.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from data_prep.errors import DataError
from data_prep.json_text import parse_json
from data_prep.lines import COMPRESSED, read_head
from data_prep.streams import say_error

ENDINGS = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".tar": "tar",
}
FORMATS = ("auto", "text", "jsonl", "parquet", "wikiextractor")  # auto: by the extension alone
WANTED = (
    f"wanted {', '.join(ending for ending in ENDINGS if ending != '.parquet')}, plain or with {', '.join(COMPRESSED)}, "
    "or .parquet; for files with other names, set --format"
)
HIDDEN = "hidden"  # stands in for an extension
AN_ENDING = re.compile(r"\.[a-z][a-z0-9]{0,9}")  # not a part number, nor the end of a sentence
Where = tuple[str, str] | None  # (field, value) that selects records


@dataclass(frozen=True)
class Source:
    """A text file. ``name`` is its name in the manifest: the path relative to the given input."""

    path: Path
    name: str


@dataclass(frozen=True)
class LeftOut:
    """Files in the input folders that are not read, grouped by extension."""

    ending: str  # shared by all of them: ".md", "" for none, or HIDDEN (a hidden folder counts as one file)
    files: int
    example: str  # name of the first of them


def find_sources(inputs: Iterable[Path], where: Where = None, format: str = "auto") -> list[Source]:
    """The text files among ``inputs`` and in their folders, in the order given and sorted within a folder.

    Links are followed. Hidden files and folders inside a folder are left out, and so are files whose format is decided
    neither by their extension nor by ``format``. Raises DataError for a path that does not exist, is not a text file or
    has none, for a file given twice, for plain text if ``where`` is set, and for a .json without one record per line.
    """
    inputs = list(inputs)
    sources: list[Source] = []
    for given in inputs:
        if not given.exists():
            raise DataError(f"input {given} does not exist: check --input")
        if given.is_dir():
            below = (name for name, hidden in _files_below(given) if not hidden)
            sources += [Source(given / name, name) for name in sorted(below) if format_of(name, format)]
        elif format_of(given.name, format):
            sources.append(Source(given, given.name))
        else:
            raise DataError(f"input {given} is not a text file: {WANTED}")
    if not sources:
        left_out = find_left_out(inputs, format)
        found = f" but {describe_left_out(left_out)}" if left_out else ""
        only_hidden = left_out and all(some.ending == HIDDEN for some in left_out)
        remedy = "to read hidden files, rename them" if only_hidden else WANTED
        raise DataError(f"no text files in {', '.join(map(str, inputs))}{found}: {remedy}")
    for source in sources:
        if not source.path.exists():
            raise DataError(f"{source.path} links to no file: remove it, or restore the file")
        if not source.path.is_file():  # reading a named pipe may wait forever
            raise DataError(f"{source.path} is a pipe or a device, not a regular file: move it out of the input")
    _refuse_misfits(sources, where, format)
    return sources


def find_left_out(inputs: Iterable[Path], format: str = "auto") -> tuple[LeftOut, ...]:
    """The files in ``inputs`` that `find_sources` leaves out, by extension, the most frequent first."""
    files: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for given in inputs:
        for name, hidden in sorted(_files_below(given)) if given.is_dir() else ():
            if hidden or not format_of(name, format):
                ending = HIDDEN if hidden else _shown(name)
                files[ending] += 1
                examples.setdefault(ending, name.encode("utf-8", "replace").decode())  # the manifest is UTF-8
    order = sorted(files, key=lambda ending: (-files[ending], ending))
    return tuple(LeftOut(ending, files[ending], examples[ending]) for ending in order)


def describe_left_out(left_out: Iterable[LeftOut]) -> str:
    """Describes how many files of each extension there are, with an example of each."""
    names = {"": "without an extension"}
    return ", ".join(f"{some.files:,} {names.get(some.ending, some.ending)} ({some.example})" for some in left_out)


def say_left_out(left_out: Collection[LeftOut]) -> None:
    """Prints which files are not read, before the work begins."""
    for hidden, remedy in ((False, "set --format"), (True, "rename them")):
        if some := [each for each in left_out if (each.ending == HIDDEN) == hidden]:
            say_error(f"data_prep: files left out: {describe_left_out(some)}; to read them, {remedy}")


def format_of(name: str, format: str = "auto") -> str | None:
    """The format of a file: by its extension, or else ``format``, one of FORMATS. None if neither decides it.

    Plain text counts as wikiextractor's if ``format`` says so: its output is often renamed to .txt.
    """
    ending, packing = endings(name)
    known = ENDINGS.get(ending)
    if known == "parquet" and packing:  # Parquet can't be read from a stream
        known = None
    if format == "auto" or (known and (known, format) != ("text", "wikiextractor")):
        return known
    return format


def parse_where(condition: str | None) -> Where:
    """Parses ``field=value`` from the command line."""
    if condition is None:
        return None
    field, equals, value = condition.partition("=")
    if not field or not equals:
        raise DataError(f"--where {condition}: wanted field=value, such as split=train")
    return field, value


def endings(name: str) -> tuple[str, str]:
    """The extension for the format and the one for the compression, in lower case; "" for none."""
    path = PurePath(name.lower())
    if path.suffix == ".tgz":
        return ".tar", ".gz"
    return (path.with_suffix("").suffix, path.suffix) if path.suffix in COMPRESSED else (path.suffix, "")


def _shown(name: str) -> str:
    ending, packing = endings(name)
    return (ending if AN_ENDING.fullmatch(ending) else "") + packing


def _refuse_misfits(sources: list[Source], where: Where, format: str) -> None:
    times = Counter(source.path.resolve() for source in sources)
    for source in sources:
        if times[source.path.resolve()] > 1:
            raise DataError(f"input {source.path} is given twice: its text would be 'not next' to itself")
        if where is not None and format_of(source.name, format) in ("text", "wikiextractor"):
            raise DataError(f"--where selects on a field of records, and {source.path} is plain text")
        if source.name.encode("utf-8", "replace").decode() != source.name:  # the manifest is UTF-8
            raise DataError(f"input {str(source.path)!a}: its name is not UTF-8; rename it")
        if endings(source.name)[0] == ".json":
            _refuse_whole(source.path)


def _refuse_whole(path: Path) -> None:
    """Raises DataError, before the work begins, for a .json that is one array, or one object over many lines."""
    block = read_head(path)
    if block is None or b"\0" in block.data:
        return  # empty, or not text: the reader has a better error
    line, more, _ = block.data.decode(errors="replace").strip().partition("\n")
    if line.startswith("["):
        remedy = f"jq -c '.[]' {path.name} > {path.stem}.jsonl"
        raise DataError(f"{path}: one JSON array, wanted one record per line: {remedy}")
    if line and (more or block.ends):
        try:
            parse_json(line)
        except ValueError:
            raise DataError(
                f"{path}: not JSON lines: its first line is not a whole record; write one record per line, or move it "
                "out of the input if it is not text"
            ) from None


def _files_below(folder: Path) -> Iterator[tuple[str, bool]]:
    """The name of each file and whether it is hidden. A hidden folder counts as one file.

    Raises DataError if a link leads to a folder that was there before: to itself, in a circle, or to a sibling.
    """
    seen: dict[str, str] = {}
    for base, folders, files in os.walk(folder, onerror=_raise, followlinks=True):
        if (first := seen.setdefault(os.path.realpath(base), base)) != base:
            raise DataError(
                f"input {base} is the folder {first} again, so its text would be read twice: remove the link"
            )
        hidden = [name for name in folders if name.startswith(".")]
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files + hidden:
            yield Path(base, name).relative_to(folder).as_posix(), name.startswith(".")


def _raise(error: OSError) -> None:
    raise error  # otherwise a folder that can't be listed would be silently left out
