"""Exports the trained model to ONNX for other runtimes, and verifies with onnxruntime that it is the same model.

The inputs of ``model.onnx`` are those that ``transformers``' tokenizers produce, (batch, sequence) int64 each. Its
outputs are those that Hugging Face's optimum expects for the task. Batch and sequence may have any size, up to the
model's positions. Padding is masked and does not affect the result.
"""

from __future__ import annotations

import logging
import math
import warnings
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.convert.hugging_face import SILENT, difference
from trainer.errors import TrainerError
from trainer.model.batch import MicroBatch
from trainer.model.bert import Bert, ModelConfig, pool

OPSET = 18  # the first with every operation used here; it dates from 2022, so old runtimes support it too
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
OUTPUTS = {  # optimum's name of a task: names of its outputs
    "fill-mask": ("logits", "seq_relationship_logits"),  # (batch, sequence, vocabulary), (batch, 2)
    "feature-extraction": ("last_hidden_state", "pooler_output"),  # (batch, sequence, hidden), (batch, hidden)
}
# Largest allowed difference of an output, as a share of the largest. onnxruntime fuses and orders fp32 sums differently
# on each processor; a wrong activation, mask or LayerNorm epsilon shows as 1e-3 or more.
TOLERANCE = 1e-4
_LARGEST_FILE = 1_800_000_000  # bytes of weights inside the file: a protocol buffer is limited to 2 GB


class Padded(nn.Module):
    """A BERT for padded batches that uses only plain PyTorch operations and shares the weights of ``bert``."""

    def __init__(self, bert: Bert, task: str) -> None:
        """``task``: one of OUTPUTS."""
        super().__init__()
        self.bert, self.task, rows = bert, task, bert.model.vocab_size
        self.table = nn.Parameter(bert.token_table[:rows], requires_grad=False)
        self.decoder_bias = nn.Parameter(bert.decoder_bias[:rows].clone(), requires_grad=False)
        self.decoder_bias[bert.predicted :] = SILENT

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs of the task, in the order of OUTPUTS. All inputs are (B, S) int64."""
        bert, model = self.bert, self.bert.model

        def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.layer_norm(x, (model.hidden,), weight, bias, model.layer_norm_eps)

        def next_input(z: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:  # and the next residual
            x = norm(z, weight, bias)
            return x, z if model.layer_norm == "before" else x

        z = F.embedding(input_ids, self.table) + F.embedding(token_type_ids, bert.segment_table)
        z = z + bert.position_table[: input_ids.shape[1]]  # (B, S, D)
        x, residual = next_input(z, bert.embedding_norm_weight, bert.embedding_norm_bias)
        hidden = (1.0 - attention_mask[:, None, None, :].float()) * torch.finfo(torch.float32).min  # (B, 1, 1, S)
        layers: list[Any] = list(bert.layers)
        for layer in layers:
            y = self._attention(layer, x, hidden)
            x, residual = next_input(residual + y, layer.attention_norm_weight, layer.attention_norm_bias)
            y = F.gelu(F.linear(x, layer.mlp_in_weight, layer.mlp_in_bias), approximate=model.gelu)
            y = F.linear(y, layer.mlp_out_weight, layer.mlp_out_bias)
            x, residual = next_input(residual + y, layer.mlp_norm_weight, layer.mlp_norm_bias)
        pooled = torch.tanh(F.linear(x[:, 0], bert.pooler_weight, bert.pooler_bias))  # (B, D)
        if self.task == "feature-extraction":
            return x, pooled
        y = F.gelu(F.linear(x, bert.mlm_weight, bert.mlm_bias), approximate=model.gelu)
        y = norm(y, bert.mlm_norm_weight, bert.mlm_norm_bias)
        return F.linear(y, self.table, self.decoder_bias), F.linear(pooled, bert.nsp_weight, bert.nsp_bias)

    def _attention(self, layer: Any, x: Tensor, hidden: Tensor) -> Tensor:
        heads, size = self.bert.model.heads, self.bert.model.hidden // self.bert.model.heads
        qkv = F.linear(x, layer.qkv_weight, layer.qkv_bias).view(*x.shape[:2], 3, heads, size)  # (B, S, 3, N, H)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # (B, N, S, H)
        scores = q @ k.transpose(-1, -2) / math.sqrt(size) + hidden  # (B, N, S, S)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)  # (B, S, D)
        return F.linear(mixed, layer.attention_out_weight, layer.attention_out_bias)


def export_checked(
    weights: dict[str, Tensor], model: ModelConfig, task: str, path: Path, batch: MicroBatch, fillers: int = 0
) -> float:
    """Write ``path``, and return the result of :func:`check` on ``batch``.

    ``fillers``: number of pieces at the end of the vocabulary that get zero probability.

    Raises TrainerError if a required library is not installed, or if :func:`check` does.
    """
    if missing := [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]:
        raise TrainerError(f"--onnx needs {' and '.join(missing)}: pip install {' '.join(missing)}, or drop --onnx")
    bert = Bert(model, fillers=fillers)
    bert.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    write(bert, task, path)
    return check(path, bert, task, batch)


def write(bert: Bert, task: str, path: Path) -> None:
    """Write the model's graph and weights."""
    module, longest = Padded(bert.eval(), task).eval(), bert.model.max_positions
    examples = tuple(torch.ones(2, min(longest, 8), dtype=torch.int64) for _ in INPUTS)  # separate: no shared input
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=longest)}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns about torchvision, which is not needed here
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # deprecation warnings of the exporter
        torch.onnx.export(
            module,
            examples,
            path,
            input_names=INPUTS,
            output_names=OUTPUTS[task],
            dynamic_shapes=(axes, axes, axes),
            opset_version=OPSET,
            dynamo=True,
            external_data=sum(p.numel() for p in bert.parameters()) * 4 > _LARGEST_FILE,
            verbose=False,
        )


