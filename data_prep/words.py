"""A cache of words in front of the tokenizer: text repeats its words, so most are looked up, not encoded.

BERT's cleaning and its split into words treat each character alone, but for accents, which move only within
a word, and a space always parts two words (that is why `load_tokenizer` takes no other kind of tokenizer).
So the ids of a text are the ids of what stands between its spaces, one after the other, and a word's ids
never change. Lambert's own tests compare the two on arbitrary Unicode.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.tokenizer import CONTINUING, Tokenizer

MOST_CHARACTERS = 1 << 21  # in the words of the cache; it starts anew beyond that: bounded memory
BATCH = 64  # words encoded in one text
BORDER = "\n"  # a word of no ids, between two sentences
SEPARATORS = "|~^`}{"  # one that is a piece parts the words of a batch
CHINESE = re.compile("([\u3400-\u4dbf\u4e00-\u9fff])")  # among the characters that BERT sets apart

Ids = NDArray[np.unsignedinteger[Any]]  # uint16 or uint32


class Encoded(NamedTuple):
    """Sentences as one row of ids."""

    ids: Ids  # [tokens]
    continues: NDArray[np.uint8]  # [tokens] 1 where a token continues the word of the token before it
    lengths: NDArray[np.int64]  # [sentences] tokens, 0 for a sentence without visible text


class WordCache:
    """Encodes sentences as `Tokenizer.encode` does, several times as fast.

    Args:
        given_words: Chinese characters between two spaces are one word. Without it each is a word of its own.
    """

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype[np.unsignedinteger[Any]], given_words: bool) -> None:
        self._tokenizer, self._dtype, self._given_words = tokenizer, dtype, given_words
        chinese = {i for i, piece in enumerate(tokenizer.pieces) if CHINESE.fullmatch(piece)}
        self._is_chinese = _flags(tokenizer.vocab_size, chinese)
        self._is_inner = _flags(
            tokenizer.vocab_size, {i for i, piece in enumerate(tokenizer.pieces) if piece.startswith(CONTINUING)}
        )
        self._splits_chinese = bool(tokenizer.settings["tokenize_chinese_chars"]) and not given_words
        self._separator = _separator(tokenizer)
        self._clear()

    @property
    def characters(self) -> int:
        """In the words that are known."""
        return self._numbers.characters

    def encode(self, sentences: list[str]) -> Encoded:
        """The sentences, whose words are parted by U+0020 alone (`cleaning.clean`), without control tokens."""
        if not sentences:
            return Encoded(np.empty(0, self._dtype), np.empty(0, np.uint8), np.empty(0, np.int64))
        text = f" {BORDER} ".join(sentences)
        if self._splits_chinese and not text.isascii():
            text = CHINESE.sub(r" \1 ", text)
        if self.characters > MOST_CHARACTERS:
            self._clear()
        words = text.split(" ")
        numbers = np.fromiter(map(self._numbers.__getitem__, words), np.int64, len(words))
        self._learn()
        lengths = self._lengths[numbers]
        ends = np.cumsum(lengths)
        index = np.repeat(self._starts[numbers] - (ends - lengths), lengths)
        index += np.arange(len(index))
        borders = np.append(ends[numbers == 0], ends[-1])
        return Encoded(self._ids[index], self._continues[index], np.diff(borders, prepend=0))

    def _clear(self) -> None:
        self._numbers = _Numbers({BORDER: 0, "": 1})
        self._ids = np.empty(0, self._dtype)
        self._continues = np.empty(0, np.uint8)
        self._starts = self._lengths = np.zeros(2, np.int64)  # of each word in the two above

    def _learn(self) -> None:
        """Encodes the words that were met for the first time."""
        words = self._numbers.take_new()
        if not words:
            return
        parts = [self._encode(words[start : start + BATCH]) for start in range(0, len(words), BATCH)]
        ids = np.concatenate([ids for ids, _ in parts]).astype(self._dtype)
        lengths = np.concatenate([lengths for _, lengths in parts])
        first = np.zeros(len(ids), np.bool_)
        starts = np.cumsum(lengths) - lengths
        first[starts[lengths > 0]] = True
        continues = self._is_inner[ids]
        if self._given_words:
            chinese = self._is_chinese[ids]
            continues |= chinese & np.append(np.uint8(0), chinese[:-1])
        continues[first] = 0
        self._starts = np.concatenate([self._starts, len(self._ids) + starts])
        self._lengths = np.concatenate([self._lengths, lengths])
        self._ids = np.concatenate([self._ids, ids])
        self._continues = np.concatenate([self._continues, continues])

    def _encode(self, words: list[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids of the words and their lengths. As one text, since a call costs more than a word, if that is safe."""
        if self._separator is not None and not any(self._separator[0] in word for word in words):
            piece, separator = self._separator
            ids = np.array(next(self._tokenizer.encode([f" {piece} ".join(words)])), np.int64)
            found = np.flatnonzero(ids == separator)
            if len(found) == len(words) - 1:
                return np.delete(ids, found), np.diff(found, prepend=-1, append=len(ids)) - 1
        rows = list(self._tokenizer.encode(words))
        return np.array(list(chain.from_iterable(rows)), np.int64), np.array([len(row) for row in rows], np.int64)


class _Numbers(dict[str, int]):
    """Numbers the words in the order in which they are met."""

    characters = 0

    def __init__(self, known: dict[str, int]) -> None:
        super().__init__(known)
        self._new: list[str] = []

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        self._new.append(word)
        return number

    def take_new(self) -> list[str]:
        new, self._new = self._new, []
        self.characters += sum(map(len, new))
        return new


def _separator(tokenizer: Tokenizer) -> tuple[str, int] | None:
    """A punctuation mark that is a piece, with its id."""
    known = {piece: i for i, piece in enumerate(tokenizer.pieces)}
    for mark in SEPARATORS:
        if mark in known and list(tokenizer.encode([f"a {mark} a"]))[0].count(known[mark]) == 1:
            return mark, known[mark]
    return None


def _flags(size: int, ids: set[int]) -> NDArray[np.uint8]:
    flags = np.zeros(size, np.uint8)
    flags[sorted(ids)] = 1
    return flags
