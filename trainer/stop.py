"""A stop that all ranks agree on: a SIGTERM to any of them ends the run after a step that all of them finish."""

from __future__ import annotations

import signal
from types import FrameType

import torch
import torch.distributed as dist

from trainer.state import TrainState
from trainer.world import World

STOPPED = 75  # the exit code of a run that was asked to stop and can go on: EX_TEMPFAIL of sysexits.h


class Stop:
    """Listens for SIGTERM from its making on. A second one changes nothing, also while a checkpoint is saved."""

    def __init__(self, world: World, every: int) -> None:
        self.world, self.every, self.asked = world, every, False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def agreed(self, state: TrainState) -> bool:
        """Whether any rank was asked to stop; looked at every ``every`` steps, by all ranks together."""
        if state.attempts % self.every:
            return False
        asked = torch.tensor(int(self.asked), device=self.world.device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked.item())
