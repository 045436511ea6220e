"""The settings of a data set: everything but the corpus and the tokenizer that decides its samples."""

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
MOST_SAMPLES = 2**20  # of a shard, which is proved in one piece
CHOICES = {
    "pairs": ("nsp", "sop", "single"),
    "cut": ("either", "outer"),
    "masking": ("token", "word", "ngram", "span"),
    "part": ("all", "train", "held-out"),
    "bad_bytes": ("strict", "replace"),
    "format": FORMATS,
}
# Of a field that came after the first manifests. One without it is read with the field's default; and the default is
# in no fingerprint, so that what was built before is known again.
LATER = {"later": True}


@dataclass(frozen=True)
class Settings:
    """As the manifest records them. Make them with `make_settings`, which checks them."""

    sequence_length: int
    seed: int = 1
    duplicates: int = 1  # passes over the corpus, each with other pairs and masks
    pairs: str = "nsp"  # nsp: the next sentences or random ones; sop: in order or swapped; single: one segment
    short_sequence_rate: float = 0.1
    cut: str = "either"  # where long pairs lose tokens: at either end, as BERT's; outer: so that A and B still touch
    masking: str = "token"  # what is masked together: token, word, ngram (ALBERT's), span (SpanBERT's)
    masked_share: float = 0.15
    max_predictions: int = 0  # masked positions: no sample has more; 0 until `make_settings` fills it in
    samples_per_shard: int = 8192
    drop_duplicates: bool = False  # of equal documents only the first takes part
    held_out_share: float = 0.0  # of the documents, chosen by a hash of their text
    part: str = "all"  # all documents, or those on one side of the held-out share: train, held-out
    language: str = "en"  # of the sentence splitter
    where: str | None = None  # field=value: the records that were taken
    text_field: str = "text"  # of a record
    bad_bytes: str = "strict"  # strict: an error; replace: by U+FFFD
    given_words: bool = False  # Chinese characters between two spaces are one word
    tokenizers: str = field(default_factory=partial(version, "tokenizers"))  # the libraries that decide the tokens
    sentencex: str = field(default_factory=partial(version, "sentencex"))  # and the sentences
    format: str = field(default="auto", metadata=LATER)  # of files whose ending does not say it


def make_settings(sequence_length: int, *, max_predictions: int | None = None, **chosen: Any) -> Settings:
    """`Settings`; without ``max_predictions`` it is what the masked share of a full sequence comes to.

    Raises DataError with all problems at once.
    """
    settings = Settings(sequence_length, max_predictions=1 if max_predictions is None else max_predictions, **chosen)
    if found := list(problems(settings)):
        raise DataError("; ".join(found))
    parse_where(settings.where)
    return replace(settings, max_predictions=largest_count(settings)) if max_predictions is None else settings


def largest_count(settings: Settings) -> int:
    """Masked positions of a full sequence, of which 3 are control tokens."""
    return max(1, round(settings.masked_share * (settings.sequence_length - 3)))


def problems(settings: Settings) -> Iterator[str]:
    """What cannot be, by the options of the command line."""
    for name, low, high in (
        ("sequence_length", SHORTEST_SEQUENCE, LONGEST_SEQUENCE),
        ("seed", 0, 2**63 - 1),
        ("duplicates", 1, 1000),
        ("masked_share", 0.001, 1),
        ("max_predictions", 1, LONGEST_SEQUENCE),
        ("short_sequence_rate", 0, 1),
        ("samples_per_shard", 1, MOST_SAMPLES),
        ("held_out_share", 0, 0.5),
    ):
        value = getattr(settings, name)
        if not low <= value <= high:
            yield f"{_flag(name)} {shown(value)}: wanted {low} to {high}"
    for name, allowed in CHOICES.items():
        value = getattr(settings, name)
        if value not in allowed:
            yield f"{_flag(name)} {value[:80]}: wanted one of {', '.join(allowed)}"
    if (settings.part == "all") != (settings.held_out_share == 0):
        yield (
            f"--part {settings.part[:80]} with --held-out-share {settings.held_out_share:g}: a share above 0 and a "
            "part, train or held-out, go together"
        )
    if not re.fullmatch(r"[a-z]{2,3}(-[A-Za-z0-9]+)*", settings.language):
        yield f"--language {settings.language[:80]}: wanted a code such as en, de or zh"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
