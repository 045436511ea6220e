"""Saves made-up parts, one after another, until it is killed; test_trainer_checkpoint.py runs it on each rank.

python tests/helpers/saving_on_ranks.py ROOT
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

from trainer.checkpoint.reading import CheckpointConfig, newest
from trainer.checkpoint.saving import Saver
from trainer.checkpoint.shared_folder import SharedFolder
from trainer.engine.optimizer import OptimizerConfig, make_optimizer
from trainer.engine.partition import Buffer, Partition, Slice
from trainer.ranks.world import from_launcher, join

ELEMENTS = 100_000  # of one rank


def main() -> None:
    root = Path(sys.argv[1])
    world = from_launcher("cpu")
    join(world, 60)
    master = torch.zeros(ELEMENTS)
    piece = Slice("a", world.rank * ELEMENTS, 0, ELEMENTS)
    optimizer = make_optimizer(iter([master]), OptimizerConfig())
    optimizer.bind(
        Partition((Buffer(master, (piece,)),), {"a": torch.Size([world.size * ELEMENTS])}, True, world.device)
    )
    saver = Saver(SharedFolder(root), CheckpointConfig(keep=2), optimizer, world)
    found, _ = newest(root)
    for step in itertools.count(1 if found is None else found.record["step"] + 1):
        master.fill_(step)
        saver.save(step, {"step": step})
        master.fill_(-1)  # a save that did not copy would contain it


if __name__ == "__main__":
    main()
