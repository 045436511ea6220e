"""Cache a remote data set in a local folder, shard by shard, within a size limit.

The folder is ``<cache>/<sha256 of the manifest>`` and keeps the data set's file names, so the ranks of a node, several
runs and several phases share it. Each shard has a lock file (flock): readers hold a shared lock, and whoever fetches or
removes the shard holds an exclusive one. So a node fetches a shard once, never removes one that is being read, and a
killed process leaves no lock behind. A file gets its name only after its sha256 matches the manifest.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from data_prep.atomic import TEMPORARY
from data_prep.errors import DataError
from data_prep.json_text import shown
from data_prep.manifest import (
    LENGTH_COUNTS,
    MANIFEST,
    SMALL_FILE_BYTES,
    TOKEN_COUNTS,
    TOKENIZER_FOLDER,
    Manifest,
    ShardRecord,
    file_sha256,
    load_manifest,
)
from data_prep.shards import SHARD_PREFIX, index_limit, index_path, tar_path
from data_prep.tokenizer import TOKENIZER_FILES, load_proven
from trainer.bounds import outside
from trainer.data.remote import Remote
from trainer.errors import PassingError, TrainerError, exit_code, shortage
from trainer.exits import FAILED

FETCHERS = 4  # shards that a rank fetches at once
LOCK_POLL_SECONDS = 0.05  # between two attempts to lock a shard
ORIGIN = re.compile(r"https?://[^/?#@\s]+")


@dataclass(frozen=True)
class CacheConfig:
    """The folder that keeps the shards of remote data sets, and its size."""

    # on the node's own disk, shared by its ranks and by other runs; a run at an address works in it
    folder: str = "~/.cache/lambert"
    # size limit, beyond which the least recently used shards are removed; the shards of the current shuffle window and
    # of the next one always stay
    gigabytes: float = 20.0
    # origins, besides its own, that an HTTP server may redirect to: ["https://cdn.example.com"]
    redirects: tuple[str, ...] = ()

    def problems(self) -> list[str]:
        """List invalid values, each with what to change."""
        found = []
        if not self.folder:
            found.append("folder is empty: name one on the node's own disk")
        found += outside(self, gigabytes=(0, 10**6))
        for place in self.redirects:
            if not ORIGIN.fullmatch(place):
                found.append(
                    f"redirects has {shown(place)}: name only scheme, host and port, as in https://cdn.example.com"
                )
        return found


class Cache:
    """The local folder of a remote data set. ``folder`` must already contain everything except the shards.

    ``limit``: bytes of shards in the whole cache, beyond which unlocked shards are removed. ``turn``: which shard to
    fetch first, so that the ranks of a node share the work.
    """

    def __init__(self, remote: Remote, folder: Path, limit: float, turn: int) -> None:
        self.remote, self.folder, self.limit, self.turn = remote, folder, limit, turn
        self.manifest = load_manifest(folder)
        self._held: dict[int, IO[bytes]] = {}  # shard number: its shared lock
        self._wanted: set[int] = set()
        self._ahead: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(FETCHERS, thread_name_prefix="remote")

    def problems(self) -> list[str]:
        """List the shards that the server lacks or reports with another size. Reads none of them."""
        tars = {f"{shard.name}.tar": shard.bytes for shard in self.manifest.shards}
        keys = [*tars, *(f"{shard.name}.idx.npy" for shard in self.manifest.shards)]
        sizes = self.remote.sizes(keys)
        wrong = [key for key in keys if key not in sizes]
        wrong += [
            f"{key} ({sizes[key]} bytes instead of {size})"
            for key, size in tars.items()
            if key in sizes and sizes[key] not in (None, size)
        ]
        if not wrong:
            return []
        return [f"{self.remote.address}: missing or truncated: {', '.join(wrong)}; publish the data set again"]

    def want(self, now: Sequence[int], following: Sequence[int]) -> None:
        """Fetch and lock the shards ``now``, start to fetch ``following``, and release all others.

        Raises TrainerError with the address of a shard that cannot be fetched.
        """
        self._wanted = {*now, *following}
        for number in list(self._held):
            if number not in self._wanted:
                self._release(number)
        for task in self._ahead:
            task.cancel()
        list(self._pool.map(self._hold, self._mine_first(now)))
        under_way = [task for task in self._ahead if not task.done()]
        self._ahead = under_way + [self._pool.submit(self._hold, number) for number in self._mine_first(following)]

    def halt(self) -> None:
        """Abort all fetching and waiting, however slow the server is."""
        self.remote.ended.set()

    def rest(self) -> None:
        """Release all shards and stop fetching until shards are wanted again."""
        self.want((), ())
        wait(self._ahead)
        self.remote.ended.clear()

    def _mine_first(self, numbers: Sequence[int]) -> list[int]:
        wanted = [number for number in numbers if number not in self._held]
        start = self.turn % max(len(wanted), 1)
        return wanted[start:] + wanted[:start]

    def _hold(self, number: int) -> None:
        """Lock a shard, and fetch it first if absent. A failed prefetch is tried again when the shard is needed."""
        if number in self._held or number not in self._wanted:
            return
        shard = self.manifest.shards[number]
        asked = time.time()
        lock = (self.folder / f"{shard.name}.lock").open("a+b")
        try:
            while not self._share(shard, lock):
                if not _try_lock(lock, fcntl.LOCK_EX):  # another process fetches or removes it: check again
                    if self.remote.ended.wait(LOCK_POLL_SECONDS):
                        raise TrainerError(f"{self.remote.address}: the run is ending")
                elif not self._is_whole(shard):
                    self._fetch(shard, lock, asked)
            os.utime(tar_path(self.folder, shard.name))
        except BaseException:
            lock.close()
            raise
        self._held[number] = lock
        if number not in self._wanted:
            self._release(number)

    def _release(self, number: int) -> None:
        lock = self._held.pop(number, None)
        if lock is not None:
            lock.close()

    def _share(self, shard: ShardRecord, lock: IO[bytes]) -> bool:
        """Take the shared lock if the shard is there; return whether it was. An absent shard stays unlocked."""
        if not (self._is_whole(shard) and _try_lock(lock, fcntl.LOCK_SH)):
            return False
        if not self._is_whole(shard):  # removed in between
            fcntl.flock(lock, fcntl.LOCK_UN)
            return False
        return True

    def _is_whole(self, shard: ShardRecord) -> bool:
        """Whether both files exist. They were verified before they got their names."""
        tar = tar_path(self.folder, shard.name)
        return tar.is_file() and tar.stat().st_size == shard.bytes and index_path(self.folder, shard.name).is_file()

    def _fetch(self, shard: ShardRecord, lock: IO[bytes], asked: float) -> None:
        """Fetch both files of a shard under its exclusive lock. Waiting ranks get a failure's text and exit code."""
        lock.seek(0)
        failure = lock.read().decode()
        if failure and os.fstat(lock.fileno()).st_mtime >= asked:
            code, _, line = failure.partition(" ")
            raise (PassingError if code == str(FAILED) else TrainerError)(line)
        for left in self.folder.glob(f"{shard.name}.*{TEMPORARY}"):  # left by a killed process
            left.unlink(missing_ok=True)
        tar, index = tar_path(self.folder, shard.name), index_path(self.folder, shard.name)
        try:
            self._require_room(shard)
            self.remote.fetch(index.name, index, shard.index_sha256, index_limit(shard.bytes))
            self.remote.fetch(tar.name, tar, shard.sha256, shard.bytes, shard.bytes)
            _make_room(self.folder.parent, self.limit)
        except TrainerError as error:
            if not self.remote.ended.is_set():  # ending this run is not a failure for others
                lock.truncate(0)
                lock.write(f"{exit_code(error)} {error}".encode())
                lock.flush()
            raise

    def _require_room(self, shard: ShardRecord) -> None:
        """Raises TrainerError before fetching a shard that does not fit on the disk."""
        free = shutil.disk_usage(self.folder).free
        if shard.bytes > free:
            raise TrainerError(
                f"{self.remote.address}/{shard.name}.tar has {shard.bytes:,} bytes, but the disk of "
                f"cache.folder has {free:,} free: free some, or name another folder"
            )


