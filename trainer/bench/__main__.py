"""Time BERT's forward and backward pass against Hugging Face's: python -m trainer.bench [--shards FOLDER ...]."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from data_prep.errors import DataError
from data_prep.options import CommandParser
from trainer.bench.model import MODEL_SIZES, TOKENS, report, shard_lengths
from trainer.console import print_result


def main() -> None:
    """Measure, printing each row of the table as soon as it is ready."""
    parser = CommandParser(prog="python -m trainer.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=MODEL_SIZES, default="large")
    parser.add_argument("--shards", nargs="*", type=Path, default=[], help="also time the lengths of these data sets")
    parser.add_argument("--compile", action="store_true", help="also time Hugging Face with torch.compile (minutes)")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("trainer.bench: error: no CUDA device: run this benchmark on a machine with a GPU")
    try:
        work = {f"{s} full": [s] * (TOKENS // s) for s in (128, 512)} | {str(f): shard_lengths(f) for f in given.shards}
    except DataError as error:
        raise SystemExit(f"trainer.bench: error: {error}") from error
    logging.disable(logging.WARNING)
    print_result(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, BERT-{given.size}, fp16, dropout 0.1\n")
    print_result("| sequences | who | ms | TFLOP/s | valid tokens/s | GiB |\n|---|---|---|---|---|---|")
    for name, lengths in work.items():
        report(name, MODEL_SIZES[given.size], lengths, given.compile)


if __name__ == "__main__":
    main()
