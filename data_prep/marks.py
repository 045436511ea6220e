"""Combining marks that an uncased BERT strips: accents, but also vowel signs and tone marks, which tell words apart."""

from __future__ import annotations

import re
from typing import NamedTuple

from tokenizers import normalizers

LIMIT = 0.01  # marks of other scripts a token; above it stripping loses words
# Those of Latin, Greek and Cyrillic, and those of no script. All other scripts have marks of their own.
WESTERN = re.compile(
    "[\u0300-\u036f\u0483-\u0487\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20dc\u20e1\u20e5-\u20f0\u2de0-\u2dff\ua66f"
    "\ua674-\ua67d\ua69e\ua69f\ufe20-\ufe2f]"
)
SELECTORS = re.compile("[\ufe00-\ufe0f\U000e0100-\U000e01ef]")  # stripped, too, but they only choose a picture

_decompose = normalizers.NFD().normalize_str
_strip = normalizers.BertNormalizer(
    clean_text=False, handle_chinese_chars=False, strip_accents=True, lowercase=False
).normalize_str


class Marks(NamedTuple):
    """How many combining marks BERT strips from a text."""

    stripped: int
    other: int  # those of scripts other than Latin, Greek and Cyrillic


def count_marks(text: str) -> Marks:
    """The marks of a text. The library itself is asked, so they are exactly those that the tokenizer loses."""
    if text.isascii():
        return Marks(0, 0)
    before, after = _decompose(text), _strip(text)
    selectors, western = (len(kind.findall(before)) - len(kind.findall(after)) for kind in (SELECTORS, WESTERN))
    stripped = len(before) - len(after) - selectors
    return Marks(stripped, stripped - western)


def loss(marks: int) -> str:
    """What so many stripped marks of other scripts mean, and what to do: the end of a warning."""
    return (
        f"{marks:,} combining marks of scripts other than Latin, Greek and Cyrillic stripped: words that differ only "
        "in them get the same ids; learn the vocabulary with `vocab --keep-accents`"
    )
