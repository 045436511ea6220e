"""Attention kernels that work in tiles with an online softmax, for any length below 2^31 / (3 N H).

(Dao, "FlashAttention-2", 2023, algorithms 1 and 2.) Backward has two passes. In the first, each program takes one
tile of queries, computes their gradient, and stores the row sums of out * d_out. In the second, each program takes one
tile of keys and computes the gradients of its keys and values. No two programs add to the same gradient, so neither
pass needs atomics or partial sums in memory.

    P = softmax(Q K^T / sqrt(H)),  out = (D * P) V,  D = dropout's multiplier
    dV = (D * P)^T dO,  dS = P * (D * (dO V^T) - rowsum(out * dO)),  dQ = dS K / sqrt(H),  dK = dS^T Q / sqrt(H)

The row sum equals rowsum(P * D * (dO V^T)). For fp16 and bf16 it is computed as rowsum(out * dO), which is cheaper. In
fp32, that would be the largest error: it rounds differently from the terms that it is subtracted from. So fp32 sums
those terms themselves, in one more pass.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import dropout
from kernels.backend import tl, triton

WIDEST = 128  # the largest H
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _add_product(total, a, b):
    """Return ``total`` (M, H) fp32 + a (M, N) @ b (N, H).

    For fp32 inputs, each product is summed separately and then added: in one chain of additions over all tiles, the
    error would grow with the length of the sequence. The compiler would turn ``total + dot`` into that chain, but not
    ``total - dot``.
    """
    if a.dtype == tl.float32:
        total = total - tl.dot(-a, b, input_precision="ieee")
    else:
        total = tl.dot(a, b, total)
    return total


@triton.jit
def _attention_tiled_forward_kernel(
    qkv,  # (T, 3, N, H)
    cu_seqlens,  # (B + 1,) int32
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
    BLOCK_M: tl.constexpr,  # queries per program
    BLOCK_N: tl.constexpr,  # keys at a time
    DROPOUT: tl.constexpr,
):
    head, sequence, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(cu_seqlens + sequence)
    length = tl.load(cu_seqlens + sequence + 1) - start
    if tile * BLOCK_M >= length:
        return
    columns = tl.arange(0, BLOCK_H)
    wide = columns[None, :] < HEAD
    queries = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = queries < length
    base = qkv + (start.to(tl.int64) * (3 * HEADS) + head) * HEAD + columns[None, :]
    q = tl.load(base + queries[:, None] * (3 * HEADS * HEAD), mask=row[:, None] & wide, other=0.0)  # (M, H)
    if DROPOUT:
        a, b = dropout.row_keys(keys, start + queries, row, site + head * dropout.HEAD_SITE)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
    for first in range(0, length, BLOCK_N):
        columns_n = first + dropout.spread(BLOCK_N)
        there = columns_n < length
        k_at = base + HEADS * HEAD + columns_n[:, None] * (3 * HEADS * HEAD)
        k = tl.load(k_at, mask=there[:, None] & wide, other=0.0)  # (N, H)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # (M, N)
        if first + BLOCK_N > length:
            scores = tl.where(there[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * (scale * LOG2_E))
        weights = tl.exp2(scores * (scale * LOG2_E) - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        if DROPOUT:
            # gain * 0.0 hides the zero from the compiler. With a constant 0, it rounds first and selects packed halves.
            weights = tl.where(dropout.kept_spread(a, b, first, cut, BLOCK_N), weights, gain * 0.0)
        v = tl.load(k_at + HEADS * HEAD, mask=there[:, None] & wide, other=0.0)  # (N, H)
        mixed = _add_product(mixed * shrink[:, None], weights.to(v.dtype), v)
        top = higher
    mixed = mixed * (gain / total)[:, None]
    out_at = out + ((start + queries).to(tl.int64)[:, None] * HEADS + head) * HEAD + columns[None, :]
    tl.store(out_at, mixed.to(out.dtype.element_ty), mask=row[:, None] & wide)
    tl.store(lse + head.to(tl.int64) * tokens + start + queries, top + tl.log2(total), mask=row)


@triton.jit
def _query_tile(
    q,  # (M, H)
    do,  # (M, H)
    kv,  # (1, H) pointers to the first key of the sequence, for this head
    values,  # offset from a key to its value
    stride,  # offset from a token to the next
    length,
    wide,  # (1, H): mask of the columns below HEAD
    log_total,  # (M,) fp32
    a,  # (M,) uint32, from dropout.row_keys, like b
    b,
    first,  # the first key of the tile
    scale,
    cut,
    BLOCK_N: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Return the weights and their gradients without the gain, (M, N) fp32 each, and the keys (N, H)."""
    columns_n = first + dropout.spread(BLOCK_N)
    at, mask = kv + columns_n[:, None] * stride, (columns_n < length)[:, None] & wide
    k = tl.load(at, mask=mask, other=0.0)  # (N, H)
    v = tl.load(at + values, mask=mask, other=0.0)  # (N, H)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if first + BLOCK_N > length:
        scores = tl.where((columns_n < length)[None, :], scores, float("-inf"))
    weights = tl.exp2(scores * (scale * LOG2_E) - log_total[:, None])
    d_weights = tl.dot(do, tl.trans(v), input_precision="ieee")
    if DROPOUT:
        d_weights = tl.where(dropout.kept_spread(a, b, first, cut, BLOCK_N), d_weights, 0.0)
    return weights, d_weights, k


