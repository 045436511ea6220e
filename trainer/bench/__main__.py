"""Time BERT's forward and backward pass against Hugging Face's: python -m trainer.bench [--shards FOLDER ...]

``--checkpointing none cheap full`` times each kind of activation checkpointing instead, and finds the largest
micro-batch of each. ``--write FILE`` times only Lambert's model, for the planner's table of rates; see
:mod:`trainer.bench.plan`.
"""

from __future__ import annotations

import argparse
import logging
from itertools import product
from pathlib import Path
from typing import get_args

import torch

from data_prep.errors import DataError
from data_prep.options import CommandParser, check_place
from trainer.bench import checkpointing
from trainer.bench.model import MODEL_SIZES, TOKENS, rates, report, shard_lengths
from trainer.console import print_result
from trainer.errors import TrainerError
from trainer.model.checkpointing import Checkpointing
from trainer.plan.cards import add_rates


def main() -> None:
    """Measure, printing each row of the table as soon as it is ready."""
    given = _parse()
    if not torch.cuda.is_available():
        raise SystemExit("trainer.bench: error: no CUDA device: run this benchmark on a machine with a GPU")
    try:
        shards = {str(folder): shard_lengths(folder) for folder in given.shards}
        if given.write is not None:
            check_place("--write", given.write, ".json")
            add_rates(given.write, [])  # so that a file that is no table is refused before the time is spent
    except (DataError, TrainerError) as error:
        raise SystemExit(f"trainer.bench: error: {error}") from error
    logging.disable(logging.WARNING)
    for size in given.size:
        print_result(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, BERT-{size}, fp16, dropout 0.1\n")
        model = MODEL_SIZES[size]
        if given.checkpointing:
            print_result(checkpointing.HEADER)
            for length, tokens in product(given.lengths, given.tokens):
                checkpointing.report(model, length, tokens, given.checkpointing)
        elif given.write is not None:
            print_result("| length | tokens | ms | TFLOP/s |\n|---|---|---|---|")
            for rate in rates(model, given.lengths, given.tokens):
                add_rates(given.write, [rate])
                print_result(f"| {rate.length} | {rate.tokens:,} | {rate.milliseconds} | {rate.tflops} |")
        else:
            print_result("| sequences | who | ms | TFLOP/s | valid tokens/s | GiB |\n|---|---|---|---|---|---|")
            full = product(given.lengths, given.tokens)
            work = {f"{tokens // length} of {length}": [length] * (tokens // length) for length, tokens in full}
            for name, lengths in (work | shards).items():
                report(name, model, lengths, given.compile)


def _parse() -> argparse.Namespace:
    parser = CommandParser(prog="python -m trainer.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--size", nargs="+", choices=MODEL_SIZES, default=["large"])
    parser.add_argument("--shards", nargs="*", type=Path, default=[], help="also time the lengths of these data sets")
    parser.add_argument("--compile", action="store_true", help="also time Hugging Face with torch.compile (minutes)")
    parser.add_argument("--checkpointing", nargs="+", choices=get_args(Checkpointing), help="compare these kinds")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512], help="of the full sequences")
    parser.add_argument("--tokens", type=int, nargs="+", default=[TOKENS], help="per micro-batch of full sequences")
    parser.add_argument("--write", type=Path, metavar="FILE", help="add our rates at full length, for trainer.plan")
    given = parser.parse_args()
    if not 1 <= min(given.lengths) <= max(given.lengths) <= min(512, *given.tokens):
        parser.error("--lengths must be between 1 and 512, and at most --tokens")
    if (given.checkpointing or given.write) and (given.shards or given.compile):
        parser.error("--checkpointing and --write time only Lambert's model: remove --shards and --compile")
    if given.checkpointing and given.write:
        parser.error("--checkpointing and --write are different measurements: give one of them")
    return given


if __name__ == "__main__":
    main()
