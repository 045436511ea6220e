"""Computes cross-entropy with integer labels, summed over rows, and the number of correct predictions.

    loss = sum over rows with a label of  log(sum_c exp(logits[row, c])) - logits[row, label]
    correct = number of rows whose largest logit (the first one, if tied) is the label's, and whose loss is not NaN
    gradient[row, c] = (exp(logits[row, c]) / sum exp - (1 if c is the label else 0)) * d loss

The loss is a sum and not a mean, because the divisor depends on the whole global batch. ``logits`` is (P, V),
``labels`` (P,), and the loss is fp32. For backward, the reference keeps the log-probabilities. The kernels keep
the logits themselves and four fp32 numbers per row (ROW below). Forward reads the logits once, backward reads
and writes them once, and they never exist in fp32 in memory.

Backward overwrites the logits with the gradient if nothing else can refer to their memory. That is so if they
are the direct output of a matrix product, such as a linear layer's, and not a view; or if they were strided and
copied here. (Any other function may have returned its input's memory.) After backward, such logits hold the
gradient. Their version counter is advanced, so a second backward through them raises RuntimeError instead of
giving wrong results.

Exponentials and sums are fp32, and the gradient is rounded once, to its dtype. Rows are summed in a fixed order,
so results repeat bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import fused, tl, triton
from kernels.first_derivative import first_derivative_only

IGNORED = -100  # the label of a row without a target (PyTorch's convention)
NO_TARGET = tl.constexpr(IGNORED)

# What forward keeps of each row, (ROW, P) fp32: the largest logit, log(sum of exp(logit - largest)), the loss,
# and whether the prediction is correct. The first two are stored separately: their sum would lose digits.
ROW = 4
GROUP = 8  # 16 bytes of fp16

PRODUCTS = ("AddmmBackward0", "MmBackward0")  # the autograd nodes whose outputs are always new memory


def cross_entropy_reference(logits: Tensor, labels: Tensor, valid_columns: int) -> tuple[Tensor, Tensor]:
    """The summed loss and the number of correct predictions. The gradient is 0 from ``valid_columns`` on."""
    valid = logits[:, :valid_columns].to(torch.promote_types(logits.dtype, torch.float32))  # (P, V)
    loss = F.cross_entropy(valid, labels, ignore_index=IGNORED, reduction="sum")
    top = valid.detach().max(-1)
    return loss, ((top.indices == labels) & top.values.isfinite()).sum()


@triton.jit
def _take(x, column, own, label, top, total, beaten, GROUP: tl.constexpr):
    """Add ``x`` (LANES, GROUP), whose columns start at ``column`` (LANES,), to each lane's running softmax."""
    largest = tl.max(x, 1)
    higher = tl.maximum(top, largest)
    total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher[:, None]), 1)
    # In a group before the label's, an equal logit also beats the label.
    wins = (largest > own) | ((largest == own) & (column + GROUP <= label))
    return higher, total, beaten | wins.to(tl.int32)


@triton.jit
def _cross_entropy_forward_kernel(
    logits,  # (P, V)
    labels,  # (P,) int64
    kept,  # (ROW, P) fp32, written
    rows,  # P
    columns,  # V
    valid,  # columns in use; the rest are padding
    LANES: tl.constexpr,  # threads: each has its own running softmax until the end of the row
    GROUP: tl.constexpr,  # adjacent columns that a lane takes at once
):
    row = tl.program_id(0)
    label = tl.load(labels + row)
    if label == NO_TARGET:
        for part in tl.static_range(4):
            tl.store(kept + part * rows + row, 0.0)
        return
    base = logits + row.to(tl.int64) * columns
    known = (label >= 0) & (label < valid)
    own = tl.load(base + label, mask=known, other=float("nan")).to(tl.float32)
    top = tl.full((LANES,), -3.4028234663852886e38, tl.float32)  # not -inf: -inf - -inf is NaN
    total = tl.zeros((LANES,), tl.float32)
    beaten = tl.zeros((LANES,), tl.int32)
    column = tl.arange(0, LANES) * GROUP
    within = column[:, None] + tl.arange(0, GROUP)[None, :]
    whole = valid // (LANES * GROUP) * (LANES * GROUP)
    for start in range(0, whole, LANES * GROUP):
        x = tl.load(base + start + within).to(tl.float32)
        top, total, beaten = _take(x, start + column, own, label, top, total, beaten, GROUP)
    # Read the padding columns and then replace them: a mask at ``valid`` would split the wide loads.
    x = tl.load(base + whole + within, mask=whole + within < columns, other=float("-inf")).to(tl.float32)
    x = tl.where(whole + within < valid, x, float("-inf"))
    top, total, beaten = _take(x, whole + column, own, label, top, total, beaten, GROUP)
    # Still to compare: the columns of the label's own group that come before it.
    near = label // GROUP * GROUP + tl.arange(0, GROUP)
    near_mask = (near >= 0) & (near < tl.minimum(label, valid))
    before = tl.load(base + near, mask=near_mask, other=float("-inf")).to(tl.float32)
    lost = tl.max(beaten, 0) | tl.max((before == own).to(tl.int32), 0)
    highest = tl.max(top, 0)
    log_total = tl.where(known, tl.log(tl.sum(total * tl.exp(top - highest), 0)), float("nan"))
    tl.store(kept + row, highest)
    tl.store(kept + rows + row, log_total)
    loss = (highest - own) + log_total
    tl.store(kept + 2 * rows + row, loss)
    tl.store(kept + 3 * rows + row, tl.where(loss == loss, 1.0 - lost, 0.0))  # NaN beats nothing, and is never correct