def check(path: Path, bert: Bert, task: str, batch: MicroBatch) -> float:
    """The largest difference between onnxruntime's outputs and our unpadded ones, as a share of the largest.

    onnxruntime gets the padded batch as a whole, and then each sequence on its own. Raises TrainerError if the
    difference exceeds TOLERANCE.
    """
    session = import_module("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    names, lengths = list(OUTPUTS[task]), batch.cu_seqlens.diff()
    present = torch.arange(batch.max_seqlen) < lengths[:, None]  # (B, S)
    tokens, segments = (
        torch.zeros(present.shape, dtype=torch.int64).masked_scatter(present, each)
        for each in (batch.tokens, batch.segments)
    )
    given = {n: t.numpy() for n, t in zip(INPUTS, (tokens, present.long(), segments), strict=True)}
    whole = session.run(names, given)
    found: list[tuple[Tensor, ...]] = [(torch.from_numpy(whole[0])[present], torch.from_numpy(whole[1]))]
    alone = [
        session.run(names, {name: each[row : row + 1, :length] for name, each in given.items()})
        for row, length in enumerate(lengths.tolist())
    ]
    found.append(tuple(torch.cat([torch.from_numpy(each[k]).flatten(0, -2) for each in alone]) for k in (0, 1)))
    expected = _ours(bert, task, batch)
    worst = max(difference(ours, theirs) for pair in found for ours, theirs in zip(expected, pair, strict=True))
    if not worst <= TOLERANCE:  # written so that NaN fails
        raise TrainerError(f"{path}: outputs differ from Lambert's by {worst:.1e}; only {TOLERANCE} is allowed")
    return worst


@torch.no_grad()
def _ours(bert: Bert, task: str, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Our outputs of the task, for all T tokens of the unpadded batch and for its B sequences."""
    if task == "fill-mask":
        return bert.logits(replace(batch, masked=torch.arange(len(batch.tokens))))
    x = bert.encode(batch)
    return x, pool(x, batch, bert.pooler_weight, bert.pooler_bias)
