"""The time of an optimizer step by part. Pure functions.

Forward and backward come from measured rates (:mod:`trainer.plan.cards`), reductions from :mod:`trainer.plan.network`.
The constants below are from `docs/lab.md`, BERT-Large on H200s, 2026-11-28 and 29. Waiting for data is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.model.bert import ModelConfig
from trainer.model.checkpointing import Checkpointing
from trainer.model.flops import model_flops
from trainer.plan.cards import Card
from trainer.plan.lengths import Lengths
from trainer.plan.memory import Setting, Sizes
from trainer.plan.network import Network

ACCUMULATE_PS = 0.98  # per parameter and micro-batch: 0.33 ms for 336 million
OFFLOADED_PS = 2400.0  # per updated parameter: 0.8 s for 336 million on 16 cores
ZERO_3_FACTOR = 2.02  # of forward and backward
# Forward and backward with checkpointing, not measured: one forward pass more, of three; "cheap" is taken as free.
CHECKPOINTING_FACTOR: dict[Checkpointing, float] = {"none": 1.0, "cheap": 1.0, "full": 4 / 3}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on one rank, by part. Parts that overlap with computing are left out."""

    compute: float  # forward and backward passes
    accumulate: float
    reduce: float  # the gradients over the ranks
    optimizer: float
    gather: float  # the new weights to all ranks

    @property
    def total(self) -> float:
        """The whole step."""
        return self.compute + self.accumulate + self.reduce + self.optimizer + self.gather


def step_time(
    model: ModelConfig,
    sizes: Sizes,
    setting: Setting,
    optimizer: str,
    lengths: Lengths,
    batch: tuple[int, int],
    hardware: tuple[Card, Network],
) -> StepTime:
    """The time of a step. ``batch``: the global batch, and the micro-batches per rank."""
    (global_batch, micro_batches), (card, network), ranks = batch, hardware, setting.ranks
    counts = lengths.batch(global_batch)
    tokens = counts.tokens / ranks / micro_batches
    rate = 1e12 * card.rate(model.hidden, lengths.squares / lengths.tokens, tokens)
    compute = model_flops(model, counts) / ranks / rate * CHECKPOINTING_FACTOR[setting.checkpointing]
    update = OFFLOADED_PS if setting.offloads else card.optimizer_ps(optimizer)
    one_pass = network.pass_seconds(setting.element * sizes.padded(ranks), ranks)
    reduction = 2 * one_pass if setting.deepspeed_bf16 or setting.stage == 0 else one_pass
    return StepTime(
        compute=compute * (ZERO_3_FACTOR if setting.stage == 3 else 1),
        accumulate=0.0 if setting.stage == 3 else 1e-12 * ACCUMULATE_PS * sizes.parameters * micro_batches,
        # stage 2 reduces each micro-batch while the next one is computed; stage 3's are in its factor
        reduce=0.0 if setting.stage == 3 else reduction,
        optimizer=1e-12 * update * sizes.share(setting.stage, ranks),
        gather=one_pass if setting.stage in (1, 2) else 0.0,
    )