def open_cache(address: str, cache: CacheConfig, stall: float, turn: int) -> Cache:
    """Create the folder of the data set at ``address`` with its manifest, counts and tokenizer, but no shards yet.

    Raises TrainerError with the address of a file that cannot be fetched or does not match the manifest.
    """
    remote, root = Remote(address, stall, cache.redirects), Path(cache.folder)
    try:
        root = root.expanduser()
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="incoming-", dir=root) as incoming:
            remote.fetch(MANIFEST, Path(incoming) / MANIFEST, None, SMALL_FILE_BYTES)
            folder = root / file_sha256(Path(incoming) / MANIFEST)
            manifest = _load(Path(incoming), remote)
            folder.mkdir(exist_ok=True)
            with (folder / "lock").open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _small_is_whole(folder, manifest):
                    _fetch_small(remote, manifest, folder)
                    (Path(incoming) / MANIFEST).replace(folder / MANIFEST)  # last: it marks the data set as complete
        return Cache(remote, folder, cache.gigabytes * 1e9, turn)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder for that user
        if shortage(error):
            raise
        raise TrainerError(f"cache.folder {root} cannot be used ({error}): name a writable folder") from None


def _load(folder: Path, remote: Remote) -> Manifest:
    try:
        manifest = load_manifest(folder)
    except DataError as error:
        raise TrainerError(f"{remote.address}: {str(error).replace(str(folder) + '/', '')}") from None
    names = [shard.name for shard in manifest.shards]
    strange = [name for name in names if "/" in name or not name.startswith(SHARD_PREFIX)]
    if strange or (manifest.token_counts.file, manifest.length_counts.file) != (TOKEN_COUNTS, LENGTH_COUNTS):
        raise TrainerError(
            f"{remote.address}/{MANIFEST} names files that no build writes: name a data set built by data_prep"
        )
    return manifest


