"""The time of an optimizer step by part. Pure, except for reading a file.

Forward and backward come from measured rates (:mod:`trainer.plan.cards`). The constants below are from `docs/lab.md`,
BERT-Large on H200s, 2026-11-28 and 29. Waiting for data is not counted.

Reductions follow the α–β model of a ring. A reduce-scatter or an all-gather of b bytes over r ranks is r - 1 steps of
b / r bytes: (r - 1) α + (r - 1) / r · b / β (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005, section 2 and the ring algorithm). β is NCCL's bus bandwidth, α the latency of one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from data_prep.json_text import read_json
from trainer.errors import TrainerError, shortage
from trainer.links.wires import GIGA, INFINIBAND
from trainer.model.bert import ModelConfig
from trainer.model.checkpointing import Checkpointing
from trainer.model.flops import model_flops
from trainer.plan.cards import Card
from trainer.plan.lengths import Lengths
from trainer.plan.memory import Setting, sizes

ACCUMULATE_PS = 0.98  # per parameter and micro-batch: 0.33 ms for 336 million
OFFLOADED_PS = 2400.0  # per updated parameter: 0.8 s for 336 million on 16 cores
ZERO_3_FACTOR = 2.02  # of forward and backward
# Forward and backward with checkpointing: "full" is one forward pass more, of three. Measured on an H200 (docs/lab.md,
# 2026-11-29): cheap 1.03 to 1.04, full 1.31 to 1.35.
CHECKPOINTING_FACTOR: dict[Checkpointing, float] = {"none": 1.0, "cheap": 1.04, "full": 4 / 3}
LAUNCH_BOUND = 2.0  # times the least that a micro-batch takes: below, the host's speed decides
# Two H200s over NVLink 4 reduce BERT-Large's 672 MB in 1.7 ms (docs/lab.md, 2026-11-28, stage 2).
MEASURED_INSIDE = 672e6 / 2 / 1.7e-3
# Not measured: to be calibrated, or replaced by --network.
ASSUMED_LATENCY = 10e-6  # seconds per step of the ring
ASSUMED_SHARE = 0.8  # of the ports' rate that NCCL reaches between nodes


@dataclass(frozen=True)
class Network:
    """The links that the slowest step of a ring goes over."""

    latency: float  # α, seconds per step
    bandwidth: float  # β, bytes per second of one rank
    source: str  # where both come from

    def pass_seconds(self, size: float, ranks: int) -> float:
        """Seconds of a reduce-scatter or an all-gather of ``size`` bytes in all."""
        return (ranks - 1) * (self.latency + size / ranks / self.bandwidth)


def assumed(gpus: int, nodes: int) -> Network:
    """NVLink inside a node; between nodes, one InfiniBand NDR port per GPU, which all rings of a node share."""
    port = INFINIBAND[-1]
    if nodes == 1:
        return Network(ASSUMED_LATENCY, MEASURED_INSIDE, "NVLink as measured on two H200s; latency assumed")
    between = ASSUMED_SHARE * port.rate * gpus
    source = f"NVLink, and {gpus} {port.name} port(s) per node, assumed"
    return Network(ASSUMED_LATENCY, min(MEASURED_INSIDE, between), source)


def read_network(path: Path) -> Network:
    """α and β from ``trainer.preflight --network --json``: its fastest and its smallest reduce-scatter.

    Raises TrainerError if the file is no such result.
    """
    try:
        tree = read_json(path)
        ranks = len(tree["ranks"])
        found = [each for each in tree["collectives"] if each["collective"] == "reduce-scatter"]
        bandwidth = max(float(each["bus_bytes_per_second"]) for each in found)
        latency = min(float(each["seconds"]) for each in found) / (ranks - 1)
        if not (0 < bandwidth <= 1e15 and 0 < latency < 3600):
            raise ValueError(f"{bandwidth / GIGA:g} GB/s and {latency:g} s")
    except OSError as error:
        if shortage(error):
            raise
        raise TrainerError(f"--network {path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise TrainerError(
            f"--network {path} is no result of a network check ({error}): write one with trainer.preflight --network "
            "--json"
        ) from None
    return Network(latency, bandwidth, f"{path}, measured on {ranks} ranks")


def launch_bound(model: ModelConfig, setting: Setting, card: Card, seconds: float) -> bool:
    """Whether launching the kernels of a micro-batch may take longer than running them.

    ``seconds``: the planned time of its forward and backward pass.
    """
    factor = CHECKPOINTING_FACTOR[setting.checkpointing] * (ZERO_3_FACTOR if setting.stage == 3 else 1)
    return seconds < LAUNCH_BOUND * factor * card.least_seconds(model.layers)


def step_time(
    model: ModelConfig,
    setting: Setting,
    optimizer: str,
    lengths: Lengths,
    global_batch: int,
    micro_batches: int,
    card: Card,
    network: Network,
) -> dict[str, float]:
    """The seconds of a step on one rank by part, without those that overlap with computing.

    ``micro_batches``: per rank.
    """
    counts, counted, ranks = lengths.batch(global_batch), sizes(model), setting.ranks
    tokens = counts.tokens / ranks / micro_batches
    rate = 1e12 * card.rate(model.hidden, lengths.squares / lengths.tokens, tokens)
    least = micro_batches * card.least_seconds(model.layers)
    compute = max(model_flops(model, counts) / ranks / rate, least) * CHECKPOINTING_FACTOR[setting.checkpointing]
    update = OFFLOADED_PS if setting.offloads else card.optimizer_ps(optimizer)
    one_pass = network.pass_seconds(setting.element * counted.padded(ranks), ranks)
    reduction = 2 * one_pass if setting.deepspeed_bf16 or setting.stage == 0 else one_pass
    # stage 2 reduces each micro-batch while the next one is computed; stage 3's reductions are in its factor
    return {
        "compute": compute * (ZERO_3_FACTOR if setting.stage == 3 else 1),  # forward and backward passes
        "accumulate": 0.0 if setting.stage == 3 else 1e-12 * ACCUMULATE_PS * counted.parameters * micro_batches,
        "reduce": 0.0 if setting.stage == 3 else reduction,  # the gradients over the ranks
        "optimizer": 1e-12 * update * counted.share(setting.stage, ranks),
        "gather": one_pass if setting.stage in (1, 2) else 0.0,  # the new weights to all ranks
    }
