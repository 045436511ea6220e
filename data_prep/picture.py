"""Plots a data set: its lengths, its vocabulary, its masks, and how even its shards are.

Everything is read from the manifest, the indexes and the token counts, one index at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from data_prep.atomic import replacing
from data_prep.errors import DataError
from data_prep.manifest import TOKENIZER_FOLDER, Manifest, load_manifest, read_histogram
from data_prep.shards import Column, index_path, read_index
from data_prep.tokenizer import load_proven

if TYPE_CHECKING:  # only a picture needs it
    from matplotlib.axes import Axes

INCHES, DPI = (12, 8), 150
BARS = 64  # most bars in a histogram
RANKS = 400  # points of a curve over the vocabulary
DOTS, LARGE_DOT, SMALL_DOT = 100, 5, 2  # up to DOTS shards have large dots
TWO_SIDED = 1.96  # standard errors on either side of a mean; 95 % of random draws fall within
BLUE, DARK = "C0", "black"
SECOND_TASK = {"nsp": "share of true pairs", "sop": "share of pairs in order"}  # by settings.pairs


@dataclass(frozen=True)
class Histograms:
    """Histograms over the whole data set."""

    lengths: NDArray[np.int64]  # [sequence_length + 1] number of samples with that many tokens
    masks: NDArray[np.int64]  # [max_predictions + 1] number of samples with that many masked positions
    tokens: NDArray[np.int64]  # [ordinary] how often each piece that can be predicted occurs in the samples


@dataclass(frozen=True)
class ShardSpread:
    """A mean over the samples of each shard, and the range expected from chance alone."""

    name: str
    values: NDArray[np.float64]  # [shards]
    mean: float
    error: NDArray[np.float64]  # [shards] standard error of a random draw of as many samples, without replacement

    def inside(self) -> int:
        """The number of shards within the 95 % range of random draws."""
        return int(np.count_nonzero(np.abs(self.values - self.mean) <= TWO_SIDED * self.error))


def draw(folder: Path, out: Path) -> None:
    """Writes a PNG with four panels about the data set in ``folder``.

    Raises DataError if matplotlib is missing, or if a file of the data set is missing or has changed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws to files, so it needs no display
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DataError(f"{out}: no picture without matplotlib ({error}); pip install matplotlib") from None
    manifest = load_manifest(folder)
    histograms = read_histograms(folder, manifest)
    spread = make_spread(manifest, histograms.lengths)
    figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"{folder}: {manifest.counts.samples:,} samples of up to {manifest.settings.sequence_length} tokens, "
        f"{manifest.counts.tokens:,} tokens"
    )
    grid = figure.add_gridspec(2, 2)
    _draw_lengths(figure.add_subplot(grid[0, 0]), histograms.lengths)
    _draw_tokens(figure.add_subplot(grid[0, 1]), histograms.tokens)
    _draw_masks(figure.add_subplot(grid[1, 0]), histograms.masks, manifest)
    stack = grid[1, 1].subgridspec(2, 1)
    above = figure.add_subplot(stack[0])
    below = figure.add_subplot(stack[1], sharex=above)
    above.set_title(f"shards: {spread.inside():,} of {len(manifest.shards):,} are in the 95 % range of random draws")
    _draw_sizes(above, np.array([shard.samples for shard in manifest.shards]))
    _draw_spread(below, spread)
    for panel in figure.axes:
        panel.grid(alpha=0.3)
        panel.set_axisbelow(True)
    with replacing(out) as file:
        figure.savefig(file, format="png")


def read_histograms(folder: Path, manifest: Manifest) -> Histograms:
    """Sums over the indexes. Raises DataError for a file that is missing or does not match the manifest."""
    lengths = np.zeros(manifest.settings.sequence_length + 1, np.int64)
    masks = np.zeros(manifest.settings.max_predictions + 1, np.int64)
    for shard in manifest.shards:
        path = index_path(folder, shard.name)
        index = read_index(path, shard.index_sha256)
        for counts, column in ((lengths, Column.TOKENS), (masks, Column.MASKED)):
            most, found = len(counts) - 1, int(index[:, column].max())
            if found > most or index[:, column].min() < 0:
                raise DataError(f"{path}: a sample of {found} {column.name.lower()}, wanted 0 to {most}; run verify")
            counts += np.bincount(index[:, column], minlength=most + 1)
    tokens, path = read_histogram(folder, manifest.token_counts), folder / manifest.token_counts.file
    tokenizer = load_proven(folder / TOKENIZER_FOLDER, manifest.tokenizer.sha256)
    if tokens.shape != (manifest.tokenizer.vocab_size,):
        raise DataError(f"{path}: shape {tokens.shape} for a vocabulary of {manifest.tokenizer.vocab_size}")
    return Histograms(lengths, masks, np.delete(tokens, tokenizer.never))


def padding_share(lengths: NDArray[np.int64]) -> float:
    """The share of padding among the positions when a trainer pads every sample to the full length."""
    most = len(lengths) - 1
    return float(1 - np.arange(most + 1) @ lengths / (most * lengths.sum()))


