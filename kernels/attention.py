"""Bidirectional multi-head self-attention over unpadded sequences, with dropout on the attention weights.

For each sequence and head:  out = dropout(softmax(Q K^T / sqrt(H))) V
(Vaswani et al., "Attention is all you need", 2017, equation 1; dropout as in BERT).

``qkv`` (T, 3, N, H) holds all sequences end to end; ``out`` is (T, N, H). Softmax is fp32.

On a GPU, kernels/attention_block.py runs if one block can hold a whole sequence of one head: fp16 or bf16,
H up to 64, and up to 128 tokens. Otherwise kernels/attention_tiled.py runs. Neither uses atomics, and the
launch configuration is a pure function of shape and dtype, so equal inputs give equal bits. Both keep qkv
and the log2 of the softmax's denominator, (N, T) fp32, for backward; the tiled one also keeps ``out``. The
reference keeps Q, K, V, and the weights before and after dropout, (B, N, S, S) each.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kernels import attention_block, attention_tiled, dropout
from kernels.backend import fused
from kernels.first_derivative import first_derivative_only

SEQUENCES = 65535  # the most sequences in one launch: they are the second axis of the grid


def attention_reference(
    qkv: Tensor,  # (T, 3, N, H)
    cu_seqlens: Tensor,  # (B + 1,) int32
    max_seqlen: int,
    dropout_p: float,
    keys: Tensor | None,  # (T, 2) int32
    site: int,
) -> Tensor:  # (T, N, H)
    """Pad to (B, S) and compute densely. Padding keys get no weight; the rows of padding queries are dropped."""
    tokens, _, heads, size = qkv.shape
    batch = cu_seqlens.numel() - 1
    lengths = cu_seqlens.diff()
    full = tokens == batch * max_seqlen
    slots = _slots(cu_seqlens, lengths, tokens, max_seqlen)  # (T,)

    def pad(rows: Tensor) -> Tensor:  # (T, X) -> (B, S, X)
        if not full:
            rows = rows.new_zeros(batch * max_seqlen, rows.shape[-1]).index_copy(0, slots, rows)
        return rows.view(batch, max_seqlen, -1)

    padded = pad(qkv.reshape(tokens, -1)).view(batch, max_seqlen, 3, heads, size)
    q, k, v = padded.permute(2, 0, 3, 1, 4)  # (B, N, S, H) each
    scores = (q / math.sqrt(size)) @ k.transpose(-2, -1)  # (B, N, S, S); q is scaled first, or fp16 could overflow
    if not full:
        absent = torch.arange(max_seqlen, device=qkv.device) >= lengths[:, None]  # (B, S)
        scores = scores.masked_fill(absent[:, None, None, :], torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    if keys is not None and dropout_p > 0:
        sites = site + dropout.HEAD * torch.arange(heads, dtype=torch.int32, device=qkv.device)
        weights = dropout.apply(weights, pad(keys)[:, None], sites[:, None], dropout_p)
    out: Tensor = (weights.to(v.dtype) @ v).transpose(1, 2).reshape(batch * max_seqlen, heads * size)
    return (out if full else out.index_select(0, slots)).view(tokens, heads, size)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_p: float,
        keys: Tensor | None,
        site: int,
    ) -> Tensor:
        qkv, cu_seqlens = qkv.contiguous(), cu_seqlens.contiguous()
        constants = max_seqlen, dropout_p, None if keys is None else keys.contiguous(), site
        ctx.kernels = attention_block if attention_block.fits(qkv, max_seqlen) else attention_tiled
        out: Tensor
        out, lse = ctx.kernels.forward(qkv, cu_seqlens, *constants)
        ctx.save_for_backward(qkv, cu_seqlens, lse, *((out,) if ctx.kernels is attention_tiled else ()))
        ctx.constants = constants
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        d_qkv = ctx.kernels.backward(d_out.contiguous(), *ctx.saved_tensors, *ctx.constants)
        return d_qkv, None, None, None, None, None


def attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    dropout_p: float = 0.0,
    keys: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """Self-attention inside each sequence of ``qkv`` (T, 3, N, H). Returns (T, N, H) in the same dtype.

    ``cu_seqlens`` is (B + 1,) int32: sequence b is rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``. No sequence
    is longer than ``max_seqlen``. ``keys`` (T, 2) int32 are the tokens' dropout keys, None for evaluation;
    ``site`` identifies this layer's attention. Raises ValueError if shapes or dtypes do not fit, or if the heads are
    too wide, the sequences too many, or a sequence too long for the kernels.
    """
    if qkv.dim() != 4 or qkv.shape[1] != 3 or not qkv.is_floating_point():
        raise ValueError(f"qkv is {qkv.dtype} {tuple(qkv.shape)}; it must be floating point (T, 3, N, H)")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype != torch.int32:
        shape = tuple(cu_seqlens.shape)
        raise ValueError(f"cu_seqlens is {cu_seqlens.dtype} {shape}; it must be int32 (B + 1,) with B > 0")
    dropout.check_keys(keys, qkv.shape[0])
    if not cu_seqlens.is_cuda:  # on a GPU, reading the values would wait for the queue
        _check_lengths(cu_seqlens.tolist(), qkv.shape[0], max_seqlen)
    if fused(qkv):
        _check_sizes(qkv, cu_seqlens.numel() - 1, max_seqlen)
        out: Tensor = _Attention.apply(qkv, cu_seqlens, max_seqlen, dropout_p, keys, site)
        return out
    return attention_reference(qkv, cu_seqlens, max_seqlen, dropout_p, keys, site)


def _slots(cu_seqlens: Tensor, lengths: Tensor, tokens: int, max_seqlen: int) -> Tensor:
    """The row of each token in the padded (B * S) layout: (T,) int64."""
    rows = torch.arange(lengths.numel(), device=lengths.device) * max_seqlen  # (B,): where each sequence starts
    shift = torch.repeat_interleave(rows - cu_seqlens[:-1], lengths, output_size=tokens)
    return shift + torch.arange(tokens, device=lengths.device)


def _check_sizes(qkv: Tensor, sequences: int, max_seqlen: int) -> None:
    """Raise ValueError for sizes that only the reference can take."""
    row, longest = qkv[:1].numel(), min(max_seqlen, qkv.shape[0])
    problem = ""
    if qkv.shape[-1] > attention_tiled.WIDEST:
        problem = f"heads are {qkv.shape[-1]} wide; the kernels take at most {attention_tiled.WIDEST}"
    elif sequences > SEQUENCES:
        problem = f"there are {sequences} sequences; the kernels take at most {SEQUENCES}"
    elif longest * row >= 2**31:  # a row's offset from the start of its sequence is an int32
        problem = f"{longest} tokens of {row} numbers each are too long a sequence; the limit is 2^31 numbers"
    if problem:
        raise ValueError(f"{problem}: set kernels to torch")


def _check_lengths(ends: list[int], tokens: int, max_seqlen: int) -> None:
    lengths = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    if ends[0] != 0 or ends[-1] != tokens or min(lengths) < 0:
        raise ValueError(
            f"cu_seqlens goes from {ends[0]} to {ends[-1]}; it must go from 0 to {tokens} and never decrease"
        )
    if max(lengths) > max_seqlen:
        raise ValueError(f"max_seqlen is {max_seqlen}, but a sequence has {max(lengths)} tokens")
