"""Verifies a data set against its manifest, and a shard against its index."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import CopyError, DataError
from data_prep.manifest import TOKENIZER_FOLDER, Manifest, ShardRecord, file_sha256, load_manifest
from data_prep.published import Published
from data_prep.shards import SHARD_PREFIX, Column, index_path, read_shard, tar_path
from data_prep.stock import compare, import_webdataset
from data_prep.tokenizer import TOKENIZER_JSON, load_tokenizer, require_sha256
from data_prep.workers import show_progress


def verify(folder: Path, full: bool = False, stock: bool = False, published: Published | None = None) -> list[str]:
    """All problems of a data set, one per line, by shard. An empty list means that it is complete and undamaged.

    Args:
        full: also hash every tar and decode every sample. Without it: names, sizes, indexes and counts.
        stock: also read every sample with stock `webdataset`, and compare it with our own reading. A shard's first
            difference is reported. Prints its progress.
        published: provides the shards, if they are not in the folder.

    Raises DataError if there is no manifest to verify it against, or if ``stock`` lacks the library; CopyError
    if a shard cannot be copied.
    """
    manifest = load_manifest(folder)
    if stock:
        import_webdataset()
    checked: Iterable[Checked] = _check_shards(folder, manifest, full, stock, published)
    if stock:
        checked = show_progress(checked, "compared", "samples", lambda done: done.samples, manifest.counts.samples)
    return [*_inconsistencies(folder, manifest), *(done.problem for done in checked if done.problem is not None)]


class Checked(NamedTuple):
    """A shard that was checked, with its problem if it has one."""

    samples: int
    problem: str | None


def verify_published(address: str, stock: bool = False) -> tuple[list[str], int]:
    """All problems of a published data set, as `verify` with ``full`` reports them, and its number of samples.

    Copies one shard at a time into a temporary folder. Raises DataError if there is no data set, or its small files
    cannot be copied; CopyError if the server or this machine fails.
    """
    address = address.rstrip("/")
    with TemporaryDirectory(prefix="lambert-") as name:
        folder = Path(name)
        try:
            problems = verify(folder, True, stock, Published(address, folder))
        except CopyError:  # names the address, and the temporary folder if that is full
            raise
        except DataError as error:
            raise type(error)(str(error).replace(name, address)) from None
        return [problem.replace(name, address) for problem in problems], load_manifest(folder).counts.samples


def _check_shards(
    folder: Path, manifest: Manifest, full: bool, stock: bool, published: Published | None
) -> Iterator[Checked]:
    first = 0  # number of the shard's first sample
    for record in manifest.shards:
        problem = None
        try:
            with published.shard(record) if published else nullcontext():
                _check_shard(folder, record, first, manifest.tokenizer.vocab_size, full)
                if stock:
                    compare(folder, record, first)
        except CopyError:
            raise
        except (DataError, OSError) as error:
            problem = str(error)
        yield Checked(record.samples, problem)
        first += record.samples


class Measured(NamedTuple):
    """The contents of a shard, as read by `measure_shard`."""

    record: ShardRecord
    token_counts: NDArray[np.int64]  # [V] how often each id occurs in its samples
    length_counts: NDArray[np.int64]  # [longest + 1] number of its samples of each length


def measure_shard(folder: Path, name: str, start: int, vocab_size: int) -> Measured:
    """Reads a whole shard, whose first sample is number ``start``, and counts its tokens and lengths.

    Raises DataError, with the shard's name, for a file that is missing, truncated or damaged.
    """
    index, is_next, ids = read_shard(folder, name, start)
    path = tar_path(folder, name)
    if ids.max() >= vocab_size:
        raise DataError(f"{path}: id {ids.max()} is beyond the vocabulary of {vocab_size}")
    record = ShardRecord(
        name=name,
        bytes=path.stat().st_size,
        sha256=file_sha256(path),
        index_sha256=file_sha256(index_path(folder, name)),
        samples=len(index),
        tokens=int(index[:, Column.TOKENS].sum()),
        masked=int(index[:, Column.MASKED].sum()),
        is_next=int(np.count_nonzero(is_next == 1)),
    )
    return Measured(record, np.bincount(ids, minlength=vocab_size), np.bincount(index[:, Column.TOKENS]))


def _check_shard(folder: Path, record: ShardRecord, start: int, vocab_size: int, full: bool) -> None:
    tar, index = tar_path(folder, record.name), index_path(folder, record.name)
    missing = [path.name for path in (tar, index) if not (path.is_file() and os.access(path, os.R_OK))]
    if missing:
        raise DataError(f"{folder}: {' and '.join(missing)} missing or unreadable")
    if tar.stat().st_size != record.bytes:
        raise DataError(f"{tar}: {tar.stat().st_size} bytes, the manifest says {record.bytes}")
    if file_sha256(index) != record.index_sha256:
        raise DataError(f"{index}: not the index in the manifest (its sha256 differs)")
    if full and measure_shard(folder, record.name, start, vocab_size).record != record:
        raise DataError(f"{tar}: not the shard in the manifest (its sha256 or its counts differ)")


def _inconsistencies(folder: Path, manifest: Manifest) -> Iterator[str]:
    named = {path(folder, record.name) for record in manifest.shards for path in (tar_path, index_path)}
    for path in sorted(set(folder.glob(SHARD_PREFIX + "*")) - named):
        yield f"{path}: foreign, the manifest does not name it"
    for count in ("samples", "tokens", "masked", "is_next"):
        total = getattr(manifest.counts, count)
        parts = sum(getattr(record, count) for record in manifest.shards)
        if total != parts:
            yield f"{folder}: the manifest counts {total} {count}, its shards {parts}"
    plan, tokens = manifest.plan, manifest.settings.duplicates * manifest.corpus.tokens
    accounted = plan.own + plan.truncated + plan.left_over + plan.unmaskable_tokens
    if accounted != tokens:
        yield f"{folder}: the manifest accounts for {accounted} of {tokens} tokens"
    for histogram in (manifest.token_counts, manifest.length_counts):
        path = folder / histogram.file
        if not path.is_file() or file_sha256(path) != histogram.sha256:
            yield f"{path}: missing, or not the file in the manifest"
    try:
        yield from _check_tokenizer(folder / TOKENIZER_FOLDER, manifest)
    except DataError as problem:
        yield str(problem)


def _check_tokenizer(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Checks each file's content. The manifest's hash covers only what decides the ids, which is in tokenizer.json."""
    tokenizer = load_tokenizer(folder)
    require_sha256(tokenizer, manifest.tokenizer.sha256, folder)
    files = tokenizer.files()
    if manifest.settings.tokenizers != version("tokenizers"):
        del files[TOKENIZER_JSON]  # another version may have another layout
    for name, content in files.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != content:
            yield f"{path}: not as the build wrote it, which follows from tokenizer.json; build again, or copy it again"
