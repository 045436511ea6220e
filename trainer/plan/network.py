"""The time of a reduction over the ranks, by the α–β model of a ring. Pure, except for reading a file.

A reduce-scatter or an all-gather of b bytes over r ranks is r - 1 steps of b / r bytes:
(r - 1) α + (r - 1) / r · b / β (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005, section 2 and the ring algorithm). β is NCCL's bus bandwidth, α the latency of one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from data_prep.json_text import read_json
from trainer.errors import TrainerError, shortage
from trainer.links.wires import GIGA, INFINIBAND

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
