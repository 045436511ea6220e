"""A data set in words: its statistics, and its samples as text with the masks done and undone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_prep.manifest import TOKENIZER_FOLDER, Manifest, load_manifest
from data_prep.shards import Column, Sample, decode_sample, index_path, read_index, tar_path
from data_prep.tokenizer import load_tokenizer

UNKNOWN_LIMIT = 0.01  # of a file's tokens; above it the tokenizer does not suit the text
TRUE_PAIRS = (0.4, 0.6)  # share of the pairs that the model can learn from


def describe(manifest: Manifest) -> Iterator[str]:
    """The statistics of a data set, a line each."""
    counts, corpus, settings = manifest.counts, manifest.corpus, manifest.settings
    unknown, cut = sum(file.unknown for file in corpus.files), sum(file.cut for file in corpus.files)
    yield (
        f"corpus: {_amount(len(corpus.files), 'file')}, {_amount(corpus.documents, 'document')} "
        f"({corpus.lone_sentences:,} of one sentence), {_amount(corpus.sentences, 'sentence')} "
        f"({_amount(cut, 'cut')} in long ones), {_amount(corpus.tokens, 'token')} "
        f"({unknown / corpus.tokens:.2%} unknown)"
    )
    yield (
        f"samples: {counts.samples:,} in {_amount(len(manifest.shards), 'shard')}, {counts.tokens:,} tokens, "
        f"mean length {counts.tokens / counts.samples:.1f} of {settings.sequence_length}"
    )
    yield (
        f"labels: {counts.masked / (counts.tokens - 3 * counts.samples):.2%} of the tokens masked, "
        f"{counts.is_next / counts.samples:.2%} of the pairs true"
    )


def warnings(manifest: Manifest) -> Iterator[str]:
    """What looks wrong with a data set that is whole, a line each."""
    strange = [file for file in manifest.corpus.files if file.unknown > UNKNOWN_LIMIT * file.tokens]
    if strange:
        worst = max(strange, key=lambda file: file.unknown / file.tokens)
        yield (
            f"{_amount(len(strange), 'file')} with more than {UNKNOWN_LIMIT:.0%} of tokens unknown to the tokenizer, "
            f"most in {worst.name}: {worst.unknown / worst.tokens:.1%}; learn a vocabulary from this text"
        )
    true = manifest.counts.is_next / manifest.counts.samples
    if not TRUE_PAIRS[0] <= true <= TRUE_PAIRS[1]:
        pairs = _amount(manifest.counts.samples, "pair")
        yield f"{true:.0%} of {pairs} true, wanted about 50%; a larger corpus or more --duplicates helps"


def show_samples(folder: Path, count: int) -> Iterator[str]:
    """The first ``count`` samples of a data set as text; what was masked reads {label>what stands there}."""
    manifest = load_manifest(folder)
    pieces = load_tokenizer(folder / TOKENIZER_FOLDER).pieces
    number = 0
    for shard in manifest.shards:
        index = read_index(index_path(folder, shard.name))[: max(0, count - number)]
        with tar_path(folder, shard.name).open("rb") as tar:
            for offset, size in index[:, [Column.OFFSET, Column.BYTES]].tolist():
                tar.seek(offset)
                yield f"{number}: {_show(decode_sample(tar.read(size)), pieces)}"
                number += 1


def _show(sample: Sample, pieces: list[str]) -> str:
    words = np.array(pieces, object)[sample.ids]
    for position, replacement in zip(sample.positions, sample.replacements, strict=True):
        words[position] = f"{{{words[position]}>{pieces[replacement]}}}"
    text = " ".join(words).replace(" ##", "")
    return f"{'is next' if sample.is_next else 'not next'}, {len(sample.ids)} tokens: {text}"


def _amount(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
