"""Attention's Triton kernels against the reference: in the interpreter here, compiled if there is a GPU."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels import backend, dropout
from kernels.attention import attention
from tests.helpers.kernel_errors import assert_errs_at_most_twice
from tests.test_kernels_attention import cumulative, draw, keys_of

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALVES = [torch.float16, torch.bfloat16]


class Outcome(NamedTuple):
    out: Tensor
    gradient: Tensor


def run(choice: str, qkv: Tensor, towards: Tensor, lengths: list[int], p: float) -> Outcome:
    qkv = qkv.to(DEVICE, copy=True).requires_grad_()
    cu_seqlens, keys = cumulative(lengths).to(DEVICE), keys_of(lengths).to(DEVICE)
    with backend.using(choice):
        out = attention(qkv, cu_seqlens, max(lengths), dropout_p=p, keys=keys, site=3)
    (gradient,) = torch.autograd.grad(out, qkv, towards.to(DEVICE))
    return Outcome(out.detach(), gradient)


def compare(lengths: list[int], heads: int, size: int, dtype: torch.dtype, p: float) -> None:
    qkv = draw(lengths, heads, size, dtype)
    towards = draw(lengths, heads, size)[:, 0].flip(0).to(dtype)
    ours, same = (run(choice, qkv, towards, lengths, p) for choice in ("triton", "torch"))
    exact = run("torch", qkv.double(), towards.double(), lengths, p)
    for name in Outcome._fields:
        assert_errs_at_most_twice(getattr(ours, name), getattr(same, name), getattr(exact, name), name)


# Not bf16: the interpreter multiplies its matrices as if they were integers. Halves are taken whole up to 128 tokens,
# beyond that, and in heads wider than 64, in tiles of 128 or 64; fp32 always in tiles of 32.
@pytest.mark.parametrize(
    ("dtype", "lengths", "size"),
    [
        (torch.float16, [2, 40], 64),
        (torch.float16, [127, 16, 0, 65], 64),
        (torch.float16, [5, 33], 20),
        (torch.float16, [128, 64], 32),
        (torch.float16, [129, 1], 64),
        (torch.float16, [70, 3], 80),
        (torch.float16, [40], 128),
        (torch.float32, [63, 16, 0, 33], 64),
        (torch.float32, [5, 32], 20),
        (torch.float32, [64], 32),
        (torch.float32, [65, 1], 64),
        (torch.float32, [2, 9], 96),
        (torch.float32, [3], 80),
        (torch.float32, [34], 128),
    ],
    ids=str,
)
def test_it_errs_at_most_twice_as_much_as_pytorch(dtype: torch.dtype, lengths: list[int], size: int) -> None:
    compare(lengths, 2, size, dtype, 0.1)


@pytest.mark.parametrize(
    ("dtype", "lengths"),
    [(torch.float16, [127, 16, 0, 65]), (torch.float16, [129, 1]), (torch.float32, [33, 1])],
    ids=str,
)
def test_it_errs_at_most_twice_as_much_without_dropout(dtype: torch.dtype, lengths: list[int]) -> None:
    compare(lengths, 2, 64, dtype, 0.0)


@pytest.mark.parametrize("length", [16, 130])
def test_the_mask_is_the_references_forward_and_backward(length: int) -> None:
    """V = identity shows the mask in the output; a gradient at the last query shows it in V's."""
    size = min(length, 128)
    qkv = torch.zeros(length, 3, 2, size, dtype=torch.float16)  # equal scores
    qkv[:size, 2] = torch.eye(size, dtype=torch.float16)[:, None, :]
    towards = torch.zeros(length, 2, size, dtype=torch.float16)
    towards[-1] = 1
    out, gradient = run("triton", qkv, towards, [length], 0.5)
    keys = keys_of([length])
    for head in range(2):
        mask = dropout.keep(keys, 3 + head * dropout.HEAD, length, 0.5)
        assert torch.equal(out[:, head].cpu() != 0, mask[:, :size])
        assert torch.equal(gradient[:, 2, head, 0].cpu() != 0, mask[-1])


def test_large_scores_stay_finite() -> None:
    for lengths in ([30, 1], [129]):
        qkv = draw(lengths, 2, 64, torch.float16) * 100
        out, gradient = run("triton", qkv, qkv[:, 0], lengths, 0.1)
        assert out.isfinite().all() and gradient.isfinite().all()


@pytest.mark.parametrize(("dtype", "length"), [(torch.float16, 30), (torch.float16, 129), (torch.float32, 30)], ids=str)
def test_scores_far_below_those_of_zeros_beyond_the_end_stay_finite(dtype: torch.dtype, length: int) -> None:
    qkv = draw([length], 2, 64, dtype)
    qkv[:, 0], qkv[:, 1] = 5, -5
    out, gradient = run("triton", qkv, qkv[:, 2], [length], 0.1)
    assert out.isfinite().all() and gradient.isfinite().all()


