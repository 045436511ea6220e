"""The build: text to shards, in three stages that each leave a file behind for the next.

    text --tokenize_chunk--> store --plan_pairs--> plan --make_samples--> shards, then the manifest

Each stage is a map of a pure function over pieces of work that do not depend on the number of processes. The
plan is shuffled by a function of the seed, and shard k is its k-th slice; so a shard depends on corpus,
settings, seed and k only, and a rerun after a kill makes just the shards that are missing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.atomic import TEMPORARY, replacing
from data_prep.corpus import Source, find_sources, parse_where, read_chunks
from data_prep.draws import shuffled
from data_prep.errors import DataError, KilledError
from data_prep.manifest import (
    FORMAT,
    MANIFEST,
    TOKEN_COUNTS,
    TOKENIZER_FOLDER,
    VERSION,
    CorpusRecord,
    Counts,
    Manifest,
    ShardRecord,
    SourceRecord,
    TokenCounts,
    TokenizerRecord,
    file_sha256,
    load_manifest,
    save_manifest,
)
from data_prep.masking import make_samples, make_vocabulary
from data_prep.pairs import PAIR, Block, cut_blocks, plan_pairs
from data_prep.settings import Settings
from data_prep.shards import PREFIX, shard_name, tar_path, write_shard
from data_prep.store import COUNTS, Store, id_dtype, open_store, tokenize_chunk, write_store
from data_prep.tokenizer import load_tokenizer
from data_prep.verify import measure_shard, verify
from data_prep.workers import Workers, show_progress, start_workers

WORK = ".work"  # below the output folder, removed at the end
FINGERPRINT = "fingerprint"
ANOTHER = "another build, of other text or settings; choose another --out or remove it"
ORDER = 0x6F726465  # "orde": the stream of draws that shuffles the plan


@dataclass(frozen=True)
class Job:
    """What every worker knows about the build."""

    out: Path
    settings: Settings
    tokenizer: TokenizerRecord

    @property
    def tokenizer_folder(self) -> Path:
        """What the workers load; the user's own folder may change meanwhile."""
        return self.out / WORK / TOKENIZER_FOLDER

    @property
    def store(self) -> Path:
        """Folder of the tokenized corpus."""
        return self.out / WORK / "store"

    @property
    def plan(self) -> Path:
        """File of pairs, raw PAIR records in corpus order."""
        return self.out / WORK / "plan"

    def open_store(self) -> Store:
        """Maps the store."""
        return open_store(self.store, self.tokenizer.vocab_size)

    def open_plan(self) -> NDArray[np.void]:
        """Maps the plan, PAIR[samples]."""
        return np.memmap(self.plan, PAIR, "r")


def build(inputs: list[Path], tokenizer: Path, out: Path, settings: Settings, processes: int) -> Manifest:
    """Makes the data set, or what is missing of it after a run that was killed.

    Args:
        inputs: text files and folders of them.
        tokenizer: folder as `load_tokenizer` reads it.
        out: new or empty folder, or one in which the same build was begun.

    Raises DataError for bad input; as long as there is no shard yet, nothing is left behind then.
    """
    loaded = load_tokenizer(tokenizer)
    make_vocabulary(loaded.vocab_size, loaded.specials)  # refuses one that is too small
    sources = find_sources(inputs, parse_where(settings.where))
    for folder in (tokenizer.resolve(), out.resolve()):
        inside = [source.path for source in sources if folder in source.path.resolve().parents]
        if inside:
            raise DataError(f"input {inside[0]} lies in {folder}, which this build reads or writes; move one of them")
    hashes = [file_sha256(source.path) for source in sources]
    job = Job(out, settings, TokenizerRecord(loaded.vocab_size, loaded.sha256(), loaded.specials))
    fingerprint = _fingerprint(job, [source.name for source in sources], hashes)
    if _is_complete(out, fingerprint):
        return load_manifest(out)
    _claim(out, fingerprint)
    loaded.save(job.tokenizer_folder)
    try:
        with start_workers(processes) as workers:
            corpus = _tokenize(job, sources, hashes, workers)
            _plan(job, workers)
            shards, token_counts = _make_shards(job, workers)
    except KilledError:
        raise  # what is done is kept for the next run
    except DataError:
        _release(out)
        raise
    loaded.save(out / TOKENIZER_FOLDER)
    manifest = Manifest(
        format=FORMAT,
        version=VERSION,
        fingerprint=fingerprint,
        settings=settings,
        tokenizer=job.tokenizer,
        corpus=corpus,
        counts=_total(shards),
        shards=shards,
        token_counts=_save_token_counts(out, token_counts),
    )
    save_manifest(out, manifest)
    shutil.rmtree(out / WORK)
    return manifest


def make_shard(number: int, job: Job) -> tuple[ShardRecord, NDArray[np.int64]]:
    """Makes shard ``number`` unless it is there and whole. Returns what `measure_shard` reads in it."""
    name = shard_name(number)
    if tar_path(job.out, name).exists():
        try:
            return measure_shard(job.out, name, job.tokenizer.vocab_size)
        except DataError:
            pass  # damaged since the run that made it: made again
    plan = job.open_plan()
    size = job.settings.samples_per_shard
    numbers = np.arange(number * size, min((number + 1) * size, len(plan)))
    pairs = plan[shuffled(numbers, len(plan), job.settings.seed, ORDER)]
    vocab_size, specials = job.tokenizer.vocab_size, job.tokenizer.specials
    samples = make_samples(job.open_store(), pairs, number * size, vocab_size, specials, job.settings)
    write_shard(job.out, name, number * size, samples, id_dtype(vocab_size))
    return measure_shard(job.out, name, vocab_size)


