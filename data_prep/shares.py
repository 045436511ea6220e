"""The stages of a build that several builders share: each makes units of the stage, and one of them joins these.

    pieces of tokens ─▶ store ─▶ selection ─▶ pieces of the plan ─▶ plan ─▶ shards, each with its counts

Every function returns when the whole stage is made, by whichever builders. `builders.py` says how they share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import numpy as np

from data_prep.builders import Builder, OvertakenError, own_first, owners, unless
from data_prep.corpus import Chunk, read_chunks
from data_prep.formats import Reading
from data_prep.job import BuildJob
from data_prep.pairs import DocumentBlock, PlanCounts, cut_blocks
from data_prep.pieces import (
    PIECES,
    FilePieces,
    load_measured,
    load_plan,
    load_record,
    read_tokens,
    save_measured,
    save_plan,
    save_tokens,
)
from data_prep.shards import index_path, shard_name, tar_path
from data_prep.sources import Source
from data_prep.store import COUNTS_FILE, TokenizedChunk
from data_prep.units import make_shard, plan_block
from data_prep.verify import Measured
from data_prep.workers import Workers

PIECE_CHARACTERS = 1 << 20  # of text in a piece of tokens
MOST_PLAN_PIECES = 256
PLAN_PIECES, MADE = "plan-pieces", "made"  # folders of working files
Tokenize = Callable[[Chunk], TokenizedChunk]
Item = TypeVar("Item")


# ---- tokens ----------------------------------------------------------------------------------------------------


def tokenize_pieces(
    builder: Builder, job: BuildJob, sources: list[Source], reading: Reading, tokenize: Tokenize, workers: Workers
) -> Iterator[TokenizedChunk]:
    """Makes all pieces of the token store that are missing; yields the counts of those that this builder made."""
    store, folder = job.store / COUNTS_FILE, job.store / PIECES
    if not store.exists():
        folder.mkdir(exist_ok=True)
        with unless(store.exists):
            work = partial(_tokenize_piece, tokenize=tokenize)
            yield from workers.map(work, _missing_pieces(builder, folder, sources, reading))


def join_tokens(job: BuildJob, sources: int) -> Iterator[TokenizedChunk]:
    """The pieces of the token store, in order."""
    return _unless_overtaken(read_tokens(job.store / PIECES, sources), job.store / COUNTS_FILE)


def _missing_pieces(
    builder: Builder, folder: Path, sources: list[Source], reading: Reading
) -> Iterator[tuple[Path, Chunk]]:
    """The text of the missing pieces, this builder's first. A file that has none of them is not read."""
    ends = list(accumulate(source.path.stat().st_size for source in sources))
    shared = [owners(start, end, ends[-1], builder.count) for start, end in zip([0, *ends], ends, strict=False)]
    for number, source in enumerate(sources):
        of_file = shared[number]
        if builder.number in of_file:
            mine = partial(_is_own, of_file, builder.number)
            yield from _pieces_of(FilePieces(folder, number), source, reading, mine)
    first = next((number for number, of_file in enumerate(shared) if builder.number in of_file), 0)
    for number in [*range(first, len(sources)), *range(first)]:  # each builder helps the next one first
        yield from _pieces_of(FilePieces(folder, number), sources[number], reading, lambda piece: True)


def _is_own(of_file: range, builder: int, piece: int) -> bool:
    """Whether this is the builder's piece of a file that some builders share."""
    return of_file[piece % len(of_file)] == builder


def _pieces_of(
    file: FilePieces, source: Source, reading: Reading, wanted: Callable[[int], bool]
) -> Iterator[tuple[Path, Chunk]]:
    """The wanted pieces of a text file that are missing. Stops reading as soon as none is."""
    missing = file.first_missing(0, wanted)
    if missing is None:
        return
    count = 0
    for count, chunk in enumerate(read_chunks([source], reading, PIECE_CHARACTERS), 1):
        missing = file.first_missing(missing, wanted)
        if missing is None:
            return
        if wanted(count - 1) and not file.path(count - 1).exists():
            yield file.path(count - 1), replace(chunk, source=file.number)
    file.end(count)


