"""Describes a data set in words: its statistics, and samples as text with both the masked and the original words."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from data_prep.combining_marks import LIMIT, loss
from data_prep.errors import DataError
from data_prep.manifest import TOKENIZER_FOLDER, Manifest, load_manifest
from data_prep.settings import largest_count
from data_prep.shards import Sample, decode_sample, index_path, read_index, tar_path
from data_prep.sources import describe_left_out
from data_prep.tokenizer import load_proven

UNKNOWN_LIMIT = 0.01  # share of a file's tokens; above this the tokenizer does not fit the text
TRUE_PAIRS = (0.4, 0.6)  # range of the share of true pairs in which the model can learn
MASKED_LIMIT = 0.8  # fraction of the requested share; below this --max-predictions is too low for the sequences
LABELS = {  # by is_next
    "nsp": ("not next, ", "is next, "),
    "sop": ("swapped, ", "in order, "),
    "single": ("", "", ""),
}
OF_FILES = (  # counts of SourceRecord
    *("tokens", "unknown", "empty", "cut", "replaced", "cleaned", "blank", "unwanted", "titles", "stripped"),
    *("members", "metadata"),
)


def describe(manifest: Manifest) -> Iterator[str]:
    """The statistics of a data set, one per line."""
    counts, corpus, plan, settings = manifest.counts, manifest.corpus, manifest.plan, manifest.settings
    total = {name: sum(getattr(file, name) for file in corpus.files) for name in OF_FILES}
    yield (
        f"corpus: {_amount(len(corpus.files), 'file')}, {_amount(corpus.documents, 'document')} "
        f"({corpus.lone_sentences:,} of one sentence), {_amount(corpus.sentences, 'sentence')}, "
        f"{_amount(corpus.tokens, 'token')} ({total['unknown'] / total['tokens']:.2%} unknown)"
    )
    changed = [
        _amount(corpus.duplicates, "duplicate document") + " dropped",
        _amount(corpus.other_part, "document") + " on the other side of the held-out share",
        _amount(total["replaced"], "byte") + " replaced, not UTF-8",
        _amount(total["cleaned"], "character") + " cleaned",
        _amount(total["stripped"], "combining mark") + " stripped",
        _amount(total["cut"], "cut") + " in long lines and sentences",
        _amount(total["empty"], "sentence") + " without visible text left out",
        _amount(total["blank"], "document") + " without visible text left out",
        _amount(total["unwanted"], "record") + f" without {settings.where} left out",
        _amount(total["titles"], "title") + " of articles left out",
        _amount(total["members"], "member") + " of tars left out, not text",
        _amount(total["metadata"], "member") + " of tars read as metadata",
        _amount(plan.unmaskable, "sample") + " without anything to predict left out",
    ]
    yield "changed: " + (", ".join(line for line in changed if not line.startswith("0 ")) or "nothing")
    without_text = [file.name for file in corpus.files if not file.tokens]
    if without_text:
        yield f"files without text: {len(without_text):,} ({without_text[0]})"
    if corpus.left_out:
        yield f"files left out: {describe_left_out(corpus.left_out)}"
    share = 1 / (settings.duplicates * corpus.tokens)
    yield (
        f"tokens: {plan.own * share:.2%} in samples, {plan.truncated * share:.2%} cut off in long pairs, "
        f"{plan.left_over * share:.2%} in last single sentences, "
        f"{plan.unmaskable_tokens * share:.2%} in samples left out"
    )
    yield (
        f"samples: {counts.samples:,} in {_amount(len(manifest.shards), 'shard')}, {counts.tokens:,} tokens, "
        f"mean length {counts.tokens / counts.samples:.1f} of {settings.sequence_length}"
    )
    controls = (2 if settings.pairs == "single" else 3) * counts.samples
    pairs = "" if settings.pairs == "single" else f", {counts.is_next / counts.samples:.2%} of the pairs "
    pairs += {"nsp": "true", "sop": "in order", "single": ""}[settings.pairs]
    yield f"labels: {counts.masked / (counts.tokens - controls):.2%} of the tokens masked{pairs}"


def warnings(manifest: Manifest) -> Iterator[str]:
    """Warnings about a complete data set, one per line."""
    strange = [file for file in manifest.corpus.files if file.unknown > UNKNOWN_LIMIT * file.tokens]
    if strange:
        worst = max(strange, key=lambda file: file.unknown / file.tokens)
        yield (
            f"{_amount(len(strange), 'file')} with more than {UNKNOWN_LIMIT:.0%} of tokens unknown to the tokenizer, "
            f"most in {worst.name}: {worst.unknown / worst.tokens:.1%}; learn a vocabulary from this text"
        )
    yield from warn_of_markup({file.name: file.markup for file in manifest.corpus.files})
    lossy = [file for file in manifest.corpus.files if file.stripped_other > LIMIT * file.tokens]
    if lossy:
        worst = max(lossy, key=lambda file: file.stripped_other / file.tokens)
        marks = sum(file.stripped_other for file in lossy)
        yield f"{_amount(len(lossy), 'file')}, above all {worst.name}: {loss(marks)}"
    counts, settings = manifest.counts, manifest.settings
    true = counts.is_next / counts.samples
    if settings.pairs != "single" and not TRUE_PAIRS[0] <= true <= TRUE_PAIRS[1]:
        pairs = _amount(counts.samples, "pair")
        yield f"{true:.0%} of {pairs} true, wanted about 50%; a larger corpus or more --duplicates helps"
    masked = counts.masked / counts.tokens
    if masked < MASKED_LIMIT * settings.masked_share and largest_count(settings) > settings.max_predictions:
        yield (
            f"{masked:.1%} of the tokens masked, wanted {settings.masked_share:.0%}: --max-predictions "
            f"{settings.max_predictions} is too low for sequences of {settings.sequence_length}; omit it to use "
            f"{largest_count(settings)}"
        )


def warn_of_markup(lines: Mapping[str, int]) -> Iterator[str]:
    """A warning if markup was read as text; ``lines``: number of markup lines in each file."""
    found = {name: count for name, count in lines.items() if count}
    if found:
        worst = max(found, key=found.__getitem__)
        yield (
            f"{_amount(len(found), 'file')} with markup that was read as text, most in {worst}: "
            f"{_amount(found[worst], 'line')} such as <doc …>, <html>, WARC/1.0 or JSON; for wikiextractor's <doc …> "
            "use --format wikiextractor, rename JSON lines to .jsonl, and extract the text of anything else"
        )


def show_samples(folder: Path, count: int) -> Iterator[str]:
    """The first ``count`` samples of a data set as text; a masked position reads {label>masked input}."""
    manifest = load_manifest(folder)
    remedy = f"run verify --full {folder}, which lists everything to rebuild"
    tokenizer = load_proven(folder / TOKENIZER_FOLDER, manifest.tokenizer.sha256, remedy=remedy)
    labels = LABELS[manifest.settings.pairs]
    number = 0
    for shard in manifest.shards:
        if number >= count:
            return
        path = index_path(folder, shard.name)
        try:
            index = read_index(path, shard.index_sha256)[: count - number]
        except DataError as error:
            raise DataError(f"{error}; {remedy}") from None
        path = tar_path(folder, shard.name)
        with path.open("rb") as tar:
            for row, (offset, size, _, _, crc) in enumerate(index.tolist()):
                tar.seek(offset)
                content = tar.read(size)
                if zlib.crc32(content) != crc:
                    raise DataError(f"{path}: sample {row} is damaged; {remedy}")
                sample = decode_sample(content)
                yield f"{number}: {_show(sample, tokenizer.pieces, labels[sample.is_next])}"
                number += 1


def _show(sample: Sample, pieces: list[str], label: str) -> str:
    words = np.array(pieces, object)[sample.ids]
    for position, replacement in zip(sample.positions, sample.replacements, strict=True):
        words[position] = f"{{{words[position]}>{pieces[replacement]}}}"
    text = " ".join(words).replace(" ##", "")
    return f"{label}{len(sample.ids)} tokens: {text}"


def _amount(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
