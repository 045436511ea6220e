"""LayerNorm, alone and behind dropout and the residual, against the formula written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import dropout
from kernels.layer_norm import dropout_add_layer_norm, layer_norm

EPS = 1e-12
SHAPES = [(1, 1), (3, 7), (5, 1023), (2, 1500)]


def formula(z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = z - z.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight + bias


def draw(tokens: int, hidden: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(hidden)
    shapes = ((tokens, hidden), (tokens, hidden), (hidden,), (hidden,))
    x, residual, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return x, residual, weight, bias


def keys_of(tokens: int) -> Tensor:
    ends = torch.tensor([0, tokens], dtype=torch.int32)
    return dropout.token_keys(5, 0, torch.tensor([2]), torch.arange(tokens), ends)


@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_layer_norm_is_the_formula(tokens: int, hidden: int) -> None:
    x, _, weight, bias = draw(tokens, hidden)
    torch.testing.assert_close(layer_norm(x, weight, bias, EPS), formula(x, weight, bias))


@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_dropout_and_residual_come_first(tokens: int, hidden: int) -> None:
    x, residual, weight, bias = draw(tokens, hidden)
    keys = keys_of(tokens)
    dropped = x * dropout.multiplier(keys, 4, hidden, 0.1, x.dtype)
    out = dropout_add_layer_norm(x, residual, weight, bias, EPS, dropout_p=0.1, keys=keys, site=4)
    torch.testing.assert_close(out, formula(residual + dropped, weight, bias))
    out = dropout_add_layer_norm(x, None, weight, bias, EPS, dropout_p=0.1, keys=keys, site=4)
    torch.testing.assert_close(out, formula(dropped, weight, bias))
    out = dropout_add_layer_norm(x, residual, weight, bias, EPS, dropout_p=0.1)  # evaluation
    torch.testing.assert_close(out, formula(residual + x, weight, bias))


def test_gradients_are_those_of_the_function() -> None:
    inputs = [t.requires_grad_() for t in draw(4, 6)]
    keys = keys_of(4)

    def function(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return dropout_add_layer_norm(x, residual, weight, bias, EPS, dropout_p=0.3, keys=keys, site=1)

    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_errs_by_its_own_rounding_only(dtype: torch.dtype) -> None:
    x, residual, weight, bias = (t.to(dtype) for t in draw(16, 256))
    x = x + 100  # statistics in half precision would lose this row's variance
    out = dropout_add_layer_norm(x, residual, weight, bias, EPS)
    exact = formula(x.double() + residual.double(), weight.double(), bias.double())
    assert out.dtype == dtype
    assert float(((out.double() - exact).abs() / (exact.abs() + 1e-2)).max()) < torch.finfo(dtype).eps


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    x, weight = torch.zeros(3, 4), torch.zeros(5)
    with pytest.raises(ValueError, match=r"x \(3, 4\), weight \(5,\)"):
        layer_norm(x, weight, weight, EPS)
    with pytest.raises(ValueError, match=r"residual \(2, 4\)"):
        dropout_add_layer_norm(x, x[:2], x[0], x[0], EPS)
    with pytest.raises(ValueError, match="float16"):
        layer_norm(x.half(), x[0], x[0], EPS)
