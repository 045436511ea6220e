"""A stock `webdataset` pipeline over Lambert's shards, for any PyTorch or transformers loop. See docs/webdataset.md.

The library splits the shards, iterates the tars, decodes, shuffles and batches. Lambert fetches remote shards, checks
each member against its index, and applies the masks. The trainer itself does not use this: its reader has one exact
order for any number of ranks, and resumes anywhere in O(1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from numbers import Integral
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.draws import bits, permutation
from data_prep.errors import DataError
from data_prep.json_text import shown
from data_prep.manifest import TOKENIZER_FOLDER, Manifest, load_manifest
from data_prep.masking import remask
from data_prep.shards import Sample, samples_of
from data_prep.stock import DECODED, import_webdataset, stock_members
from data_prep.tokenizer import load_proven
from trainer.data.cache import Cache, CacheConfig, open_cache
from trainer.data.collate import collate
from trainer.data.masks import DynamicMasks, dynamic_masks
from trainer.data.remote import is_remote
from trainer.model.batch import IGNORED

SHUFFLED = 10_000  # samples in the shuffle buffer of a worker; each takes about a kilobyte
MASKED_AT_ONCE = 256  # samples
STALL_SECONDS = 30.0  # after which an attempt to fetch a shard fails
_SHARDS, _SAMPLES = 6, 7  # the purposes of these random streams; see trainer/data/order.py


def stock_pipeline(
    place: str | Path,
    batch_size: int | None = None,
    *,
    padded: bool = True,
    mask_seed: int | None = None,
    shuffle_seed: int | None = 1,
    epochs: Sequence[int] = range(1),
    by_node: bool = True,
    cache: CacheConfig | None = None,
) -> Any:
    """A `webdataset.DataPipeline` over a data set. It yields dicts that `transformers`' BertForPreTraining takes.

    Each dict has ``input_ids``, ``token_type_ids``, ``attention_mask`` and ``labels``, int64[S] or int64[B, S], and
    ``next_sentence_label``, int64[] or int64[B]: 0 if B follows A (or they are in order), 1 if not. Labels are -100
    where nothing is predicted. A data set without pairs has no ``next_sentence_label``: it is for BertForMaskedLM.

    Args:
        place: a folder, or an address such as https://host/train-128, whose shards are fetched into the cache.
        batch_size: B; None yields single samples.
        padded: batches are padded to their longest sample, and single samples to the data set's sequence length. If
            false, a batch is one row of T tokens: ``position_ids`` and the others are int64[T], ``cu_seqlens`` is
            int32[B + 1], ``max_seqlen`` an int, as in FlashAttention's varlen interface, and there is no
            ``attention_mask``. A single sample has its own length.
        mask_seed: draws new masks in each epoch: those of a run with this seed. None: the static ones.
        shuffle_seed: shuffles the shards, then samples in a buffer of SHUFFLED per worker. None: the order on disk.
        epochs: the epochs to read, without a gap between them. Their numbers decide the order and the new masks.
        by_node: give each rank (``RANK`` and ``WORLD_SIZE``, or torch.distributed) its own shards. False if the loop
            itself divides the batches among the ranks.
        cache: the folder for remote shards, and its size.

    Raises DataError or TrainerError, in one line: for an impossible argument, a missing library, no data set, or fewer
    shards than workers, and with the shard's name on any damage.
    """
    if problem := _problem(batch_size, epochs, {"mask_seed": mask_seed, "shuffle_seed": shuffle_seed}):
        raise DataError(problem)
    webdataset, cache = import_webdataset(), cache or CacheConfig()
    with _opened(str(place), cache) as (folder, _):
        manifest = load_manifest(folder)
        tokenizer = load_proven(folder / TOKENIZER_FOLDER, manifest.tokenizer.sha256)
    masks = None if mask_seed is None else dynamic_masks(tokenizer, manifest, mask_seed)
    read = _Reading(str(place), cache, manifest, masks, shuffle_seed, tuple(epochs), by_node)
    pad = manifest.tokenizer.specials.pad if padded else None
    if batch_size is None:
        single = partial(_single, pad=pad, length=manifest.settings.sequence_length)
        return webdataset.DataPipeline(read, webdataset.map(single))
    return webdataset.DataPipeline(read, webdataset.batched(batch_size, collation_fn=partial(_batch, pad=pad)))


def _problem(batch_size: Any, epochs: Any, seeds: dict[str, Any]) -> str:
    """One line on the first argument that is wrong and how to change it; empty if all are right."""
    if batch_size is not None and not _is_whole(batch_size, 1):
        return f"batch_size is {shown(batch_size)}: must be 1 or more, or None for single samples"
    if not (isinstance(epochs, Sequence) and epochs and all(_is_whole(epoch, 0) for epoch in epochs)):
        return f"epochs is {shown(epochs)}: must be the numbers of one or more epochs, such as range(3)"
    for name, seed in seeds.items():
        if seed is not None and not _is_whole(seed, 0):
            return f"{name} is {shown(seed)}: must be between 0 and 2^63 - 1, or None"
    return ""


def _is_whole(value: Any, least: int) -> bool:
    """Whether a value is an integer, Python's or numpy's, of at least ``least`` and below 2^63."""
    return isinstance(value, Integral) and least <= int(value) < 2**63


@dataclass(frozen=True)
class _Reading:
    """The first stage of the pipeline: yields the samples of a worker, epoch by epoch. It is copied to each worker."""

    place: str
    cache: CacheConfig
    manifest: Manifest
    masks: DynamicMasks | None
    shuffle_seed: int | None
    epochs: tuple[int, ...]
    by_node: bool

    def __call__(self) -> Iterator[Sample]:
        with _opened(self.place, self.cache) as (folder, cache):
            for epoch in self.epochs:
                yield from self._pipeline(epoch, folder, cache)

    def _pipeline(self, epoch: int, folder: Path, cache: Cache | None) -> Any:
        """The library's pipeline over one epoch."""
        webdataset = import_webdataset()
        shuffle = None
        if self.shuffle_seed is not None:
            draw = Random(int(bits(self.shuffle_seed, _SAMPLES, epoch)[0]))
            shuffle = webdataset.shuffle(SHUFFLED, initial=SHUFFLED, rng=draw)
        return webdataset.DataPipeline(
            partial(self._shards, epoch),  # numbers of all shards, the same on every node
            webdataset.split_by_node if self.by_node else None,
            webdataset.split_by_worker,
            partial(self._members, folder, cache),  # dict(__key__=..., npy=bytes)
            shuffle,
            webdataset.decode(only=DECODED),  # dict(__key__=..., npy=array)
            partial(self._samples, epoch),
        )

    def _shards(self, epoch: int) -> list[int]:
        count = len(self.manifest.shards)
        order = list(range(count))
        if self.shuffle_seed is not None:
            order = permutation(count, self.shuffle_seed, _SHARDS, epoch).tolist()
        return order

    def _members(self, folder: Path, cache: Cache | None, numbers: Iterator[int]) -> Iterator[dict[str, Any]]:
        """The members of these shards. Remote ones are fetched, each while the one before it is read."""
        mine, shards = list(numbers), self.manifest.shards
        if not mine:
            raise DataError(
                f"{self.place} has {len(shards)} shards, and this worker gets none: start fewer workers or nodes, or "
                "build it with fewer --samples-per-shard"
            )
        first = [0, *accumulate(shard.samples for shard in shards)]  # number of each shard's first sample
        for turn, number in enumerate(mine):
            if cache is not None:
                cache.want(mine[turn : turn + 1], mine[turn + 1 : turn + 2])
            yield from stock_members(folder, shards[number], first[number])

    def _samples(self, epoch: int, decoded: Iterator[dict[str, Any]]) -> Iterator[Sample]:
        """The samples, with the masks of their epoch if these are dynamic."""
        while block := list(islice(decoded, MASKED_AT_ONCE)):
            samples = samples_of([member["npy"] for member in block])
            if self.masks is not None:
                keys = np.array([int(member["__key__"]) for member in block]) + epoch * self.manifest.counts.samples
                samples = remask(samples, keys, self.masks.vocabulary, self.masks.masking, self.masks.seed)
            yield from samples


