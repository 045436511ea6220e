"""Read shards as unpadded micro-batches. A batch is a function of its position; the loader keeps no state.

Every rank works out the whole global batch from the indexes (lengths and masked counts), so all ranks agree on the
counts, the partition and the number of steps without communicating. Each rank reads only its own samples, by offset,
and verifies their checksums. Ranks communicate before a step in only two cases: to count the targets of dynamic masks
whose number depends on the draw, and to stop while waiting for remote shards.
"""

from __future__ import annotations

import os
import time
import weakref
import zlib
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data_prep.draws import bits
from data_prep.errors import DataError
from data_prep.manifest import Manifest
from data_prep.masking import Masking, Vocabulary, make_vocabulary, remask
from data_prep.shards import Column, Sample, decode_sample, index_path, read_index, tar_path
from data_prep.tokenizer import Tokenizer
from trainer.data.cache import Cache
from trainer.data.collate import collate, filler
from trainer.data.order import Order, deal
from trainer.data.spread import Spread, spread
from trainer.errors import PassingError, TrainerError, shortage
from trainer.model.batch import GlobalCounts, MicroBatch
from trainer.ranks.stop import Stop

CPU = torch.device("cpu")
_MASKS = 4  # the purpose of this random stream; see trainer/data/order.py


@dataclass(frozen=True)
class StepBatch:
    """The data of one step on one rank."""

    position: int  # of the first sample in the phase's order; the next step starts at position + samples
    samples: int  # of the global batch
    micro_batches: tuple[MicroBatch, ...]  # for this rank
    counts: GlobalCounts  # of the global batch
    wait_seconds: float = 0.0  # how long training waited for it


@dataclass(frozen=True)
class _Shard:
    """An open shard. It is read by system calls: a memory map would kill the process if the file shrinks."""

    path: Path
    index: NDArray[np.int64]  # (samples, columns)
    handle: int  # closed when nothing refers to this object any longer

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.handle)


@dataclass(frozen=True)
class DynamicMasks:
    """Settings for drawing new masks."""

    vocabulary: Vocabulary
    masking: Masking
    seed: int

    @property
    def keeps_counts(self) -> bool:
        """Whether new masks cover as many tokens as the static ones, whose number is in the index."""
        return self.masking.unit == "token"


def dynamic_masks(tokenizer: Tokenizer, manifest: Manifest, seed: int) -> DynamicMasks:
    """Return the settings for drawing new masks over the data set."""
    settings, specials = manifest.settings, manifest.tokenizer.specials
    vocabulary = make_vocabulary(manifest.tokenizer.vocab_size, tokenizer.never, specials.mask)
    masking = Masking(settings.masking, settings.masked_share, settings.max_predictions)
    return DynamicMasks(vocabulary, masking, int(bits(seed, _MASKS)[0]))  # never the static masks' seed


