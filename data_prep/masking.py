"""Turns planned pairs into masked samples, after Devlin et al., "BERT" (2019), section 3.1.

A share of the ordinary tokens is predicted. Of these, 80 % become [MASK], 10 % become a random ordinary token
and 10 % stay unchanged. Control tokens, padding and [UNK] are never predicted and never used as a replacement.
Every draw is keyed by (seed, sample number, position), so a mask does not depend on the shard or process that makes
it, nor on the neighboring samples. The unit says what is masked together:

    token   single tokens, as in the paper
    word    all pieces of a word: `create_masked_lm_predictions` in BERT's repository, since May 2019
    ngram   runs of one to three words, p(n) ~ 1/n: Lan et al., "ALBERT" (2020), section 4.1
    span    runs of one to ten words, p(n) ~ 0.8**n: Joshi et al., "SpanBERT" (2020), section 3.1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.draws import bits, uniform
from data_prep.errors import DataError
from data_prep.settings import Settings
from data_prep.shards import Sample, Samples
from data_prep.store import Store
from data_prep.tokenizer import SpecialIds

# Streams of draws: "mask", "kind", "rand", "leng".
CHOICE, KIND, RANDOM, LENGTH = 0x6D61736B, 0x6B696E64, 0x72616E64, 0x6C656E67
TO_MASK, TO_RANDOM = 0.8, 0.1  # the rest stays
RUNS = {  # relative frequency of runs of 1, 2, ... words
    "word": np.ones(1),
    "ngram": 1 / np.arange(1, 4),
    # Geo(0.2) without lengths above 10: its mean is the paper's 3.8, which min(n, 10) would raise to 4.5.
    "span": 0.8 ** np.arange(10),
}
POSITION_BITS = np.uint64(0xFFFF)  # low bits of a draw
LAST = ~np.uint64(0)  # the draw for a token or word that cannot be chosen
TOKENS_AT_ONCE = 1 << 17  # tokens of the samples that are masked together


@dataclass(frozen=True)
class Vocabulary:
    """The ids of ordinary tokens."""

    mask: int
    is_ordinary: NDArray[np.bool_]  # [V]
    ordinary: NDArray[np.int32]  # their ids, ascending


@dataclass(frozen=True)
class Masking:
    """The masking rule of a sample."""

    unit: str  # token, word, ngram or span
    share: float  # share of the ordinary tokens
    most: int  # maximum masked tokens per sample


class Words(NamedTuple):
    """The words of a rectangle [B, S] of tokens, row by row. A flat position is row * S + position."""

    begins: NDArray[np.int64]  # [W] flat position of a word's first token
    ends: NDArray[np.int64]  # [W] flat position behind its last token
    rows: NDArray[np.int64]  # [W]
    positions: NDArray[np.int64]  # [W] position of the first token in its row
    whole: NDArray[np.bool_]  # [W] every token is an ordinary one


def make_vocabulary(vocab_size: int, never: Sequence[int], mask: int) -> Vocabulary:
    """The vocabulary of ids 0..vocab_size-1, where ``never`` and ``mask`` are never predicted or a replacement.

    Raises DataError for fewer than two ordinary tokens: a random replacement would have no choice.
    """
    is_ordinary = np.ones(vocab_size, np.bool_)
    is_ordinary[[*never, mask]] = False
    ordinary = np.flatnonzero(is_ordinary).astype(np.int32)
    if len(ordinary) < 2:
        raise DataError(
            f"the vocabulary of {vocab_size} pieces is too small for random replacement: it needs 2 besides "
            "control tokens, [UNK] and [unused] pieces; train a larger one"
        )
    return Vocabulary(mask, is_ordinary, ordinary)


def make_samples(
    store: Store,
    pairs: NDArray[np.void],
    first: int,
    vocabulary: Vocabulary,
    specials: SpecialIds,
    settings: Settings,
) -> Iterator[Sample]:
    """The samples numbered ``first``, ``first + 1``, ... of ``pairs``, PAIR[samples]; a B of 0 tokens means no B."""
    masking = Masking(settings.masking, settings.masked_share, settings.max_predictions)
    step = max(1, TOKENS_AT_ONCE // settings.sequence_length)
    for start in range(0, len(pairs), step):
        rows = pairs[start : start + step]
        ids, continues = _lay_out(store, rows, specials)  # (B, S), (B, S)
        numbers = first + start + np.arange(len(rows))
        counts, positions, replacements = _mask(ids, continues, numbers, vocabulary, masking, settings.seed)
        splits = rows["a_length"] + 2
        lengths = splits + rows["b_length"] + (rows["b_length"] > 0)
        there = np.arange(ids.shape[1]) < lengths[:, None]  # (B, S)
        yield from Samples(
            lengths, counts, splits, rows["is_next"], ids[there], positions, replacements, continues[there]
        )


def remask(
    samples: Samples, numbers: NDArray[np.int64], vocabulary: Vocabulary, masking: Masking, seed: int
) -> Samples:
    """The samples with new masks, drawn as in `make_samples`: the same seed and numbers give the same masks.

    Args:
        numbers: [samples] number of each sample in the data set.
        seed: for dynamic masks, a different one in each epoch.
    """
    if not len(samples):
        return samples
    step = max(1, TOKENS_AT_ONCE // int(samples.lengths.max()))
    masks = []
    for start in range(0, len(samples), step):
        block = samples[start : start + step]
        there = np.arange(block.lengths.max()) < block.lengths[:, None]  # (B, S)
        ids = np.full(there.shape, vocabulary.mask, np.int32)  # any id that is not ordinary can be padding
        ids[there] = block.ids
        continues = np.zeros(there.shape, np.bool_)
        continues[there] = block.continues
        masks.append(_mask(ids, continues, numbers[start : start + step], vocabulary, masking, seed))
    counts, positions, replacements = (np.concatenate(parts) for parts in zip(*masks, strict=True))
    return dataclasses.replace(samples, counts=counts, positions=positions, replacements=replacements)


def maskable(
    ids: NDArray[np.integer[Any]],
    continues: NDArray[Any],
    lengths: NDArray[np.int64],
    vocabulary: Vocabulary,
    masking: Masking,
) -> NDArray[np.bool_]:
    """Which segments contain something that `choose` can choose: a token, or a word of at most ``masking.most`` tokens.

    Args:
        ids, continues: [tokens] of all segments, concatenated. A word does not continue into the next segment.
        lengths: [segments] tokens; 0 for an empty one.
    """
    ends = np.cumsum(lengths)
    begins = ends - lengths
    targets = vocabulary.is_ordinary[ids]  # (tokens,)
    if masking.unit != "token" and len(ids):
        goes_on = continues != 0
        goes_on[begins[lengths > 0]] = False
        words = _find_words(targets[None], goes_on[None])
        targets = np.zeros(len(ids), np.bool_)
        targets[words.begins] = words.whole & (words.ends - words.begins <= masking.most)
    before = np.append(0, np.cumsum(targets))  # (tokens + 1,)
    found: NDArray[np.bool_] = before[ends] > before[begins]
    return found


def choose(
    ids: NDArray[np.int32],
    continues: NDArray[np.bool_],
    samples: NDArray[np.int64],
    vocabulary: Vocabulary,
    masking: Masking,
    seed: int,
) -> NDArray[np.int32]:
    """Chooses the tokens to predict: max(1, round(share * ordinary tokens)) per row, and at most ``most``.

    Unit token chooses exactly this many. The other units try the words of a row in random order, each as the start
    of a run. A run is shortened if it would reach a chosen word, a token that is not ordinary, the end of the row,
    or the number of tokens wanted; if not even one word fits, the next word is tried. If every word has more tokens
    than are wanted, the shortest word of at most ``most`` tokens is taken.

    Args:
        ids: [B, S], padded with any id that is not ordinary.
        continues: [B, S] whether a token continues the word before it; False at control tokens and behind them.
        samples: [B] sample numbers.
    Returns:
        int32[B, S]: -1 if not chosen, else the position at which its run starts (unit token: its own position).
    """
    ordinary = vocabulary.is_ordinary[ids]  # (B, S)
    available = ordinary.sum(axis=1)
    budget = np.minimum(np.maximum(np.rint(masking.share * available), 1), masking.most).astype(np.int64)  # (B,)
    if masking.unit == "token":
        return _choose_tokens(ordinary, samples, np.minimum(budget, available), seed)
    words = _find_words(ordinary, continues)
    draws = bits(seed, CHOICE, samples[words.rows], words.positions)  # (W,)
    ends = _take_runs(words, draws, _draw_lengths(words, samples, masking.unit, seed), budget)
    sizes = ends - words.begins  # (W,) tokens of the run that starts there
    shortest = _find_shortest(words, draws, np.bincount(words.rows, sizes) == 0, masking.most)
    sizes[shortest] = words.ends[shortest] - words.begins[shortest]
    tokens = np.repeat(words.begins - (np.cumsum(sizes) - sizes), sizes)
    tokens += np.arange(len(tokens))
    spans = np.full(ids.size, -1, np.int32)
    spans[tokens] = np.repeat(words.positions, sizes)
    return spans.reshape(ids.shape)


def replace(
    labels: NDArray[np.int32],
    samples: NDArray[np.int64],
    positions: NDArray[np.integer[Any]],
    spans: NDArray[np.integer[Any]],
    vocabulary: Vocabulary,
    masking: Masking,
    seed: int,
) -> NDArray[np.int32]:
    """Replacements for ``labels`` in the masked input. All arrays are [P], one entry per position.

    Args:
        spans: from `choose`. With unit span, all tokens of a run become [MASK], or all become random tokens, or all
            stay; with the other units each position draws this independently.
    """
    kind = uniform(seed, KIND, samples, spans if masking.unit == "span" else positions)
    pick = uniform(seed, RANDOM, samples, positions) * len(vocabulary.ordinary)
    random = vocabulary.ordinary[pick.astype(np.int64)]
    changed = np.where(kind < TO_MASK, np.int32(vocabulary.mask), random)
    return np.where(kind < TO_MASK + TO_RANDOM, changed, labels)


def _choose_tokens(
    ordinary: NDArray[np.bool_], samples: NDArray[np.int64], counts: NDArray[np.int64], seed: int
) -> NDArray[np.int32]:
    """`choose` for unit token; ``counts``, [B], do not exceed the number of ordinary tokens in a row."""
    column = np.arange(ordinary.shape[1], dtype=np.uint64)
    draws = bits(seed, CHOICE, samples[:, None], column)  # (B, S)
    draws = draws & ~POSITION_BITS | column  # no two draws in a row are equal
    lowest = np.sort(np.where(ordinary, draws, LAST), axis=1)
    # A count of 0 reads the last column; then no token of the row is ordinary, so any limit will do.
    limit = lowest[np.arange(len(ordinary)), counts - 1]  # (B,)
    return np.where(ordinary & (draws <= limit[:, None]), column.astype(np.int32), np.int32(-1))


def _find_words(ordinary: NDArray[np.bool_], continues: NDArray[np.bool_]) -> Words:
    """The words of a rectangle, both [B, S]; each row starts one."""
    starts = ~continues
    starts[:, 0] = True
    begins = np.flatnonzero(starts)
    ends = np.append(begins[1:], starts.size)
    rows, positions = np.divmod(begins, starts.shape[1])
    return Words(begins, ends, rows, positions, np.logical_and.reduceat(ordinary.ravel(), begins))


def _draw_lengths(words: Words, samples: NDArray[np.int64], unit: str, seed: int) -> NDArray[np.int64]:
    """Run length, in words, drawn for each starting word, int64[W]."""
    if len(RUNS[unit]) == 1:
        return np.ones(len(words.rows), np.int64)
    chances = np.cumsum(RUNS[unit])
    draws = uniform(seed, LENGTH, samples[words.rows], words.positions)
    return 1 + np.searchsorted(chances / chances[-1], draws, side="right")


def _take_runs(
    words: Words, draws: NDArray[np.uint64], lengths: NDArray[np.int64], budget: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The flat end of the run that starts at each word, int64[W]; the word's own start if no run starts there.

    Args:
        draws: [W] the order in which the words of a row are tried.
        lengths: [W] wanted run length in words.
        budget: [B] tokens to take from a row.
    """
    begins, ends, rows, _, whole = words
    counts = np.bincount(rows, minlength=len(budget))
    first = np.cumsum(counts) - counts  # (B,) first word of a row
    number = np.arange(len(rows)) - first[rows]  # (W,) number of a word in its row
    last = first[rows] + np.minimum(number + lengths, counts[rows]) - 1  # (W,) last word of the run
    order = np.full((len(budget), counts.max()), LAST)
    order[rows[whole], number[whole]] = (draws & ~POSITION_BITS | number.astype(np.uint64))[whole]
    order = (np.sort(order, axis=1) & POSITION_BITS).astype(np.int64) + first[:, None]  # whole words first
    tries = np.bincount(rows[whole], minlength=len(budget))  # (B,)

    following = np.arange(lengths.max())
    free, left, run_ends = whole.copy(), budget.copy(), begins.copy()
    active, turn = np.flatnonzero(tries), 0  # the rows that still need tokens
    while len(active):
        word = order[active, turn]  # (R,)
        run = np.minimum(word[:, None] + following, last[word, None])  # (R, words), the last one repeated
        fits = free[run] & (ends[run] <= (begins[word] + left[active])[:, None])
        fits = np.logical_and.accumulate(fits, axis=1)
        free[run[fits]] = False
        run_ends[word] = np.where(fits, ends[run], begins[word, None]).max(axis=1)
        left[active] -= run_ends[word] - begins[word]
        turn += 1
        active = active[(left[active] > 0) & (tries[active] > turn)]
    return run_ends


