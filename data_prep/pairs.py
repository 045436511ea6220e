"""Documents to samples, as a plan: where in the store the segments of each sample lie. Three ways to pair them:

- ``nsp``, after Devlin et al., "BERT" (2019), appendix A.2, and its `create_pretraining_data.py`: sentences of a
  document are collected up to a target length and split at random into A and B; for half of the pairs B comes
  from another document instead, and the sentences that it displaced are used again;
- ``sop``, after Lan et al., "ALBERT" (2020), section 3.1: B always follows A, and half of the pairs are swapped;
- ``single``, after Liu et al., "RoBERTa" (2019), section 4.2, DOC-SENTENCES: as many sentences of a document as
  fit, in one segment.

A pair longer than its target is cut as BERT's `truncate_seq_pair` does: tokens are taken off the longer segment,
or B, one at a time, each from the front or the back by the toss of a coin; or, with ``cut`` outer, from the front
of A and the back of B, so that the text of a true pair goes on from A to B. Where this differs from BERT's:

- the short target is drawn for each pair, not once a document, and the pair is cut to it;
- a pair is made of two sentences at least, however long they are, so that half of the pairs can be true;
  a single sentence left at a document's end starts no pair (it can still be a random B).

Draws are keyed by (seed, duplicate, number of the pair's first sentence in the store). So what a pair would be
is known for all sentences at once, and a document's pairs are those on the way from its first sentence on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.draws import bits, uniform
from data_prep.masking import Masking, Vocabulary, maskable
from data_prep.settings import Settings
from data_prep.shards import NO_PAIR
from data_prep.store import Store

SPECIALS_IN_PAIR = 3  # [CLS] A [SEP] B [SEP]
SPECIALS_IN_SINGLE = 2  # [CLS] A [SEP]
PAIR = np.dtype(
    [("a_start", "<i8"), ("b_start", "<i8"), ("a_length", "<i4"), ("b_length", "<i4"), ("is_next", "<i4")]
)  # 28 bytes a sample; starts are offsets in Store.ids, lengths in tokens
PIECE, OTHER, FRONT = 0x70696563, 0x6F746872, 0x66726F6E  # streams of draws: "piec", "othr", "fron"
WORD = 64  # bits of a draw
BLOCK_TOKENS, BLOCK_DOCUMENTS = 1 << 18, 1 << 13  # of documents planned at once
TOKENS_AT_ONCE = 1 << 21  # of the pairs looked at together, at most


@dataclass(frozen=True)
class Block:
    """Rows first..last-1 of Store.documents, in one of the duplicates."""

    duplicate: int
    first: int
    last: int


class PlanCounts(NamedTuple):
    """What became of the tokens of a block's documents: the last four are all of them, each once."""

    unmaskable: int  # pairs in which nothing can be predicted, left out
    truncated: int  # tokens cut off the documents' own segments; not those of a random B
    left_over: int  # tokens of sentences that are in no pair
    unmaskable_tokens: int  # tokens of the documents' own segments in pairs left out, uncut
    own: int  # tokens of the documents' own segments in the pairs made

    @property
    def tokens(self) -> int:
        """Of the block's documents."""
        return self.truncated + self.left_over + self.unmaskable_tokens + self.own


class Pieces(NamedTuple):
    """Consecutive pieces of documents, [pieces] each: a pair, or a sentence left over, which is its whole piece.
    Sentences are numbers in the store, and `last` is exclusive."""

    document: NDArray[np.int64]  # row of Store.documents
    first: NDArray[np.int64]  # sentence that begins the piece
    middle: NDArray[np.int64]  # sentence that begins the second segment, or `last` where there is none
    last: NDArray[np.int64]
    after: NDArray[np.int64]  # sentence that begins the next piece: `middle` if B is from another document
    target: NDArray[np.int64]  # tokens of the pair at most
    is_next: NDArray[np.int64]