class Loader:
    """Reads the shards of one folder for rank ``rank`` of ``ranks``.

    ``masks``: draw new masks for each sample in each epoch; None uses the static ones. ``cache``: fills the folder if
    the shards are remote. ``device``: where training's batches will go. ``spread``: start each training sequence at a
    random position. Raises TrainerError with the shard's name on any damage.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        rank: int,
        ranks: int,
        masks: DynamicMasks | None = None,
        cache: Cache | None = None,
        device: torch.device = CPU,
        spread: Spread | None = None,
    ) -> None:
        self.folder, self.manifest, self.rank, self.ranks, self.masks = folder, manifest, rank, ranks, masks
        self.cache, self.device, self.spread = cache, device, spread
        self._sizes = np.array([shard.samples for shard in manifest.shards])
        self._remedy = "restore it or build the shards again"
        if cache is not None:
            self._remedy = f"remove it, and it will be fetched again from {cache.remote.address}"
        self._in_use: tuple[list[int], list[int]] = [], []  # shards requested from the cache: needed now, and next
        self._shard = lru_cache(maxsize=256)(self._open)

    def problems(self) -> list[str]:
        """List the shards that are absent, unreadable or of another size. Reads none of them."""
        if self.cache is not None:
            return self.cache.problems()
        wrong = []
        for shard in self.manifest.shards:
            tar, index = tar_path(self.folder, shard.name), index_path(self.folder, shard.name)
            wrong += [path.name for path in (tar, index) if not (path.is_file() and os.access(path, os.R_OK))]
            if tar.is_file() and tar.stat().st_size != shard.bytes:
                wrong.append(f"{tar.name} ({tar.stat().st_size} bytes instead of {shard.bytes})")
        if not wrong:
            return []
        return [f"{self.folder}: missing, unreadable or truncated: {', '.join(wrong)}; restore them or build again"]

    def read(self, order: Order, position: int, global_batch: int, micro_batches: int) -> StepBatch:
        """Read this rank's part of the batch at ``position``, which is divided into ``micro_batches`` per rank.

        If new masks change the number of targets, ``counts.targets`` covers only this rank; ``steps`` completes it.
        """
        self._use(*_shards_at(order, position, global_batch))
        picks = order.take(position, global_batch)
        index = self._index_rows(picks)
        lengths = index[:, Column.TOKENS]
        parts = deal(lengths, self.ranks * micro_batches)
        mine = parts[
            self.rank :: self.ranks
        ]  # all ranks' k-th parts are neighbours, so they have nearly the same number of tokens
        own = np.concatenate(mine)
        samples, targets = self._samples(picks[own], index[own]), int(index[:, Column.MASKED].sum())
        if self.masks is not None:  # a whole step at once: half the time of masking each micro-batch separately
            samples = self._remasked(samples, picks[own], position + own, self.masks)
            if not self.masks.keeps_counts:
                targets = sum(len(sample.positions) for sample in samples)
        rest = iter(samples)
        batches = [self._collate(list(islice(rest, len(part))), position + part) for part in mine]
        if self.spread is not None:
            batches = [spread(batch, self.spread) for batch in batches]
        pinned = tuple(batch.pin(self.device) for batch in batches)
        counts = GlobalCounts(
            targets=targets,
            pairs=0 if self.manifest.settings.pairs == "single" else global_batch,
            tokens=int(lengths.sum()),
            squares=int((lengths**2).sum()),
        )
        return StepBatch(position, global_batch, pinned, counts)

    def steps(
        self, order: Order, position: int, global_batch: int, micro_batches: int, stop: Stop | None = None
    ) -> Generator[StepBatch, None, None]:
        """Yield batches endlessly from ``position`` on; the next one is read while this one is trained on.

        With ``stop``, all ranks take each batch together, and the batches end if a stop is requested while any rank
        waits for remote shards.
        """

        def read(position: int) -> tuple[StepBatch, float]:
            return self.read(order, position, global_batch, micro_batches), time.perf_counter()

        with self._reader() as reader:
            pending = reader.submit(read, position)
            while True:
                asked = time.perf_counter()
                if not self._arrives(pending, stop):
                    return
                batch, arrived = pending.result()
                position += global_batch
                pending = reader.submit(read, position)
                counts = self._complete(batch.counts, stop)
                yield replace(batch, counts=counts, wait_seconds=max(0.0, arrived - asked))

    def sweep(self, size: int, stop: Stop | None = None) -> Iterator[MicroBatch]:
        """Yield this rank's share of all samples once, with static masks, in shard order, ``size`` at a time.

        ``stop`` works as in :meth:`steps`; a stopped sweep is incomplete.
        """
        sizes = self._sizes.tolist()
        picks = np.concatenate([np.stack([np.full(n, s), np.arange(n)], axis=1) for s, n in enumerate(sizes)])
        numbers = np.arange(len(picks))[self.rank :: self.ranks]
        rounds = -(
            -len(picks) // (size * self.ranks)
        )  # the same on all ranks; this rank may have nothing in the last round
        parts = [numbers[start : start + size] for start in range(0, rounds * size, size)]
        shards = [np.unique(picks[part, 0]).tolist() for part in parts] + [[]]

        def read(part: NDArray[np.int64], now: list[int], following: list[int]) -> MicroBatch:
            self._use(now, following)
            return self._collate(self._samples(picks[part], self._index_rows(picks[part])), part)

        with self._reader() as reader:
            for part, now, following in zip(parts, shards, shards[1:], strict=False):
                pending = reader.submit(read, part, now, following)
                if not self._arrives(pending, stop):
                    return
                if len(part):
                    yield pending.result()

    @contextmanager
    def _reader(self) -> Iterator[ThreadPoolExecutor]:
        """Open a reading thread. On exit, waits for no shards and releases all."""
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as reader:
            try:
                yield reader
            finally:
                if self.cache is not None:
                    self.cache.halt()
                    reader.submit(self._rest)

    def _arrives(self, pending: Future[Any], stop: Stop | None) -> bool:
        """Whether the read will complete; False if all ranks must stop instead of waiting for it."""
        return self.cache is None or stop is None or stop.wait(pending)

    def _complete(self, counts: GlobalCounts, stop: Stop | None) -> GlobalCounts:
        """Sum the counts over all ranks if :meth:`read` knew only this rank's."""
        if self.masks is None or self.masks.keeps_counts or self.ranks == 1:
            return counts
        assert stop is not None, "ranks whose masks change the counts need a stop to sum them"
        return replace(counts, targets=stop.sum(counts.targets)[0])

    def _use(self, now: list[int], following: list[int]) -> None:
        """Make sure that the shards ``now`` are in the cache, and that ``following`` soon will be."""
        if self.cache is not None and (now, following) != self._in_use:
            self._shard.cache_clear()  # an open file takes disk space even after removal
            self._in_use = [], []
            self.cache.want(now, following)
            self._in_use = now, following

    def _rest(self) -> None:
        """Release all shards if they are remote."""
        self._use([], [])
        if self.cache is not None:
            self.cache.rest()

    def _index_rows(self, picks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index rows of (count, 2) picks: (count, columns)."""
        rows = np.empty((len(picks), len(Column)), np.int64)
        for shard in np.unique(picks[:, 0]):
            chosen = picks[:, 0] == shard
            rows[chosen] = self._shard(int(shard)).index[picks[chosen, 1]]
        return rows

    def _open(self, number: int) -> _Shard:
        shard = self.manifest.shards[number]
        path, beside = tar_path(self.folder, shard.name), index_path(self.folder, shard.name)
        try:
            index = read_index(
                beside, shard.index_sha256
            )  # the hash detects a shard of another build with the same size
            opened = _Shard(path, index, os.open(path, os.O_RDONLY))
            size = os.fstat(opened.handle).st_size
        except (OSError, ValueError) as error:
            raise self._unreadable(path, error) from None
        if size != shard.bytes or len(index) != shard.samples:
            raise TrainerError(
                f"shard {path} has {size} bytes and {len(index)} samples, but the manifest says {shard.bytes} "
                f"and {shard.samples}: {self._remedy}"
            )
        return opened

    def _unreadable(self, path: Path, error: Exception) -> TrainerError:
        if lacks := shortage(error):  # the shard itself is fine
            return PassingError(f"shard {path} cannot be read ({error}): {lacks}")
        return TrainerError(f"shard {path} cannot be read ({error}): {self._remedy}")

    def _samples(self, picks: NDArray[np.int64], index: NDArray[np.int64]) -> list[Sample]:
        """Read the samples of (count, 2) picks, whose index rows are (count, columns)."""
        samples = []
        columns = index[:, [Column.OFFSET, Column.BYTES, Column.CRC32]]
        for number, row, offset, size, crc in np.concatenate([picks, columns], axis=1).tolist():
            shard = self._shard(number)
            try:
                payload = os.pread(shard.handle, size, offset)
            except OSError as error:
                raise self._unreadable(shard.path, error) from None
            if zlib.crc32(payload) != crc:
                wrong = "is damaged at sample {}: its checksum differs"
                if len(payload) < size:
                    wrong = "is truncated: it ends before sample {} does"
                raise TrainerError(f"shard {shard.path} {wrong.format(row)}; {self._remedy}")
            try:
                samples.append(decode_sample(payload))
            except DataError as error:
                raise TrainerError(f"shard {shard.path} is damaged at sample {row}: {error}; {self._remedy}") from None
        return samples

    def _remasked(
        self, samples: list[Sample], picks: NDArray[np.int64], numbers: NDArray[np.int64], masks: DynamicMasks
    ) -> list[Sample]:
        """Return the samples with the masks of their epoch: a function of (seed, epoch, sample), not of position."""
        shard, row = picks.T
        first, count = np.cumsum(self._sizes) - self._sizes, self._sizes.sum()
        keys = numbers // count * count + first[shard] + row  # (B,) unique over all epochs
        masked = remask(samples, keys, masks.vocabulary, masks.masking, masks.seed)
        drawn, static = ([len(sample.positions) for sample in those] for those in (masked, samples))
        if masks.keeps_counts and drawn != static:  # the count from the index would be wrong
            raise TrainerError(
                f"{self.folder}: dynamic masking changed the number of masked tokens; "
                "set `masks: static` or rebuild the shards"
            )
        return masked

    def _collate(self, samples: list[Sample], numbers: NDArray[np.int64]) -> MicroBatch:
        if not samples:  # more parts than samples: a sequence without targets keeps the ranks in sync
            return filler(self.manifest.tokenizer.specials.cls, self.manifest.tokenizer.specials.sep)
        return collate(samples, numbers)


def _shards_at(order: Order, position: int, count: int) -> tuple[list[int], list[int]]:
    """Return the shards of the windows that contain ``count`` samples from ``position`` on, and the second window's.

    If a batch crosses a window boundary, the first list includes the second, and the next window is fetched one step
    later.
    """
    now, following = order.window_at(position)
    second, end = order.window_at(following)
    if following < position + count:
        now = now + second
    while end < position + count:  # a batch larger than a window
        more, end = order.window_at(end)
        now = now + more
    return sorted(set(now)), second
