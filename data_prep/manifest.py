"""manifest.json: the content of a data set and how it was made. Written last: without it, there is no data set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from data_prep.atomic import replacing
from data_prep.errors import DataError, shortage
from data_prep.json_text import read_json, shown
from data_prep.npy import read_integers
from data_prep.settings import LATER, MOST_SHARD_SAMPLES, Settings
from data_prep.settings import problems as settings_problems
from data_prep.shards import shard_name
from data_prep.sources import LeftOut
from data_prep.tokenizer import MOST_PIECES, SpecialIds

SHARDS_FORMAT, SHARDS_VERSION = "lambert-shards", 2
MANIFEST = "manifest.json"
# A remote reader's limit for the manifest, and for each file whose size the manifest does not give.
SMALL_FILE_BYTES = 64 << 20
TOKENIZER_FOLDER = "tokenizer"
MOST_TOLD = 5  # problems of a manifest in one error line
TOKEN_COUNTS, LENGTH_COUNTS = "token_counts.npy", "length_counts.npy"


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer in the folder ``tokenizer``; the hash is `Tokenizer.sha256`."""

    vocab_size: int
    sha256: str
    specials: SpecialIds


@dataclass(frozen=True)
class SourceRecord:
    """A text file: its size and hash on disk, counts of what was read from it, and counts of what was changed."""

    name: str
    bytes: int
    sha256: str
    tokens: int
    unknown: int  # tokens that are [UNK]
    empty: int  # sentences without visible text, left out
    cut: int  # cuts in lines and sentences that were too long
    replaced: int  # bytes that were not UTF-8, replaced
    cleaned: int  # characters that cleaning changed, except whitespace
    blank: int = field(default=0, metadata=LATER)  # documents without visible text, left out
    unwanted: int = field(default=0, metadata=LATER)  # records left out by --where
    titles: int = field(default=0, metadata=LATER)  # titles of articles, left out
    markup: int = field(default=0, metadata=LATER)  # lines of markup that were read as text
    stripped: int = field(default=0, metadata=LATER)  # combining marks (accents, vowel signs) that the tokenizer strips
    stripped_other: int = field(default=0, metadata=LATER)  # marks of scripts other than Latin, Greek and Cyrillic
    members: int = field(default=0, metadata=LATER)  # members of a tar that are not text, left out
    metadata: int = field(default=0, metadata=LATER)  # members of a tar that hold the metadata of a text


@dataclass(frozen=True)
class CorpusRecord:
    """Counts of the text that was read, and of the part that was selected."""

    files: tuple[SourceRecord, ...]
    documents: int  # read, with visible text
    duplicates: int  # documents left out: an earlier one has the same text
    other_part: int  # documents left out: on the other side of the held-out share
    lone_sentences: int  # selected documents of one sentence
    sentences: int  # in the selected documents
    tokens: int  # in the selected documents
    left_out: tuple[LeftOut, ...] = field(default=(), metadata=LATER)  # files in the input folders that were not read


@dataclass(frozen=True)
class PlanRecord:
    """Counts of where the tokens of the selected documents went, summed over the duplicates.

    own + truncated + left_over + unmaskable_tokens = duplicates * tokens of the corpus.
    """

    own: int  # in a sample of its own document (a random B is not counted)
    truncated: int  # cut off because the pair was too long
    left_over: int  # in a single sentence at the end of a document, which starts no pair
    unmaskable_tokens: int  # in pairs without anything to predict
    unmaskable: int  # such pairs


@dataclass(frozen=True)
class SampleCounts:
    """Totals over all samples. tokens includes control tokens; is_next counts pairs that are true or in order."""

    samples: int
    tokens: int
    masked: int
    is_next: int


@dataclass(frozen=True)
class ShardRecord:
    """A shard and its index, with the same counts as `SampleCounts`."""

    name: str
    bytes: int
    sha256: str
    index_sha256: str
    samples: int
    tokens: int
    masked: int
    is_next: int


