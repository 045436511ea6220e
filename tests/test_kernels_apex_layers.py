"""NVIDIA Apex's layers: on a GPU with Apex, their errors next to PyTorch's; and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import apex
from kernels.apex_layers import HALF, dense_gelu_dense, dense_gelu_dense_reference, layer_norm
from tests.helpers.kernel_errors import assert_errs_at_most_twice, poisoned_buffers
from tests.test_kernels_flat import DEVICE

FOUND = apex.find()
on_a_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and FOUND is not None and FOUND.has("fused_dense_cuda")),
    reason="needs a CUDA device, and NVIDIA's Apex",
)


def gradients_of(function: Callable[..., Tensor], inputs: list[Tensor], towards: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, towards)]


def check(
    ours: Callable[..., Tensor], torchs: Callable[..., Tensor], shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    """Apex errs at most twice as much as PyTorch in this dtype; the last shape is that of the output's gradient."""
    *inputs, towards = (
        torch.randn(shape, device=DEVICE).div(shape[-1] ** 0.5 if len(shape) > 1 else 1) for shape in shapes
    )
    inputs = [tensor.to(dtype) for tensor in inputs]
    with poisoned_buffers():
        found = gradients_of(ours, inputs, towards.to(dtype))
    same = gradients_of(torchs, inputs, towards.to(dtype))
    exact = gradients_of(torchs, [tensor.double() for tensor in inputs], towards.to(dtype).double())
    for number, each in enumerate(zip(found, same, exact, strict=True)):
        assert_errs_at_most_twice(*each, f"{dtype}: result {number}")


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (77, 768), (4096, 1024)])
def test_apexs_layer_norm_errs_at_most_twice_as_much_as_pytorch(tokens: int, width: int, dtype: torch.dtype) -> None:
    def torchs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), weight, bias, 1e-12)

    shapes = [(tokens, width), (width,), (width,), (tokens, width)]
    check(lambda x, weight, bias: layer_norm(x, weight, bias, 1e-12), torchs, shapes, dtype)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (77, 128), (4096, 1024)])
def test_apexs_dense_layers_err_at_most_twice_as_much_as_pytorch(tokens: int, width: int, dtype: torch.dtype) -> None:
    shapes = [(tokens, width), (4 * width, width), (4 * width,), (width, 4 * width), (width,), (tokens, width)]
    check(dense_gelu_dense, dense_gelu_dense_reference, shapes, dtype)


@pytest.mark.gpu
@on_a_gpu
def test_in_fp32_only_apexs_gelu_is_inexact() -> None:
    """Its matrix products are those of fp32 (TF32's err by 5e-5 and more), so fp32 is refused because of GELU alone."""
    x, weight1, weight2 = (torch.randn(shape, device=DEVICE) / 8 for shape in ((77, 128), (512, 128), (128, 512)))
    bias1, bias2 = torch.randn(512, device=DEVICE), torch.randn(128, device=DEVICE)
    apply = apex.extension("fused_dense_cuda").linear_gelu_linear_forward
    inner, out, entering = apply(x, weight1, bias1, weight2, bias2)
    exact = {
        "first": (entering, F.linear(x.double(), weight1.double(), bias1.double())),
        "gelu": (inner, F.gelu(entering.double(), approximate="tanh")),
        "second": (out, F.linear(inner.double(), weight2.double(), bias2.double())),
    }
    errors = {name: float((found - right).norm() / right.norm()) for name, (found, right) in exact.items()}
    assert errors["first"] < 2e-6 and errors["second"] < 2e-6, errors
    assert 1e-6 < errors["gelu"] < 1e-5, errors  # 2.3e-6 on an H200, where PyTorch's is 4e-8


def test_dense_layers_that_apex_does_not_compute_are_refused() -> None:
    x, w1, b1, w2, b2 = (torch.zeros(shape) for shape in ((3, 8), (16, 8), (16,), (8, 16), (8,)))
    half = [tensor.half() for tensor in (x, w1[:12], b1[:12], w2[:, :12], b2)]
    with pytest.raises(ValueError, match=r"x is \(3, 8\), with 12 inside; Apex needs multiples of 8"):
        dense_gelu_dense(*half)
    with pytest.raises(ValueError, match=r"x is torch.float32; Apex's dense layers are exact enough in fp16 and bf16"):
        dense_gelu_dense(x, w1, b1, w2, b2)
    with pytest.raises(ValueError, match=r"weight2 torch.float32 \(8, 8\)"):
        dense_gelu_dense(x, w1, b1, w2[:, :8], b2)
    with pytest.raises(ValueError, match=r"bias1 torch.float16 \(16,\)"):
        dense_gelu_dense(x, w1, b1.half(), w2, b2)
