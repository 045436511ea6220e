"""Trains a vocabulary: decides which characters of a text get a piece, and which word pieces fit in the rest."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from tokenizers import trainers

from data_prep.combining_marks import Marks, count_marks
from data_prep.errors import DataError
from data_prep.tokenizer import (
    CONTINUING,
    DEFAULT_SETTINGS,
    ENCODING_BATCH,
    SPECIALS,
    SpecialIds,
    Tokenizer,
    bert_encoder,
)

LEAST_ALPHABET = 1_000  # minimum number of characters in the vocabulary, if the text has as many
COVERAGE = 0.9999  # share of the text's characters to cover; more characters are added until then, if they fit
LARGEST_VOCABULARY = 1_000_000  # pieces; twice the largest published BERT vocabulary (LaBSE)
LARGEST_MULTIPLE = 65_536  # no matrix product needs more


@dataclass(frozen=True)
class Learnt:
    """A tokenizer trained on a text, with counts of what it leaves out."""

    tokenizer: Tokenizer
    left_out: int  # characters of the text that have no piece
    share: float  # share of these in the text, counted by occurrence
    limit: str | None  # the option that excluded them
    words: int  # words in the text
    marks: Marks  # combining marks that the tokenizer strips


def train_tokenizer(paragraphs: Iterable[str], size: int, cased: bool, multiple_of: int = 1) -> Tokenizer:
    """Trains a tokenizer with `learn_tokenizer` and returns only the tokenizer."""
    return learn_tokenizer(paragraphs, size, cased, multiple_of).tokenizer


def learn_tokenizer(
    paragraphs: Iterable[str],
    size: int,
    cased: bool,
    multiple_of: int = 1,
    coverage: float = COVERAGE,
    keep_accents: bool = False,
) -> Learnt:
    """Trains a vocabulary of at most ``size`` pieces; the same text gives the same vocabulary.

    Each of the most frequent characters gets a piece: LEAST_ALPHABET of them, and more until they make up ``coverage``
    of the text or ``size`` is used up. Pieces of words come next, and rarer characters last, if there is room.

    The vocabulary is padded with [unused0], [unused1], ... to a multiple of ``multiple_of`` (matrix products are
    fastest for multiples of 8 to 64). These pieces never occur in a text and are never predicted.

    `tokenizers` numbers the characters in the order of a hash table, which differs from run to run, and
    breaks ties by these numbers. So the characters are passed to it in a fixed order, as if they were special tokens.

    Raises DataError if there is no text, or if ``size`` is too small for LEAST_ALPHABET characters.
    """
    settings = DEFAULT_SETTINGS | {"do_lower_case": not cased, "strip_accents": False if keep_accents else None}
    bare = _new(list(SPECIALS), settings)
    encoder = bare.encoder
    words, marks = _count_words(bare, paragraphs)
    if not words:
        raise DataError("no text found to learn a vocabulary from")
    counts = _count_characters(words)
    following = {character for word in words for character in word[1:]}
    costs = [1 + (character in following) for character in counts]  # "c" and "##c"
    wanted = _covering(list(counts.values()), coverage)
    needed = len(SPECIALS) + sum(costs[:LEAST_ALPHABET])
    if needed > size:
        raise DataError(f"--size {size} is too small: the characters alone need {needed}")
    kept = _fitting(costs[:wanted], size - len(SPECIALS))
    alphabet = sorted(list(counts)[:kept])
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        special_tokens=[*SPECIALS, *_pieces_of(alphabet, following)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    encoder.train_from_iterator(_repeated(words), trainer)
    vocab = encoder.get_vocab()
    learnt = sorted(vocab, key=vocab.__getitem__)
    more = kept + _fitting(costs[kept:], size - len(learnt))
    learnt += _pieces_of(list(counts)[kept:more], following)
    left_out = list(counts.values())[more:]
    limit = ("--size" if kept < wanted else "--character-coverage") if left_out else None
    learnt += [f"[unused{i}]" for i in range(-len(learnt) % multiple_of)]
    share = sum(left_out) / counts.total()
    return Learnt(_new(learnt, settings), len(left_out), share, limit, words.total(), marks)


def _count_words(tokenizer: Tokenizer, paragraphs: Iterable[str]) -> tuple[Counter[str], Marks]:
    words: Counter[str] = Counter()
    stripped = other = 0
    normalizer, pre_tokenizer = tokenizer.encoder.normalizer, tokenizer.encoder.pre_tokenizer
    for paragraph in paragraphs:
        words.update(word for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(paragraph)))
        if tokenizer.strips_accents:
            marks = count_marks(paragraph)
            stripped, other = stripped + marks.stripped, other + marks.other
    return words, Marks(stripped, other)


def _count_characters(words: Counter[str]) -> Counter[str]:
    """How often each character occurs in the text, the most frequent first."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    return Counter({c: counts[c] for c in sorted(sorted(counts), key=counts.__getitem__, reverse=True)})


def _covering(counts: list[int], coverage: float) -> int:
    """How many of the most frequent characters make up ``coverage`` of a text, at least LEAST_ALPHABET."""
    sums = list(accumulate(counts))
    return max(bisect_left(sums, coverage * sums[-1]) + 1, min(LEAST_ALPHABET, len(counts)))


def _fitting(costs: list[int], room: int) -> int:
    """How many characters, in order, fit in ``room`` pieces."""
    return bisect_right(list(accumulate(costs)), room)


def _pieces_of(characters: list[str], following: set[str]) -> list[str]:
    """The pieces ``c`` of each character, and ``##c`` of those that also occur inside a word."""
    return characters + [CONTINUING + character for character in characters if character in following]


def _repeated(words: Counter[str]) -> Iterator[str]:
    """Each word, repeated as often as it was counted: the trainer takes texts, not counts."""
    for word, count in words.items():
        for start in range(0, count, ENCODING_BATCH):
            yield " ".join([word] * min(ENCODING_BATCH, count - start))


def _new(pieces: list[str], settings: dict[str, Any]) -> Tokenizer:
    """A new tokenizer with our cleaning; its vocabulary begins with SPECIALS."""
    specials = SpecialIds(*range(len(SPECIALS)))
    return Tokenizer(bert_encoder(pieces, settings), pieces, specials, settings).with_cleaning()