def _find_shortest(words: Words, draws: NDArray[np.uint64], wanted: NDArray[np.bool_], most: int) -> NDArray[np.int64]:
    """The shortest whole word of at most ``most`` tokens in each row that is ``wanted``, [B], if it has one."""
    sizes = words.ends - words.begins
    found = np.flatnonzero(wanted[words.rows] & words.whole & (sizes <= most))
    found = found[np.lexsort((draws[found], sizes[found], words.rows[found]))]
    return found[np.unique(words.rows[found], return_index=True)[1]]


def _mask(
    ids: NDArray[np.int32],
    continues: NDArray[np.bool_],
    numbers: NDArray[np.int64],
    vocabulary: Vocabulary,
    masking: Masking,
    seed: int,
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """The masks of a rectangle, as in `Samples`: counts, positions and replacements. Arguments as in `choose`."""
    spans = choose(ids, continues, numbers, vocabulary, masking, seed)  # (B, S)
    row, position = np.divmod(np.flatnonzero(spans >= 0), ids.shape[1])  # (P,), (P,): row by row, ascending
    labels, runs = ids[row, position], spans[row, position]
    replacements = replace(labels, numbers[row], position, runs, vocabulary, masking, seed)
    return np.bincount(row, minlength=len(ids)), position.astype(np.int32), replacements


def _lay_out(
    store: Store, pairs: NDArray[np.void], specials: SpecialIds
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """[CLS] A [SEP] B [SEP] of each pair, or [CLS] A [SEP], padded with [PAD] to the longest.

    Returns:
        The ids, int32[B, S], and whether a token continues the word before it, bool[B, S]. That is never true of a
        control token or the start of A or B, even if a truncated pair starts inside a word.
    """
    a_length, b_length = pairs["a_length"][:, None], pairs["b_length"][:, None]  # (B, 1)
    middle = a_length + 1  # [SEP]
    last = middle + b_length + (b_length > 0)
    column = np.arange(int(last.max()) + 1)  # (S,)
    text = (column > 0) & (column < last) & (column != middle)  # (B, S)
    starts = np.stack([pairs["a_start"], pairs["b_start"]], axis=1).ravel()
    lengths = np.stack([pairs["a_length"], pairs["b_length"]], axis=1).ravel()
    ids = np.full(text.shape, specials.pad, np.int32)
    ids[:, 0] = specials.cls
    ids[(column == middle) | (column == last)] = specials.sep
    # A boolean index runs row by row, as `gather` does.
    ids[text] = store.gather(store.ids, starts, lengths)
    continues = np.zeros(text.shape, np.bool_)
    continues[text] = store.gather(store.continues, starts, lengths)
    continues[:, 1] = False
    continues[column == middle + 1] = False
    return ids, continues
