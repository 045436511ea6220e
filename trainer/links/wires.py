"""The rates of the hardware between two ranks, and the hardware that a measured rate looks like.

Rates are per direction, in decimal gigabytes per second: NVLink per GPU, the others per port. Sources: NVIDIA's data
sheets of the A100 (NVLink 600 GB/s, both directions together), H100 and H200 (900) and B200 (1,800); PCI-SIG: 16 lanes
of 32 (5.0) or 16 (4.0) GT/s with 128b/130b encoding, less the packets' headers; the InfiniBand Trade Association's
roadmap: NDR 400 and HDR 200 Gb/s on 4 lanes; IEEE 802.3 for Ethernet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

GIGA = 1e9
INTERFACES = Path("/sys/class/net")


@dataclass(frozen=True)
class Wire:
    """A kind of connection, with its rate per direction in bytes per second."""

    name: str
    rate: float


NVLINK = (Wire("NVLink 3", 300e9), Wire("NVLink 4", 450e9), Wire("NVLink 5", 900e9))
PCIE = (Wire("PCIe 4.0 x16", 27e9), Wire("PCIe 5.0 x16", 55e9))
ETHERNET = (Wire("1 GbE", 0.125e9), Wire("10 GbE", 1.25e9), Wire("25 GbE", 3.125e9), Wire("100 GbE", 12.5e9))
INFINIBAND = (Wire("InfiniBand HDR", 25e9), Wire("InfiniBand NDR", 50e9))  # EDR is as fast as 100 GbE
BETWEEN_GPUS = (*NVLINK, *PCIE)
# how PyTorch names GPUs that come with NVLink
GPU_NAMES = {"A100-SXM": NVLINK[0], "H100 80GB HBM3": NVLINK[1], "H200": NVLINK[1], "B200": NVLINK[2]}


def wire_of_gpu(name: str) -> Wire | None:
    """Return the NVLink of a GPU, given its name; None if it has none or is unknown."""
    return next((wire for part, wire in GPU_NAMES.items() if part in name), None)


def wire_of_ports(ports: Iterable[str]) -> Wire | None:
    """Return the fastest of InfiniBand and RoCE ports, written as ``mlx5_0:1 400 Gb/sec (4X NDR)``."""
    found = [Wire(port, float(match[1]) / 8 * GIGA) for port in ports if (match := re.search(r"([\d.]+) Gb/sec", port))]
    return max(found, key=lambda wire: wire.rate, default=None)


def wire_of_interfaces(interfaces: Path = INTERFACES) -> Wire | None:
    """Return this node's fastest Ethernet interface that is up; None if none is known, as in most containers.

    Virtual interfaces are left out: their speed is invented.
    """
    found = []
    for folder in interfaces.glob("*"):
        try:
            state, megabits = (folder / "operstate").read_text().strip(), int((folder / "speed").read_text())
        except (OSError, ValueError):
            continue  # it is down or has no speed
        if state == "up" and megabits > 0 and (folder / "device").exists():
            found.append(Wire(f"{folder.name} {megabits / 1000:g} GbE", megabits / 8000 * GIGA))
    return max(found, key=lambda wire: (wire.rate, wire.name), default=None)


def looks_like(rate: float, wires: Iterable[Wire]) -> Wire:
    """Return the slowest of the wires that can carry ``rate`` bytes per second, or the fastest of all."""
    ordered = sorted(wires, key=lambda wire: wire.rate)
    return next((wire for wire in ordered if wire.rate >= rate), ordered[-1])
