"""The four stages of a build. Each leaves a file behind for the next, and is skipped if the file is there."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import astuple
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep import shares
from data_prep.atomic import replacing
from data_prep.builders import Builder, make_once
from data_prep.corpus import read_chunks
from data_prep.errors import DataError
from data_prep.formats import Reading
from data_prep.job import BuildJob
from data_prep.manifest import ShardRecord, SourceRecord
from data_prep.metrics import BuildMetrics
from data_prep.npy import read_integers
from data_prep.pairs import PlanCounts, cut_blocks
from data_prep.pieces import PIECES
from data_prep.selection import Selected, select_documents
from data_prep.sources import Source, parse_where
from data_prep.store import COUNTS_FILE, Counted, TokenizedChunk, require_whole, tokenize_chunk, write_store
from data_prep.units import make_shard, plan_block
from data_prep.verify import Measured
from data_prep.workers import Workers, show_progress

FEWEST_DOCUMENTS = {"nsp": 2, "sop": 1, "single": 1}
Planned = tuple[bytes, PlanCounts]


def tokenize(
    job: BuildJob,
    sources: list[Source],
    hashes: list[str],
    workers: Workers,
    metrics: BuildMetrics,
    builder: Builder | None = None,
) -> tuple[SourceRecord, ...]:
    """Makes the token store; returns what was read from each text file."""
    settings = job.settings
    sizes = [source.path.stat().st_size for source in sources]
    total = sum(sizes) / (builder.count if builder else 1)
    metrics.begin("tokenize", total)
    reading = Reading(parse_where(settings.where), settings.text_field, settings.bad_bytes, settings.format)
    work = partial(
        tokenize_chunk,
        tokenizer=job.tokenizer_folder,
        sha256=job.tokenizer.sha256,
        language=settings.language,
        given_words=settings.given_words,
    )
    if builder is None:
        chunks = workers.map(work, read_chunks(sources, reading))
    else:
        chunks = shares.tokenize_pieces(builder, job, sources, reading, work, workers)
    chunks = show_progress(chunks, "tokenized", "bytes", lambda chunk: chunk.read, total)
    chunks = _counting_text(chunks, metrics)
    if builder is not None:
        deque(chunks, 0)  # makes the pieces
        chunks = shares.join_tokens(job, len(sources))
    make_once(builder, "the token store", job.store / COUNTS_FILE, lambda: write_store(job.store, chunks, len(sources)))
    shutil.rmtree(job.store / PIECES, ignore_errors=True)
    counts = _read_again(job.store / COUNTS_FILE, len(Counted))
    require_whole(job.store, counts, len(sources), job.tokenizer.vocab_size)
    if not counts[:, 0].any():
        which = f" in records with {settings.where}" if settings.where else ""
        more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
        if members := counts[:, Counted.MEMBERS].sum():
            more += f"; skipped in tars: {members:,} of other kinds than .txt, .json and .jsonl"
        raise DataError(f"no text found{which} in {sources[0].path}{more}")
    rows = zip(sources, sizes, hashes, counts.tolist(), strict=True)
    return tuple(SourceRecord(source.name, size, sha256, *row) for source, size, sha256, row in rows)


def _counting_text(chunks: Iterator[TokenizedChunk], metrics: BuildMetrics) -> Iterator[TokenizedChunk]:
    for chunk in chunks:
        metrics.advance(chunk.read)
        metrics.bytes_read += chunk.read
        metrics.sentences += len(chunk.lengths)
        metrics.tokens += int(chunk.counted[Counted.TOKENS])
        metrics.sentences_empty += int(chunk.counted[Counted.EMPTY])
        metrics.sentences_cut += int(chunk.counted[Counted.CUT])
        metrics.bytes_replaced += int(chunk.counted[Counted.REPLACED])
        metrics.characters_cleaned += int(chunk.counted[Counted.CLEANED])
        yield chunk


def select(job: BuildJob, metrics: BuildMetrics, builder: Builder | None = None) -> Selected:
    """Selects the documents. Raises DataError if too few are left."""
    metrics.begin("select", 1)
    make_once(builder, "the selection", job.selected, partial(_write_selection, job))
    selected = Selected(*_read_again(job.selected).tolist())
    metrics.documents += selected.documents
    metrics.documents_duplicate += selected.duplicates
    metrics.documents_held_out += selected.other_part
    documents = selected.documents - selected.duplicates - selected.other_part
    if documents >= FEWEST_DOCUMENTS[job.settings.pairs]:
        return selected
    if selected.documents > 1:
        raise DataError(
            f"{documents} of {selected.documents} documents left: {selected.duplicates} are duplicates, "
            f"{selected.other_part} are on the other side of --held-out-share {job.settings.held_out_share:g}; "
            "change the share or add more text"
        )
    raise DataError(
        f"one document only (sentences: {selected.sentences}), so none to draw a 'not next' sentence from; put a "
        "blank line between the documents of a .txt, or one document on each line of a .jsonl, or choose --pairs "
        "sop or single"
    )


def _write_selection(job: BuildJob) -> None:
    counts = np.array(select_documents(job.store, job.selection, job.settings), np.int64)
    with replacing(job.selected) as file:
        np.save(file, counts, allow_pickle=False)


def plan(
    job: BuildJob, selected: Selected, workers: Workers, metrics: BuildMetrics, builder: Builder | None = None
) -> PlanCounts:
    """Plans the samples. Raises DataError if there are none."""
    total = job.settings.duplicates * selected.tokens / (builder.count if builder else 1)
    metrics.begin("plan", total)
    if builder is None:
        made = workers.map(partial(plan_block, job=job), cut_blocks(job.open_store(), job.settings.duplicates))
    else:
        made = shares.plan_pieces(builder, job, workers)
    made = _counting_plan(show_progress(made, "planned", "tokens", lambda block: block[1].tokens, total), metrics)
    if builder is not None:
        deque(made, 0)  # makes the pieces
        made = shares.join_plan(job)
    make_once(builder, "the plan", job.planned, partial(_write_plan, job, selected, made))
    planned = PlanCounts(*_read_again(job.planned).tolist())
    metrics.tokens_left_over += planned.left_over
    metrics.tokens_truncated += planned.truncated
    metrics.pairs_unmaskable += planned.unmaskable
    return planned


def _counting_plan(made: Iterator[Planned], metrics: BuildMetrics) -> Iterator[Planned]:
    for pairs, counts in made:
        metrics.advance(counts.tokens)
        yield pairs, counts


def _write_plan(job: BuildJob, selected: Selected, made: Iterator[Planned]) -> None:
    total = np.zeros(len(PlanCounts._fields), np.int64)
    with replacing(job.plan) as file:
        for pairs, counts in made:
            file.write(pairs)
            total += counts
        if total[PlanCounts._fields.index("unmaskable")] and not file.tell():
            raise DataError("no sample has a token that can be predicted: does the tokenizer fit this text?")
        if not file.tell():
            raise DataError(
                f"no pair of sentences: {selected.lone_sentences} of {selected.documents} documents have only "
                "one sentence; in a .txt a blank line ends a document, not a sentence"
            )
    with replacing(job.planned) as file:
        np.save(file, total, allow_pickle=False)


def make_shards(
    job: BuildJob, workers: Workers, metrics: BuildMetrics, builder: Builder | None = None
) -> tuple[tuple[ShardRecord, ...], NDArray[np.int64], NDArray[np.int64]]:
    """Makes the shards; returns their records, and counts of their tokens and lengths."""
    samples = len(job.open_plan())
    shards = -(-samples // job.settings.samples_per_shard)
    total = samples / (builder.count if builder else 1)
    metrics.begin("write", total)
    if builder is None:
        made = workers.map(partial(make_shard, job=job), range(shards))
    else:
        made = shares.make_shards(builder, job, shards, workers)
    made = _counting_shards(show_progress(made, "wrote", "samples", lambda shard: shard.record.samples, total), metrics)
    if builder is not None:
        deque(made, 0)
        made = shares.measured_shards(job, shards)
    token_counts = np.zeros(job.tokenizer.vocab_size, np.int64)
    length_counts = np.zeros(job.settings.sequence_length + 1, np.int64)
    records = []
    for record, tokens, lengths in made:
        records.append(record)
        token_counts += tokens
        length_counts[: len(lengths)] += lengths
    token_counts[list(astuple(job.tokenizer.specials))] = 0
    return tuple(records), token_counts, length_counts


def _counting_shards(made: Iterator[Measured], metrics: BuildMetrics) -> Iterator[Measured]:
    for shard in made:
        metrics.advance(shard.record.samples)
        metrics.samples += shard.record.samples
        metrics.shards += 1
        metrics.bytes_written += shard.record.bytes
        yield shard


def _read_again(path: Path, *columns: int) -> NDArray[np.int64]:
    """Reads counts that this run, or a killed one before it, wrote."""
    try:
        return read_integers(path, *columns, what="counts")
    except DataError as error:
        raise DataError(f"{error}; remove it, and run again") from None
