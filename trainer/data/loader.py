"""Yield unpadded micro-batches from shards. A batch is a function of its position; the loader keeps no state.

Every rank works out the whole global batch from the indexes (lengths and masked counts), so all ranks agree on the
counts, the partition and the number of steps without communicating. Each rank reads only its own samples, by offset,
and verifies their checksums. Ranks communicate before a step in only two cases: to count the targets of dynamic masks
whose number depends on the draw, and to stop while waiting for remote shards.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from data_prep.manifest import Manifest
from data_prep.shards import index_path, tar_path
from trainer.data.cache import Cache
from trainer.data.collate import micro_batch
from trainer.data.masks import DynamicMasks
from trainer.data.order import Order
from trainer.data.reader import Reader, Step
from trainer.data.reading_process import ReadingProcess
from trainer.data.spread import Spread
from trainer.model.batch import GlobalCounts, MicroBatch
from trainer.ranks.stop import Stop

CPU = torch.device("cpu")
R = TypeVar("R")


@dataclass(frozen=True)
class StepBatch:
    """The data of one step on one rank."""

    position: int  # of this step in the phase's order; the next one starts at position + left_out + samples
    samples: int  # of the global batch
    micro_batches: tuple[MicroBatch, ...]  # for this rank
    counts: GlobalCounts  # of the global batch
    wait_seconds: float = 0.0  # how long training waited for it
    left_out: int = 0  # samples of the order that are skipped, before the batch or inside it

    @property
    def following(self) -> int:
        """The position of the next step."""
        return self.position + self.left_out + self.samples


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
        self.cache, self.device = cache, device
        remedy = "restore it or build the shards again"
        if cache is not None:
            remedy = f"remove it, and it will be fetched again from {cache.remote.address}"
        self._reader = Reader(folder, manifest, rank, ranks, masks, spread, remedy)
        self._in_use: tuple[list[int], list[int]] = [], []  # shards requested from the cache: needed now, and next

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
        self._use(*_shards_at(order, order.numbers(position, global_batch)), self._reader.forget)
        step = self._reader.step(order, position, global_batch, micro_batches)
        return self._batch(step, order, position, global_batch)

    def steps(
        self, order: Order, position: int, global_batch: int, micro_batches: int, stop: Stop | None = None
    ) -> Generator[StepBatch, None, None]:
        """Yield batches endlessly from ``position`` on; the next one is read while this one is trained on.

        It is read by a process of its own if the batches go to a GPU, else by a thread: see
        trainer/data/reading_process.py. With ``stop``, all ranks take each batch together, and the batches end if a
        stop is requested while any rank waits for remote shards.
        """
        # the thread ends first, for it talks to the process
        with self._process(order, global_batch, micro_batches) as process, self._thread() as thread:
            forget = self._reader.forget if process is None else process.forget

            def read(position: int) -> tuple[Step | None, float]:
                self._use(*_shards_at(order, order.numbers(position, global_batch)), forget)
                if process is not None:
                    process.ask(position)
                    return None, 0.0
                return self._reader.step(order, position, global_batch, micro_batches), time.perf_counter()

            # even a thread that only asks competes for the GIL: it is needed only if shards may have to come first
            submit = _at_once if process is not None and self.cache is None else thread.submit
            pending = submit(read, position)
            while True:
                asked = time.perf_counter()
                if not self._arrives(pending, stop):
                    return
                step, arrived = pending.result()
                if process is not None:
                    step, arrived = process.take(), time.perf_counter()
                assert step is not None
                batch = self._batch(step, order, position, global_batch)
                position = batch.following
                pending = submit(read, position)
                counts = self._complete(batch.counts, stop)
                yield replace(batch, counts=counts, wait_seconds=max(0.0, arrived - asked))

    def sweep(self, size: int, stop: Stop | None = None) -> Iterator[MicroBatch]:
        """Yield this rank's share of all samples once, with static masks, in shard order, ``size`` at a time.

        ``stop`` works as in :meth:`steps`; a stopped sweep is incomplete.
        """
        sizes = self._reader.sizes.tolist()
        picks = np.concatenate([np.stack([np.full(n, s), np.arange(n)], axis=1) for s, n in enumerate(sizes)])
        numbers = np.arange(len(picks))[self.rank :: self.ranks]
        rounds = -(
            -len(picks) // (size * self.ranks)
        )  # the same on all ranks; this rank may have nothing in the last round
        parts = [numbers[start : start + size] for start in range(0, rounds * size, size)]
        shards = [np.unique(picks[part, 0]).tolist() for part in parts] + [[]]

        def read(part: NDArray[np.int64], now: list[int], following: list[int]) -> MicroBatch:
            self._use(now, following, self._reader.forget)
            return micro_batch(self._reader.samples(picks[part], part))

        with self._thread() as reader:
            for part, now, following in zip(parts, shards, shards[1:], strict=False):
                pending = reader.submit(read, part, now, following)
                if not self._arrives(pending, stop):
                    return
                if len(part):
                    yield pending.result()

    @contextmanager
    def _process(self, order: Order, global_batch: int, micro_batches: int) -> Iterator[ReadingProcess | None]:
        """Start a process that reads for a GPU; None on CPUs, where the cores are needed for training."""
        if self.device.type != "cuda":
            yield None
            return
        with closing(ReadingProcess(self._reader, order, global_batch, micro_batches)) as process:
            yield process

    def _batch(self, step: Step, order: Order, position: int, global_batch: int) -> StepBatch:
        pairs = 0 if self.manifest.settings.pairs == "single" else global_batch
        counts = GlobalCounts(targets=step.targets, pairs=pairs, tokens=step.tokens, squares=step.squares)
        batches = tuple(micro_batch(flat).pin(self.device) for flat in step.micro_batches)
        left_out = int(order.numbers(position, global_batch)[-1]) + 1 - position - global_batch
        return StepBatch(position, global_batch, batches, counts, left_out=left_out)

    @contextmanager
    def _thread(self) -> Iterator[ThreadPoolExecutor]:
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

    def _use(self, now: list[int], following: list[int], forget: Callable[[], None]) -> None:
        """Make sure that the shards ``now`` are in the cache, and that ``following`` soon will be.

        ``forget`` closes all shards first if others are needed now.
        """
        if self.cache is not None and (now, following) != self._in_use:
            forget()
            self._in_use = [], []
            self.cache.want(now, following)
            self._in_use = now, following

    def _rest(self) -> None:
        """Release all shards if they are remote."""
        self._use([], [], self._reader.forget)
        if self.cache is not None:
            self.cache.rest()


def _at_once(call: Callable[[int], R], position: int) -> Future[R]:
    """Make the call now, as a thread's ``submit`` would later."""
    future = Future[R]()
    future.set_result(call(position))
    return future


def _shards_at(order: Order, numbers: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Return the shards of the windows that contain the samples at these positions, and the second window's.

    If a batch crosses a window boundary, the first list includes the second, and the next window is fetched one step
    later.
    """
    now, end = order.window_at(int(numbers[0]))
    second, _ = order.window_at(int(order.numbers(end, 1)[0]))
    while len(later := numbers[numbers >= end]):  # a batch may be larger than a window
        more, end = order.window_at(int(later[0]))
        now = now + more
    return sorted(set(now)), second
