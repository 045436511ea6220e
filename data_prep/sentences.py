"""Paragraphs to sentences, by the rules of `sentencex` (Wikimedia)."""

from __future__ import annotations

from collections.abc import Iterator

import sentencex

LONGEST = 10_000  # characters; a longer "sentence" has no punctuation and is cut


def split_sentences(paragraph: str, language: str) -> tuple[list[str], int]:
    """The sentences of a paragraph, stripped, none empty or longer than LONGEST, and how often one was cut.

    Args:
        language: ISO 639-1 code; `sentencex` takes related rules, at last English, for one it doesn't know.
    """
    sentences = [text for text in map(str.strip, sentencex.segment(language, paragraph)) if text]
    pieces = [piece for sentence in sentences for piece in _cut(sentence)]
    return pieces, len(pieces) - len(sentences)


def _cut(sentence: str) -> Iterator[str]:
    """Cuts what no sentence should be (a table, a blob, text without punctuation), at a space if it can."""
    start = 0
    while len(sentence) - start > LONGEST:
        space = sentence.rfind(" ", start + 1, start + LONGEST)
        end = space if space > 0 else start + LONGEST
        yield sentence[start:end]
        start = end
    yield sentence[start:]
