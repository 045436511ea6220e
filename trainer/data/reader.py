"""Read a rank's samples from the shards of a local folder, by offset, as arrays. No torch."""

from __future__ import annotations

import os
import weakref
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.manifest import Manifest
from data_prep.masking import remask
from data_prep.shards import Column, NoSample, Samples, decode_samples, index_path, read_index, tar_path
from trainer.data.flat import Flat, flat_filler, flatten
from trainer.data.masks import DynamicMasks
from trainer.data.order import Order, deal
from trainer.data.spread import Spread, spread
from trainer.errors import PassingError, TrainerError, shortage


@dataclass(frozen=True)
class Step:
    """One rank's micro-batches of a step, and the counts of the global batch."""

    micro_batches: tuple[Flat, ...]
    targets: int  # masked tokens; only this rank's if new masks change their number
    tokens: int
    squares: int  # sum of squared sequence lengths


@dataclass(frozen=True)
class _Shard:
    """An open shard. It is read by system calls: a memory map would kill the process if the file shrinks."""

    path: Path
    index: NDArray[np.int64]  # (samples, columns)
    handle: int  # closed when nothing refers to this object any longer

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.handle)


class Reader:
    """Reads the shards of one folder for rank ``rank`` of ``ranks``. Can be pickled.

    ``masks``: draw new masks for each sample in each epoch; None uses the static ones. ``spread``: start each sequence
    of a step at a random position. ``remedy``: what to do about a damaged shard. Raises TrainerError with the shard's
    name on any damage.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        rank: int,
        ranks: int,
        masks: DynamicMasks | None,
        spread: Spread | None,
        remedy: str,
    ) -> None:
        self.folder, self.manifest, self.rank, self.ranks = folder, manifest, rank, ranks
        self.masks, self.spread, self.remedy = masks, spread, remedy
        self.sizes = np.array([shard.samples for shard in manifest.shards])
        self._shard = lru_cache(maxsize=256)(self.open)

    def __reduce__(self) -> tuple[type[Reader], tuple[Any, ...]]:
        settings = (self.folder, self.manifest, self.rank, self.ranks, self.masks, self.spread, self.remedy)
        return Reader, settings

    def step(self, order: Order, position: int, global_batch: int, micro_batches: int) -> Step:
        """Read this rank's part of the batch at ``position``, which is divided into ``micro_batches`` per rank."""
        numbers = order.numbers(position, global_batch)
        picks = order.rows(numbers)
        index = self._index_rows(picks)
        lengths = index[:, Column.TOKENS]
        parts = deal(lengths, self.ranks * micro_batches)
        mine = parts[
            self.rank :: self.ranks
        ]  # all ranks' k-th parts are neighbours, so they have nearly the same number of tokens
        own = np.concatenate(mine)
        samples, targets = self._samples(picks[own], index[own]), int(index[:, Column.MASKED].sum())
        if self.masks is not None:
            samples = self._remasked(samples, picks[own], numbers[own], self.masks)
            if not self.masks.keeps_counts:
                targets = int(samples.counts.sum())
        ends = np.cumsum([len(part) for part in mine]).tolist()
        flats = [
            self._flatten(samples[end - len(part) : end], numbers[part]) for end, part in zip(ends, mine, strict=True)
        ]
        if self.spread is not None:
            flats = [spread(flat, self.spread) for flat in flats]
        return Step(tuple(flats), targets, int(lengths.sum()), int((lengths**2).sum()))

    def samples(self, picks: NDArray[np.int64], numbers: NDArray[np.int64]) -> Flat:
        """Read the samples of (count, 2) ``picks`` (shard, row), with static masks, as one micro-batch."""
        return self._flatten(self._samples(picks, self._index_rows(picks)), numbers)

    def forget(self) -> None:
        """Close all shards: an open file takes disk space even after removal."""
        self._shard.cache_clear()

    def open(self, number: int) -> _Shard:
        """Open a shard, and verify its size and its index."""
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
                f"and {shard.samples}: {self.remedy}"
            )
        return opened

    def _index_rows(self, picks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index rows of (count, 2) picks: (count, columns)."""
        rows = np.empty((len(picks), len(Column)), np.int64)
        for shard in np.unique(picks[:, 0]):
            chosen = picks[:, 0] == shard
            rows[chosen] = self._shard(int(shard)).index[picks[chosen, 1]]
        return rows

    def _unreadable(self, path: Path, error: Exception) -> TrainerError:
        if lacks := shortage(error):  # the shard itself is fine
            return PassingError(f"shard {path} cannot be read ({error}): {lacks}")
        return TrainerError(f"shard {path} cannot be read ({error}): {self.remedy}")

    def _samples(self, picks: NDArray[np.int64], index: NDArray[np.int64]) -> Samples:
        """Read the samples of (count, 2) picks, whose index rows are (count, columns)."""
        members = []
        columns = index[:, [Column.OFFSET, Column.BYTES, Column.CRC32]]
        for number, row, offset, size, crc in np.concatenate([picks, columns], axis=1).tolist():
            shard = self._shard(number)
            try:
                member = os.pread(shard.handle, size, offset)
            except OSError as error:
                raise self._unreadable(shard.path, error) from None
            if zlib.crc32(member) != crc:
                wrong = "is damaged at sample {}: its checksum differs"
                if len(member) < size:
                    wrong = "is truncated: it ends before sample {} does"
                raise TrainerError(f"shard {shard.path} {wrong.format(row)}; {self.remedy}")
            members.append(member)
        try:
            return decode_samples(members)
        except NoSample as error:
            number, row = picks[error.place].tolist()
            path = self._shard(number).path
            raise TrainerError(f"shard {path} is damaged at sample {row}: {error}; {self.remedy}") from None

    def _remasked(
        self, samples: Samples, picks: NDArray[np.int64], numbers: NDArray[np.int64], masks: DynamicMasks
    ) -> Samples:
        """Return the samples with the masks of their epoch: a function of (seed, epoch, sample), not of position."""
        shard, row = picks.T
        first, count = np.cumsum(self.sizes) - self.sizes, self.sizes.sum()
        keys = numbers // count * count + first[shard] + row  # (B,) unique over all epochs
        masked = remask(samples, keys, masks.vocabulary, masks.masking, masks.seed)
        if masks.keeps_counts and not np.array_equal(masked.counts, samples.counts):  # the index has the old counts
            raise TrainerError(
                f"{self.folder}: dynamic masking changed the number of masked tokens; "
                "set `masks: static` or rebuild the shards"
            )
        return masked

    def _flatten(self, samples: Samples, numbers: NDArray[np.int64]) -> Flat:
        if not len(samples):  # more parts than samples: a sequence without targets keeps the ranks in sync
            return flat_filler(self.manifest.tokenizer.specials.cls, self.manifest.tokenizer.specials.sep)
        return flatten(samples, numbers)
