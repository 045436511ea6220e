"""Attention kernels for short sequences: one program holds a whole sequence of one head.

Everything a query needs is in the program, so forward needs no online softmax, and backward needs neither a
second pass nor a first pass that sums out * d_out. A backward program loops over several heads, so that the
next head's rows load while it computes the current one. A sequence that fits into a block of half the size
uses that block, so short sequences cost less.

    P = softmax(Q K^T / sqrt(H)),  out = (D * P) V,  D = dropout's multiplier
    dV = (D * P)^T dO,  dP = D * (dO V^T),  dS = P * (dP - rowsum(P * dP)),  dQ = dS K / sqrt(H),  dK = dS^T Q / sqrt(H)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels import dropout
from kernels.backend import tl, triton

LONGEST_SEQUENCE = 128  # the most tokens in a sequence
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attention_forward_block(
    start,  # the sequence's first row
    length,  # its number of rows
    qkv,  # (T, 3, N, H)
    keys,  # (T, 2) int32; not read without DROPOUT
    out,  # (T, N, H)
    lse,  # (N, T) fp32: log2 of the sum of 2^score
    tokens,  # T
    scale,  # 1 / sqrt(H)
    site,  # identifies this layer's dropout
    cut,  # the dropout threshold: see dropout.kept
    gain,  # 1 / (1 - p)
    HEADS: tl.constexpr,  # N
    HEAD: tl.constexpr,  # H
    BLOCK_H: tl.constexpr,  # H, rounded up to a power of two
    BLOCK: tl.constexpr,  # rows of queries and of keys: ``length`` or more
    DROPOUT: tl.constexpr,
):
    head = tl.program_id(0)
    columns, rows = tl.arange(0, BLOCK_H), dropout.spread(BLOCK)  # rows are queries and keys
    there = rows < length
    mask = there[:, None] & (columns[None, :] < HEAD)
    at = (start.to(tl.int64) * (3 * HEADS) + head) * HEAD + rows[:, None] * (3 * HEADS * HEAD) + columns[None, :]
    q = tl.load(qkv + at, mask=mask, other=0.0)  # (S, H)
    k = tl.load(qkv + at + HEADS * HEAD, mask=mask, other=0.0)  # (S, H)
    v = tl.load(qkv + at + 2 * HEADS * HEAD, mask=mask, other=0.0)  # (S, H)
    scores = tl.where(there[None, :], tl.dot(q, tl.trans(k)), float("-inf"))  # (S, S), one query per row
    top = tl.max(scores, 1) * (scale * LOG2_E)
    weights = tl.exp2(scores * (scale * LOG2_E) - top[:, None])
    total = tl.sum(weights, 1)
    if DROPOUT:
        a, b = dropout.row_keys(keys, start + rows, there, site + head * dropout.HEAD_SITE)
        # gain * 0.0 hides the zero from the compiler. With a constant 0, it rounds first and selects packed halves.
        weights = tl.where(dropout.kept_spread(a, b, 0, cut, BLOCK), weights, gain * 0.0)
    mixed = tl.dot(weights.to(v.dtype), v) * (gain / total)[:, None]  # (S, H)
    out_at = (start.to(tl.int64) * HEADS + head) * HEAD + rows[:, None] * (HEADS * HEAD) + columns[None, :]
    tl.store(out + out_at, mixed.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + head.to(tl.int64) * tokens + start + rows, top + tl.log2(total), mask=there)


@triton.jit
def _attention_block_forward_kernel(
    cu_seqlens,  # (B + 1,) int32
    qkv,
    keys,
    out,
    lse,
    tokens,
    scale,
    site,
    cut,
    gain,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    SHORT: tl.constexpr,  # a smaller block for sequences that fit into it; BLOCK if there is none
    DROPOUT: tl.constexpr,
):
    start = tl.load(cu_seqlens + tl.program_id(1))
    length = tl.load(cu_seqlens + tl.program_id(1) + 1) - start
    if length <= SHORT:
        _attention_forward_block(
            start, length, qkv, keys, out, lse, tokens, scale, site, cut, gain, HEADS, HEAD, BLOCK_H, SHORT, DROPOUT
        )
    elif SHORT < BLOCK:
        _attention_forward_block(
            start, length, qkv, keys, out, lse, tokens, scale, site, cut, gain, HEADS, HEAD, BLOCK_H, BLOCK, DROPOUT
        )


@triton.jit
def _attention_backward_block(
    start,
    length,
    qkv,  # (T, 3, N, H)
    d_out,  # (T, N, H)
    d_qkv,  # (T, 3, N, H)
    keys,
    lse,  # (N, T) fp32, written by forward
    tokens,
    scale,  # 1 / sqrt(H)
    site,
    cut,
    gain,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    PER: tl.constexpr,  # heads per program
    DROPOUT: tl.constexpr,
    STAGES: tl.constexpr,
):
    first = tl.program_id(0) * PER
    columns, rows = tl.arange(0, BLOCK_H), dropout.spread(BLOCK)  # rows are queries and keys
    there = rows < length
    mask = there[:, None] & (columns[None, :] < HEAD)
    at = (start.to(tl.int64) * (3 * HEADS) + first) * HEAD + rows[:, None] * (3 * HEADS * HEAD) + columns[None, :]
    out_at = (start.to(tl.int64) * HEADS + first) * HEAD + rows[:, None] * (HEADS * HEAD) + columns[None, :]
    for i in tl.range(0, PER, num_stages=STAGES):
        q = tl.load(qkv + at + i * HEAD, mask=mask, other=0.0)  # (S, H)
        k = tl.load(qkv + at + (HEADS + i) * HEAD, mask=mask, other=0.0)  # (S, H)
        v = tl.load(qkv + at + (2 * HEADS + i) * HEAD, mask=mask, other=0.0)  # (S, H)
        do = tl.load(d_out + out_at + i * HEAD, mask=mask, other=0.0)  # (S, H)
        # Rows past the end get weights of 0. Columns past the end get weights of at most 1, but their k and v are
        # zero: they add nothing to the gradient of the queries, and their own gradients are not stored. (In fp16,
        # row sums above 65,504 turn this into NaN, as they do in PyTorch.)
        stat_at = (first + i).to(tl.int64) * tokens + start + rows
        log_total = tl.load(lse + stat_at, mask=there, other=float("inf"))
        scores = tl.dot(q, tl.trans(k)) * (scale * LOG2_E)  # (S, S), one query per row
        weights = tl.exp2(tl.minimum(scores - log_total[:, None], 0.0))
        dropped = weights
        if DROPOUT:
            a, b = dropout.row_keys(keys, start + rows, there, site + (first + i) * dropout.HEAD_SITE)
            dropped = tl.where(dropout.kept_spread(a, b, 0, cut, BLOCK), weights, 0.0)
        dv = tl.dot(tl.trans(dropped.to(do.dtype)), do)  # (S, H), without the gain
        tl.store(d_qkv + at + (2 * HEADS + i) * HEAD, (dv * gain).to(d_qkv.dtype.element_ty), mask=mask)
        d_weights = dropped * tl.dot(do, tl.trans(v))  # (S, S), times the weights, without the gain
        d_scores = (d_weights - weights * tl.sum(d_weights, 1)[:, None]).to(q.dtype)
        dk = tl.dot(tl.trans(d_scores), q)  # (S, H)
        tl.store(d_qkv + at + (HEADS + i) * HEAD, (dk * (scale * gain)).to(d_qkv.dtype.element_ty), mask=mask)
        dq = tl.dot(d_scores, k)  # (S, H)
        tl.store(d_qkv + at + i * HEAD, (dq * (scale * gain)).to(d_qkv.dtype.element_ty), mask=mask)


@triton.jit
def _attention_block_backward_kernel(
    cu_seqlens,  # (B + 1,) int32
    qkv,
    d_out,
    d_qkv,
    keys,
    lse,
    tokens,
    scale,
    site,
    cut,
    gain,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    SHORT: tl.constexpr,
    PER: tl.constexpr,
    DROPOUT: tl.constexpr,
    STAGES: tl.constexpr,
):
    start = tl.load(cu_seqlens + tl.program_id(1))
    length = tl.load(cu_seqlens + tl.program_id(1) + 1) - start
    if length <= SHORT:
        _attention_backward_block(
            start, length, qkv, d_out, d_qkv, keys, lse, tokens, scale, site, cut, gain,
            HEADS, HEAD, BLOCK_H, SHORT, PER, DROPOUT, STAGES,
        )  # fmt: skip
    elif SHORT < BLOCK:
        _attention_backward_block(
            start, length, qkv, d_out, d_qkv, keys, lse, tokens, scale, site, cut, gain,
            HEADS, HEAD, BLOCK_H, BLOCK, PER, DROPOUT, STAGES,
        )  # fmt: skip


def fits(qkv: Tensor, max_seqlen: int) -> bool:
    """Whether these kernels can take ``qkv`` (T, 3, N, H): fp16 or bf16, H up to 64, short sequences."""
    return qkv.dtype != torch.float32 and qkv.shape[-1] <= 64 and max_seqlen <= LONGEST_SEQUENCE


def forward(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float, keys: Tensor | None, site: int
) -> tuple[Tensor, Tensor]:
    """Return (out (T, N, H), lse (N, T) fp32) for contiguous ``qkv`` (T, 3, N, H)."""
    tokens, _, heads, size = qkv.shape
    out, lse = qkv.new_empty(tokens, heads, size), qkv.new_empty(heads, tokens, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    cut, gain = dropout.kernel_constants(keys, dropout_p)
    shape = _shape(max_seqlen, size)
    _attention_block_forward_kernel[(heads, cu_seqlens.numel() - 1)](
        cu_seqlens, qkv, keys, out, lse, tokens, 1 / math.sqrt(size), site, cut, gain,
        HEADS=heads, HEAD=size, DROPOUT=keys is not None and dropout_p > 0, **shape, num_stages=1,
    )  # fmt: skip
    return out, lse


def backward(
    d_out: Tensor,
    qkv: Tensor,
    cu_seqlens: Tensor,
    lse: Tensor,
    max_seqlen: int,
    dropout_p: float,
    keys: Tensor | None,
    site: int,
) -> Tensor:
    """The gradient of ``qkv``, (T, 3, N, H), given the gradient of out, (T, N, H) and contiguous."""
    tokens, _, heads, size = qkv.shape
    d_qkv = torch.empty_like(qkv)
    if d_qkv.numel() == 0:
        return d_qkv
    cut, gain = dropout.kernel_constants(keys, dropout_p)
    per = next(n for n in (4, 3, 2, 1) if heads % n == 0)
    _attention_block_backward_kernel[(heads // per, cu_seqlens.numel() - 1)](
        cu_seqlens, qkv, d_out, d_qkv, keys, lse, tokens, 1 / math.sqrt(size), site, cut, gain,
        HEADS=heads, HEAD=size, PER=per, STAGES=2, DROPOUT=keys is not None and dropout_p > 0,
        **_shape(max_seqlen, size), num_stages=2,
    )  # fmt: skip
    return d_qkv


def _shape(max_seqlen: int, size: int) -> dict[str, int]:
    """Blocks and warps, a pure function of the shape. Tensor cores want 64 rows per group of four warps."""
    block = min(LONGEST_SEQUENCE, max(16, triton.next_power_of_2(max_seqlen)))
    block_h = max(16, triton.next_power_of_2(size))
    return {
        "BLOCK_H": block_h,
        "BLOCK": block,
        "SHORT": min(64, block),
        "num_warps": 8 if block > 64 else 4,
    }