def _fetch_small(remote: Remote, manifest: Manifest, folder: Path) -> None:
    for histogram in (manifest.token_counts, manifest.length_counts):
        remote.fetch(histogram.file, folder / histogram.file, histogram.sha256, SMALL_FILE_BYTES)
    tokenizer = folder / TOKENIZER_FOLDER
    tokenizer.mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        remote.fetch(f"{TOKENIZER_FOLDER}/{name}", tokenizer / name, None, SMALL_FILE_BYTES)
    try:
        load_proven(tokenizer, manifest.tokenizer.sha256, remedy="publish the data set again")
    except DataError as error:
        raise TrainerError(str(error).replace(str(folder), remote.address)) from None


def _small_is_whole(folder: Path, manifest: Manifest) -> bool:
    """Whether everything except the shards is there and undamaged; if not, it is fetched again."""
    counts = {each.file: each.sha256 for each in (manifest.token_counts, manifest.length_counts)}
    try:
        if any(file_sha256(folder / name) != sha256 for name, sha256 in {MANIFEST: folder.name, **counts}.items()):
            return False
        load_proven(folder / TOKENIZER_FOLDER, manifest.tokenizer.sha256)
    except (DataError, OSError):
        return False
    return True


def _try_lock(lock: IO[bytes], kind: int) -> bool:
    """Take or change the lock if no other process prevents it; return whether it worked."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make_room(cache: Path, limit: float) -> None:
    """Remove unlocked shards, least recently used first, until at most ``limit`` bytes are left.

    Only shards with a lock file are removed: the user's own data sets are never touched, wherever the cache is.
    """
    tars = []
    for lock in cache.glob(f"*/{SHARD_PREFIX}*.lock"):
        tar = tar_path(lock.parent, lock.stem)
        try:
            about = tar.stat()
        except FileNotFoundError:  # never fetched, or removed
            continue
        tars.append((about.st_mtime, about.st_size, tar))
    total = sum(size for _, size, _ in tars)
    for _, size, tar in sorted(tars):
        if total <= limit:
            return
        with tar.with_suffix(".lock").open("r+b") as held:
            if _try_lock(held, fcntl.LOCK_EX):
                tar.unlink(missing_ok=True)
                index_path(tar.parent, tar.stem).unlink(missing_ok=True)
                total -= size
