"""One sentence on what bounds a run's speed and what to change. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.profile import parts
from trainer.profile.breakdown import BACKWARD, FORWARD, OPTIMIZER, REST, Breakdown
from trainer.profile.steps import Timing

# shares of a step from which something bounds it
WAITING, IDLE, REDUCING, UPDATING = 0.05, 0.10, 0.15, 0.10


@dataclass(frozen=True)
class Setting:
    """The settings that the advice is about."""

    where: str  # the phase's place in the configuration: phases.0
    cuda: bool
    peak: float  # operations per second of the GPU at most; 0 if unknown
    ranks: int
    sequences: int  # per micro-batch of a rank
    tokens: float  # valid tokens per micro-batch of a rank
    micro_batches: int  # per step and rank, in the profile
    run_micro_batches: int  # and in the run
    checkpointing: str
    log_every_steps: int

    @property
    def shortened(self) -> float:
        """The micro-batches of a step of the run, as a multiple of those in the profile."""
        return self.run_micro_batches / self.micro_batches


def busy_share(found: Breakdown, timing: Timing, cuda: bool) -> float:
    """The share of a step in which the device has work.

    The profiler slows the host down, but not a GPU's kernels: so a GPU's work is compared with the time without it.
    """
    return min(1.0, found.busy / (timing.milliseconds if cuda else found.step))


def advise(found: Breakdown, timing: Timing, setting: Setting) -> str:
    """A sentence on what bounds the step and what to change."""
    step = timing.milliseconds
    if timing.waited >= WAITING * step:
        return (
            f"Bound by the loader: a step waits {timing.waited:.1f} ms ({timing.waited / step:.0%}) for its data: keep "
            "the shards on a faster disk, or give each rank more CPU cores."
        )
    if not setting.cuda:
        return _on_cpu(found)
    reducing = found.part(parts.REDUCTION) / found.step / setting.shortened
    if setting.ranks > 1 and reducing >= REDUCING:
        return (
            f"Bound by the reduction over {setting.ranks} ranks, which takes {reducing:.0%} of a step: raise "
            f"{setting.where}.global_batch, so that a step has more micro-batches, or use faster links."
        )
    idle = 1 - busy_share(found, timing, cuda=True)
    if idle >= IDLE:
        return f"Host-bound: the GPU is idle for {idle:.0%} of a step{_idle_remedy(found, setting)}"
    return f"Device-bound: the GPU works for {1 - idle:.0%} of a step{_busy_remedy(found, setting)}"


def _on_cpu(found: Breakdown) -> str:
    largest = max(found.spent, key=found.part)
    share, most = found.busy / found.step, found.part(largest) / found.busy
    return (
        f"On CPUs: a rank computes for {share:.0%} of a step, {most:.0%} of it in the part {largest!r}: give each rank "
        "more cores, or use a GPU."
    )


def _idle_remedy(found: Breakdown, setting: Setting) -> str:
    model = found.idle.get(FORWARD, 0.0) + found.idle.get(BACKWARD, 0.0)
    largest = max(found.idle, key=lambda column: found.idle[column])
    if largest == REST and setting.log_every_steps < 10:
        return f", mostly between steps: raise metrics.log_every_steps, now {setting.log_every_steps}."
    if largest == OPTIMIZER and model < found.idle[OPTIMIZER]:
        return (
            f", mostly around the optimizer: raise {setting.where}.global_batch, so that a step has more micro-batches."
        )
    size = f"{setting.sequences:,} sequences, {setting.tokens:,.0f} tokens"
    pieces, key = found.pieces / setting.micro_batches, f"{setting.where}.micro_batch"
    keys = f"{key} and global_batch" if setting.run_micro_batches == 1 else key
    return (
        f", because it finishes kernels faster than the host launches them: raise {keys}: a micro-batch has {size} "
        f"and needs {pieces:,.0f} launches whatever its size."
    )


def _busy_remedy(found: Breakdown, setting: Setting) -> str:
    largest = max(found.spent, key=found.part)
    said = f", and the largest part of it is {largest}, {found.part(largest) / found.step:.0%}"
    if setting.checkpointing != "none":
        less = "none or cheap" if setting.checkpointing == "full" else "none"
        return f"{said}: set engine.checkpointing to {less} if that fits, so that backward computes less again."
    updating = (found.part(parts.OPTIMIZER) + found.part(parts.ACCUMULATION)) / found.step / setting.shortened
    if updating >= UPDATING:
        return f"{said}; the optimizer takes {updating:.0%}: raise {setting.where}.global_batch to step less often."
    return f"{said}: a larger micro-batch would gain little; use more GPUs, or faster ones."