def masked_share(manifest: Manifest) -> float:
    """The share of masked positions among all that are not control tokens."""
    controls = 2 if manifest.settings.pairs == "single" else 3
    counts = manifest.counts
    return counts.masked / (counts.tokens - controls * counts.samples)


def make_spread(manifest: Manifest, lengths: NDArray[np.int64]) -> ShardSpread:
    """The share of true pairs per shard, or the mean length if there are no pairs."""
    samples = np.array([shard.samples for shard in manifest.shards])
    name = SECOND_TASK.get(manifest.settings.pairs)
    if name is not None:
        mean = manifest.counts.is_next / manifest.counts.samples
        deviation = np.sqrt(mean * (1 - mean))
        totals = np.array([shard.is_next for shard in manifest.shards])
    else:
        mean = manifest.counts.tokens / manifest.counts.samples
        deviation = np.sqrt((np.arange(len(lengths)) - mean) ** 2 @ lengths / lengths.sum())
        totals = np.array([shard.tokens for shard in manifest.shards])
    every = int(samples.sum())
    error = deviation * np.sqrt((every - samples) / (samples * max(1, every - 1)))
    return ShardSpread(name or "mean length, tokens", totals / samples, mean, error)


def _draw_lengths(panel: Axes, lengths: NDArray[np.int64]) -> None:
    most = len(lengths) - 1
    _draw_bars(panel, lengths)
    panel.set_title(f"sample lengths: padding to {most} would waste {_percent(padding_share(lengths))}")
    full = _percent(lengths[most] / lengths.sum())
    panel.set_xlabel(f"tokens, control tokens included ({full} of the samples have {most})")


def _draw_tokens(panel: Axes, tokens: NDArray[np.int64]) -> None:
    seen = np.sort(tokens[tokens > 0])[::-1]
    ranks = np.unique(np.geomspace(1, len(seen), RANKS).astype(np.int64))
    zipf = seen.sum() / np.sum(1 / np.arange(1, len(seen) + 1)) / ranks
    panel.loglog(ranks, zipf, color=DARK, linestyle=":", linewidth=1, label="Zipf's law, ~ 1 / rank")
    panel.loglog(ranks, seen[ranks - 1], color=BLUE, linewidth=1.6, label="pieces by frequency")
    if len(seen) < len(tokens):
        panel.axvspan(len(seen), len(tokens), color=DARK, alpha=0.12, linewidth=0, label="never seen")
    panel.set_title(f"vocabulary: {_percent(1 - len(seen) / len(tokens))} of the {len(tokens):,} pieces never seen")
    panel.set_xlabel("rank of the piece")
    panel.set_ylabel("occurrences in the samples")
    panel.legend(loc="lower left")


def _draw_masks(panel: Axes, masks: NDArray[np.int64], manifest: Manifest) -> None:
    most, asked = len(masks) - 1, manifest.settings.masked_share
    _draw_bars(panel, masks)
    panel.set_title(f"masks: {_percent(masked_share(manifest))} of the tokens, {_percent(asked)} requested")
    panel.set_xlabel(f"masked positions ({_percent(masks[most] / masks.sum())} of the samples have the most, {most})")


def _draw_sizes(panel: Axes, samples: NDArray[np.int64]) -> None:
    _draw_filled(panel, samples, np.arange(len(samples) + 1) - 0.5)
    panel.set_ylabel("samples")
    panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.tick_params(labelbottom=False)


def _draw_spread(panel: Axes, spread: ShardSpread) -> None:
    shards = np.arange(len(spread.values))
    edges = np.arange(len(shards) + 1) - 0.5
    low, high = spread.mean - TWO_SIDED * spread.error, spread.mean + TWO_SIDED * spread.error
    panel.stairs(high, edges, baseline=low, fill=True, color=DARK, alpha=0.12)
    panel.axhline(spread.mean, color=DARK, linestyle=":", linewidth=1)
    panel.plot(shards, spread.values, "o", color=BLUE, markersize=LARGE_DOT if len(shards) <= DOTS else SMALL_DOT)
    panel.set_xlabel("shard number (gray: 95 % of random draws)")
    panel.set_ylabel(spread.name)
    panel.locator_params("x", integer=True)


def _draw_bars(panel: Axes, counts: NDArray[np.int64]) -> None:
    """A histogram of the numbers from 0 to the largest, which ends a bar. Log scale, since most samples are full."""
    width = -(-len(counts) // BARS)
    padded = np.concatenate([np.zeros(-len(counts) % width, np.int64), counts])
    edges = len(counts) - 0.5 - width * np.arange(len(padded) // width, -1, -1)
    _draw_filled(panel, padded.reshape(-1, width).sum(axis=1), edges)
    panel.locator_params("x", integer=True)
    panel.set_yscale("log")
    panel.set_ylim(bottom=0.5)
    panel.set_ylabel("samples")


def _draw_filled(panel: Axes, heights: NDArray[np.int64], edges: NDArray[np.floating[Any]]) -> None:
    panel.stairs(heights, edges, fill=True, color=BLUE, alpha=0.25)
    panel.stairs(heights, edges, color=BLUE, linewidth=1.6)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
