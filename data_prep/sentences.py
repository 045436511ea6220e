"""Splits paragraphs into sentences, by the rules of `sentencex` (Wikimedia).

The rules know the full stops of all scripts, so Chinese is split at 。！？ even if the language is set to English. A
quotation of several sentences stays in one piece, and a semicolon does not end a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable

import sentencex

LONGEST_SENTENCE = 10_000  # characters; a longer "sentence" has no punctuation and is cut
WINDOW_CHARACTERS = 2_000  # characters split at once: for Chinese the time grows with the square of the length
CLOSING = "」』）〕】》〉｣］｝"  # never start a sentence; `sentencex` does not know all of them


def split_sentences(paragraph: str, language: str) -> tuple[list[str], int]:
    """The sentences of a paragraph, stripped, none empty or longer than LONGEST_SENTENCE; and the number of cuts.

    Args:
        language: ISO 639-1 code; for unknown ones `sentencex` uses the rules of a related language, or English.
    """
    sentences: list[str] = []
    start, size, cut = 0, WINDOW_CHARACTERS, 0
    while start + size < len(paragraph):
        window = paragraph[start : start + size]
        found = sentencex.segment(language, window)
        if len(found) > 1:
            found.pop()  # it may continue beyond the window
        elif size < LONGEST_SENTENCE:
            size = min(2 * size, LONGEST_SENTENCE)
            continue
        else:
            found = [_cut(window)]
            cut += 1
        sentences += found
        start += sum(map(len, found))
        size = WINDOW_CHARACTERS
    sentences += sentencex.segment(language, paragraph[start:])
    if paragraph.isascii():  # no brackets of CLOSING
        return [sentence for sentence in map(str.strip, sentences) if sentence], cut
    return _strip(sentences), cut


def _cut(sentence: str) -> str:
    """The start of an overlong "sentence" (a table, a blob, text without punctuation), up to a space if possible."""
    space = sentence.rfind(" ", 1)
    return sentence[:space] if space > 0 else sentence


def _strip(sentences: Iterable[str]) -> list[str]:
    """Strips whitespace, and moves closing brackets to the sentence that they close."""
    stripped: list[str] = []
    for sentence in map(str.strip, sentences):
        if stripped and sentence[:1] in CLOSING:
            rest = sentence.lstrip(CLOSING)
            closed = stripped[-1] + sentence[: len(sentence) - len(rest)]
            if len(closed) <= LONGEST_SENTENCE:
                stripped[-1], sentence = closed, rest.lstrip()
        if sentence:
            stripped.append(sentence)
    return stripped
