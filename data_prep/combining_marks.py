"""Combining marks that an uncased BERT strips: accents, but also vowel signs and tone marks that distinguish words."""

from __future__ import annotations

import re
from typing import NamedTuple

from tokenizers import normalizers

LIMIT = 0.01  # marks of other scripts per token; above this, stripping loses words
# Marks of Latin, Greek and Cyrillic, and marks of no script. Every other script has its own marks.
WESTERN = re.compile(
    "[\u0300-\u036f\u0483-\u0487\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20dc\u20e1\u20e5-\u20f0\u2de0-\u2dff\ua66f"
    "\ua674-\ua67d\ua69e\ua69f\ufe20-\ufe2f]"
)
SELECTORS = re.compile("[\ufe00-\ufe0f\U000e0100-\U000e01ef]")  # also stripped, but they only select a glyph

_decompose = normalizers.NFD().normalize_str
_strip = normalizers.BertNormalizer(
    clean_text=False, handle_chinese_chars=False, strip_accents=True, lowercase=False
).normalize_str


class Marks(NamedTuple):
    """Counts of the combining marks that BERT strips from a text."""

    stripped: int
    other: int  # marks of scripts other than Latin, Greek and Cyrillic


def count_marks(text: str) -> Marks:
    """Counts the marks in a text by running the tokenizer library, so the counts are exactly what it strips."""
    if text.isascii():
        return Marks(0, 0)
    before, after = _decompose(text), _strip(text)
    selectors, western = (len(kind.findall(before)) - len(kind.findall(after)) for kind in (SELECTORS, WESTERN))
    stripped = len(before) - len(after) - selectors
    return Marks(stripped, stripped - western)


def loss(marks: int) -> str:
    """The end of a warning: what ``marks`` stripped marks of other scripts mean, and what to do."""
    return (
        f"{marks:,} combining marks of scripts other than Latin, Greek and Cyrillic stripped: words that differ only "
        "in them get the same ids; learn the vocabulary with `vocab --keep-accents`"
    )
