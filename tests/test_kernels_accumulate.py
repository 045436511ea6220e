"""Gradients added up in fp32: the kernel has PyTorch's own bits, whatever the size."""

from __future__ import annotations

import pytest
import torch
from test_kernels_flat import DEVICE

from kernels import backend
from kernels.accumulate import BLOCK, accumulate


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 63, BLOCK, 2 * BLOCK + 7])
def test_sums_are_pytorchs(size: int, dtype: torch.dtype) -> None:
    gradients = [torch.randn(size, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3)]
    around = torch.full((size + 20,), torch.nan, device=DEVICE)  # nothing is written beyond the sum
    own = around[7 : 7 + size]
    with backend.using("triton"):
        total = accumulate(None, gradients[0].to(DEVICE))
        own.copy_(total)
        for gradient in gradients[1:]:
            assert accumulate(total, gradient.to(DEVICE)) is total
            accumulate(own, gradient.to(DEVICE))
    expected = gradients[0].float() + gradients[1].float() + gradients[2].float()
    assert torch.equal(total.cpu(), expected) and torch.equal(own.cpu(), expected)
    assert around.isnan().sum() == 20


def test_a_matrix_keeps_its_shape_and_a_transposed_one_is_read_as_it_looks() -> None:
    gradient = torch.arange(6.0, device=DEVICE).half().view(2, 3).t()
    with backend.using("triton"):
        total = accumulate(accumulate(None, gradient), gradient)
    assert torch.equal(total, 2 * gradient.float())


def test_a_sum_of_another_size_is_refused() -> None:
    with backend.using("triton"), pytest.raises(ValueError, match="as the gradient is"):
        accumulate(torch.zeros(3, device=DEVICE), torch.zeros(4, device=DEVICE).half())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_token_table_of_bert_large_on_a_gpu(dtype: torch.dtype) -> None:
    test_sums_are_pytorchs(31_260_672 + 3, dtype)