def test_a_token_alone_has_no_gradient_by_its_scores() -> None:
    for dtype in (torch.float16, torch.float32):
        qkv = draw([1] * 8, 2, 32, dtype)
        _, gradient = run("triton", qkv, qkv[:, 2].flip(0), [1] * 8, 0.1)
        assert gradient[:, 2].any() and (dtype == torch.float16 or not gradient[:, :2].any())


def test_a_number_of_heads_that_programs_do_not_share_evenly() -> None:
    for heads in (5, 8):  # one, and four, of a program
        compare([20, 3], heads, 32, torch.float16, 0.1)


def test_strided_and_empty_inputs() -> None:
    wide = torch.randn(9, 3, 2, 64)
    lengths = [6, 3]
    ours, theirs = (run(choice, wide[..., ::2], wide[:, 0, :, ::2], lengths, 0.0) for choice in ("triton", "torch"))
    torch.testing.assert_close(ours.out, theirs.out)
    torch.testing.assert_close(ours.gradient, theirs.gradient)
    for dtype in (torch.float16, torch.float32):
        empty = run("triton", torch.zeros(0, 3, 2, 16, dtype=dtype), torch.zeros(0, 2, 16, dtype=dtype), [0, 0], 0.1)
        assert empty.gradient.shape == (0, 3, 2, 16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_strided_keys_and_ends_are_read_rightly(dtype: torch.dtype) -> None:
    """Backward too, by either kernel; what stands between them is something else."""
    lengths = [5, 11]
    qkv = draw(lengths, 2, 16, dtype).to(DEVICE).requires_grad_()
    ends, keys = cumulative(lengths).to(DEVICE), keys_of(lengths).to(DEVICE)
    strided = torch.stack([ends, ends.flip(0)], -1)[:, 0], torch.stack([keys, keys.flip(0)], -1)[..., 0]
    found = []
    for cu_seqlens, own in ((ends, keys), strided):
        with backend.using("triton"):
            out = attention(qkv, cu_seqlens, 11, dropout_p=0.3, keys=own, site=3)
        found.append((out, torch.autograd.grad(out.float().square().sum(), qkv)[0]))
    assert not strided[0].is_contiguous() and not strided[1].is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_the_kernels_do_not_take_is_refused_with_the_numbers() -> None:
    """Refused before anything is copied: the expanded tensor would be 6 GB."""
    with pytest.raises(ValueError, match="192 wide; the kernels take at most 128"):
        run("triton", torch.zeros(4, 3, 1, 192), torch.zeros(4, 1, 192), [4], 0.0)
    one = torch.zeros((), dtype=torch.float16, device=DEVICE)
    with backend.using("triton"):
        with pytest.raises(ValueError, match="65536 sequences; the kernels take at most 65535"):
            attention(one.expand(0, 3, 1, 16), torch.zeros(65_537, dtype=torch.int32, device=DEVICE), 1)
        length = 2**31 // (3 * 16 * 64) + 1
        with pytest.raises(ValueError, match="699051 tokens of 3072 numbers each"):
            attention(one.expand(length, 3, 16, 64), cumulative([length]).to(DEVICE), length + 9)


# ---- on a GPU ------------------------------------------------------------------------------------------------

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("size", [32, 64, 80, 96, 128])
@pytest.mark.parametrize(
    "lengths",
    [[2, 9], [15, 16, 17], [64, 65, 63, 128, 127] * 3, [129], [512, 1, 300, 257, 384], [1000, 2, 3]],
    ids=lambda lengths: f"{len(lengths)} of {max(lengths)}",
)
def test_every_shape_on_a_gpu(lengths: list[int], size: int, dtype: torch.dtype) -> None:
    compare(lengths, 12, size, dtype, 0.1)


@gpu
@needs_gpu
def test_a_long_sequence_on_a_gpu() -> None:
    compare([8192, 5], 1, 64, torch.float16, 0.1)


@gpu
@needs_gpu
@pytest.mark.parametrize("longest", [128, 512])
def test_repeated_runs_are_bit_identical_and_leave_nothing_unwritten(longest: int) -> None:
    lengths = torch.randint(1, longest + 1, (48,)).tolist()
    qkv = draw(lengths, 16, 64, torch.float16)
    first = run("triton", qkv, qkv[:, 0], lengths, 0.1)
    for _ in range(200):
        torch.full((qkv.numel() * 4,), torch.nan, device=DEVICE)  # what the next allocations reuse
        again = run("triton", qkv, qkv[:, 0], lengths, 0.1)
        assert torch.equal(first.out, again.out) and torch.equal(first.gradient, again.gradient)
    assert first.out.isfinite().all() and first.gradient.isfinite().all()