@dataclass(frozen=True)
class Histogram:
    """A one-dimensional int64 array in a file of the data set."""

    file: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A complete data set. The fingerprint covers settings, tokenizer and corpus: same fingerprint, same shards."""

    format: str
    version: int
    fingerprint: str
    settings: Settings
    tokenizer: TokenizerRecord
    corpus: CorpusRecord
    plan: PlanRecord
    counts: SampleCounts
    shards: tuple[ShardRecord, ...]
    token_counts: Histogram  # [V] how often each ordinary token occurs in the unmasked samples
    length_counts: Histogram  # [sequence_length + 1] number of samples of each length


def load_manifest(folder: Path) -> Manifest:
    """Loads and checks the manifest of a data set.

    Raises DataError if it is missing, not JSON, of another format or version, incomplete, or has values that no build
    writes.
    """
    path = folder / MANIFEST
    try:
        content = read_json(path)
    except OSError as error:
        if shortage(error):
            raise
        raise DataError(
            f"{folder} holds no {MANIFEST} ({error.strerror}): not a data set, or its build has not ended; build it or "
            "name another"
        ) from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error})") from None
    found = (content.get("format"), content.get("version")) if isinstance(content, dict) else None
    if found != (SHARDS_FORMAT, SHARDS_VERSION):
        raise DataError(f"{path}: wanted format {SHARDS_FORMAT} version {SHARDS_VERSION}, found {shown(found)}")
    manifest: Manifest = _parse(Manifest, content, str(path))
    if problems := list(_problems(manifest)):
        raise DataError(f"{path}: {'; '.join(problems[:MOST_TOLD])}")
    return manifest


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest atomically."""
    with replacing(folder / MANIFEST) as file:
        file.write(json.dumps(asdict(manifest), indent=1, ensure_ascii=False).encode() + b"\n")


def manifest_hash(folder: Path) -> str:
    """The sha256 of the manifest, which contains the sha256 of every shard: it identifies the whole data set."""
    return file_sha256(folder / MANIFEST)


def read_histogram(folder: Path, histogram: Histogram) -> NDArray[np.int64]:
    """Reads the array. Raises DataError if the file is missing or its sha256 differs."""
    try:
        return read_integers(folder / histogram.file, sha256=histogram.sha256, what="histogram")
    except DataError as error:
        raise DataError(f"{error}: restore it, or build again") from None


def file_sha256(path: Path) -> str:
    """The sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _parse(kind: Any, value: Any, place: str) -> Any:
    """Converts JSON to a dataclass, tuple or plain value. Only LATER fields may be missing; all else must match."""
    if isinstance(kind, type) and is_dataclass(kind):
        names = {field.name for field in fields(kind)}
        later = {field.name for field in fields(kind) if field.metadata == LATER}
        if not isinstance(value, dict) or not names - later <= set(value) <= names:
            raise DataError(f"{place}: wanted the fields {sorted(names)}")
        hints = get_type_hints(kind)
        return kind(**{name: _parse(hints[name], value[name], f"{place}: {name}") for name in value})
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise DataError(f"{place}: wanted a list")
        return kind(_parse(get_args(kind)[0], item, f"{place}[{i}]") for i, item in enumerate(value))
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or isinstance(value, bool) is not (kind is bool):
        raise DataError(f"{place}: wanted {getattr(kind, '__name__', kind)}, found {shown(value)}")
    if kind in (int, float) and not 0 <= value < 2**63:  # this form also rejects NaN
        raise DataError(f"{place}: wanted 0 to 2^63 - 1, found {shown(value)}")
    return value


def _problems(manifest: Manifest) -> Iterator[str]:
    """Problems with values that have the right type, but that no build writes."""
    yield from (f"settings: {problem}" for problem in settings_problems(manifest.settings))
    size, ids = manifest.tokenizer.vocab_size, astuple(manifest.tokenizer.specials)
    if size > MOST_PIECES:
        yield f"tokenizer: vocab_size {size}: wanted {MOST_PIECES} at most"
    if len(set(ids)) < len(ids) or max(ids) >= size:
        yield f"tokenizer: specials {ids}: wanted ids that differ, below vocab_size, {size}"
    if manifest.corpus.tokens == 0:
        yield "corpus: tokens 0: wanted 1 or more"
    if manifest.counts.samples == 0 or not manifest.shards:
        yield "it has no samples; build it from more text"
    for number, shard in enumerate(manifest.shards):
        if shard.name != shard_name(number):
            yield f"shards[{number}]: name {shown(shard.name)}: wanted {shard_name(number)}"
        if not 1 <= shard.samples <= MOST_SHARD_SAMPLES:
            yield f"shards[{number}]: samples {shard.samples}: wanted 1 to {MOST_SHARD_SAMPLES}"
    for name, file in (("token_counts", TOKEN_COUNTS), ("length_counts", LENGTH_COUNTS)):
        if (found := getattr(manifest, name).file) != file:
            yield f"{name}: file {shown(found)}: wanted {file}"
