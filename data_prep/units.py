"""The units of work of a build, apart from a chunk of text: a block of the plan, and a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from data_prep.draws import shuffled
from data_prep.errors import DataError
from data_prep.job import BuildJob
from data_prep.masking import make_samples
from data_prep.pairs import DocumentBlock, PlanCounts, plan_pairs
from data_prep.shards import Sample, shard_name, tar_path, write_shard
from data_prep.store import id_dtype
from data_prep.verify import Measured, measure_shard

ORDER = 0x6F726465  # "orde": the stream of draws that shuffles the plan


def plan_block(block: DocumentBlock, job: BuildJob) -> tuple[bytes, PlanCounts]:
    """The pairs of a block as raw PAIR records, and counts of where its tokens went."""
    pairs, counts = plan_pairs(job.open_store(), block, job.settings, job.vocabulary)
    return pairs.tobytes(), counts


def make_shard(number: int, job: BuildJob, watch: Callable[[Iterator[Sample]], Iterator[Sample]] = iter) -> Measured:
    """Makes shard ``number`` unless a valid one exists. Returns the result of `measure_shard`.

    ``watch`` passes the samples on; if it raises an error, no shard is written.
    """
    name, size = shard_name(number), job.settings.samples_per_shard
    start = number * size
    if tar_path(job.out, name).exists():
        try:
            return measure_shard(job.out, name, start, job.tokenizer.vocab_size)
        except DataError:
            pass  # damaged since it was made: make it again
    plan = job.open_plan()
    numbers = np.arange(start, min(start + size, len(plan)))
    pairs = plan[shuffled(numbers, len(plan), job.settings.seed, ORDER)]
    samples = make_samples(job.open_store(), pairs, start, job.vocabulary, job.tokenizer.specials, job.settings)
    write_shard(job.out, name, start, watch(samples), id_dtype(job.tokenizer.vocab_size))
    return measure_shard(job.out, name, start, job.tokenizer.vocab_size)
