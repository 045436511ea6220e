"""Bias and GELU: both forms over a sweep, gradients, half precision, refusals."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import backend
from kernels.bias_gelu import bias_gelu
from tests.helpers.kernel_errors import assert_errs_at_most_twice, last_place, poisoned_buffers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the Triton kernels: on CPUs they are interpreted
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
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


# ---- the kernels ---------------------------------------------------------------------------------------------


def inputs_of(tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, bias and the gradient of the output."""
    generator = torch.Generator(DEVICE).manual_seed(tokens)
    shapes = ((tokens, width), (width,), (tokens, width))
    x, bias, towards = (torch.randn(s, generator=generator, device=DEVICE) for s in shapes)
    return (x * 2).to(dtype), bias.to(dtype), towards.to(dtype)


def with_gradients(kernels: str, x: Tensor, bias: Tensor, towards: Tensor, approximate: str) -> list[Tensor]:
    """[output, gradients of x and bias] by a backend, or by ``eager``: PyTorch's own operations."""
    x, bias = x.detach().requires_grad_(), bias.detach().requires_grad_()
    if kernels == "eager":
        out = F.gelu(x + bias, approximate=approximate)
    else:
        with backend.using(kernels):
            out = bias_gelu(x, bias, approximate)
    return [out.detach(), *torch.autograd.grad(out, (x, bias), towards)]


def check(x: Tensor, bias: Tensor, towards: Tensor, approximate: str) -> None:
    with poisoned_buffers():
        ours = with_gradients("triton", x, bias, towards, approximate)
    same_dtype = with_gradients("eager", x, bias, towards, approximate)
    exact = with_gradients("torch", x.double(), bias.double(), towards.double(), approximate)
    for a, b, c, name in zip(ours, same_dtype, exact, ("out", "gradient of x", "of bias"), strict=True):
        assert_errs_at_most_twice(a, b, c, f"{approximate}: {name}")


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (1, 127), (65, 128)])
def test_kernels_err_at_most_twice_as_much_as_pytorch(
    tokens: int, width: int, dtype: torch.dtype, approximate: str
) -> None:
    check(*inputs_of(tokens, width, dtype), approximate)


def test_a_row_may_be_wider_than_a_program() -> None:
    check(*inputs_of(3, 1025, torch.float16), "none")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(32768, 4096), (32767, 3072), (4864, 1024), (1, 4096), (1000, 999)])
def test_kernels_err_at_most_twice_as_much_as_pytorch_on_a_gpu(
    tokens: int, width: int, dtype: torch.dtype, approximate: str
) -> None:
    check(*inputs_of(tokens, width, dtype), approximate)


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_sweep_is_the_formula(dtype: torch.dtype, approximate: str) -> None:
    u = torch.linspace(-12, 12, 4800, device=DEVICE).view(40, 120).to(dtype)  # the tails, too
    check(u, torch.zeros_like(u[0]), torch.ones_like(u), approximate)
    with backend.using("triton"):
        out = bias_gelu(u, torch.zeros_like(u[0]), approximate).double()
    exact = F.gelu(u.double(), approximate=approximate)
    assert float((out - exact).abs().max()) < max(1e-6, torch.finfo(dtype).eps * 6.1)
    assert bool((out[u < -9] <= 0).all()) and torch.equal(out[u > 9], exact[u > 9])


def test_the_tail_errs_by_little_more_than_its_rounding() -> None:
    """Half a unit in the last place is the rounding; the polynomial may add 1/60 of that, and fp32 some."""
    u = torch.arange(-6, 0, 2**-7, device=DEVICE).half()[None]
    with backend.using("triton"):
        out = bias_gelu(u, torch.zeros_like(u[0])).double()
    exact = F.gelu(u.double())
    units = last_place(exact.half()).clamp(min=2**-24)  # what is subnormal has one unit
    assert float(((out - exact).abs() / units).max()) < 0.54


@pytest.mark.parametrize("approximate", FORMS)
def test_halves_at_the_end_of_their_range_give_finite_results(approximate: str) -> None:
    x, bias, towards = inputs_of(5, 64, torch.float16)
    x.copy_(torch.where(x > 0, 60000.0, -60000.0))
    check(x, bias, towards, approximate)
    assert all(t.isfinite().all() for t in with_gradients("triton", x, bias, towards, approximate))


def test_strides_change_nothing() -> None:
    inputs = inputs_of(5, 24, torch.float32)
    x, bias, towards = (torch.stack([t, t], -1)[..., 1] for t in inputs)
    expected = with_gradients("triton", *inputs, "none")
    assert all(
        torch.equal(a, b) for a, b in zip(with_gradients("triton", x, bias, towards, "none"), expected, strict=True)
    )


def test_no_tokens_give_no_output_and_a_zero_gradient() -> None:
    out, d_x, d_bias = with_gradients("triton", *inputs_of(0, 8, torch.float32), "none")
    assert out.shape == d_x.shape == (0, 8)
    assert d_bias.shape == (8,) and not d_bias.any()


def test_one_gradient_alone_is_the_same_and_none_changes_no_output() -> None:
    x, bias, towards = inputs_of(9, 24, torch.float16)
    out, *expected = with_gradients("triton", x, bias, towards, "none")
    for wanted in range(2):
        leaves = [t.detach().requires_grad_(i == wanted) for i, t in enumerate((x, bias))]
        with backend.using("triton"):
            (found,) = torch.autograd.grad(bias_gelu(leaves[0], leaves[1]), [leaves[wanted]], towards)
        assert torch.equal(found, expected[wanted])
    with backend.using("triton"), torch.inference_mode():
        assert torch.equal(bias_gelu(x, bias), out)


@pytest.mark.parametrize(
    ("tokens", "width", "runs"), [(70, 48, 1), pytest.param(5000, 4096, 200, marks=[pytest.mark.gpu, on_gpu])]
)
def test_every_run_gives_the_same_bits(tokens: int, width: int, runs: int) -> None:
    inputs = inputs_of(tokens, width, torch.float16)
    first = with_gradients("triton", *inputs, "none")
    for _ in range(runs):
        again = with_gradients("triton", *inputs, "none")
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.whole_gpu
@pytest.mark.gpu
@on_gpu
def test_more_than_two_to_the_31_elements() -> None:
    tokens, width = 525_000, 4096
    x, bias, towards = inputs_of(1, width, torch.float16)
    towards = towards / 100  # or the bias's gradient is beyond fp16
    far = x.new_zeros(tokens, width)
    far[-1] = x[0]
    out, d_x, d_bias = with_gradients("triton", far, bias, towards.expand(tokens, -1), "none")
    expected = with_gradients("triton", x, bias, towards, "none")
    assert torch.equal(out[-1:], expected[0]) and torch.equal(d_x[-1:], expected[1])
    rest = with_gradients("torch", x.double() * 0, bias.double(), towards.double(), "none")[2] * (tokens - 1)
    torch.testing.assert_close(d_bias.double(), rest + expected[2], rtol=2e-3, atol=2e-3)
