"""The build: text to shards, in four stages that each leave a file behind for the next.

    text --tokenize_chunk--> store --select--> documents --plan_pairs--> plan --make_samples--> shards, manifest

All stages except the second map a pure function over units of work that do not depend on the number of
processes. The plan is shuffled by a function of the seed, and shard k is its k-th slice. So a shard depends only on
corpus, settings, seed and k, and a rerun after a kill makes only the missing shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, fields
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.atomic import replacing
from data_prep.corpus import read_chunks
from data_prep.errors import DataError, KilledError
from data_prep.formats import Reading
from data_prep.job import (
    FINGERPRINT,
    WORK,
    BuildJob,
    claim,
    claim_store,
    fingerprint,
    is_complete,
    release,
    release_work,
    remove_work,
)
from data_prep.manifest import (
    LENGTH_COUNTS,
    SHARDS_FORMAT,
    SHARDS_VERSION,
    TOKEN_COUNTS,
    TOKENIZER_FOLDER,
    CorpusRecord,
    Histogram,
    Manifest,
    PlanRecord,
    SampleCounts,
    ShardRecord,
    SourceRecord,
    TokenizerRecord,
    file_sha256,
    load_manifest,
    save_manifest,
)
from data_prep.masking import make_vocabulary
from data_prep.metrics import BuildMetrics
from data_prep.npy import read_integers
from data_prep.pairs import PlanCounts, cut_blocks
from data_prep.selection import Selected, select_documents
from data_prep.settings import Settings
from data_prep.sources import LeftOut, Source, find_left_out, find_sources, parse_where, say_left_out
from data_prep.store import COUNTS_FILE, Counted, TokenizedChunk, require_whole, tokenize_chunk, write_store
from data_prep.tokenizer import load_tokenizer
from data_prep.units import make_shard, plan_block
from data_prep.workers import Workers, show_progress, start_workers

FEWEST_DOCUMENTS = {"nsp": 2, "sop": 1, "single": 1}


def build(
    inputs: list[Path],
    tokenizer: Path,
    out: Path,
    settings: Settings,
    processes: int,
    store: Path | None = None,
    metrics: BuildMetrics | None = None,
) -> Manifest:
    """Makes the data set, or the missing part of it after a run that was killed.

    Args:
        inputs: text files, or folders of text files.
        tokenizer: folder for `load_tokenizer`; the data set gets a copy that includes the build's cleaning.
        out: new or empty folder, or one in which the same build was started.
        store: folder that keeps the tokenized text for other builds; None: the text is removed at the end.
        figures: metrics that are updated during the build.

    Raises DataError for bad input. If no shard was written before the error, nothing is left behind.
    """
    loaded = load_tokenizer(tokenizer)
    if loaded.added:
        names = ", ".join(token.content for token in list(loaded.added.values())[:5])
        raise DataError(
            f"tokenizer in {tokenizer}: {len(loaded.added)} token(s) were added to the vocabulary ({names}); shards "
            "can be built only without them: name a tokenizer without added tokens"
        )
    loaded = loaded.with_cleaning()
    make_vocabulary(loaded.vocab_size, loaded.never, loaded.specials.mask)  # raises if the vocabulary is too small
    sources = _find_text(inputs, settings, [tokenizer, out, *([store] if store else [])])
    left_out = find_left_out(inputs, settings.format)
    say_left_out(left_out)
    hashes = [file_sha256(source.path) for source in sources]
    texts = [(source.name, sha256) for source, sha256 in zip(sources, hashes, strict=True)]
    record = TokenizerRecord(loaded.vocab_size, loaded.sha256(), loaded.specials)
    metrics = metrics or BuildMetrics()
    job = BuildJob(out, store or out / WORK / "store", settings, record)
    mark = fingerprint(job, texts)
    if is_complete(job, mark):
        return _finished(load_manifest(out), metrics)
    claim(job, mark)
    try:
        claim_store(job, texts)
    except (DataError, OSError):
        release_work(job)
        raise
    loaded.save(job.tokenizer_folder)
    try:
        with start_workers(processes) as workers:
            manifest = _make(job, sources, hashes, left_out, workers, metrics)
    except KilledError:
        raise  # the next run reuses what is done
    except DataError:
        release(job)
        raise
    loaded.save(out / TOKENIZER_FOLDER)
    save_manifest(out, manifest)
    remove_work(job)
    return _finished(manifest, metrics)


def _find_text(inputs: list[Path], settings: Settings, ours: list[Path]) -> list[Source]:
    sources = find_sources(inputs, parse_where(settings.where), settings.format)
    for folder in ours:
        inside = [source.path for source in sources if folder.resolve() in source.path.resolve().parents]
        if inside:
            raise DataError(f"input {inside[0]} is inside {folder}, which this build reads or writes; move one of them")
    return sources


def _make(
    job: BuildJob,
    sources: list[Source],
    hashes: list[str],
    left_out: tuple[LeftOut, ...],
    workers: Workers,
    metrics: BuildMetrics,
) -> Manifest:
    """Runs the four stages."""
    files = _tokenize(job, sources, hashes, workers, metrics)
    selected = _select(job, metrics)
    planned = _plan(job, selected, workers, metrics)
    shards, token_counts, length_counts = _make_shards(job, workers, metrics)
    return Manifest(
        format=SHARDS_FORMAT,
        version=SHARDS_VERSION,
        fingerprint=(job.work / FINGERPRINT).read_text(),
        settings=job.settings,
        tokenizer=job.tokenizer,
        corpus=CorpusRecord(files, *selected, left_out),
        plan=PlanRecord(**planned._asdict()),
        counts=_total(shards),
        shards=shards,
        token_counts=_save_histogram(job.out / TOKEN_COUNTS, token_counts),
        length_counts=_save_histogram(job.out / LENGTH_COUNTS, length_counts),
    )


def _tokenize(
    job: BuildJob, sources: list[Source], hashes: list[str], workers: Workers, metrics: BuildMetrics
) -> tuple[SourceRecord, ...]:
    settings = job.settings
    sizes = [source.path.stat().st_size for source in sources]
    metrics.begin("tokenize", sum(sizes))
    if not (job.store / COUNTS_FILE).exists():
        reading = Reading(parse_where(settings.where), settings.text_field, settings.bad_bytes, settings.format)
        work = partial(
            tokenize_chunk,
            tokenizer=job.tokenizer_folder,
            sha256=job.tokenizer.sha256,
            language=settings.language,
            given_words=settings.given_words,
        )
        chunks = workers.map(work, read_chunks(sources, reading))
        shown = show_progress(chunks, "tokenized", "bytes", lambda chunk: chunk.read, sum(sizes))
        write_store(job.store, _counting_text(shown, metrics), len(sources))
    counts = _read_again(job.store / COUNTS_FILE, len(Counted))
    require_whole(job.store, counts, len(sources), job.tokenizer.vocab_size)
    if not counts[:, 0].any():
        which = f" in records with {settings.where}" if settings.where else ""
        more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
        if members := counts[:, Counted.MEMBERS].sum():
            more += f", whose tars have {members:,} members that are not text: wanted .txt, .json or .jsonl"
        raise DataError(f"no text found{which} in {sources[0].path}{more}")
    rows = zip(sources, sizes, hashes, counts.tolist(), strict=True)
    return tuple(SourceRecord(source.name, size, sha256, *row) for source, size, sha256, row in rows)


def _counting_text(chunks: Iterator[TokenizedChunk], metrics: BuildMetrics) -> Iterator[TokenizedChunk]:
    for chunk in chunks:
        metrics.advance(chunk.read)
        metrics.bytes_read += chunk.read
        metrics.sentences += len(chunk.lengths)
        metrics.tokens += len(chunk.ids)
        metrics.sentences_empty += int(chunk.counted[Counted.EMPTY])
        metrics.sentences_cut += int(chunk.counted[Counted.CUT])
        metrics.bytes_replaced += int(chunk.counted[Counted.REPLACED])
        metrics.characters_cleaned += int(chunk.counted[Counted.CLEANED])
        yield chunk


def _select(job: BuildJob, metrics: BuildMetrics) -> Selected:
    metrics.begin("select", 1)
    selected = select_documents(job.store, job.selection, job.settings)
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


def _plan(job: BuildJob, selected: Selected, workers: Workers, metrics: BuildMetrics) -> PlanCounts:
    counts_file = job.plan.with_suffix(".npy")
    tokens = job.settings.duplicates * selected.tokens
    metrics.begin("plan", tokens)
    if not counts_file.exists():
        total = np.zeros(len(PlanCounts._fields), np.int64)
        blocks = workers.map(partial(plan_block, job=job), cut_blocks(job.open_store(), job.settings.duplicates))
        with replacing(job.plan) as file:
            for pairs, counts in show_progress(blocks, "planned", "tokens", lambda made: made[1].tokens, tokens):
                file.write(pairs)
                total += counts
                metrics.advance(counts.tokens)
            if total[PlanCounts._fields.index("unmaskable")] and not file.tell():
                raise DataError("no sample has a token that can be predicted: does the tokenizer fit this text?")
            if not file.tell():
                raise DataError(
                    f"no pair of sentences: {selected.lone_sentences} of {selected.documents} documents have only "
                    "one sentence; in a .txt a blank line ends a document, not a sentence"
                )
        with replacing(counts_file) as file:
            np.save(file, total, allow_pickle=False)
    planned = PlanCounts(*_read_again(counts_file).tolist())
    metrics.tokens_left_over += planned.left_over
    metrics.tokens_truncated += planned.truncated
    metrics.pairs_unmaskable += planned.unmaskable
    return planned


def _make_shards(
    job: BuildJob, workers: Workers, metrics: BuildMetrics
) -> tuple[tuple[ShardRecord, ...], NDArray[np.int64], NDArray[np.int64]]:
    samples = len(job.open_plan())
    metrics.begin("write", samples)
    made = workers.map(partial(make_shard, job=job), range(-(-samples // job.settings.samples_per_shard)))
    token_counts = np.zeros(job.tokenizer.vocab_size, np.int64)
    length_counts = np.zeros(job.settings.sequence_length + 1, np.int64)
    records = []
    for record, tokens, lengths in show_progress(made, "wrote", "samples", lambda made: made.record.samples, samples):
        records.append(record)
        metrics.advance(record.samples)
        metrics.samples += record.samples
        metrics.shards += 1
        metrics.bytes_written += record.bytes
        token_counts += tokens
        length_counts[: len(lengths)] += lengths
    token_counts[list(astuple(job.tokenizer.specials))] = 0
    return tuple(records), token_counts, length_counts


def _read_again(path: Path, *columns: int) -> NDArray[np.int64]:
    """Reads counts that this run, or a killed one before it, wrote."""
    try:
        return read_integers(path, *columns, what="counts")
    except DataError as error:
        raise DataError(f"{error}; remove it, and run again") from None


def _finished(manifest: Manifest, metrics: BuildMetrics) -> Manifest:
    """Sets the metrics to those of the whole data set, even if this run made only part of it."""
    corpus, plan = manifest.corpus, manifest.plan
    metrics.bytes_read = sum(file.bytes for file in corpus.files)
    metrics.bytes_replaced = sum(file.replaced for file in corpus.files)
    metrics.characters_cleaned = sum(file.cleaned for file in corpus.files)
    metrics.documents, metrics.documents_duplicate = corpus.documents, corpus.duplicates
    metrics.documents_held_out = corpus.other_part
    metrics.sentences, metrics.tokens = corpus.sentences, corpus.tokens
    metrics.sentences_empty = sum(file.empty for file in corpus.files)
    metrics.sentences_cut = sum(file.cut for file in corpus.files)
    metrics.tokens_left_over, metrics.tokens_truncated = plan.left_over, plan.truncated
    metrics.pairs_unmaskable = plan.unmaskable
    metrics.samples, metrics.shards = manifest.counts.samples, len(manifest.shards)
    metrics.bytes_written = sum(shard.bytes for shard in manifest.shards)
    metrics.succeed()
    return manifest


def _total(shards: tuple[ShardRecord, ...]) -> SampleCounts:
    names = [field.name for field in fields(SampleCounts)]
    return SampleCounts(**{name: sum(getattr(shard, name) for shard in shards) for name in names})


def _save_histogram(path: Path, counts: NDArray[np.int64]) -> Histogram:
    with replacing(path) as file:
        np.save(file, counts, allow_pickle=False)
    return Histogram(path.name, file_sha256(path))
