"""Floating-point operations: those a model needs, and those a device could do."""

from __future__ import annotations

from trainer.model.batch import GlobalCounts
from trainer.model.bert import ModelConfig

# dense fp16 with fp32 sums, in TFLOP/s, by the start of the name that CUDA gives the device; NVIDIA's data sheets
PEAKS = {
    "Tesla V100-SXM2": 125.0,
    "NVIDIA A100": 312.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA H100": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.0,
    "NVIDIA B200": 2250.0,
}


def model_flops(model: ModelConfig, counts: GlobalCounts) -> float:
    """Operations of one step's forward and backward over the global batch.

    ``6 N + 12 L H s`` a token with N = L (4 H² + 2 H I), which is 12 L H² where I = 4 H, and
    ``6 (H² + H V)`` a predicted token.
    """
    weights = model.layers * (4 * model.hidden**2 + 2 * model.hidden * model.intermediate)
    encoder = 6 * weights * counts.tokens
    attention = 12 * model.layers * model.hidden * counts.squares
    head = 6 * (model.hidden**2 + model.hidden * model.vocab_size) * counts.targets
    return float(encoder + attention + head)


def peak_flops(device: str) -> float:
    """Operations a second of one device by its name, 0 where it is not known."""
    if " MIG " in device:  # a part of it
        return 0.0
    known = [name for name in PEAKS if device == name or device.startswith((f"{name} ", f"{name}-"))]
    return PEAKS[max(known, key=len)] * 1e12 if known else 0.0
