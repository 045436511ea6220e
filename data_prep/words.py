"""A cache of words in front of the tokenizer: text repeats its words, so most are looked up instead of encoded.

BERT's cleaning and word splitting treat each character independently, except accents, which move only within a word.
Spaces and marks always separate two words (this is why `load_tokenizer` accepts no other kind of tokenizer). So the ids
of a text are the ids of its marks and of the words between spaces and marks, concatenated, and the ids of a word never
change. A new word of unaccented Latin letters and digits needs no cleaning and goes straight to the tokenizer's
WordPiece; for any other word the tokenizer also does the cleaning. The tests check all of this on arbitrary Unicode.

Words are found and recognized by array arithmetic on the whole text at once: a word of up to 16 bytes is two numbers.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.combining_marks import Marks, count_marks
from data_prep.tokenizer import CONTINUING, Tokenizer

MOST_CHARACTERS = 1 << 21  # total over the words in the cache; beyond that it is cleared, to bound memory
SENTENCE_BREAK = "\n"  # a word without ids, between two sentences
SPACE, RUN, MARK = range(3)  # classes of bytes; for BERT each mark is a word
CLASSES = bytes(
    SPACE if byte == ord(" ") else RUN if byte >= 0x80 or chr(byte).isalnum() else MARK for byte in range(256)
)
MARKS = {byte: mark for byte, mark in enumerate("“”‘’–—…", 1)}  # one byte each: clean text has no control characters
MARK_LEADS = b"\xe2\x80"  # the first bytes of all of them in UTF-8
MARK_BYTES = np.zeros(256, np.uint8)  # indexed by the last byte in UTF-8; 0 if not a mark
MARK_BYTES[[ord(mark) & 0x3F | 0x80 for mark in MARKS.values()]] = list(MARKS)
CHINESE = re.compile("([\u3400-\u4dbf\u4e00-\u9fff])")  # some of the characters that BERT separates
CHINESE_LEADS = np.uint8(0xE3), np.uint8(0xE9)  # range of their first bytes in UTF-8, which few other characters share
KEY = 16  # maximum bytes of a word in the memo
LOW = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)  # masks for the first n of 8 bytes
NO_WORD = np.uint64(0xFF)  # never occurs in UTF-8
MEMO_BITS = 18
FACTORS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)  # arbitrary odd numbers

Ids = NDArray[np.unsignedinteger[Any]]  # uint16 or uint32


class Encoded(NamedTuple):
    """Sentences as one array of ids."""

    ids: Ids  # [tokens]
    continues: NDArray[np.uint8]  # [tokens] 1 where a token continues the word of the token before it
    lengths: NDArray[np.int64]  # [sentences] tokens, 0 for a sentence without visible text
    marks: Marks  # combining marks that the tokenizer strips


class WordCache:
    """Encodes sentences like `Tokenizer.encode`, many times faster.

    Args:
        given_words: Chinese characters between two spaces are one word. Otherwise each is a separate word.
    """

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype[np.unsignedinteger[Any]], given_words: bool) -> None:
        self._tokenizer, self._dtype, self._given_words = tokenizer, dtype, given_words
        pieces = tokenizer.pieces
        self._is_chinese = np.array([CHINESE.fullmatch(piece) is not None for piece in pieces], np.uint8)
        self._is_inner = np.array([piece.startswith(CONTINUING) for piece in pieces], np.uint8)
        self._splits_chinese = bool(tokenizer.settings["tokenize_chinese_chars"]) and not given_words
        self._lowercase = bool(tokenizer.settings["do_lower_case"])
        self._strips = tokenizer.strips_accents
        self._clear()

    @property
    def characters(self) -> int:
        """The number of characters in all cached words."""
        return self._numbers.characters

    def encode(self, sentences: list[str]) -> Encoded:
        """Encodes sentences, without control tokens. Only U+0020 may separate words, as after `cleaning.clean`."""
        if self.characters > MOST_CHARACTERS:
            self._clear()
        text = f" {SENTENCE_BREAK} ".join(["", *sentences, ""])
        numbers = self._look_up(self._spell(text))
        self._learn()
        lengths = self._lengths[numbers]
        ends = np.cumsum(lengths)
        index = np.repeat(self._starts[numbers] - (ends - lengths), lengths)
        index += np.arange(len(index))
        marks = Marks(*(int(of_words[numbers].sum()) if of_words.any() else 0 for of_words in self._marks))
        return Encoded(self._ids[index], self._continues[index], np.diff(ends[numbers == 0]), marks)

    def _clear(self) -> None:
        self._numbers = _Numbers({SENTENCE_BREAK.encode(): 0})
        self._memo_low, self._memo_high = np.zeros((2, 1 << MEMO_BITS), np.uint64)  # no word is empty
        self._memo = np.zeros(1 << MEMO_BITS, np.int32)  # number of the word with these bytes
        self._ids = np.empty(0, self._dtype)
        self._continues = np.empty(0, np.uint8)
        self._starts = self._lengths = np.zeros(1, np.int64)  # start and length of each word in the two arrays above
        self._marks = np.zeros((2, 1), np.int64)  # Marks of each word

    def _spell(self, text: str) -> bytes:
        """UTF-8 with spaces around Chinese characters, ASCII letters in lower case, and MARKS as single bytes."""
        data = text.encode()
        if not text.isascii():
            first, last = CHINESE_LEADS
            if self._splits_chinese and (np.frombuffer(data, np.uint8) - first <= last - first).any():
                data = CHINESE.sub(r" \1 ", text).encode()
            data = _spell_marks(data)
        return data.lower() if self._lowercase else data

    def _look_up(self, data: bytes) -> NDArray[np.int32]:
        """The numbers of the words, from the memo, or else from the dictionary, which numbers new words."""
        starts, ends = _find_words(data)
        lengths = ends - starts
        eight = np.ndarray(len(data) + 1, "<u8", data + bytes(8), strides=(1,))  # (bytes + 1,) a byte and 7 after it
        low, high = eight[starts] & LOW[np.minimum(lengths, 8)], np.zeros(len(starts), np.uint64)
        longer = np.flatnonzero(lengths > 8)
        high[longer] = eight[starts[longer] + 8] & LOW[np.minimum(lengths[longer] - 8, 8)]
        low[longer[lengths[longer] > KEY]] = NO_WORD
        place = ((low ^ high * FACTORS[1]) * FACTORS[0] >> np.uint64(64 - MEMO_BITS)).astype(np.int64)
        numbers: NDArray[np.int32] = self._memo[place]
        new = np.flatnonzero((self._memo_low[place] != low) | (self._memo_high[place] != high))
        words = [data[start:end] for start, end in zip(starts[new].tolist(), ends[new].tolist(), strict=True)]
        numbers[new] = np.fromiter(map(self._numbers.__getitem__, words), np.int32, len(words))
        new = new[lengths[new] <= KEY]
        at = place[new]  # if words share a place, the last one stays there
        self._memo_low[at], self._memo_high[at], self._memo[at] = low[new], high[new], numbers[new]
        return numbers

    def _learn(self) -> None:
        """Finds the ids of the words that were seen for the first time."""
        words = self._numbers.take_new()
        if not words:
            return
        plain = list(map(bytes.isascii, words))
        texts = [MARKS.get(word[0], word.decode()) for word in words]
        others = self._tokenizer.encode([text for text, here in zip(texts, plain, strict=True) if not here])
        cut = self._tokenizer.encoder.model.tokenize
        rows = [
            [piece.id for piece in cut(text)] if here else next(others) for text, here in zip(texts, plain, strict=True)
        ]
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
        marks = np.zeros((2, len(words)), np.int64)
        if self._strips and not all(plain):
            counted = [count_marks(text) for text, here in zip(texts, plain, strict=True) if not here]
            marks[:, ~np.array(plain)] = np.transpose(counted)
        self._marks = np.concatenate([self._marks, marks], axis=1)
        self._ids = np.concatenate([self._ids, ids])
        self._continues = np.concatenate([self._continues, continues])


def _spell_marks(data: bytes) -> bytes:
    """Replaces each of MARKS by its byte and two spaces; nothing else in UTF-8 has their three bytes."""
    spelt = np.frombuffer(bytearray(data), np.uint8)
    at = np.flatnonzero(spelt == MARK_LEADS[0])
    byte = MARK_BYTES[spelt[at + 2]] * (spelt[at + 1] == MARK_LEADS[1])
    at, byte = at[byte > 0], byte[byte > 0]
    spelt[at], spelt[at + 1], spelt[at + 2] = byte, ord(" "), ord(" ")
    return spelt.tobytes()


def _find_words(data: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Start and end of each mark, and of each run without marks and spaces. The data begin and end with one."""
    classes = np.frombuffer(data.translate(CLASSES), np.uint8)
    run, starts = classes == RUN, classes == MARK
    ends = starts.copy()
    starts[1:] |= run[1:] > run[:-1]
    ends[:-1] |= run[:-1] > run[1:]
    return np.flatnonzero(starts), np.flatnonzero(ends) + 1


class _Numbers(dict[bytes, int]):
    """Numbers words in the order in which they are first seen."""

    characters = 0

    def __init__(self, known: dict[bytes, int]) -> None:
        super().__init__(known)
        self._new: list[bytes] = []

    def __missing__(self, word: bytes) -> int:
        number = self[word] = len(self)
        self._new.append(word)
        return number

    def take_new(self) -> list[bytes]:
        new, self._new = self._new, []
        self.characters += sum(map(len, new))
        return new
