"""The settings of a data set: everything but the corpus and the tokenizer that decides its samples."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

from data_prep.corpus import parse_where
from data_prep.errors import DataError

SHORTEST_SEQUENCE = 5  # [CLS] a [SEP] b [SEP]
LONGEST_SEQUENCE = 65_535  # a length is written as 16 bits


@dataclass(frozen=True)
class Settings:
    """As the manifest records them."""

    sequence_length: int
    seed: int
    duplicates: int  # passes over the corpus, each with other pairs and masks
    masked_share: float
    max_predictions: int  # masked positions of a full sequence: no sample has more
    short_sequence_rate: float
    samples_per_shard: int
    language: str  # of the sentence splitter
    where: str | None  # field=value: the records that were taken
    tokenizers: str  # versions of the libraries that decide the tokens and the sentences
    sentencex: str


def make_settings(
    sequence_length: int,
    seed: int = 1,
    duplicates: int = 1,
    masked_share: float = 0.15,
    short_sequence_rate: float = 0.1,
    samples_per_shard: int = 8192,
    language: str = "en",
    where: str | None = None,
) -> Settings:
    """Checks the values and adds what follows from them. Raises DataError with all problems at once."""
    bounds = [
        ("--sequence-length", sequence_length, SHORTEST_SEQUENCE, LONGEST_SEQUENCE),
        ("--seed", seed, 0, 2**63 - 1),
        ("--duplicates", duplicates, 1, 1000),
        ("--masked-share", masked_share, 0.001, 1),
        ("--short-sequence-rate", short_sequence_rate, 0, 1),
        ("--samples-per-shard", samples_per_shard, 1, 2**20),  # a shard is proved in one piece
    ]
    problems = [
        f"{name} {value}: wanted {low} to {high}" for name, value, low, high in bounds if not low <= value <= high
    ]
    if problems:
        raise DataError("; ".join(problems))
    parse_where(where)
    return Settings(
        sequence_length=sequence_length,
        seed=seed,
        duplicates=duplicates,
        masked_share=masked_share,
        max_predictions=largest_count(sequence_length, masked_share),
        short_sequence_rate=short_sequence_rate,
        samples_per_shard=samples_per_shard,
        language=language,
        where=where,
        tokenizers=version("tokenizers"),
        sentencex=version("sentencex"),
    )


def largest_count(sequence_length: int, share: float) -> int:
    """Masked positions of a full sequence of ``sequence_length``, of which 3 are control tokens."""
    return max(1, round(share * (sequence_length - 3)))
