"""Reads samples straight from the shards' files with ``tarfile`` and ``numpy``, and from a loader's batches."""

from __future__ import annotations

import io
import tarfile
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.manifest import load_manifest
from data_prep.masking import Masking, make_vocabulary
from data_prep.shards import NO_PAIR
from data_prep.tokenizer import load_tokenizer
from trainer.data.loader import Loader, StepBatch
from trainer.data.masks import DynamicMasks
from trainer.data.order import Order
from trainer.model.batch import IGNORED, MicroBatch

CUTS = [(1, 1), (1, 4), (2, 3), (3, 2), (7, 1)]  # ranks, micro-batches a rank


@dataclass(frozen=True)
class Raw:
    """A sample as stored in its .npy, read only with ``tarfile`` and ``numpy``."""

    ids: tuple[int, ...]
    split: int
    is_next: int
    masks: tuple[tuple[int, int], ...]  # (position, what stands there)


def raw_shards(folder: Path) -> list[list[Raw]]:
    """All samples, by shard."""
    shards = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            files = [tar.extractfile(member) for member in tar.getmembers()]
            shards.append([_raw(np.load(io.BytesIO(file.read())).tolist()) for file in files if file is not None])
    return shards


def _raw(numbers: list[int]) -> Raw:
    n, split, is_next, m, *rest = numbers
    assert len(rest) == n + 2 * m + -(-n // 16)
    return Raw(tuple(rest[:n]), split, is_next, tuple(zip(rest[n : n + m], rest[n + m : n + 2 * m], strict=True)))


def undone(batch: MicroBatch) -> list[tuple[int, Raw]]:
    """(sample number, sample) of each sequence in a micro-batch, with its masks undone."""
    out = []
    bounds, tokens, masked = batch.cu_seqlens.tolist(), batch.tokens.tolist(), batch.masked.tolist()
    old = dict(zip(masked, batch.labels.tolist(), strict=True))
    assert masked == sorted(old)
    for b, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        assert batch.positions[start:end].tolist() == list(range(end - start))
        segments = batch.segments[start:end].tolist()
        assert segments == sorted(segments) and end - start <= batch.max_seqlen
        places = masked[bisect_left(masked, start) : bisect_left(masked, end)]
        masks = tuple((place - start, tokens[place]) for place in places)
        split, is_next = segments.count(0), int(batch.is_next[b])
        ids = tuple(old.get(place, tokens[place]) for place in range(start, end))
        raw = Raw(ids, split, NO_PAIR if is_next == IGNORED else is_next, masks)
        out.append((int(batch.samples[b]), raw))
    return out


def order_of(folder: Path, seed: int = 5) -> Order:
    return Order(tuple(shard.samples for shard in load_manifest(folder).shards), seed, window=2)


def read_ranks(
    folder: Path, cut: tuple[int, int], position: int, global_batch: int, masks: DynamicMasks | None = None
) -> list[StepBatch]:
    """One step of each rank, cut into (ranks, micro-batches a rank)."""
    manifest, (ranks, micro_batches) = load_manifest(folder), cut
    loaders = [Loader(folder, manifest, rank, ranks, masks) for rank in range(ranks)]
    return [loader.read(order_of(folder), position, global_batch, micro_batches) for loader in loaders]


def read_epochs(folder: Path, cut: tuple[int, int], masks: DynamicMasks | None = None) -> list[tuple[int, Raw]]:
    """(number, sample) over a little more than two epochs; epochs end inside batches."""
    samples, read = order_of(folder).samples, list[tuple[int, Raw]]()
    assert samples % 48
    while len(read) < 2 * samples:
        read += samples_of(read_ranks(folder, cut, len(read), 48, masks))
    return read


def samples_of(steps: list[StepBatch]) -> list[tuple[int, Raw]]:
    """(number, sample) of one step over all ranks, sorted by number, without fillers."""
    batches = [batch for step in steps for batch in step.micro_batches if batch.masked.numel()]
    return sorted((pair for batch in batches for pair in undone(batch)), key=lambda pair: pair[0])


def masks_of(folder: Path, seed: int = 3) -> DynamicMasks:
    manifest, tokenizer = load_manifest(folder), load_tokenizer(folder / "tokenizer")
    settings, mask = manifest.settings, manifest.tokenizer.specials.mask
    masking = Masking(settings.masking, settings.masked_share, settings.max_predictions)
    return DynamicMasks(make_vocabulary(manifest.tokenizer.vocab_size, tokenizer.never, mask), masking, seed)
