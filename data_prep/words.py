"""A cache of words in front of the tokenizer: text repeats its words, so most are looked up, not encoded.

BERT's cleaning and its split into words treat each character alone, but for accents, which move only within
a word, and a space always parts two words (that is why `load_tokenizer` takes no other kind of tokenizer).
So the ids of a text are the ids of what stands between its spaces, one after the other, and a word's ids
never change. A new word of Latin letters without accents, digits and marks is cut here, by the same rule in a
third of the time; any other is the tokenizer's to encode. The tests compare all of it on arbitrary Unicode.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.tokenizer import CONTINUING, MODEL, Tokenizer

MOST_CHARACTERS = 1 << 21  # in the words of the cache; it starts anew beyond that: bounded memory
BORDER = "\n"  # a word of no ids, between two sentences
_is_plain = re.compile("[!-~“”‘’–—…]+").fullmatch  # BERT makes a piece of each mark among these, and keeps the rest
_parts = re.compile("[A-Za-z0-9]+|[^A-Za-z0-9]").findall
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
        pieces = tokenizer.pieces
        self._heads = {piece: i for i, piece in enumerate(pieces)}
        self._tails = {piece[2:]: i for i, piece in enumerate(pieces) if piece.startswith(CONTINUING)}
        self._longest = max(map(len, pieces))
        self._is_chinese = np.array([CHINESE.fullmatch(piece) is not None for piece in pieces], np.uint8)
        self._is_inner = np.array([piece.startswith(CONTINUING) for piece in pieces], np.uint8)
        self._splits_chinese = bool(tokenizer.settings["tokenize_chinese_chars"]) and not given_words
        self._lowercase = bool(tokenizer.settings["do_lower_case"])
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
        self._known_parts: dict[str, list[int]] = {}
        self._numbers = _Numbers({BORDER: 0, "": 1})
        self._ids = np.empty(0, self._dtype)
        self._continues = np.empty(0, np.uint8)
        self._starts = self._lengths = np.zeros(2, np.int64)  # of each word in the two above

    def _learn(self) -> None:
        """Finds the ids of the words that were met for the first time."""
        words = self._numbers.take_new()
        if not words:
            return
        plain = [_is_plain(word) for word in words]
        others = self._tokenizer.encode([word for word, here in zip(words, plain, strict=True) if not here])
        rows = [self._find(word) if here else next(others) for word, here in zip(words, plain, strict=True)]
        lengths = np.array([len(row) for row in rows], np.int64)
        ids = np.fromiter(chain.from_iterable(rows), self._dtype, int(lengths.sum()))
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

    def _find(self, word: str) -> list[int]:
        """The ids of a plain word: of its runs of letters and digits, and of the marks between them."""
        if self._lowercase:
            word = word.lower()
        if word.isalnum():
            return self._find_part(word)
        return [id for part in _parts(word) for id in self._find_part(part)]

    def _find_part(self, part: str) -> list[int]:
        known = self._known_parts.get(part)
        if known is None:
            known = self._known_parts[part] = self._cut(part)
        return known

    def _cut(self, part: str) -> list[int]:
        """WordPiece: from the left, the longest piece each time (Wu et al., "Google's NMT", 2016, section 4.1)."""
        if len(part) > MODEL["max_input_chars_per_word"]:
            return [self._tokenizer.specials.unk]
        ids, vocab, start, length = [], self._heads, 0, len(part)
        while start < length:
            end = min(length, start + self._longest)
            while end > start and part[start:end] not in vocab:
                end -= 1
            if end == start:
                return [self._tokenizer.specials.unk]
            ids.append(vocab[part[start:end]])
            start, vocab = end, self._tails
        return ids


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