@triton.jit
def _attention_tiled_query_kernel(
    qkv,  # (T, 3, N, H)
    out,  # (T, N, H)
    d_out,  # (T, N, H)
    d_qkv,  # (T, 3, N, H)
    cu_seqlens,  # (B + 1,) int32
    keys,  # (T, 2) int32; not read without DROPOUT
    lse,  # (N, T) fp32, written by forward
    delta,  # (N, T) fp32, written here: the sum of out * d_out over H, without the gain
    tokens,  # T
    scale,  # 1 / sqrt(H)
    site,
    cut,
    gain,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,  # queries per program
    BLOCK_N: tl.constexpr,  # keys at a time
    DROPOUT: tl.constexpr,
    EXACT: tl.constexpr,  # sum the terms themselves, for fp32
):
    head, sequence, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(cu_seqlens + sequence)
    length = tl.load(cu_seqlens + sequence + 1) - start
    if tile * BLOCK_M >= length:
        return
    ROW: tl.constexpr = 3 * HEADS * HEAD
    columns = tl.arange(0, BLOCK_H)
    wide = columns[None, :] < HEAD
    base = (start.to(tl.int64) * (3 * HEADS) + head) * HEAD + columns[None, :]
    o_base = (start.to(tl.int64) * HEADS + head) * HEAD + columns[None, :]
    stat = head.to(tl.int64) * tokens + start
    queries = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = queries < length
    mask = row[:, None] & wide
    q = tl.load(qkv + base + queries[:, None] * ROW, mask=mask, other=0.0)
    do = tl.load(d_out + o_base + queries[:, None] * (HEADS * HEAD), mask=mask, other=0.0)
    log_total = tl.load(lse + stat + queries, mask=row, other=float("inf"))
    kv = qkv + base + HEADS * HEAD
    a, b = queries, queries  # placeholders, not read without dropout
    if DROPOUT:
        a, b = dropout.row_keys(keys, start + queries, row, site + head * dropout.HEAD_SITE)
    if EXACT:
        mean = tl.zeros((BLOCK_M,), tl.float32)
        for first in range(0, length, BLOCK_N):
            weights, d_weights, _ = _query_tile(
                q, do, kv, HEADS * HEAD, ROW, length, wide, log_total, a, b, first, scale, cut, BLOCK_N, DROPOUT
            )
            mean += tl.sum(weights * d_weights, 1)
    else:
        o = tl.load(out + o_base + queries[:, None] * (HEADS * HEAD), mask=mask, other=0.0)
        mean = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1) / gain
    tl.store(delta + stat + queries, mean, mask=row)
    dq = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
    for first in range(0, length, BLOCK_N):
        weights, d_weights, k = _query_tile(
            q, do, kv, HEADS * HEAD, ROW, length, wide, log_total, a, b, first, scale, cut, BLOCK_N, DROPOUT
        )
        d_scores = (weights * (d_weights - mean[:, None])).to(q.dtype)  # (M, N), without the gain
        dq = _add_product(dq, d_scores, k)
    tl.store(d_qkv + base + queries[:, None] * ROW, (dq * (scale * gain)).to(d_qkv.dtype.element_ty), mask=mask)


