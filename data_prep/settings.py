"""The settings of a data set: everything that decides its samples, except the corpus and the tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Any

from data_prep.errors import DataError
from data_prep.json_text import shown
from data_prep.sources import FORMATS, parse_where

SHORTEST_SEQUENCE = 5  # [CLS] a [SEP] b [SEP]
LONGEST_SEQUENCE = 65_535  # a length is written as 16 bits
MOST_SHARD_SAMPLES = 2**20  # per shard, since a shard is verified in one piece
SETTING_CHOICES = {
    "pairs": ("nsp", "sop", "single"),
    "cut": ("either", "outer"),
    "masking": ("token", "word", "ngram", "span"),
    "part": ("all", "train", "held-out"),
    "bad_bytes": ("strict", "replace"),
    "format": FORMATS,
}
# Marks a field added after the first manifests were written. A manifest without it gets the default; and a default
# does not enter the fingerprint, so that older builds are still recognized.
LATER = {"later": True}


@dataclass(frozen=True)
class Settings:
    """The settings as the manifest records them. Create them with `make_settings`, which checks them."""

    sequence_length: int
    seed: int = 1
    duplicates: int = 1  # passes over the corpus, each with different pairs and masks
    pairs: str = "nsp"  # nsp: the next sentences or random ones; sop: in order or swapped; single: one segment
    short_sequence_rate: float = 0.1
    cut: str = "either"  # where long pairs lose tokens: either end, as in BERT; outer: A and B still touch
    masking: str = "token"  # unit that is masked together: token, word, ngram (ALBERT), span (SpanBERT)
    masked_share: float = 0.15
    max_predictions: int = 0  # maximum masked positions per sample; 0 until `make_settings` fills it in
    samples_per_shard: int = 8192
    drop_duplicates: bool = False  # keep only the first of identical documents
    held_out_share: float = 0.0  # share of the documents, chosen by a hash of their text
    part: str = "all"  # all documents, or those on one side of the held-out share: train, held-out
    language: str = "en"  # language of the sentence splitter
    where: str | None = None  # field=value: the records that were selected
    text_field: str = "text"  # field of a record with the text
    bad_bytes: str = "strict"  # strict: an error; replace: replaced by U+FFFD
    given_words: bool = False  # Chinese characters between two spaces are one word
    tokenizers: str = field(default_factory=partial(version, "tokenizers"))  # library versions: one decides the tokens
    sentencex: str = field(default_factory=partial(version, "sentencex"))  # the other splits the sentences
    format: str = field(default="auto", metadata=LATER)  # of files whose extension does not determine it


def make_settings(sequence_length: int, *, max_predictions: int | None = None, **chosen: Any) -> Settings:
    """Creates and checks `Settings`. The default ``max_predictions`` is the masked share of a full sequence.

    Raises DataError with all problems at once.
    """
    settings = Settings(sequence_length, max_predictions=1 if max_predictions is None else max_predictions, **chosen)
    if found := list(problems(settings)):
        raise DataError("; ".join(found))
    parse_where(settings.where)
    return replace(settings, max_predictions=largest_count(settings)) if max_predictions is None else settings


def largest_count(settings: Settings) -> int:
    """The number of masked positions in a full sequence, of which 3 tokens are control tokens."""
    return max(1, round(settings.masked_share * (settings.sequence_length - 3)))


def problems(settings: Settings) -> Iterator[str]:
    """Invalid settings, named by their command-line options."""
    for name, low, high in (
        ("sequence_length", SHORTEST_SEQUENCE, LONGEST_SEQUENCE),
        ("seed", 0, 2**63 - 1),
        ("duplicates", 1, 1000),
        ("masked_share", 0.001, 1),
        ("max_predictions", 1, LONGEST_SEQUENCE),
        ("short_sequence_rate", 0, 1),
        ("samples_per_shard", 1, MOST_SHARD_SAMPLES),
        ("held_out_share", 0, 0.5),
    ):
        value = getattr(settings, name)
        if not low <= value <= high:
            yield f"{_flag(name)} {shown(value)}: wanted {low} to {high}"
    for name, allowed in SETTING_CHOICES.items():
        value = getattr(settings, name)
        if value not in allowed:
            yield f"{_flag(name)} {value[:80]}: wanted one of {', '.join(allowed)}"
    if (settings.part == "all") != (settings.held_out_share == 0):
        yield (
            f"--part {settings.part[:80]} with --held-out-share {settings.held_out_share:g}: use a share above 0 "
            "and a part, train or held-out, together"
        )
    if not re.fullmatch(r"[a-z]{2,3}(-[A-Za-z0-9]+)*", settings.language):
        yield f"--language {settings.language[:80]}: wanted a code such as en, de or zh"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
