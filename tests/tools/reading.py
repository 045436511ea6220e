"""Time how fast one process reads shards, for `docs/performance.md`.

    python -m tests.tools.reading data/train-128

A step is what a training step reads: 1,024 samples in four micro-batches. The order of the samples is random, and the
files are in the page cache after the first rounds, which are not counted.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from data_prep.manifest import TOKENIZER_FOLDER, load_manifest
from data_prep.masking import RUNS
from data_prep.tokenizer import load_tokenizer
from trainer.data.masks import dynamic_masks
from trainer.data.order import Order
from trainer.data.reader import Reader

STEP, MICRO_BATCHES = 1024, 4
STEPS, ROUNDS, UNCOUNTED = 8, 9, 2


def main() -> None:
    """Print the samples per second of processor time, for static masks and for each unit of dynamic masks."""
    folder = Path(sys.argv[1])
    manifest = load_manifest(folder)
    order = Order(tuple(shard.samples for shard in manifest.shards), seed=1, window=8)
    drawn = dynamic_masks(load_tokenizer(folder / TOKENIZER_FOLDER), manifest, seed=1)
    readers = {"static": Reader(folder, manifest, 0, 1, None, None, "")}
    for unit in ("token", *RUNS):
        masks = replace(drawn, masking=replace(drawn.masking, unit=unit))
        readers[f"dynamic, {unit}"] = Reader(folder, manifest, 0, 1, masks, None, "")
    for name, reader in readers.items():
        speeds = [_speed(reader, order, turn) for turn in range(ROUNDS)][UNCOUNTED:]
        print(f"{name:16} {statistics.median(speeds):10,.0f} samples/s, {min(speeds):,.0f} to {max(speeds):,.0f}")


def _speed(reader: Reader, order: Order, turn: int) -> float:
    start = time.process_time()
    for step in range(turn * STEPS, (turn + 1) * STEPS):
        reader.step(order, step * STEP, STEP, MICRO_BATCHES)
    return STEPS * STEP / (time.process_time() - start)


if __name__ == "__main__":
    main()