@triton.jit
def _attention_tiled_key_kernel(
    qkv,  # (T, 3, N, H)
    d_out,  # (T, N, H)
    d_qkv,  # (T, 3, N, H)
    cu_seqlens,  # (B + 1,) int32
    keys,  # (T, 2) int32; not read without DROPOUT
    lse,  # (N, T) fp32, written by forward
    delta,  # (N, T) fp32: the sum of out * d_out over H, without the gain
    tokens,  # T
    scale,  # 1 / sqrt(H)
    site,
    cut,
    gain,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,  # queries at a time
    BLOCK_N: tl.constexpr,  # keys per program
    DROPOUT: tl.constexpr,
):
    head, sequence, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(cu_seqlens + sequence)
    length = tl.load(cu_seqlens + sequence + 1) - start
    if tile * BLOCK_N >= length:
        return
    ROW: tl.constexpr = 3 * HEADS * HEAD
    columns = tl.arange(0, BLOCK_H)
    wide = columns[None, :] < HEAD
    base = (start.to(tl.int64) * (3 * HEADS) + head) * HEAD + columns[None, :]
    o_base = (start.to(tl.int64) * HEADS + head) * HEAD + columns[None, :]
    stat = head.to(tl.int64) * tokens + start
    columns_n = tile * BLOCK_N + dropout.spread(BLOCK_N)
    kv_at = base + HEADS * HEAD + columns_n[:, None] * ROW
    kv_mask = (columns_n < length)[:, None] & wide
    k = tl.load(qkv + kv_at, mask=kv_mask, other=0.0)
    v = tl.load(qkv + kv_at + HEADS * HEAD, mask=kv_mask, other=0.0)
    dk = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
    for begin in range(0, length, BLOCK_M):
        queries = begin + tl.arange(0, BLOCK_M)
        row = queries < length
        q = tl.load(qkv + base + queries[:, None] * ROW, mask=row[:, None] & wide, other=0.0)
        do = tl.load(d_out + o_base + queries[:, None] * (HEADS * HEAD), mask=row[:, None] & wide, other=0.0)
        # Rows past the end get weights of 0. Columns past the end get any weights: their gradients are not stored.
        log_total = tl.load(lse + stat + queries, mask=row, other=float("inf"))
        mean = tl.load(delta + stat + queries, mask=row, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # (M, N)
        weights = tl.exp2(scores * (scale * LOG2_E) - log_total[:, None])
        d_weights = tl.dot(do, tl.trans(v), input_precision="ieee")  # (M, N), without the gain
        dropped = weights
        if DROPOUT:
            a, b = dropout.row_keys(keys, start + queries, row, site + head * dropout.HEAD_SITE)
            stays = dropout.kept_spread(a, b, tile * BLOCK_N, cut, BLOCK_N)
            dropped = tl.where(stays, weights, 0.0)
        dv = _add_product(dv, tl.trans(dropped.to(do.dtype)), do)
        d_scores = (dropped * d_weights - weights * mean[:, None]).to(q.dtype)  # (M, N), without the gain
        dk = _add_product(dk, tl.trans(d_scores), q)
    tl.store(d_qkv + kv_at, (dk * (scale * gain)).to(d_qkv.dtype.element_ty), mask=kv_mask)
    tl.store(d_qkv + kv_at + HEADS * HEAD, (dv * gain).to(d_qkv.dtype.element_ty), mask=kv_mask)


class _Launch(NamedTuple):
    """The launch configuration of one kernel, a pure function of shape and dtype."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int | None = None  # per thread; with fewer, two programs can share a multiprocessor


def _launches(size: int, dtype: torch.dtype) -> tuple[_Launch, _Launch, _Launch]:
    """Launches of forward, the pass over queries and the pass over keys. Tuned on an H100 (docs/lab.md)."""
    if dtype == torch.float32:
        return (_Launch(32, 32, 4, 1),) * 3
    if size > 64:
        return (_Launch(64, 64, 4, 2),) * 3
    return _Launch(128, 64, 8, 3), _Launch(128, 64, 8, 3, 128), _Launch(64, 64, 4, 3, 168)


def _constants(launch: _Launch, qkv: Tensor, dropout_p: float, keys: Tensor | None) -> dict[str, Any]:
    _, _, heads, size = qkv.shape
    return {
        "HEADS": heads,
        "HEAD": size,
        "BLOCK_H": max(16, triton.next_power_of_2(size)),
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
        "DROPOUT": keys is not None and dropout_p > 0,
        "num_warps": launch.warps,
        "num_stages": launch.stages,
        "maxnreg": launch.registers,
    }


def forward(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float, keys: Tensor | None, site: int
) -> tuple[Tensor, Tensor]:
    """Return (out (T, N, H), lse (N, T) fp32) for contiguous ``qkv`` (T, 3, N, H)."""
    tokens, _, heads, size = qkv.shape
    out, lse = qkv.new_empty(tokens, heads, size), qkv.new_empty(heads, tokens, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    launch, *_ = _launches(size, qkv.dtype)
    _attention_tiled_forward_kernel[(heads, cu_seqlens.numel() - 1, triton.cdiv(max_seqlen, launch.block_m))](
        qkv, cu_seqlens, keys, out, lse, tokens, 1 / math.sqrt(size), site,
        *dropout.kernel_constants(keys, dropout_p), **_constants(launch, qkv, dropout_p, keys),
    )  # fmt: skip
    return out, lse


def backward(
    d_out: Tensor,
    qkv: Tensor,
    cu_seqlens: Tensor,
    lse: Tensor,
    out: Tensor,
    max_seqlen: int,
    dropout_p: float,
    keys: Tensor | None,
    site: int,
) -> Tensor:
    """The gradient of ``qkv``, (T, 3, N, H), given the gradient of out, (T, N, H) and contiguous."""
    tokens, _, heads, size = qkv.shape
    d_qkv, delta = torch.empty_like(qkv), torch.empty_like(lse)
    if d_qkv.numel() == 0:
        return d_qkv
    _, by_query, by_key = _launches(size, qkv.dtype)
    numbers = (tokens, 1 / math.sqrt(size), site, *dropout.kernel_constants(keys, dropout_p))
    _attention_tiled_query_kernel[(heads, cu_seqlens.numel() - 1, triton.cdiv(max_seqlen, by_query.block_m))](
        qkv,
        out,
        d_out,
        d_qkv,
        cu_seqlens,
        keys,
        lse,
        delta,
        *numbers,
        EXACT=qkv.dtype == torch.float32,
        **_constants(by_query, qkv, dropout_p, keys),
    )
    _attention_tiled_key_kernel[(heads, cu_seqlens.numel() - 1, triton.cdiv(max_seqlen, by_key.block_n))](
        qkv, d_out, d_qkv, cu_seqlens, keys, lse, delta, *numbers, **_constants(by_key, qkv, dropout_p, keys)
    )
    return d_qkv
