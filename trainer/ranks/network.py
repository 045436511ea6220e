"""Which network the ranks use, InfiniBand or not, as reported by the kernel and by NCCL; and a free port on it."""

from __future__ import annotations

import re
import socket
from pathlib import Path

DEVICES = Path("/sys/class/infiniband")
TCP = "Socket"  # NCCL's name for it


def ports(devices: Path = DEVICES) -> list[str]:
    """List this node's active InfiniBand and RoCE ports: ``mlx5_0:1 400 Gb/sec (4X NDR)``."""
    found = []
    for port in sorted(devices.glob("*/ports/*")):
        try:
            state, rate = (port / "state").read_text(), (port / "rate").read_text()
        except OSError:
            continue  # the device is being removed
        if "ACTIVE" in state:
            found.append(f"{port.parent.parent.name}:{port.name} {rate.strip()}")
    return found


def free_port(address: str) -> int:
    """Return a port of this node that nothing listens on yet; ``address`` may be empty for all of its addresses."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def spoken(log: str) -> str:
    """Return the network that NCCL reports, by its name ("IB", "Socket", a plugin's); empty if it has not reported."""
    found = re.findall(r"NCCL INFO (?:Initialized NET plugin|Using network) (\S+)", log)
    return found[-1] if found else ""


def falls_to_tcp(log: str) -> str:
    """Return a warning if NCCL uses TCP between nodes, else an empty text."""
    if spoken(log) != TCP:
        return ""
    up = ", ".join(ports())
    there = f"though {up} is up" if up else "and this node has no InfiniBand port that is up"
    return (
        f"NCCL uses TCP, {there}: expect a fraction of the speed; check NCCL_IB_DISABLE, NCCL_IB_HCA, NCCL_NET, "
        "and that the container sees /dev/infiniband"
    )
