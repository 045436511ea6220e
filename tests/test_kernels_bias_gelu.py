"""Bias and GELU: both forms over a sweep, gradients, half precision, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.bias_gelu import bias_gelu

FORMS = {
    "none": lambda u: 0.5 * u * (1 + math.erf(u / math.sqrt(2))),
    "tanh": lambda u: 0.5 * u * (1 + math.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))),
}


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_a_sweep_is_the_formula(approximate: str, dtype: torch.dtype, tolerance: float) -> None:
    x = torch.linspace(-6, 6, 1201, dtype=dtype)
    bias = torch.tensor([0.0, 0.25], dtype=dtype)
    out = bias_gelu(x[:, None].repeat(1, 2), bias, approximate)
    rows = [[FORMS[approximate](u + b) for b in bias.tolist()] for u in x.tolist()]
    assert float((out.double() - torch.tensor(rows, dtype=torch.float64)).abs().max()) < tolerance


def test_the_two_forms_are_told_apart() -> None:
    exact, near = (bias_gelu(torch.tensor([[2.7]]), torch.zeros(1), form) for form in ("none", "tanh"))
    assert 4e-4 < float((exact - near).abs()) < 5e-4


@pytest.mark.parametrize("approximate", FORMS)
def test_gradients_are_those_of_the_function(approximate: str) -> None:
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor, bias: Tensor) -> Tensor:
        return bias_gelu(x, bias, approximate)

    assert torch.autograd.gradcheck(function, (x, bias))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_once(dtype: torch.dtype) -> None:
    x, bias = torch.randn(64, 33).to(dtype), torch.randn(33).to(dtype)
    exact = torch.nn.functional.gelu(x.double() + bias.double())
    out = bias_gelu(x, bias).double()
    assert float(((out - exact).abs() / (exact.abs() + 1e-3)).max()) < torch.finfo(dtype).eps


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\), bias torch.float32 \(4,\)"):
        bias_gelu(torch.zeros(2, 3), torch.zeros(4))
    with pytest.raises(ValueError, match="'sigmoid'"):
        bias_gelu(torch.zeros(2, 3), torch.zeros(3), "sigmoid")
