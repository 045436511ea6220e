"""Floating-point operations that a training step needs, and the peak rates of known GPUs."""

from __future__ import annotations

from trainer.model.batch import GlobalCounts
from trainer.model.bert import ModelConfig

# peak TFLOP/s for dense fp16 with fp32 sums, from NVIDIA's data sheets, by the start of CUDA's device name
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
    """Operations of one step's forward and backward passes over the global batch.

    Per token, ``6 N + 12 L H s`` with N = L (4 H² + 2 H I), which is 12 L H² if I = 4 H; per predicted token,
    ``6 (H² + H V)``.
    """
    weights = model.layers * (4 * model.hidden**2 + 2 * model.hidden * model.intermediate)
    encoder = 6 * weights * counts.tokens
    attention = 12 * model.layers * model.hidden * counts.squares
    head = 6 * (model.hidden**2 + model.hidden * model.vocab_size) * counts.targets
    return float(encoder + attention + head)


def peak_flops(device: str) -> float:
    """Peak operations per second of one device, by its name; 0 if unknown."""
    if " MIG " in device:  # only a part of the GPU
        return 0.0
    known = [name for name in PEAKS if device == name or device.startswith((f"{name} ", f"{name}-"))]
    return PEAKS[max(known, key=len)] * 1e12 if known else 0.0
