"""The memory of a rank's GPU by kind, at the moment of the step when most of it is in use. Pure functions.

The sizes of what stays from step to step under ZeRO 1 and 2 in half precision are those of
:mod:`trainer.engine.gradients`, and a test compares them with an engine's tensors. Those of ZeRO 0 and 3, and of bf16
under ZeRO 1, are DeepSpeed 0.19.8's (``runtime/zero``, ``runtime/bf16_optimizer.py``); its temporary buffers are
estimates. Activations are counted from what the autograd functions in `kernels` and the matrix products save, one term
per tensor. A test counts the storages that autograd really saves and requires equal numbers. The letters are those of
:mod:`trainer.model.batch`, with L layers, F the width of the MLP, and e bytes per element.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch

from trainer.engine.engine import EngineConfig, deepspeed_config
from trainer.model.bert import Bert, ModelConfig
from trainer.model.checkpointing import Checkpointing

GIB, MIB = 2**30, 2**20
INDEX, NUMBER = 8, 4  # bytes of an int64, and of an int32 or fp32
KINDS = "weights masters moments gradients accumulation activations logits workspace NCCL context".split()
OUTSIDE = ("NCCL", "context")  # not in PyTorch's own count, torch.cuda.max_memory_reserved
ALIGNED = 2  # elements; DeepSpeed pads the row of weights to a multiple of this times the ranks

# Allowances. The first was fitted to 48 peaks on an H200 (docs/lab.md, 2026-11-29); the other two are assumed.
WORKSPACE_BYTES = 176 * MIB  # cuBLAS's workspaces, partial sums, and what the allocator rounds up
NCCL_BYTES = 1 * GIB  # buffers and channels of one communicator; none on one rank
CONTEXT_BYTES = 600 * MIB  # CUDA's context and the loaded kernels

Precision = Literal["fp16", "bf16", "fp32"]
Bytes = dict[str, int]


@dataclass(frozen=True)
class Sizes:
    """The numbers of elements of a model's parameters."""

    parameters: int
    layer: int  # in one layer
    small: int  # that stay whole on each rank under ZeRO 3
    by_tensor: tuple[int, ...]

    def padded(self, ranks: int) -> int:
        """Elements of the row that is cut into equal shares under ZeRO 1 and 2."""
        multiple = ALIGNED * ranks
        return -(-self.parameters // multiple) * multiple

    def share(self, stage: int, ranks: int) -> int:
        """Elements that one rank updates."""
        if stage == 0:
            return self.parameters
        if stage == 3:
            return sum(-(-elements // ranks) for elements in self.by_tensor)
        return self.padded(ranks) // ranks


@dataclass(frozen=True)
class Setting:
    """How a run uses its GPUs, as far as memory depends on it."""

    stage: int
    precision: Precision
    ranks: int
    offloads: bool = False
    apex: bool = False  # NVIDIA Apex's optimizers need an fp32 copy of the gradients
    checkpointing: Checkpointing = "none"

    @property
    def deepspeed_bf16(self) -> bool:
        """Whether DeepSpeed's BF16_Optimizer runs, which keeps and reduces all gradients in fp32."""
        return self.stage == 1 and self.precision == "bf16" and not self.offloads

    @property
    def element(self) -> int:
        """Bytes per weight and activation."""
        return 4 if self.precision == "fp32" else 2


@cache
def sizes(model: ModelConfig) -> Sizes:
    """Count a model's parameters without allocating them."""
    with torch.device("meta"):
        named = {name: p.numel() for name, p in Bert(model).named_parameters()}
    parameters = sum(named.values())
    stated: Any = deepspeed_config(EngineConfig(zero_stage=3), "fp16", 1, parameters)["zero_optimization"]
    limit = stated["stage3_param_persistence_threshold"]
    layer = sum(elements for name, elements in named.items() if name.startswith("layers.0."))
    small = sum(elements for elements in named.values() if elements <= limit)
    return Sizes(parameters, layer, small, tuple(named.values()))


@dataclass(frozen=True)
class Load:
    """The size of a micro-batch."""

    tokens: int  # T
    targets: int  # P, masked positions
    sequences: int  # B


class Kept(NamedTuple):
    """Bytes kept for the backward pass."""

    encoder: int  # embeddings and layers
    heads: int  # both heads, without the logits
    logits: int  # of the MLM head; backward overwrites them with their gradient


def layer_bytes(model: ModelConfig, element: int, checkpointing: Checkpointing = "none") -> int:
    """Bytes per token that one layer keeps: e (8 D + 2 F) + 4 N + 16, the same for post-LN and pre-LN.

    D each: the layer's input, attention's output, the first LayerNorm's output, and what each of the two LayerNorms
    reads (post-LN: the sublayer's output; pre-LN: the sum); 3 D: queries, keys and values; F each: the input and
    output of GELU. In fp32: one number per head (attention) and four per token (LayerNorm).

    "cheap" does not keep the outputs of the first LayerNorm and of GELU; "full" keeps only the layer's inputs, of which
    a pre-LN layer has two.
    """
    if checkpointing == "full":
        return element * model.hidden * (2 if model.layer_norm == "before" else 1)
    again = model.hidden + model.intermediate if checkpointing == "cheap" else 0
    return element * (8 * model.hidden + 2 * model.intermediate - again) + NUMBER * (model.heads + 4)


def kept(model: ModelConfig, load: Load, element: int, checkpointing: Checkpointing = "none") -> Kept:
    """The bytes that a micro-batch keeps, with ``element`` bytes per element of weights and activations.

    Dropout keys are counted even if all dropout is 0: attention refers to them. Sequence ends, labels and classes are
    included; the few other integers of the batch, 8 bytes per target or sequence, are not.
    """
    tokens, targets, sequences = load.tokens, load.targets, load.sequences
    hidden = element * model.hidden
    embedding = tokens * (3 * INDEX + 2 * NUMBER + 2 * NUMBER)  # indices, dropout keys, LayerNorm's statistics
    if model.layer_norm == "before":
        embedding += tokens * hidden  # the sum that the first LayerNorm reads
    encoder = embedding + model.layers * tokens * layer_bytes(model, element, checkpointing)
    mlm = targets * (4 * hidden + 2 * INDEX + 6 * NUMBER)  # product, GELU and LayerNorm; labels; row statistics
    nsp = sequences * (2 * hidden + 2 * element + INDEX + 4 * NUMBER) + NUMBER * (sequences + 1)
    return Kept(encoder, mlm + nsp, element * targets * model.vocab_rows)


def resident(model: ModelConfig, setting: Setting, accumulates: bool) -> Bytes:
    """Bytes on the GPU that stay from step to step. ``accumulates``: a step has several micro-batches."""
    stage, ranks, element, counted = setting.stage, setting.ranks, setting.element, sizes(model)
    whole, share = counted.padded(ranks), counted.share(stage, ranks)
    found = dict.fromkeys(KINDS, 0)
    if not setting.offloads:
        found["masters"], found["moments"] = 4 * share, 8 * share
    if stage == 0:  # the weights are the masters
        found |= {"weights": 4 * counted.parameters, "masters": 0, "gradients": 4 * counted.parameters}
    elif stage == 3:
        found |= {"weights": element * (share + counted.small), "gradients": element * share}
    elif setting.precision == "fp32":  # DeepSpeed reduces in a bucket and keeps its share of the sums
        found |= {"weights": 4 * whole, "gradients": 4 * whole, "accumulation": 4 * share}
    elif setting.deepspeed_bf16:
        found |= {"weights": 2 * whole, "accumulation": 4 * whole}
    else:
        row, reduced = 2 * whole, 2 * share if ranks > 1 else 0
        sums = 4 * (whole if stage == 1 else share) if accumulates else 0
        found |= {"weights": 2 * whole, "gradients": row + reduced, "accumulation": sums}
    if setting.apex:
        found["gradients"] += 4 * share
    found["NCCL"] = NCCL_BYTES if ranks > 1 else 0
    found["context"] = CONTEXT_BYTES
    return found


def host_bytes(model: ModelConfig, setting: Setting) -> int:
    """Bytes of host memory that a rank's offloaded optimizer takes: masters, moments, and new weights."""
    return (12 + setting.element) * sizes(model).share(setting.stage, setting.ranks) if setting.offloads else 0


def peak(model: ModelConfig, setting: Setting, load: Load, accumulates: bool) -> Bytes:
    """Bytes by kind at the moment of the step when their sum is largest.

    At the end of the forward pass, everything that backward needs is kept. What a later moment takes beyond that, in
    the space that the logits and activations have left by then, is counted as workspace. So is a second block of the
    logits' size, which PyTorch's allocator reserved on an H200. Backward frees the logits first; probably smaller
    tensors then divide their block.
    """
    found = resident(model, setting, accumulates)
    held = kept(model, load, setting.element, setting.checkpointing)
    passing = pass_bytes(model, setting, load)
    if setting.stage == 3:  # the weights that it has gathered at once: all, up to ``stage3_max_live_parameters``
        counted = sizes(model)
        found["weights"] += setting.element * max(min(counted.parameters - counted.small, 10**9), 2 * counted.layer)
    found["activations"], found["logits"] = held.encoder + held.heads, held.logits
    found["workspace"] = passing - sum(held) + held.logits + WORKSPACE_BYTES
    return found


def pass_bytes(model: ModelConfig, setting: Setting, load: Load) -> int:
    """The most bytes that a forward and backward pass takes, with the gradients of weights.

    They are all there at its end, unless DeepSpeed keeps or reduces each one as it comes.
    """
    held = kept(model, load, setting.element, setting.checkpointing)
    at_the_end = 0 if setting.stage in (0, 3) else setting.element * sizes(model).parameters
    return max(sum(held), _in_the_last_layer(model, setting, load, held), at_the_end)


def reserved(found: Bytes) -> int:
    """The part of a rank's memory that ``torch.cuda.max_memory_reserved`` counts."""
    return sum(size for kind, size in found.items() if kind not in OUTSIDE)


def _in_the_last_layer(model: ModelConfig, setting: Setting, load: Load, held: Kept) -> int:
    """Bytes in backward's first MLP: the heads are done, and gradients of its input and of GELU's input arrive."""
    weights = (model.vocab_rows + 2 * model.hidden + model.intermediate) * model.hidden  # gradients so far
    arriving = load.tokens * (model.hidden + model.intermediate)
    layer = layer_bytes(model, setting.element), layer_bytes(model, setting.element, setting.checkpointing)
    again = load.tokens * (layer[0] - layer[1])  # what checkpointing computes again
    return held.encoder + again + setting.element * (weights + arriving)