def plan_block(block: Block, job: Job) -> bytes:
    """The pairs of a block, raw PAIR records."""
    return plan_pairs(job.open_store(), block, job.settings, job.tokenizer.specials.unk).tobytes()


def _tokenize(job: Job, sources: list[Source], hashes: list[str], workers: Workers) -> CorpusRecord:
    if not (job.store / COUNTS).exists():
        work = partial(tokenize_chunk, tokenizer=job.tokenizer_folder, language=job.settings.language)
        chunks = workers.map(work, read_chunks(sources, parse_where(job.settings.where)))
        shown = show_progress(chunks, "tokenized", "characters", lambda chunk: chunk.characters)
        write_store(job.store, shown, len(sources))
    counts = np.load(job.store / COUNTS, allow_pickle=False)
    if not counts[:, 0].any():
        which = f" in records with {job.settings.where}" if job.settings.where else ""
        more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
        raise DataError(f"no text found{which} in {sources[0].path}{more}")
    store = job.open_store()
    documents, sentences = len(store.documents) - 1, len(store.sentences) - 1
    if documents == 1:
        raise DataError(
            f"one document only (sentences: {sentences}): no other to draw a 'not next' sentence from; put a "
            "blank line between the documents of a .txt, or one document on each line of a .jsonl"
        )
    files = tuple(
        SourceRecord(source.name, source.path.stat().st_size, sha256, *row)
        for source, sha256, row in zip(sources, hashes, counts.tolist(), strict=True)
    )
    return CorpusRecord(files, documents, store.lone_sentences(), sentences, len(store.ids))


def _plan(job: Job, workers: Workers) -> None:
    if job.plan.exists():
        return
    store = job.open_store()
    blocks = workers.map(partial(plan_block, job=job), cut_blocks(store, job.settings.duplicates))
    with replacing(job.plan) as file:
        for pairs in show_progress(blocks, "planned", "pairs", lambda pairs: len(pairs) // PAIR.itemsize):
            file.write(pairs)
        if not file.tell():
            raise DataError(
                f"no pair of sentences: {store.lone_sentences()} of {len(store.documents) - 1} documents "
                "have only one sentence; in a .txt a blank line ends a document, not a sentence"
            )


def _make_shards(job: Job, workers: Workers) -> tuple[tuple[ShardRecord, ...], NDArray[np.int64]]:
    count = -(-len(job.open_plan()) // job.settings.samples_per_shard)
    made = workers.map(partial(make_shard, job=job), range(count))
    token_counts = np.zeros(job.tokenizer.vocab_size, np.int64)
    records = []
    for record, counts in show_progress(made, "wrote", "samples", lambda made: made[0].samples):
        records.append(record)
        token_counts += counts
    token_counts[list(astuple(job.tokenizer.specials))] = 0
    return tuple(records), token_counts


def _fingerprint(job: Job, names: list[str], hashes: list[str]) -> str:
    """Of all that decides the data set: equal fingerprints, equal bytes."""
    identity = [FORMAT, VERSION, asdict(job.settings), asdict(job.tokenizer), names, hashes]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _is_complete(out: Path, fingerprint: str) -> bool:
    if not (out / MANIFEST).exists():
        return False
    if load_manifest(out).fingerprint != fingerprint:
        raise DataError(f"{out} holds {ANOTHER}")
    problems = verify(out)
    if problems:
        raise DataError(f"{out} was built but is damaged: {problems[0]}; remove it and build again")
    shutil.rmtree(out / WORK, ignore_errors=True)
    return True


def _claim(out: Path, fingerprint: str) -> None:
    """Takes an empty folder, or goes on in one where the same build was begun."""
    mark = out / WORK / FINGERPRINT
    if mark.exists() and mark.read_text() == fingerprint:
        for path in out.rglob(f"*{TEMPORARY}"):
            path.unlink(missing_ok=True)
        return
    found = sorted(path.name for path in out.iterdir() if path.name != WORK) if out.exists() else []
    if mark.exists() or any(name.startswith(PREFIX) for name in found):
        raise DataError(f"{out} holds {ANOTHER}")
    if found:
        raise DataError(f"{out} holds other files ({found[0]}); choose another --out or remove it")
    shutil.rmtree(out / WORK, ignore_errors=True)  # without its mark, nobody knows what it was made from
    mark.parent.mkdir(parents=True)
    with replacing(mark) as file:
        file.write(fingerprint.encode())


def _release(out: Path) -> None:
    """Removes what a build that has no shard yet left behind."""
    if not list(out.glob(PREFIX + "*")):
        shutil.rmtree(out / WORK)
        with suppress(OSError):  # not empty, or a mount point
            out.rmdir()


def _total(shards: tuple[ShardRecord, ...]) -> Counts:
    names = [field.name for field in fields(Counts)]
    return Counts(**{name: sum(getattr(shard, name) for shard in shards) for name in names})


def _save_token_counts(out: Path, counts: NDArray[np.int64]) -> TokenCounts:
    with replacing(out / TOKEN_COUNTS) as file:
        np.save(file, counts, allow_pickle=False)
    return TokenCounts(TOKEN_COUNTS, file_sha256(out / TOKEN_COUNTS))