def _tokenize_piece(piece: tuple[Path, Chunk], tokenize: Tokenize) -> TokenizedChunk:
    """Writes a piece, unless another builder has. Returns it without its tokens."""
    path, chunk = piece
    made = tokenize(chunk)
    if not path.exists():
        save_tokens(path, made)
    return replace(made, ids=made.ids[:0], continues=made.continues[:0], documents=made.documents[:0], digests={})


# ---- the plan --------------------------------------------------------------------------------------------------


def plan_pieces(builder: Builder, job: BuildJob, workers: Workers) -> Iterator[tuple[bytes, PlanCounts]]:
    """Makes all pieces of the plan that are missing; yields the counts of those that this builder made."""
    folder = job.work / PLAN_PIECES
    if not job.planned.exists():
        folder.mkdir(exist_ok=True)
        pieces = _plan_blocks(job)
        missing = (
            (path, pieces[unit])
            for unit in own_first(builder, len(pieces))
            if not (path := _plan_path(folder, unit)).exists() and not job.planned.exists()
        )
        yield from workers.map(partial(_plan_piece, job=job), missing)


def join_plan(job: BuildJob) -> Iterator[tuple[bytes, PlanCounts]]:
    """The pieces of the plan, in order."""
    paths = (_plan_path(job.work / PLAN_PIECES, unit) for unit in range(len(_plan_blocks(job))))
    return _unless_overtaken(map(load_plan, paths), job.planned)


def _plan_path(folder: Path, unit: int) -> Path:
    return folder / f"{unit:06d}.npz"


def _plan_blocks(job: BuildJob) -> list[list[DocumentBlock]]:
    """The blocks of each piece of the plan. They do not depend on the number of builders."""
    blocks = list(cut_blocks(job.open_store(), job.settings.duplicates))
    size = -(-len(blocks) // MOST_PLAN_PIECES)
    return [blocks[first : first + size] for first in range(0, len(blocks), size)]


def _plan_piece(piece: tuple[Path, list[DocumentBlock]], job: BuildJob) -> tuple[bytes, PlanCounts]:
    """Writes a piece of the plan, unless another builder has. Returns its counts, without the pairs."""
    path, blocks = piece
    pairs, counts = zip(*(plan_block(block, job) for block in blocks), strict=True)
    total = PlanCounts(*np.sum(counts, axis=0).tolist())
    if not path.exists():
        save_plan(path, b"".join(pairs), total)
    return b"", total


# ---- shards ----------------------------------------------------------------------------------------------------


def make_shards(builder: Builder, job: BuildJob, shards: int, workers: Workers) -> Iterator[Measured]:
    """Makes all shards that are missing; yields the counts of those that this builder made."""
    (job.work / MADE).mkdir(exist_ok=True)
    missing = (number for number in own_first(builder, shards) if not is_made(job, number))
    yield from (made for made in workers.map(partial(_make_shard, job=job), missing) if made)


def measured_shards(job: BuildJob, shards: int) -> Iterator[Measured]:
    """The counts of all shards, in order."""
    for number in range(shards):
        yield load_measured(_made_path(job, number))


def is_made(job: BuildJob, number: int) -> bool:
    """Whether a shard and its counts are there. One that was removed since, or has another size, is made again."""
    path, name = _made_path(job, number), shard_name(number)
    if not path.exists():
        return False
    tar, index = tar_path(job.out, name), index_path(job.out, name)
    if tar.exists() and index.exists() and tar.stat().st_size == load_record(path).bytes:
        return True
    path.unlink(missing_ok=True)
    return False


def _make_shard(number: int, job: BuildJob) -> Measured | None:
    """Makes a shard and writes its counts. Returns None if another builder has meanwhile."""
    path = _made_path(job, number)
    try:
        made = make_shard(number, job, partial(_unless_overtaken, file=path))
    except OvertakenError:
        return None
    save_measured(path, made)
    return made


def _made_path(job: BuildJob, number: int) -> Path:
    return job.work / MADE / f"{shard_name(number)}.npz"


def _unless_overtaken(items: Iterator[Item], file: Path) -> Iterator[Item]:
    """The items. Raises OvertakenError at the end if ``file`` exists: then nothing that others read is replaced."""
    yield from items
    if file.exists():
        raise OvertakenError
