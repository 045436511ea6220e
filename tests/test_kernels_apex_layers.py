"""NVIDIA Apex's layers: on a GPU with Apex, their errors next to PyTorch's; and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import apex
from kernels.apex_layers import dense_gelu_dense, dense_gelu_dense_reference, layer_norm
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


DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)


@pytest.mark.gpu
@on_a_gpu
@DTYPES
@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (77, 768), (4096, 1024)])
def test_apexs_layer_norm_errs_at_most_twice_as_much_as_pytorch(tokens: int, width: int, dtype: torch.dtype) -> None:
    def torchs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), weight, bias, 1e-12)

    shapes = [(tokens, width), (width,), (width,), (tokens, width)]
    check(lambda x, weight, bias: layer_norm(x, weight, bias, 1e-12), torchs, shapes, dtype)


@pytest.mark.gpu
@on_a_gpu
@DTYPES
@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (77, 128), (4096, 1024)])
def test_apexs_dense_layers_err_at_most_twice_as_much_as_pytorch(tokens: int, width: int, dtype: torch.dtype) -> None:
    shapes = [(tokens, width), (4 * width, width), (4 * width,), (width, 4 * width), (width,), (tokens, width)]
    check(dense_gelu_dense, dense_gelu_dense_reference, shapes, dtype)


def test_dense_layers_that_apex_does_not_compute_are_refused() -> None:
    x, w1, b1, w2, b2 = (torch.zeros(shape) for shape in ((3, 8), (16, 8), (16,), (8, 16), (8,)))
    with pytest.raises(ValueError, match=r"x is \(3, 8\), with 12 inside; Apex needs multiples of 8"):
        dense_gelu_dense(x, w1[:12], b1[:12], w2[:, :12], b2)
    with pytest.raises(ValueError, match=r"weight2 torch.float32 \(8, 8\)"):
        dense_gelu_dense(x, w1, b1, w2[:, :8], b2)
    with pytest.raises(ValueError, match=r"bias1 torch.float16 \(16,\)"):
        dense_gelu_dense(x, w1, b1.half(), w2, b2)
