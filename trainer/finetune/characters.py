"""Widens spans of a text to whole characters as a reader sees them.

A tokenizer's offsets cover only the characters that became pieces. Some never do: BERT's cleaning strips combining
marks (accents, Hebrew points, Arabic vowels, Indic vowel signs) and joiners, so a span cut at the offsets loses those
at its end. In decomposed text one letter is several code points (Hangul jamo, some Indic vowel signs). A span must not
split them, because in the composed text, which has the same pieces, it cannot.
"""

from __future__ import annotations

import unicodedata

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
_JOINER, _NON_JOINER = "\u200d", "\u200c"
_VIRAMA = 9  # the canonical combining class


def whole_characters(text: str, offsets: Integers) -> Integers:
    """Widen ``offsets`` (pieces, 2: start, end exclusive) of pieces in ``text`` to whole characters.

    A mark without a piece belongs to the character before it or, at the text's start and after a space, to the one
    after it. Canonically equal texts with the same pieces get canonically equal spans.
    """
    if text.isascii() or not len(offsets):
        return offsets
    continues = _continues(text, _covered(len(text), offsets))
    at = np.arange(len(text) + 1)
    first = np.maximum.accumulate(np.where(continues, 0, at))  # the first code point of each character
    after = np.minimum.accumulate(np.where(continues, len(text), at)[::-1])[::-1]  # the next one, from there on
    return np.stack([first[offsets[:, 0]], after[offsets[:, 1]]], 1)


def _covered(size: int, offsets: Integers) -> NDArray[np.bool_]:
    """(size,) Whether a piece covers each code point."""
    edges = np.zeros(size + 1, np.int64)
    np.add.at(edges, offsets[:, 0], 1)
    np.add.at(edges, offsets[:, 1], -1)
    return edges.cumsum()[:-1] > 0


def _continues(text: str, covered: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """(code points + 1,) Whether each belongs to the same character as the one before it; the end does not."""
    continues = np.zeros(len(text) + 1, bool)
    if not unicodedata.is_normalized("NFC", text):
        start = 0
        for at in range(1, len(text)):
            continues[at] = len(unicodedata.normalize("NFC", text[start : at + 1])) == 1
            start = start if continues[at] else at
            covered[start : at + 1] = covered[start : at + 1].any()  # a piece for one part covers the whole
    marks = [at for at in np.flatnonzero(~covered).tolist() if _is_mark(text, at)]
    based = -1  # the last mark that has a character before it
    for at in marks:
        if at and (covered[at - 1] or based == at - 1):
            continues[at], based = True, at
        elif at + 1 < len(text):  # no character before it
            continues[at + 1] = covered[at + 1] or _is_mark(text, at + 1)
    return continues


def _is_mark(text: str, at: int) -> bool:
    """Whether the code point only changes how the one before it looks."""
    if text[at] == _NON_JOINER:  # it shows an Indic virama; elsewhere, as in Persian, it separates a word's ending
        return at > 0 and unicodedata.combining(text[at - 1]) == _VIRAMA
    return text[at] == _JOINER or unicodedata.category(text[at])[0] == "M"
