"""Plans samples from documents: the plan says where in the store the segments of each sample are. Three pairings:

- ``nsp``, after Devlin et al., "BERT" (2019), appendix A.2, and its `create_pretraining_data.py`: sentences of a
  document are collected up to a target length and split at random into A and B; for half of the pairs B comes
  from another document instead, and the sentences it replaced are used again;
- ``sop``, after Lan et al., "ALBERT" (2020), section 3.1: B always follows A, and half of the pairs are swapped;
- ``single``, after Liu et al., "RoBERTa" (2019), section 4.2, DOC-SENTENCES: as many sentences of a document as
  fit, in one segment.

A pair longer than its target is truncated as in BERT's `truncate_seq_pair`: tokens are removed from the longer
segment (B if they are equal), one at a time, from the front or the back by a coin toss. With ``cut`` outer they come
from the front of A and the back of B, so that the text of a true pair continues from A to B. Differences from BERT:

- the short target is drawn for each pair, not once per document, and the pair is truncated to it;
- a pair has at least two sentences, however long they are, so that half of the pairs can be true;
  a single sentence left at the end of a document starts no pair (it can still be a random B).

Draws are keyed by (seed, duplicate, number of the pair's first sentence in the store). So the pair that would start
at each sentence is computed for all sentences at once, and a document's pairs are found by following them from its
first sentence.
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
PAIR_DTYPE = np.dtype(
    [("a_start", "<i8"), ("b_start", "<i8"), ("a_length", "<i4"), ("b_length", "<i4"), ("is_next", "<i4")]
)  # 28 bytes per sample; starts are offsets in Store.ids, lengths are in tokens
PIECE, OTHER, FRONT = 0x70696563, 0x6F746872, 0x66726F6E  # streams of draws: "piec", "othr", "fron"
WORD = 64  # bits of a draw
BLOCK_TOKENS, BLOCK_DOCUMENTS = 1 << 18, 1 << 13  # limits of a block of documents planned at once
TOKENS_AT_ONCE = 1 << 21  # most tokens of the pairs processed together


@dataclass(frozen=True)
class DocumentBlock:
    """Rows first..last-1 of Store.documents, in one of the duplicates."""

    duplicate: int
    first: int
    last: int


class PlanCounts(NamedTuple):
    """Counts of where the tokens of a block's documents went. The last four fields add up to all of them."""

    unmaskable: int  # pairs in which nothing can be predicted, left out
    truncated: int  # tokens cut off the documents' own segments; not those of a random B
    left_over: int  # tokens of sentences that are in no pair
    unmaskable_tokens: int  # tokens of the documents' own segments in pairs left out, uncut
    own: int  # tokens of the documents' own segments in the pairs made

    @property
    def tokens(self) -> int:
        """The number of tokens in the block's documents."""
        return self.truncated + self.left_over + self.unmaskable_tokens + self.own


class Pieces(NamedTuple):
    """Consecutive pieces of documents, [pieces] each. A piece is a pair or a single left-over sentence.
    Sentences are numbers in the store, and `last` is exclusive."""

    document: NDArray[np.int64]  # row of Store.documents
    first: NDArray[np.int64]  # sentence that begins the piece
    middle: NDArray[np.int64]  # sentence that begins the second segment, or `last` if there is none
    last: NDArray[np.int64]
    after: NDArray[np.int64]  # sentence that begins the next piece: `middle` if B is from another document
    target: NDArray[np.int64]  # maximum tokens of the pair
    is_next: NDArray[np.int64]


def cut_blocks(store: Store, duplicates: int) -> Iterator[DocumentBlock]:
    """The blocks to plan, in the order of the plan. A block has at most BLOCK_TOKENS tokens, or is one document."""
    count = len(store.documents)
    for duplicate in range(duplicates):
        first = 0
        while first < count:
            rows = store.documents[first : first + BLOCK_DOCUMENTS]
            tokens = np.cumsum(store.sentences[rows[:, 1]] - store.sentences[rows[:, 0]])
            last = first + max(1, int(np.searchsorted(tokens, BLOCK_TOKENS, "right")))
            yield DocumentBlock(duplicate, first, last)
            first = last


def plan_pairs(
    store: Store, block: DocumentBlock, settings: Settings, vocabulary: Vocabulary
) -> tuple[NDArray[np.void], PlanCounts]:
    """The pairs of a block, PAIR_DTYPE[samples], and counts of where its tokens went.

    A document's pairs depend only on (store, settings, duplicate, the document's row). Pairs in which nothing
    can be predicted are left out. In a store of one document no B can be random, so every pair is true.
    """
    masking = Masking(settings.masking, settings.masked_share, settings.max_predictions)
    segments = 1 if settings.pairs == "single" else 2
    planned, counts = [np.empty(0, PAIR_DTYPE)], np.zeros(len(PlanCounts._fields), np.int64)
    for pieces in _cut_documents(store, block, settings):
        text = store.sentences[pieces.after] - store.sentences[pieces.first]  # tokens of each piece
        paired = (pieces.middle < pieces.last) | (segments == 1)
        left_over = int(text[~paired].sum())
        pieces, text = Pieces(*(column[paired] for column in pieces)), text[paired]
        pairs = _place(store, pieces, block.duplicate, settings)
        own = pairs["a_length"] + np.where(pieces.after == pieces.last, pairs["b_length"], 0)

        kept = _maskable(store, pairs["a_start"], pairs["a_length"], vocabulary, masking)
        rest = np.flatnonzero(~kept)  # few, so the B is read only for these
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
    """Which segments have something that can be predicted. An empty one, as the B of a single segment, has nothing."""
    ids = store.gather(store.ids, starts, lengths)
    continues = ids if masking.unit == "token" else store.gather(store.continues, starts, lengths)  # unused
    return maskable(ids, continues, lengths.astype(np.int64), vocabulary, masking)


