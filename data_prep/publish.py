"""Copies a complete data set to an object store, or to any other place that `fsspec` can write to.

    s3://bucket/folder    needs s3fs; boto finds the keys (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile,
                          the machine's role); AWS_ENDPOINT_URL_S3=http://minio:9000 selects another server
    gs://bucket/folder    needs gcsfs; az://container/folder needs adlfs
    file:///mnt/folder    a disk or a mounted share

The manifest goes last: without it there is no data set, so a reader never trusts an incomplete one. Files that are
already there are read back and their sha256 is compared with the manifest. Missing or different files are sent, and
read back as well. So a rerun resumes where the last one stopped, and a rerun on a complete data set verifies it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.addresses import OBJECT_STORES
from data_prep.atomic import TEMPORARY
from data_prep.errors import CopyError, DataError
from data_prep.manifest import MANIFEST, SMALL_FILE_BYTES, TOKENIZER_FOLDER, file_sha256, load_manifest
from data_prep.retries import Result, is_hopeless, patiently, shown
from data_prep.shards import SHARD_PREFIX, index_path, tar_path
from data_prep.verify import verify
from data_prep.workers import show_progress

WAITS = (0.5, 1, 2, 4)  # seconds between two attempts, on top of the drivers' own retries
READ = 8 << 20  # bytes of an object in memory at once
ANSWER = 600.0  # timeout in seconds for a request that moves no file


@dataclass(frozen=True)
class Item:
    """A file of the data set, with the size and sha256 that it must have below the URL."""

    path: Path
    key: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Place:
    """The destination: a file system of `fsspec` and a folder, or key prefix, in it."""

    fs: Any  # fsspec has no types
    root: str
    url: str

    def name(self, key: str) -> str:
        """The path of ``key`` in the file system."""
        return f"{self.root}/{key}"

    def is_object_store(self) -> bool:
        """Whether this is an object store. Otherwise it has folders, and files are visible while they are written."""
        protocols = self.fs.protocol
        return bool(OBJECT_STORES.intersection([protocols] if isinstance(protocols, str) else protocols))


@dataclass(frozen=True)
class Published:
    """The result of a run: all files of the data set are there and verified."""

    files: int
    bytes: int
    sent: int  # number of files sent by this run
    sent_bytes: int


def publish(folder: Path, url: str, threads: int) -> Published:
    """Sends missing and different files, ``threads`` at once, and verifies every file by reading it back.

    Raises DataError if the data set is not complete, if another data set or its shards are at the URL, if the driver
    or the credentials are missing, or if a file cannot be sent in several attempts. A rerun then resumes.
    """
    problems = verify(folder)
    if problems:
        raise DataError(f"not published, {folder} is damaged: {problems[0]}")
    items = list_items(folder)
    manifest = _item(folder, MANIFEST)
    for item in [manifest, *(item for item in items if not item.key.startswith(SHARD_PREFIX))]:
        if item.bytes > SMALL_FILE_BYTES:
            raise DataError(
                f"not published, {item.path} has {item.bytes:,} bytes: no reader takes more than {SMALL_FILE_BYTES:,}"
            )
    place = open_place(url)
    _refuse_foreign(place, items, manifest)
    total = sum(item.bytes for item in items)
    sent = []
    with ThreadPoolExecutor(threads) as pool:
        settled = pool.map(partial(_settle, place), items)
        for item, was_sent in show_progress(settled, "published", "bytes", lambda done: done[0].bytes, total):
            if was_sent:
                sent.append(item)
    _refuse_foreign(place, items, manifest)  # foreign files may have appeared meanwhile
    if _settle(place, manifest)[1]:
        sent.append(manifest)
    return Published(len(items) + 1, total + manifest.bytes, len(sent), sum(item.bytes for item in sent))


def list_items(folder: Path) -> list[Item]:
    """All files of a data set except the manifest: the files it names, and the tokenizer that `verify` has checked."""
    manifest = load_manifest(folder)
    items = []
    for shard in manifest.shards:
        tar, index = tar_path(folder, shard.name), index_path(folder, shard.name)
        items.append(Item(tar, tar.name, shard.bytes, shard.sha256))
        items.append(Item(index, index.name, index.stat().st_size, shard.index_sha256))
    for histogram in (manifest.token_counts, manifest.length_counts):
        path = folder / histogram.file
        items.append(Item(path, path.name, path.stat().st_size, histogram.sha256))
    tokenizer = sorted(path for path in (folder / TOKENIZER_FOLDER).iterdir() if path.is_file())
    return items + [_item(folder, f"{TOKENIZER_FOLDER}/{path.name}") for path in tokenizer]


def open_place(url: str) -> Place:
    """Opens the destination. Raises DataError if ``url`` is not a URL or its driver is missing."""
    if url.startswith(("http:", "https:")):
        raise DataError(f"{url}: not writable; publish to the disk or object store behind it")
    from data_prep.servers import open_fs

    fs, root = open_fs(url, ANSWER)
    if not root.strip("/"):
        raise DataError(f"{url}: names no folder; wanted one such as s3://bucket/folder")
    return Place(fs, root, url.rstrip("/"))


def _item(folder: Path, key: str) -> Item:
    path = folder / key
    return Item(path, key, path.stat().st_size, file_sha256(path))


def _refuse_foreign(place: Place, items: list[Item], manifest: Item) -> None:
    """Raises DataError for another data set, or for shards that a reader of ``shard-*`` would mistake for ours."""
    found = _patiently(place, MANIFEST, partial(_measure, place, manifest))
    if found not in (None, (manifest.bytes, manifest.sha256)):
        raise DataError(
            f"{place.url} holds another data set: its {MANIFEST} is not {manifest.path}; publish to another URL, or "
            "remove it there first"
        )
    names = {name.rsplit("/", 1)[-1].removesuffix(TEMPORARY) for name in _patiently(place, "", partial(_list, place))}
    foreign = sorted(name for name in names - {item.key for item in items} if name.startswith(SHARD_PREFIX))
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise DataError(
            f"{place.url} holds {foreign[0]}{more}, not named by {manifest.path}; publish to another URL, or remove "
            "them there first"
        )


def _settle(place: Place, item: Item) -> tuple[Item, bool]:
    """Makes sure that an item is there, verified by its sha256. Also returns whether it had to be sent."""
    right = (item.bytes, item.sha256)
    if _patiently(place, item.key, partial(_measure, place, item)) == right:
        return item, False
    if file_sha256(item.path) != item.sha256:
        raise DataError(f"{item.path}: not the file in the manifest (its sha256 differs); build again, then publish")
    _patiently(place, item.key, partial(_send, place, item))
    return item, True


def _send(place: Place, item: Item) -> None:
    """Sends an item and reads it back. Only complete files are visible under their final name."""
    name = place.name(item.key)
    if place.is_object_store():
        place.fs.put_file(str(item.path), name)
    else:
        place.fs.makedirs(name.rpartition("/")[0], exist_ok=True)
        place.fs.put_file(str(item.path), name + TEMPORARY)
        place.fs.mv(name + TEMPORARY, name)
    found = _measure(place, item)
    if found != (item.bytes, item.sha256):
        raise OSError(f"read back, it is {'missing' if found is None else f'{found[0]} different bytes'}")


def _measure(place: Place, item: Item) -> tuple[int, str] | None:
    """Size and sha256 of the copy, read only if the size is right; None if nothing is there."""
    from data_prep.servers import ask

    name, found = place.name(item.key), 0
    try:
        size = int(ask(place.fs, ANSWER, "info", name)["size"])
        if size != item.bytes:
            return size, ""
        proof = hashlib.sha256()
        with place.fs.open(name, "rb", block_size=READ) as file:
            while found <= size and (block := file.read(READ)):
                found += len(block)
                proof.update(block)
        return found, proof.hexdigest()
    except FileNotFoundError:
        return None


def _list(place: Place) -> list[str]:
    from data_prep.servers import ask

    try:
        return list(ask(place.fs, ANSWER, "ls", place.root, detail=False))
    except FileNotFoundError:
        return []


def _patiently(place: Place, key: str, work: Callable[[], Result]) -> Result:
    """Runs ``work()`` and retries after each of WAITS on errors that may be temporary.

    Raises DataError, one line; it is a CopyError if the last attempt may have failed for a passing reason.
    """
    where = f"{place.url}/{key}".rstrip("/")
    try:
        return patiently(work, WAITS)
    except Exception as error:  # each driver has its own classes, which can't be named without importing it
        reason = shown(error)
        if is_hopeless(error):
            raise DataError(f"{where}: {reason}; check the URL, credentials, permissions and free space") from error
        times = len(WAITS) + 1
        raise CopyError(f"{where}: failed {times} times, last with {reason}; run again to resume") from error