def cut_blocks(store: Store, duplicates: int) -> Iterator[Block]:
    """The work of planning, in the order of the plan; a block is BLOCK_TOKENS long at most, or one document."""
    count = len(store.documents)
    for duplicate in range(duplicates):
        first = 0
        while first < count:
            rows = store.documents[first : first + BLOCK_DOCUMENTS]
            tokens = np.cumsum(store.sentences[rows[:, 1]] - store.sentences[rows[:, 0]])
            last = first + max(1, int(np.searchsorted(tokens, BLOCK_TOKENS, "right")))
            yield Block(duplicate, first, last)
            first = last


def plan_pairs(
    store: Store, block: Block, settings: Settings, vocabulary: Vocabulary
) -> tuple[NDArray[np.void], PlanCounts]:
    """The pairs of a block, PAIR[samples], and what became of its tokens.

    A document's pairs depend on (store, settings, duplicate, the document's row) only. Pairs in which nothing
    can be predicted are left out. In a store of one document no B can be random: every pair of it is true.
    """
    masking = Masking(settings.masking, settings.masked_share, settings.max_predictions)
    segments = 1 if settings.pairs == "single" else 2
    planned, counts = [np.empty(0, PAIR)], np.zeros(len(PlanCounts._fields), np.int64)
    for pieces in _cut_documents(store, block, settings):
        text = store.sentences[pieces.after] - store.sentences[pieces.first]  # tokens, each in one piece
        paired = (pieces.middle < pieces.last) | (segments == 1)
        left_over = int(text[~paired].sum())
        pieces, text = Pieces(*(column[paired] for column in pieces)), text[paired]
        pairs = _place(store, pieces, block.duplicate, settings)
        own = pairs["a_length"] + np.where(pieces.after == pieces.last, pairs["b_length"], 0)

        kept = _maskable(store, pairs["a_start"], pairs["a_length"], vocabulary, masking)
        rest = np.flatnonzero(~kept)  # few: a B is read for these only
        kept[rest] = _maskable(store, pairs["b_start"][rest], pairs["b_length"][rest], vocabulary, masking)
        planned.append(pairs[kept])
        counts += PlanCounts(
            unmaskable=int(np.count_nonzero(~kept)),
            truncated=int((text - own)[kept].sum()),
            left_over=left_over,
            unmaskable_tokens=int(text[~kept].sum()),
            own=int(own[kept].sum()),
        )
    return np.concatenate(planned), PlanCounts(*counts.tolist())


def _maskable(
    store: Store,
    starts: NDArray[np.int64],
    lengths: NDArray[np.int32],
    vocabulary: Vocabulary,
    masking: Masking,
) -> NDArray[np.bool_]:
    """In which segments something can be predicted. One of no tokens, as the B of a single segment, has nothing."""
    ids = store.gather(store.ids, starts, lengths)
    continues = ids if masking.unit == "token" else store.gather(store.continues, starts, lengths)  # not looked at
    return maskable(ids, continues, lengths.astype(np.int64), vocabulary, masking)