def _cut_documents(store: Store, block: DocumentBlock, settings: Settings) -> Iterator[Pieces]:
    """All pieces of the block's documents in order, in groups whose pairs have at most TOKENS_AT_ONCE tokens."""
    documents = store.documents[block.first : block.last]
    ends = np.cumsum(documents[:, 1] - documents[:, 0])  # end of each document among the block's sentences
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
    """The piece that would begin at each of the sentences ``first``, in documents that end at ``end``."""
    single = settings.pairs == "single"
    short, goal, split, coin = uniform(settings.seed, PIECE, duplicate, first, np.arange(4)[:, None])
    longest = settings.sequence_length - (SPECIALS_IN_SINGLE if single else SPECIALS_IN_PAIR)
    drawn = 2 + (goal * (longest - 1)).astype(np.int64)
    target = np.where(short < settings.short_sequence_rate, drawn, longest)
    reach = store.sentences[first] + target
    if single:  # as much as fits, but at least one sentence
        last = np.maximum(np.searchsorted(store.sentences, reach, "right") - 1, first + 1)
        last = np.minimum(last, end)
        return Pieces(document, first, last, last, last, target, np.full_like(first, NO_PAIR))
    last = np.maximum(np.searchsorted(store.sentences, reach), first + 2)  # as much as fills the target
    last = np.minimum(last, end)
    middle = first + 1 + (split * (last - first - 1)).astype(np.int64)
    is_next = coin < 0.5
    after = last
    if settings.pairs == "nsp":
        is_next |= len(store.documents) == 1
        after = np.where(is_next, last, middle)
    return Pieces(document, first, middle, last, after, target, is_next.astype(np.int64))


def _place(store: Store, pieces: Pieces, duplicate: int, settings: Settings) -> NDArray[np.void]:
    """The pair of each piece, PAIR_DTYPE[pieces], with B drawn or swapped if needed, then truncated to the target."""
    starts = store.sentences[np.stack([pieces.first, pieces.middle])]  # (segments, pieces), as below
    lengths = store.sentences[np.stack([pieces.middle, pieces.last])] - starts
    changed = np.flatnonzero(pieces.is_next == 0)
    if settings.pairs == "nsp":
        need = pieces.target[changed] - lengths[0, changed]
        key = settings.seed, OTHER, duplicate, pieces.first[changed]
        starts[1, changed], lengths[1, changed] = _draw_segments(store, pieces.document[changed], need, *key)
    else:
        starts[:, changed], lengths[:, changed] = starts[::-1, changed], lengths[::-1, changed]
    target = pieces.target
    limit = np.stack([(target + 1) // 2, target // 2])  # at equal lengths B is cut
    kept = np.minimum(lengths, np.maximum(target - lengths[::-1], limit))
    if settings.cut == "outer":
        starts[0] += lengths[0] - kept[0]
    else:
        segment = np.arange(2)[:, None]
        starts += _toss_coins(lengths - kept, settings.seed, FRONT, duplicate, pieces.first, segment)

    pairs = np.empty(len(target), PAIR_DTYPE)
    pairs["a_start"], pairs["b_start"] = starts
    pairs["a_length"], pairs["b_length"] = kept
    pairs["is_next"] = pieces.is_next
    return pairs


def _draw_segments(
    store: Store, document: NDArray[np.int64], need: NDArray[np.int64], *key: int | NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw a segment of ``need`` tokens for each ``document``; it starts at a random sentence of another document.

    Returns:
        Starts and lengths in tokens, at least one sentence, [pieces] each.
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
    words = -(-left // WORD)  # words of random bits
    coin = np.repeat(np.arange(len(left)), words)  # (W,)
    word = np.arange(len(coin)) - np.repeat(np.cumsum(words) - words, words)  # (W,)
    used = np.minimum(left[coin] - word * WORD, WORD)
    keys = (np.broadcast_to(part, counts.shape)[tossed][coin] for part in key)
    drawn = np.bitwise_count(bits(*keys, word) >> (WORD - used).astype(np.uint64))
    heads = np.zeros_like(counts)
    heads[tossed] = np.bincount(coin, drawn, len(left))  # exact in float64
    return heads
