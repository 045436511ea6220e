"""Paragraphs to sentences, by the rules of `sentencex` (Wikimedia).

The rules know the full stops of all scripts, so Chinese is split at 。！？ also where the language is said to be
English. A quotation of several sentences stays whole, and so does what a semicolon parts.
"""

from __future__ import annotations

from collections.abc import Iterable

import sentencex

LONGEST = 10_000  # characters; a "sentence" that does not end before has no punctuation and is cut
WINDOW = 2_000  # characters split at once: the time for Chinese grows with the square
CLOSING = "」』）〕】》〉｣］｝"  # never first in a sentence; `sentencex` does not know all of them


def split_sentences(paragraph: str, language: str) -> tuple[list[str], int]:
    """The sentences of a paragraph, stripped, none empty or longer than LONGEST, and how often one was cut.

    Args:
        language: ISO 639-1 code; `sentencex` takes related rules, at last English, for one it doesn't know.
    """
    sentences: list[str] = []
    start, size, cut = 0, WINDOW, 0
    while start + size < len(paragraph):
        window = paragraph[start : start + size]
        found = sentencex.segment(language, window)
        if len(found) > 1:
            found.pop()  # it may go on beyond the window
        elif size < LONGEST:
            size = min(2 * size, LONGEST)
            continue
        else:
            found = [_cut(window)]
            cut += 1
        sentences += found
        start += sum(map(len, found))
        size = WINDOW
    sentences += sentencex.segment(language, paragraph[start:])
    if paragraph.isascii():  # no bracket of CLOSING
        return [sentence for sentence in map(str.strip, sentences) if sentence], cut
    return _strip(sentences), cut


def _cut(sentence: str) -> str:
    """The beginning of what no sentence should be (a table, a blob, text without punctuation), to a space if it can."""
    space = sentence.rfind(" ", 1)
    return sentence[:space] if space > 0 else sentence


def _strip(sentences: Iterable[str]) -> list[str]:
    """Without white space around them, and with the brackets that close them."""
    stripped: list[str] = []
    for sentence in map(str.strip, sentences):
        if stripped and sentence[:1] in CLOSING:
            rest = sentence.lstrip(CLOSING)
            closed = stripped[-1] + sentence[: len(sentence) - len(rest)]
            if len(closed) <= LONGEST:
                stripped[-1], sentence = closed, rest.lstrip()
        if sentence:
            stripped.append(sentence)
    return stripped
