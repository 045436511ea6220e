"""Time BERT's forward and backward pass against Hugging Face's: python -m trainer.bench [--shards FOLDER ...]

``--checkpointing none cheap full`` times each kind of activation checkpointing instead, and finds the largest
micro-batch of each.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import get_args

import torch

from data_prep.errors import DataError
from data_prep.options import CommandParser, check_place
from trainer.bench import checkpointing
from trainer.bench.model import MODEL_SIZES, TOKENS, report, shard_lengths
from trainer.console import print_result
from trainer.errors import TrainerError
from trainer.model.checkpointing import Checkpointing
from trainer.plan.cards import add_rates


def main() -> None:
    """Measure, printing each row of the table as soon as it is ready."""
    parser = CommandParser(prog="python -m trainer.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=MODEL_SIZES, default="large")
    parser.add_argument("--shards", nargs="*", type=Path, default=[], help="also time the lengths of these data sets")
    parser.add_argument("--compile", action="store_true", help="also time Hugging Face with torch.compile (minutes)")
    parser.add_argument("--checkpointing", nargs="+", choices=get_args(Checkpointing), help="compare these kinds")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512], help="of the full sequences")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="per micro-batch of full sequences (%(default)s)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="add our rates at full length, for trainer.plan")
    given = parser.parse_args()
    if not 1 <= min(given.lengths) <= max(given.lengths) <= min(512, given.tokens):
        parser.error("--lengths must be between 1 and 512, and at most --tokens")
    if given.checkpointing and (given.shards or given.compile or given.write):
        parser.error(
            "--checkpointing only compares Lambert's model with itself: remove --shards, --compile and --write"
        )
    if not torch.cuda.is_available():
        raise SystemExit("trainer.bench: error: no CUDA device: run this benchmark on a machine with a GPU")
    try:
        work = {f"{s} full": [s] * (given.tokens // s) for s in given.lengths}
        work |= {str(folder): shard_lengths(folder) for folder in given.shards}
        if given.write is not None:
            check_place("--write", given.write, ".json")
            add_rates(given.write, [])  # so that a file that is no table is refused before the time is spent
    except (DataError, TrainerError) as error:
        raise SystemExit(f"trainer.bench: error: {error}") from error
    logging.disable(logging.WARNING)
    print_result(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, BERT-{given.size}, fp16, dropout 0.1\n")
    if given.checkpointing:
        print_result(checkpointing.HEADER)
        for length in given.lengths:
            checkpointing.report(MODEL_SIZES[given.size], length, given.tokens, given.checkpointing)
        return
    print_result("| sequences | who | ms | TFLOP/s | valid tokens/s | GiB |\n|---|---|---|---|---|---|")
    for name, lengths in work.items():
        found = report(name, MODEL_SIZES[given.size], lengths, given.compile)
        if given.write is not None and len(set(lengths)) == 1:
            add_rates(given.write, [found])


if __name__ == "__main__":
    main()
