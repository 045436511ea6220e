"""Shards → unpadded micro-batches. A batch is a function of its position; the loader keeps no state.

Every rank works out the whole global batch from the indexes (lengths and masked counts), so all ranks
agree on the counts, the cut and the number of steps without a word, and reads only its own samples:
each by its offset, each proved by its checksum. Ranks meet before a step in two cases only: to count the
targets of new masks whose number depends on the draw, and to stop while remote shards do not come.
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

from data_prep.errors import DataError
from data_prep.manifest import Manifest
from data_prep.masking import Masking, Vocabulary, remask
from data_prep.shards import NO_PAIR, Column, Sample, decode_sample, index_path, read_index, tar_path
from trainer.data.cache import Cache
from trainer.data.order import Order, deal
from trainer.errors import PassingError, TrainerError, shortage
from trainer.model.batch import IGNORED, GlobalCounts, MicroBatch
from trainer.ranks.stop import Stop

CPU = torch.device("cpu")


@dataclass(frozen=True)
class StepBatch:
    """What one step of one rank trains on."""

    position: int  # of its first sample in the phase's order; the next step starts at position + samples
    samples: int  # of the global batch
    micro_batches: tuple[MicroBatch, ...]  # this rank's
    counts: GlobalCounts  # of the global batch
    wait_seconds: float = 0.0  # that training waited for it


@dataclass(frozen=True)
class _Shard:
    """A shard that is open. Read by system calls: what is mapped kills the process if the file shrinks."""

    path: Path
    index: NDArray[np.int64]  # (samples, columns)
    handle: int  # closed when nothing refers to this any longer

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.handle)


@dataclass(frozen=True)
class DynamicMasks:
    """What new masks are drawn by."""

    vocabulary: Vocabulary
    masking: Masking
    seed: int

    @property
    def keeps_counts(self) -> bool:
        """Whether new masks have as many tokens as the static ones, whose number the index knows."""
        return self.masking.unit == "token"


class Loader:
    """Reads the shards of one folder for rank ``rank`` of ``ranks``.

    ``masks``: training reads each sample under new masks in each epoch; None: under the static ones.
    ``cache``: what fills the folder, if its shards are remote. ``device``: what training's batches will go to.
    Raises TrainerError with the shard's name on any damage.
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
    ) -> None:
        self.folder, self.manifest, self.rank, self.ranks, self.masks = folder, manifest, rank, ranks, masks
        self.cache, self.device = cache, device
        self._sizes = np.array([shard.samples for shard in manifest.shards])
        self._remedy = "restore it or build the shards again"
        if cache is not None:
            self._remedy = f"remove it, and it is fetched again from {cache.remote.address}"
        self._in_use: tuple[list[int], list[int]] = [], []  # of the cache: shards of now, and of a little later
        self._shard = lru_cache(maxsize=256)(self._open)

    def problems(self) -> list[str]:
        """All shards that are absent, unreadable or of another size, told without reading one."""
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
        return [f"{self.folder}: missing, unreadable or cut: {', '.join(wrong)}; restore them or build again"]

    def read(self, order: Order, position: int, global_batch: int, micro_batches: int) -> StepBatch:
        """The step's batch at ``position``, cut over all ranks into ``micro_batches`` each.

        ``counts.targets`` are those of this rank alone where new masks do not keep them: ``steps`` completes them.
        """
        self._use(*_shards_at(order, position, global_batch))
        picks = order.take(position, global_batch)
        index = self._index_rows(picks)
        lengths = index[:, Column.TOKENS]
        parts = deal(lengths, self.ranks * micro_batches)
        mine = parts[self.rank :: self.ranks]  # the k-th of all ranks are neighbours, so nearly equal in tokens
        own = np.concatenate(mine)
        samples, targets = self._samples(picks[own], index[own]), int(index[:, Column.MASKED].sum())
        if self.masks is not None:  # all of a step at once: half the time of one micro-batch after the other
            samples = self._remasked(samples, picks[own], position + own, self.masks)
            if not self.masks.keeps_counts:
                targets = sum(len(sample.positions) for sample in samples)
        rest = iter(samples)
        collated = (self._collate(list(islice(rest, len(part))), position + part) for part in mine)
        batches = tuple(batch.pin(self.device) for batch in collated)
        counts = GlobalCounts(
            targets=targets,
            pairs=0 if self.manifest.settings.pairs == "single" else global_batch,
            tokens=int(lengths.sum()),
            squares=int((lengths**2).sum()),
        )
        return StepBatch(position, global_batch, batches, counts)

    def steps(
        self, order: Order, position: int, global_batch: int, micro_batches: int, stop: Stop | None = None
    ) -> Generator[StepBatch, None, None]:
        """The endless batches from ``position`` on; the next one is read while this one is trained on.

        With ``stop``, all ranks take each of them together. They end when a stop is asked for while any rank waits
        for remote shards.
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
        """This rank's share of every sample once, static masks, in the shards' own order, ``size`` at a time.

        ``stop`` as in :meth:`steps`: a sweep that ends by it is not whole.
        """
        sizes = self._sizes.tolist()
        picks = np.concatenate([np.stack([np.full(n, s), np.arange(n)], axis=1) for s, n in enumerate(sizes)])
        numbers = np.arange(len(picks))[self.rank :: self.ranks]
        rounds = -(-len(picks) // (size * self.ranks))  # of all ranks; the last one may have nothing for this one
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
        """A thread that reads. In the end nothing is waited for, or held."""
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as reader:
            try:
                yield reader
            finally:
                if self.cache is not None:
                    self.cache.halt()
                    reader.submit(self._rest)

    def _arrives(self, pending: Future[Any], stop: Stop | None) -> bool:
        """Whether what is read will be there; False if all ranks are to stop instead of waiting for it."""
        return self.cache is None or stop is None or stop.wait(pending)

    def _complete(self, counts: GlobalCounts, stop: Stop | None) -> GlobalCounts:
        """The counts of all ranks, if :meth:`read` knew only those of this one."""
        if self.masks is None or self.masks.keeps_counts or self.ranks == 1:
            return counts
        assert stop is not None, "ranks whose masks do not keep the counts must meet"
        return replace(counts, targets=stop.sum(counts.targets)[0])

    def _use(self, now: list[int], following: list[int]) -> None:
        """See to it that the shards of ``now`` are there, and that those of ``following`` soon will be."""
        if self.cache is not None and (now, following) != self._in_use:
            self._shard.cache_clear()  # what is open takes room, even when it is removed
            self._in_use = [], []
            self.cache.want(now, following)
            self._in_use = now, following

    def _rest(self) -> None:
        """Let go of all shards, if they are remote."""
        self._use([], [])
        if self.cache is not None:
            self.cache.rest()

    def _index_rows(self, picks: NDArray[np.int64]) -> NDArray[np.int64]:
        """The index rows of (count, 2) picks: (count, columns)."""
        rows = np.empty((len(picks), len(Column)), np.int64)
        for shard in np.unique(picks[:, 0]):
            chosen = picks[:, 0] == shard
            rows[chosen] = self._shard(int(shard)).index[picks[chosen, 1]]
        return rows

    def _open(self, number: int) -> _Shard:
        shard = self.manifest.shards[number]
        path, beside = tar_path(self.folder, shard.name), index_path(self.folder, shard.name)
        try:
            index = read_index(beside, shard.index_sha256)  # a shard of another build may well have this size
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
        if lacks := shortage(error):  # nothing is wrong with the shard
            return PassingError(f"shard {path} cannot be read ({error}): {lacks}")
        return TrainerError(f"shard {path} cannot be read ({error}): {self._remedy}")

    def _samples(self, picks: NDArray[np.int64], index: NDArray[np.int64]) -> list[Sample]:
        """The samples of (count, 2) picks, whose index rows are (count, columns)."""
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
                    wrong = "was cut: it ends before sample {} does"
                raise TrainerError(f"shard {shard.path} {wrong.format(row)}; {self._remedy}")
            try:
                samples.append(decode_sample(payload))
            except DataError as error:
                raise TrainerError(f"shard {shard.path} is damaged at sample {row}: {error}; {self._remedy}") from None
        return samples

    def _remasked(
        self, samples: list[Sample], picks: NDArray[np.int64], numbers: NDArray[np.int64], masks: DynamicMasks
    ) -> list[Sample]:
        """The samples under the masks of their epoch: a function of (seed, epoch, sample), not of its position."""
        shard, row = picks.T
        first, count = np.cumsum(self._sizes) - self._sizes, self._sizes.sum()
        keys = numbers // count * count + first[shard] + row  # (B,) no two of them are equal in all epochs
        masked = remask(samples, keys, masks.vocabulary, masks.masking, masks.seed)
        drawn, static = ([len(sample.positions) for sample in those] for those in (masked, samples))
        if masks.keeps_counts and drawn != static:  # the global batch's count, taken from the index, would be wrong
            raise TrainerError(
                f"{self.folder}: new masks have other counts than its own: use masks: static, or build the shards again"
            )
        return masked

    def _collate(self, samples: list[Sample], numbers: NDArray[np.int64]) -> MicroBatch:
        if not samples:  # more parts than samples: a sequence without targets keeps the ranks in step
            return filler(self.manifest.tokenizer.specials.cls, self.manifest.tokenizer.specials.sep)
        return collate(samples, numbers)


def _shards_at(order: Order, position: int, count: int) -> tuple[list[int], list[int]]:
    """The shards of the windows that ``count`` samples from ``position`` on lie in, and those of the second window.

    They are the same when a batch goes over a window's border: what follows is fetched a step later.
    """
    now, following = order.window_at(position)
    second, end = order.window_at(following)
    if following < position + count:
        now = now + second
    while end < position + count:  # a batch larger than a window
        more, end = order.window_at(end)
        now = now + more
    return sorted(set(now)), second


def collate(samples: list[Sample], numbers: NDArray[np.int64]) -> MicroBatch:
    """One unpadded micro-batch of samples under their masks; ``numbers`` key their dropout."""
    lengths = np.array([len(sample.ids) for sample in samples])
    starts = np.concatenate([[0], np.cumsum(lengths)])  # (B + 1,)
    tokens = np.concatenate([sample.ids for sample in samples]).astype(np.int64)  # (T,)
    masked = np.concatenate([s.positions + start for s, start in zip(samples, starts[:-1], strict=True)])
    labels = tokens[masked]  # (P,)
    tokens[masked] = np.concatenate([sample.replacements for sample in samples])
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    splits = np.repeat([sample.split for sample in samples], lengths)
    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        segments=torch.from_numpy((positions >= splits).astype(np.int64)),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        max_seqlen=int(lengths.max()),
        samples=torch.from_numpy(np.ascontiguousarray(numbers, np.int64)),
        masked=torch.from_numpy(masked.astype(np.int64)),
        labels=torch.from_numpy(labels),
        is_next=torch.tensor([IGNORED if s.is_next == NO_PAIR else s.is_next for s in samples], dtype=torch.int64),
    )


def filler(cls_id: int, sep_id: int) -> MicroBatch:
    """A micro-batch of one sequence that has no target: it adds nothing to a loss or a gradient."""
    empty = torch.empty(0, dtype=torch.int64)
    return MicroBatch(
        tokens=torch.tensor([cls_id, sep_id, sep_id]),
        segments=torch.tensor([0, 0, 1]),
        positions=torch.arange(3),
        cu_seqlens=torch.tensor([0, 3], dtype=torch.int32),
        max_seqlen=3,
        samples=torch.zeros(1, dtype=torch.int64),
        masked=empty,
        labels=empty,
        is_next=torch.tensor([IGNORED]),
    )
