"""Reads README, CONTRIBUTING and docs as data: their links, the files they name, and the commands in fenced blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.ranks import ROOT

README = ROOT / "README.md"
PAGES = (README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
FOLDERS = "data_prep|kernels|trainer|deploy|docker|docs|tests"
NAMED = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./*{{}},-]*")
SETTING = re.compile(r"[A-Z_]+=\S*")
SEPARATORS = {";", "&&", "||", "|", "&"}


@dataclass(frozen=True)
class Command:
    """One command of a page: what would be run, with its arguments."""

    page: Path
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {shlex.join(self.words)}"


@dataclass(frozen=True)
class Program:
    """A Python program that a command starts: a module, or a script by its path, and its arguments."""

    name: str
    arguments: tuple[str, ...]


def blocks(text: str, language: str = "") -> list[str]:
    """The fenced blocks in one language; the empty string selects those that name none, which hold commands."""
    return [body for named, body in FENCE.findall(text) if named == language]


def prose(text: str) -> str:
    """The page's text without fenced blocks, inline code and link targets."""
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "", FENCE.sub("", text)))


def headings(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


def named_files(text: str) -> set[str]:
    """Paths that begin with one of the tree's folders, in inline code and fenced blocks; braces expanded."""
    code = re.findall(r"`([^`\n]+)`", FENCE.sub("", text)) + [body for _, body in FENCE.findall(text)]
    found = {name.rstrip(".,") for part in code for name in NAMED.findall(part)}
    return {path for name in found for path in expand(name)}


def expand(name: str) -> Iterator[str]:
    """Expand braces: ``a/{b,c}.yml`` becomes ``a/b.yml`` and ``a/c.yml``."""
    before, brace, rest = name.partition("{")
    if not brace:
        yield name
        return
    inside, _, after = rest.partition("}")
    for each in inside.split(","):
        yield from expand(f"{before}{each}{after}")


def commands(page: Path, section: str | None = None) -> Iterator[Command]:
    """The commands in the fenced blocks of a page, or of one section's text.

    Comments, and settings such as ``PYTHONPATH=…``, are left out.
    """
    text = page.read_text(encoding="utf-8") if section is None else section
    for block in blocks(text) + blocks(text, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            yield from (Command(page, tuple(words)) for words in split(line))


def split(line: str) -> Iterator[list[str]]:
    """The words of each command in a shell line; nothing for a line that is no valid shell, as in a picture."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    try:
        words = [*lexer, ";"]
    except ValueError:
        return
    command: list[str] = []
    for word in words:
        if word in SEPARATORS:
            if command:
                yield command
            command = []
        elif command or not SETTING.fullmatch(word):
            command.append(word)


def program(words: tuple[str, ...]) -> Program | None:
    """The Python program that the words start, directly or through ``mpirun`` or ``srun``; None without one."""
    for place, word in enumerate(words):
        if Path(word).name == "python" and len(words) > place + 1:
            rest = words[place + 1 :]
            while rest[:2] == ("-m", "mpi4py"):
                rest = rest[2:]
            if rest[0] == "-m":
                return Program(rest[1], rest[2:])
            return Program(rest[0], rest[1:]) if rest[0].endswith(".py") else None
    if words[0] == "sbatch":
        script = next(place for place, word in enumerate(words) if word.endswith(".sbatch"))
        started = re.search(r'-m (trainer|data_prep build) "\$@"', (ROOT / words[script]).read_text(encoding="utf-8"))
        assert started is not None, words[script]
        module, *more = started[1].split()
        return Program(module, (*more, *words[script + 1 :]))
    return None
