"""The build: text to shards, in four stages, which are in stages.py.

    text --tokenize_chunk--> store --select--> documents --plan_pairs--> plan --make_samples--> shards, manifest

All stages except the second map a pure function over units of work that do not depend on the number of
processes. The plan is shuffled by a function of the seed, and shard k is its k-th slice. So a shard depends only on
corpus, settings, seed and k, and a rerun after a kill makes only the missing shards.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.atomic import replacing
from data_prep.builders import Builder, leave, used_by, users
from data_prep.errors import DataError, KilledError
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
    remove_temporary,
    remove_work,
)
from data_prep.manifest import (
    LENGTH_COUNTS,
    MANIFEST,
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
    TokenizerRecord,
    file_sha256,
    load_manifest,
    save_manifest,
)
from data_prep.masking import make_vocabulary
from data_prep.metrics import BuildMetrics
from data_prep.settings import Settings
from data_prep.sources import LeftOut, Source, find_left_out, find_sources, parse_where, say_left_out
from data_prep.stages import make_shards, plan, select, tokenize
from data_prep.streams import say_error
from data_prep.tokenizer import Tokenizer, load_tokenizer
from data_prep.workers import Workers, start_workers


@dataclass(frozen=True)
class Text:
    """The text files of a build, the sha256 of each, and the files that are not read."""

    sources: list[Source]
    hashes: list[str]
    left_out: tuple[LeftOut, ...]

    @property
    def named(self) -> list[tuple[str, str]]:
        """The name and sha256 of each file."""
        return [(source.name, sha256) for source, sha256 in zip(self.sources, self.hashes, strict=True)]


def build(
    inputs: list[Path],
    tokenizer: Path,
    out: Path,
    settings: Settings,
    processes: int,
    store: Path | None = None,
    metrics: BuildMetrics | None = None,
    builder: Builder | None = None,
) -> Manifest:
    """Makes the data set, or the missing part of it after a run that was killed.

    Args:
        inputs: text files, or folders of text files.
        tokenizer: folder for `load_tokenizer`; the data set gets a copy that includes the build's cleaning.
        out: new or empty folder, or one in which the same build was started.
        store: folder that keeps the tokenized text for other builds; None: the text is removed at the end.
        metrics: updated during the build.
        builder: which of several builders this is, each with its own call of this function; None: the only one.

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
    text = _find_text(inputs, settings, [tokenizer, out, *([store] if store else [])])
    say_left_out(text.left_out)
    record = TokenizerRecord(loaded.vocab_size, loaded.sha256(), loaded.specials)
    metrics = metrics or BuildMetrics()
    job = BuildJob(out, store or out / WORK / "store", settings, record)
    mark = fingerprint(job, text.named)
    if not is_complete(job, mark):
        try:
            claim(job, mark, builder is not None)
            with used_by(builder, job.work):
                if builder is None or not is_complete(job, mark):
                    _make_all(job, text, loaded, processes, metrics, builder)
        except (DataError, OSError):
            if builder is None or not is_complete(job, mark):
                raise  # otherwise another builder is done, and has removed the working files
    _remove_work(job, builder)
    return _finished(load_manifest(out), metrics)


def _find_text(inputs: list[Path], settings: Settings, ours: list[Path]) -> Text:
    sources = find_sources(inputs, parse_where(settings.where), settings.format)
    for folder in ours:
        inside = [source.path for source in sources if folder.resolve() in source.path.resolve().parents]
        if inside:
            raise DataError(f"input {inside[0]} is inside {folder}, which this build reads or writes; move one of them")
    hashes = [file_sha256(source.path) for source in sources]
    return Text(sources, hashes, find_left_out(inputs, settings.format))


def _remove_work(job: BuildJob, builder: Builder | None) -> None:
    """Removes the working files of a complete data set, unless other builders still use them."""
    if builder is not None:
        remove_temporary(job.out)
        if others := leave(job.work, builder):
            names = ", ".join(others)
            say_error(f"data_prep: {job.work} stays until these builders have ended or are started again: {names}")
            return
    remove_work(job)


def _make_all(
    job: BuildJob, text: Text, loaded: Tokenizer, processes: int, metrics: BuildMetrics, builder: Builder | None
) -> None:
    """Makes the data set. After an error in the text, nothing is left unless a shard is made, or others still build."""
    undo = release_work
    try:
        claim_store(job, text.named, builder is not None)
        undo = release
        loaded.save(job.tokenizer_folder)
        with start_workers(processes) as workers:
            manifest = _make(job, text, workers, metrics, builder)
    except KilledError:
        raise  # the next run reuses what is done
    except (DataError, OSError) as error:
        if (undo is release_work or isinstance(error, DataError)) and not users(job.work, builder):
            undo(job)
        raise
    if not (job.out / MANIFEST).exists():  # or another builder has written the same
        loaded.save(job.out / TOKENIZER_FOLDER)
        save_manifest(job.out, manifest)


def _make(job: BuildJob, text: Text, workers: Workers, metrics: BuildMetrics, builder: Builder | None) -> Manifest:
    """Runs the four stages."""
    files = tokenize(job, text.sources, text.hashes, workers, metrics, builder)
    selected = select(job, metrics, builder)
    planned = plan(job, selected, workers, metrics, builder)
    shards, token_counts, length_counts = make_shards(job, workers, metrics, builder)
    return Manifest(
        format=SHARDS_FORMAT,
        version=SHARDS_VERSION,
        fingerprint=(job.work / FINGERPRINT).read_text(),
        settings=job.settings,
        tokenizer=job.tokenizer,
        corpus=CorpusRecord(files, *selected, text.left_out),
        plan=PlanRecord(**planned._asdict()),
        counts=_total(shards),
        shards=shards,
        token_counts=_save_histogram(job.out / TOKEN_COUNTS, token_counts),
        length_counts=_save_histogram(job.out / LENGTH_COUNTS, length_counts),
    )


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