def _cut_documents(store: Store, block: Block, settings: Settings) -> Iterator[Pieces]:
    """All pieces of the block's documents in their order; at most TOKENS_AT_ONCE of their pairs together."""
    documents = store.documents[block.first : block.last]
    ends = np.cumsum(documents[:, 1] - documents[:, 0])  # of each document, in the row of the block's sentences
    at_once = max(1, TOKENS_AT_ONCE // settings.sequence_length)
    place, count = 0, int(ends[-1])
    while place < count:
        places = np.arange(place, min(place + at_once, count))
        row = np.searchsorted(ends, places, "right")
        end = documents[row, 1]  # (places,)
        pieces = _cut_at(store, block.first + row, end - (ends[row] - places), end, block.duplicate, settings)
        lengths = (pieces.after - pieces.first).tolist()
        reached, at = [], 0
        while at < len(lengths):
            reached.append(at)
            at += lengths[at]
        yield Pieces(*(column[reached] for column in pieces))
        place += at


def _cut_at(
    store: Store,
    document: NDArray[np.int64],
    first: NDArray[np.int64],
    end: NDArray[np.int64],
    duplicate: int,
    settings: Settings,
) -> Pieces:
    """The piece that would begin at each of the sentences ``first`` of the documents that finish at ``end``."""
    single = settings.pairs == "single"
    short, goal, split, coin = uniform(settings.seed, PIECE, duplicate, first, np.arange(4)[:, None])
    longest = settings.sequence_length - (SPECIALS_IN_SINGLE if single else SPECIALS_IN_PAIR)
    drawn = 2 + (goal * (longest - 1)).astype(np.int64)
    target = np.where(short < settings.short_sequence_rate, drawn, longest)
    reach = store.sentences[first] + target
    if single:  # what fits, but one sentence at least
        last = np.maximum(np.searchsorted(store.sentences, reach, "right") - 1, first + 1)
        last = np.minimum(last, end)
        return Pieces(document, first, last, last, last, target, np.full_like(first, NO_PAIR))
    last = np.maximum(np.searchsorted(store.sentences, reach), first + 2)  # what fills the target
    last = np.minimum(last, end)
    middle = first + 1 + (split * (last - first - 1)).astype(np.int64)
    is_next = coin < 0.5
    after = last
    if settings.pairs == "nsp":
        is_next |= len(store.documents) == 1
        after = np.where(is_next, last, middle)
    return Pieces(document, first, middle, last, after, target, is_next.astype(np.int64))


def _place(store: Store, pieces: Pieces, duplicate: int, settings: Settings) -> NDArray[np.void]:
    """The pair of each piece, PAIR[pieces]: B drawn or swapped where it is to be, then cut to the target."""
    starts = store.sentences[np.stack([pieces.first, pieces.middle])]  # (segments, pieces) and so below
    lengths = store.sentences[np.stack([pieces.middle, pieces.last])] - starts
    changed = np.flatnonzero(pieces.is_next == 0)
    if settings.pairs == "nsp":
        need = pieces.target[changed] - lengths[0, changed]
        key = settings.seed, OTHER, duplicate, pieces.first[changed]
        starts[1, changed], lengths[1, changed] = _draw_segments(store, pieces.document[changed], need, *key)
    else:
        starts[:, changed], lengths[:, changed] = starts[::-1, changed], lengths[::-1, changed]
    target = pieces.target
    limit = np.stack([(target + 1) // 2, target // 2])  # at equal lengths B gives way
    kept = np.minimum(lengths, np.maximum(target - lengths[::-1], limit))
    if settings.cut == "outer":
        starts[0] += lengths[0] - kept[0]
    else:
        segment = np.arange(2)[:, None]
        starts += _toss_coins(lengths - kept, settings.seed, FRONT, duplicate, pieces.first, segment)

    pairs = np.empty(len(target), PAIR)
    pairs["a_start"], pairs["b_start"] = starts
    pairs["a_length"], pairs["b_length"] = kept
    pairs["is_next"] = pieces.is_next
    return pairs


def _draw_segments(
    store: Store, document: NDArray[np.int64], need: NDArray[np.int64], *key: int | NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each of ``document`` a segment of any other one: from a random sentence on until it has ``need`` tokens.

    Returns:
        Starts and lengths in tokens, one sentence at least, [pieces] each.
    """
    which, where = uniform(*key, np.arange(2)[:, None])
    other = (which * (len(store.documents) - 1)).astype(np.int64)
    other += other >= document
    first, end = store.documents[other].T
    start = store.sentences[first + (where * (end - first)).astype(np.int64)]
    last = np.minimum(np.searchsorted(store.sentences, start + np.maximum(need, 1)), end)
    return start, store.sentences[last] - start


def _toss_coins(counts: NDArray[np.int64], *key: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """Heads among ``counts`` coins, Binomial(counts, 1/2); the words of the key broadcast to the shape of counts."""
    tossed = np.nonzero(counts)
    left = counts[tossed]
    words = -(-left // WORD)  # of random bits
    coin = np.repeat(np.arange(len(left)), words)  # (W,)
    word = np.arange(len(coin)) - np.repeat(np.cumsum(words) - words, words)  # (W,)
    used = np.minimum(left[coin] - word * WORD, WORD)
    keys = (np.broadcast_to(part, counts.shape)[tossed][coin] for part in key)
    drawn = np.bitwise_count(bits(*keys, word) >> (WORD - used).astype(np.uint64))
    heads = np.zeros_like(counts)
    heads[tossed] = np.bincount(coin, drawn, len(left))  # exact in float64
    return heads
