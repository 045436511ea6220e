"""The bytes that one micro-batch keeps on a GPU from its forward pass until its backward pass. Pure functions.

They are counted from what the autograd functions in `kernels` and the matrix products save, one term per tensor. A
test counts the storages that autograd really saves and requires equal numbers. The letters are those of
:mod:`trainer.model.batch`, with L layers, F the width of the MLP, and e bytes per element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from trainer.model.bert import ModelConfig
from trainer.model.checkpointing import Checkpointing

INDEX, NUMBER = 8, 4  # bytes of an int64, and of an int32 or fp32


class Load(NamedTuple):
    """The size of a micro-batch."""

    tokens: int  # T
    targets: int  # P, masked positions
    sequences: int  # B


class Kept(NamedTuple):
    """Bytes kept for the backward pass."""

    encoder: int  # embeddings and layers
    heads: int  # both heads, without the logits
    logits: int  # of the MLM head; backward overwrites them with their gradient


def layer_bytes(model: ModelConfig, element: int) -> int:
    """Bytes per token that one layer keeps: e (8 D + 2 F) + 4 N + 16, the same for post-LN and pre-LN.

    D each: the layer's input, attention's output, the first LayerNorm's output, and what each of the two LayerNorms
    reads (post-LN: the sublayer's output; pre-LN: the sum); 3 D: queries, keys and values; F each: the input and
    output of GELU. In fp32: one number per head (attention) and four per token (LayerNorm).
    """
    return element * (8 * model.hidden + 2 * model.intermediate) + NUMBER * (model.heads + 4)


def cheap_layer_bytes(model: ModelConfig, element: int) -> int:
    """The same if backward computes the first LayerNorm's and GELU's outputs again."""
    return layer_bytes(model, element) - element * (model.hidden + model.intermediate)


def full_layer_bytes(model: ModelConfig, element: int) -> int:
    """The same if backward computes the whole layer again: only its inputs, of which a pre-LN layer has two."""
    return element * model.hidden * (2 if model.layer_norm == "before" else 1)


# by engine.checkpointing; see trainer/model/checkpointing.py
LAYER_BYTES: dict[Checkpointing, Callable[[ModelConfig, int], int]] = {
    "none": layer_bytes,
    "cheap": cheap_layer_bytes,
    "full": full_layer_bytes,
}


def kept(model: ModelConfig, load: Load, element: int, checkpointing: Checkpointing = "none") -> Kept:
    """What a micro-batch keeps, with ``element`` bytes per element of weights and activations.

    Dropout keys are counted even if all dropout is 0: attention refers to them. Sequence ends, labels and classes are
    included; the few other integers of the batch, 8 bytes per target or sequence, are not.
    """
    tokens, targets, sequences = load
    hidden = element * model.hidden
    embedding = tokens * (3 * INDEX + 2 * NUMBER + 2 * NUMBER)  # indices, dropout keys, LayerNorm's statistics
    if model.layer_norm == "before":
        embedding += tokens * hidden  # the sum that the first LayerNorm reads
    encoder = embedding + model.layers * tokens * LAYER_BYTES[checkpointing](model, element)
    mlm = targets * (4 * hidden + 2 * INDEX + 6 * NUMBER)  # product, GELU and LayerNorm; labels; row statistics
    nsp = sequences * (2 * hidden + 2 * element + INDEX + 4 * NUMBER) + NUMBER * (sequences + 1)
    return Kept(encoder, mlm + nsp, element * targets * model.vocab_rows)