@contextmanager
def _opened(place: str, config: CacheConfig) -> Iterator[tuple[Path, Cache | None]]:
    """The local folder of a data set, and the cache that fills it if the data set is remote."""
    if not is_remote(place):
        yield Path(place), None
        return
    cache = open_cache(place, config, STALL_SECONDS, 0)
    try:
        yield cache.folder, cache
    finally:
        cache.halt()
        cache.rest()


def _single(sample: Sample, pad: int | None, length: int) -> dict[str, Tensor]:
    """One sample, padded to ``length`` unless ``pad`` is None."""
    fields = _padded([sample], pad or 0, len(sample.ids) if pad is None else length)
    return {name: values[0] for name, values in fields.items()}


def _batch(samples: list[Sample], pad: int | None) -> dict[str, Any]:
    """A batch, padded to its longest sample with ``pad``, or unpadded if that is None."""
    return _unpadded(samples) if pad is None else _padded(samples, pad, max(len(sample.ids) for sample in samples))


def _unpadded(samples: list[Sample]) -> dict[str, Any]:
    rows = collate(samples, np.zeros(len(samples), np.int64))
    fields = {
        "input_ids": rows.tokens,
        "token_type_ids": rows.segments,
        "position_ids": rows.positions,
        "labels": torch.full_like(rows.tokens, IGNORED).scatter(0, rows.masked, rows.labels),
        "cu_seqlens": rows.cu_seqlens,
        "max_seqlen": rows.max_seqlen,
    }
    if bool((rows.is_next != IGNORED).all()):  # a data set has only pairs, or none
        fields["next_sentence_label"] = 1 - rows.is_next
    return fields


def _padded(samples: list[Sample], pad: int, length: int) -> dict[str, Tensor]:
    flat = _unpadded(samples)
    lengths: Tensor = flat["cu_seqlens"].diff()
    there = torch.arange(length) < lengths[:, None]  # (B, S)
    fields = {"attention_mask": there.long()}
    for name, empty in (("input_ids", pad), ("token_type_ids", 0), ("labels", IGNORED)):
        fields[name] = torch.full(there.shape, empty).masked_scatter(there, flat[name])
    return fields | {name: flat[name] for name in flat.keys() & {"next_sentence_label"}}
