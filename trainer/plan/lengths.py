"""How long the sequences of a phase are and how many tokens they predict, from its data set's manifest alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.draws import bits
from data_prep.manifest import Manifest, load_manifest, read_histogram
from trainer.data.cache import CacheConfig, open_cache
from trainer.data.order import deal
from trainer.data.remote import is_remote
from trainer.model.batch import GlobalCounts
from trainer.plan.memory import Load

# to find the fullest micro-batch: how many batches are drawn, their sequences, and the most parts of each
BATCHES, DRAWN, PARTS = 4, 8192, 256


@dataclass(frozen=True)
class Lengths:
    """The samples of a data set. There is no padding, so only their own tokens count."""

    counts: NDArray[np.int64] = field(repr=False)  # (longest + 1,) number of samples of each length
    masked: int  # masked tokens of all samples
    pairs: bool  # whether they have sentence pairs

    @cached_property
    def samples(self) -> int:
        """The number of samples."""
        return int(self.counts.sum())

    @cached_property
    def tokens(self) -> int:
        """The tokens of all samples."""
        return int((self.counts * np.arange(len(self.counts))).sum())

    @cached_property
    def squares(self) -> int:
        """The sum of squared lengths, which attention's cost follows."""
        return int((self.counts * np.arange(len(self.counts)) ** 2).sum())

    @property
    def mean(self) -> float:
        """Mean tokens per sample."""
        return self.tokens / self.samples

    def batch(self, samples: int) -> GlobalCounts:
        """The mean counts of a batch of ``samples``."""
        by = samples / self.samples
        targets, tokens, squares = (round(by * total) for total in (self.masked, self.tokens, self.squares))
        return GlobalCounts(targets, samples if self.pairs else 0, tokens, squares)

    def fullest(self, sequences: int) -> Load:
        """The fullest of some micro-batches of ``sequences``, dealt from drawn batches as the loader deals them.

        Deterministic. Over a whole run, a few micro-batches may have slightly more tokens.
        """
        ends, most = self.counts.cumsum(), 0
        parts = max(1, min(DRAWN // sequences, PARTS))
        for number in range(BATCHES):
            draws = bits(0, number, np.arange(parts * sequences)) % np.uint64(self.samples)
            lengths = np.searchsorted(ends, draws, side="right")
            most = max(most, *(int(lengths[part].sum()) for part in deal(lengths, parts)))
        return Load(most, round(most * self.masked / self.tokens), sequences)


def read_lengths(place: str, cache: CacheConfig, stall: float) -> tuple[Lengths, Manifest]:
    """Read the manifest at ``place``, a folder or an address, and its histogram; shards may be absent.

    ``stall``: seconds that a server may take. Raises DataError if they are missing or damaged, and TrainerError if a
    server cannot be read.
    """
    folder = open_cache(place, cache, stall, 0).folder if is_remote(place) else Path(place)
    manifest = load_manifest(folder)
    return lengths_of(folder, manifest), manifest


def lengths_of(folder: Path, manifest: Manifest) -> Lengths:
    """The lengths of a data set whose manifest was read. Raises DataError if the histogram is missing or damaged."""
    counts = read_histogram(folder, manifest.length_counts)
    return Lengths(counts, manifest.counts.masked, manifest.settings.pairs != "single")
