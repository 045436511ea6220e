"""Attention against torch's own, a sequence at a time; padding, dropout, awkward shapes and refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import dropout
from kernels.attention import attention

pytestmark = pytest.mark.slow


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def draw(lengths: list[int], heads: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(len(lengths))
    return torch.randn(sum(lengths), 3, heads, size, generator=generator, dtype=torch.float64).to(dtype)


def keys_of(lengths: list[int]) -> Tensor:
    positions = torch.cat([torch.arange(n) for n in lengths])
    return dropout.token_keys(1, 2, torch.arange(len(lengths)), positions, cumulative(lengths))


def one_by_one(qkv: Tensor, lengths: list[int]) -> Tensor:
    parts = []
    for part in torch.split(qkv, lengths):
        q, k, v = part.permute(1, 2, 0, 3).unbind(0)  # (N, S, H)
        parts.append(F.scaled_dot_product_attention(q, k, v).transpose(0, 1))  # (S, N, H)
    return torch.cat(parts)


@pytest.mark.parametrize("size", [32, 64, 80, 96, 128, 192, 20])
@pytest.mark.parametrize("lengths", [[1], [15, 16, 17], [100, 1, 128], [5, 5, 5]])
def test_outputs_and_gradients_are_torchs(size: int, lengths: list[int]) -> None:
    ours = draw(lengths, 2, size).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    out, expected = attention(ours, cumulative(lengths), max(lengths)), one_by_one(theirs, lengths)
    torch.testing.assert_close(out, expected)
    towards = torch.randn_like(out)
    (ours_grad,) = torch.autograd.grad(out, ours, towards)
    (theirs_grad,) = torch.autograd.grad(expected, theirs, towards)
    torch.testing.assert_close(ours_grad, theirs_grad)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "p"), [(torch.float32, 1e-5, 0.0), (torch.float32, 1e-5, 0.1), (torch.float16, 2e-2, 0.1)]
)
def test_padding_changes_nothing(dtype: torch.dtype, tolerance: float, p: float) -> None:
    lengths = [7, 1]
    qkv = draw(lengths, 2, 64, dtype) * 8  # logits of hundreds
    outs = []
    for width in (7, 8, 16, 17, 64, 127, 128, 129, 333, 336, 337, 511, 512):
        x = qkv.clone().requires_grad_()
        out = attention(x, cumulative(lengths), width, dropout_p=p, keys=keys_of(lengths), site=3)
        torch.autograd.backward(out.float().square().sum())
        assert x.grad is not None
        assert out.isfinite().all() and x.grad.isfinite().all()
        outs.append(out.detach().float())
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=tolerance, atol=tolerance)


def test_a_sequence_without_tokens_is_harmless() -> None:
    lengths = [4, 0, 2]
    x = draw(lengths, 2, 8).requires_grad_()
    out = attention(x, cumulative(lengths), 4)
    torch.testing.assert_close(out, one_by_one(x, lengths))
    torch.autograd.backward(out.sum())
    assert x.grad is not None and x.grad.isfinite().all()


def test_a_strided_input_is_read_rightly() -> None:
    lengths = [6, 3]
    wide = torch.randn(9, 3, 2, 16, dtype=torch.float64)
    x = wide[..., ::2]
    torch.testing.assert_close(attention(x, cumulative(lengths), 6), one_by_one(x, lengths))


@pytest.mark.parametrize("lengths", [[4, 4], [5, 1, 3]])
def test_gradients_with_dropout_are_those_of_the_function(lengths: list[int]) -> None:
    x = draw(lengths, 2, 4).requires_grad_()
    keys = keys_of(lengths)

    def function(x: Tensor) -> Tensor:
        return attention(x, cumulative(lengths), 5, dropout_p=0.3, keys=keys, site=6)

    assert torch.autograd.gradcheck(function, (x,), fast_mode=True)


def test_the_mask_seen_in_the_output_is_the_one_in_the_gradient_of_v() -> None:
    size = 16
    qkv = torch.zeros(size, 3, 2, size, dtype=torch.float64)  # equal scores: every weight is 1 / 16
    qkv[:, 2] = torch.eye(size, dtype=torch.float64)[:, None, :]  # V = identity: the output is the weights
    qkv.requires_grad_()
    keys = keys_of([size])
    out = attention(qkv, cumulative([size]), size, dropout_p=0.5, keys=keys, site=9)  # (T, N, H)
    assert not torch.equal(out[:, 0], out[:, 1])  # a mask a head
    for head in range(2):
        mask = dropout.keep(keys, 9 + head * dropout.HEAD, size, 0.5)  # (T, S)
        torch.testing.assert_close(out[:, head].detach(), mask.double() / size * 2)
        for query in range(size):  # a gradient at one query alone reads that query's mask off V's
            towards = torch.zeros_like(out)
            towards[query, head] = 1
            (grad,) = torch.autograd.grad(out, qkv, towards, retain_graph=True)
            assert torch.equal(grad[:, 2, head, 0] != 0, mask[query])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.zeros(5, 2, 2, 4)}, r"\(5, 2, 2, 4\)"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "int64"),
        ({"cu_seqlens": torch.tensor([0, 4], dtype=torch.int32)}, "from 0 to 4"),
        ({"cu_seqlens": torch.tensor([0, 6, 5], dtype=torch.int32)}, "never decrease"),
        ({"max_seqlen": 2}, "a sequence has 3 tokens"),
        ({"keys": torch.zeros(4, 2, dtype=torch.int32)}, r"must be int32 \(5, 2\)"),
        ({"keys": torch.zeros(5, 2, dtype=torch.int64)}, r"torch.int64 \(5, 2\); they must be int32"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(change: dict[str, object], message: str) -> None:
    arguments = {"qkv": torch.zeros(5, 3, 2, 4), "cu_seqlens": cumulative([3, 2]), "max_seqlen": 3} | change
    with pytest.raises(ValueError, match=message):
        attention(**arguments)  # type: ignore[arg-type]
