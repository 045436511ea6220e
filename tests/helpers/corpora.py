"""Tiny corpora whose every word is unique: word 7 of document 3 is "d3w7" and occurs nowhere else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.manifest import TOKENIZER_FOLDER, load_manifest
from data_prep.shards import Column, Sample, decode_sample, index_path, read_index, tar_path
from data_prep.tokenizer import SPECIALS, load_tokenizer

SPECIAL_IDS = {0, 1, 2, 3, 4}


@dataclass(frozen=True)
class Words:
    """A segment: its document, and its words' numbers there."""

    document: int
    words: list[int]


def write_corpus(folder: Path, sentences: list[int], words: int, different: int | None = None) -> tuple[Path, Path]:
    """Write a .txt with ``sentences[d]`` sentences of ``words`` words in document d, and a tokenizer of whole words.

    ``different``: how many different words a document has, for a small vocabulary; None: no word comes twice.
    """
    lines: list[str] = []
    for document, count in enumerate(sentences):
        names = [f"d{document}w{number % (different or count * words)}" for number in range(count * words)]
        lines += [" ".join(names[start : start + words]) for start in range(0, len(names), words)] + [""]
    text = folder / "corpus.txt"
    text.write_text("\n".join(lines))
    return text, write_tokenizer(folder / "words", list(dict.fromkeys(" ".join(lines).split())))


def write_tokenizer(folder: Path, pieces: list[str], specials: tuple[str, ...] = SPECIALS) -> Path:
    """Write a tokenizer as Google published BERT's: only a vocab.txt."""
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join([*specials, *pieces]) + "\n", "utf-8")
    return folder


def read_samples(folder: Path) -> Iterator[Sample]:
    """All samples of a data set, in order."""
    for shard in load_manifest(folder).shards:
        data = tar_path(folder, shard.name).read_bytes()
        index = read_index(index_path(folder, shard.name))
        for offset, size in index[:, [Column.OFFSET, Column.BYTES]].tolist():
            yield decode_sample(data[offset : offset + size])


def segments(folder: Path) -> Iterator[tuple[Sample, Words, Words]]:
    """Each sample with its segments A and B, recognized by their unique words."""
    pieces = np.array(load_tokenizer(folder / TOKENIZER_FOLDER).pieces)
    for sample in read_samples(folder):
        words = pieces[sample.ids].tolist()
        yield sample, _words(words[1 : sample.split - 1]), _words(words[sample.split : -1])


def contents(folder: Path) -> dict[str, bytes]:
    """The contents of every file below a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _words(words: list[str]) -> Words:
    found = [re.fullmatch(r"d(\d+)w(\d+)", word) for word in words]
    numbers = [(int(match[1]), int(match[2])) for match in found if match]
    assert len(numbers) == len(words), words
    assert len({document for document, _ in numbers}) == 1, words
    return Words(numbers[0][0], [number for _, number in numbers])
