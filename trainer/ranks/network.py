"""What the ranks speak over: InfiniBand or not, in the words of the kernel and of NCCL itself."""

from __future__ import annotations

import re
from pathlib import Path

DEVICES = Path("/sys/class/infiniband")
TCP = "Socket"  # NCCL's name of it


def ports(devices: Path = DEVICES) -> list[str]:
    """InfiniBand and RoCE ports of this node that are up: ``mlx5_0:1 400 Gb/sec (4X NDR)``."""
    found = []
    for port in sorted(devices.glob("*/ports/*")):
        try:
            state, rate = (port / "state").read_text(), (port / "rate").read_text()
        except OSError:
            continue  # a device that is being taken away
        if "ACTIVE" in state:
            found.append(f"{port.parent.parent.name}:{port.name} {rate.strip()}")
    return found


def spoken(log: str) -> str:
    """The network that NCCL says it uses, by its own name ("IB", "Socket", a plugin's); empty if it has not said."""
    found = re.findall(r"NCCL INFO (?:Initialized NET plugin|Using network) (\S+)", log)
    return found[-1] if found else ""


def falls_to_tcp(log: str) -> str:
    """A warning where NCCL speaks over TCP between nodes; empty where it does not."""
    if spoken(log) != TCP:
        return ""
    up = ", ".join(ports())
    there = f"though {up} is up" if up else "and this node shows no InfiniBand port that is up"
    return (
        f"NCCL speaks over TCP, {there}: expect a fraction of the speed; check NCCL_IB_DISABLE, NCCL_IB_HCA, NCCL_NET, "
        "and that the container sees /dev/infiniband"
    )