@triton.jit
def _cross_entropy_sum_kernel(
    kept,  # (ROW, P) fp32
    loss,  # () fp32, written
    correct,  # () int64, written
    rows,  # P
    BLOCK: tl.constexpr,  # rows at a time
):
    """Sum over all rows in one program, so that the order depends only on P."""
    losses = tl.zeros((BLOCK,), tl.float32)
    right = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        losses += tl.load(kept + 2 * rows + row, mask=row < rows, other=0.0)
        right += tl.load(kept + 3 * rows + row, mask=row < rows, other=0.0).to(tl.int64)
    tl.store(loss, tl.sum(losses, 0))
    tl.store(correct, tl.sum(right, 0))


@triton.jit
def _cross_entropy_backward_kernel(
    logits,  # (P, V)
    gradient,  # (P, V), written; may be the logits
    labels,  # (P,) int64
    kept,  # (ROW, P) fp32
    d_loss,  # () fp32
    rows,  # P
    columns,  # V
    valid,  # columns in use; the rest are padding
    blocks,  # column blocks per row
    BLOCK: tl.constexpr,
):
    # Go from the last row to the first: forward has left the last rows in the cache.
    row = rows - 1 - tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    base = row.to(tl.int64) * columns
    label = tl.load(labels + row)
    if label == NO_TARGET:
        tl.store(gradient + base + column, tl.zeros((BLOCK,), gradient.dtype.element_ty), mask=column < columns)
        return
    x = tl.load(logits + base + column, mask=column < columns, other=0.0).to(tl.float32)
    x = tl.where(column < valid, x, float("-inf"))
    share = tl.exp((x - tl.load(kept + row)) - tl.load(kept + rows + row))
    g = tl.where(column == label, share - 1.0, share) * tl.load(d_loss)
    g = tl.where(column < valid, g, 0.0)  # even if d_loss is not finite
    tl.store(gradient + base + column, g.to(gradient.dtype.element_ty), mask=column < columns)


def _forward(logits: Tensor, labels: Tensor, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss, correct, kept (ROW, P) fp32) for contiguous ``logits``."""
    rows, columns = logits.shape
    kept = torch.empty(ROW, rows, dtype=torch.float32, device=logits.device)
    loss = torch.empty((), dtype=torch.float32, device=logits.device)
    correct = torch.empty((), dtype=torch.int64, device=logits.device)
    if rows > 0:
        warps = max(1, min(triton.next_power_of_2(columns) // (32 * GROUP), 4))
        shape = {"LANES": 32 * warps, "GROUP": GROUP, "num_warps": warps}
        _cross_entropy_forward_kernel[(rows,)](logits, labels, kept, rows, columns, valid, **shape)
    _cross_entropy_sum_kernel[(1,)](kept, loss, correct, rows, BLOCK=1024, num_warps=8)
    return loss, correct, kept


def _backward(logits: Tensor, gradient: Tensor, labels: Tensor, kept: Tensor, d_loss: Tensor, valid: int) -> None:
    rows, columns = logits.shape
    if rows == 0:
        return
    block = min(triton.next_power_of_2(columns), 1024)
    blocks = triton.cdiv(columns, block)
    args = (logits, gradient, labels, kept, d_loss, rows, columns, valid, blocks)
    _cross_entropy_backward_kernel[(rows * blocks,)](*args, BLOCK=block, num_warps=max(1, block // 256))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, valid: int, reuse: bool) -> tuple[Tensor, Tensor]:
        loss, correct, kept = _forward(logits, labels, valid)
        ctx.save_for_backward(logits, labels, kept)
        ctx.valid, ctx.reuse = valid, reuse
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, kept = ctx.saved_tensors  # raises if an earlier backward has overwritten the logits
        gradient = logits.detach() if ctx.reuse else torch.empty_like(logits)
        _backward(logits, gradient, labels, kept, d_loss, ctx.valid)
        if ctx.reuse:
            torch.autograd.graph.increment_version(logits)
        return gradient, None, None, None


def cross_entropy(logits: Tensor, labels: Tensor, valid_columns: int | None = None) -> tuple[Tensor, Tensor]:
    """Return (loss summed over rows, fp32 scalar; correct predictions, int64 scalar) for ``logits`` (P, V).

    ``labels`` (P,) int64 are in [0, valid_columns) or IGNORED. Columns from ``valid_columns`` on, the padding of
    the vocabulary, are ignored. If no row has a label, the loss and its gradient are 0. On a GPU, backward may
    overwrite ``logits`` with the gradient: see the top of this file. Raises ValueError if shapes or dtypes do not
    fit. A label out of range raises IndexError on CPUs; on GPUs, the loss and the row's gradient are NaN.
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        seen = f"logits {tuple(logits.shape)}, labels {labels.dtype} {tuple(labels.shape)}"
        raise ValueError(f"cross_entropy got {seen}; they must be (P, V), and int64 (P,)")
    columns = logits.shape[1]
    valid = columns if valid_columns is None else valid_columns
    if not 0 < valid <= columns:
        raise ValueError(f"valid_columns is {valid}; it must be from 1 to {columns}, the number of columns of logits")
    if not fused(logits):
        return cross_entropy_reference(logits, labels, valid)
    dense, node = logits.contiguous(), logits.grad_fn
    product = node is not None and node.name() in PRODUCTS and logits._base is None
    reuse = product or dense is not logits
    out: tuple[Tensor, Tensor] = _CrossEntropy.apply(dense, labels.contiguous(), valid, reuse)
    return out
