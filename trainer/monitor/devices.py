"""The node and device of a rank, as metrics and the log name them."""

from __future__ import annotations

import socket

import torch


def device_facts(device: torch.device) -> dict[str, str]:
    """The node and device of this rank, which ranks of other nodes cannot see."""
    facts = {"node": socket.gethostname(), "device": device.type, "gpu_uuid": ""}
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        facts |= {"device": gpu.name, "gpu_uuid": f"GPU-{gpu.uuid}"}
    return facts
