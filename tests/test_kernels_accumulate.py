"""Gradients of many tensors added into one buffer: PyTorch's own bits, wherever they lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import backend
from kernels.accumulate import BLOCK, Places, accumulate, make_places
from tests.test_kernels_flat import DEVICE

LENGTHS = [BLOCK + 8, 1, 63, 2 * BLOCK, 2, 5]
OFFSETS = [0, 4112, 4120, 4192, 12400, 12402]  # with gaps; the last is not a multiple of 8
SIZE = 12_420


def draw(step: int, dtype: torch.dtype, lengths: list[int]) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(length, generator=generator).to(dtype).to(DEVICE) for length in lengths]


def whole(gradients: list[Tensor | None], places: Places, size: int) -> Tensor:
    """The buffer with each tensor in its place, and NaN in the gaps."""
    flat = torch.full((size,), torch.nan)
    for gradient, offset, length in zip(gradients, places.offsets, places.lengths, strict=True):
        flat[offset : offset + length] = 0.0 if gradient is None else gradient.float().cpu().view(-1)
    return flat


def assert_sums(dtype: torch.dtype, lengths: list[int], offsets: list[int], size: int) -> None:
    """Assert three sums: a first, a second in place, and a last one that is rounded into another buffer."""
    places = make_places(offsets, lengths, DEVICE)
    first, second, last = (draw(step, dtype, lengths) for step in range(3))
    second[1] = None
    total, out = (torch.full((size,), torch.nan, device=DEVICE, dtype=d) for d in (torch.float32, dtype))
    with backend.using("triton"):
        accumulate(total, first, places)
        accumulate(total, second, places, total)
        accumulate(out, last, places, total)
    expected = [whole(gradients, places, size) for gradients in (first, second, last)]
    assert torch.equal(total.cpu().nan_to_num(7.0), (expected[0] + expected[1]).nan_to_num(7.0))
    assert torch.equal(out.cpu().nan_to_num(7.0), (expected[0] + expected[1] + expected[2]).to(dtype).nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)  # the interpreter cuts bf16 off
def test_sums_are_pytorchs_and_gaps_stay(dtype: torch.dtype) -> None:
    assert_sums(dtype, LENGTHS, OFFSETS, SIZE)


def test_memory_that_begins_anywhere_is_read_right() -> None:
    places = make_places([0, 16], [9, 8], DEVICE)
    around = torch.arange(32.0, device=DEVICE).half()
    out = torch.full((24,), torch.nan, device=DEVICE)
    with backend.using("triton"):
        accumulate(out, [around[1:10], around[16:24]], places)
        accumulate(out, [around[1:10], around[16:24]], places, out)
    assert out[:9].tolist() == [2.0 * i for i in range(1, 10)] and out[16:].tolist() == [2.0 * i for i in range(16, 24)]
    assert out[9:16].isnan().all()


def test_no_gradient_at_all_is_one_of_zeros() -> None:
    """Nothing is done for an empty buffer."""
    out = torch.full((8,), 3.0, device=DEVICE)
    with backend.using("triton"):
        accumulate(out, [], make_places([], [], DEVICE))
        assert out.tolist() == [3.0] * 8
        accumulate(out, [None, None], make_places([0, 6], [2, 2], DEVICE))
    assert out.tolist() == [0.0, 0.0, 3.0, 3.0, 3.0, 3.0, 0.0, 0.0]


def test_gradients_that_do_not_fit_are_refused() -> None:
    places = make_places([0, 16], [4, 4], DEVICE)
    out, half = torch.zeros(24, device=DEVICE), torch.ones(4, device=DEVICE).half()
    with backend.using("triton"):
        with pytest.raises(ValueError, match="of one dtype"):
            accumulate(out, [half, half.float()], places)
        with pytest.raises(ValueError, match="contiguous"):
            accumulate(out, [half, torch.ones(8, device=DEVICE).half()[::2]], places)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_lengths_that_do_not_fit_are_refused_with_the_numbers(name: str) -> None:
    places, given = make_places([0, 16], [4, 4], DEVICE), [torch.ones(4, device=DEVICE)] * 2
    out, strided = torch.zeros(24, device=DEVICE), torch.zeros(48, device=DEVICE)[::2]
    with backend.using(name):
        for buffers in ((strided, None), (out, strided), (out[:19], None), (out, out[:23]), (out.view(2, 12), None)):
            with pytest.raises(ValueError, match=r"strides \(.*contiguous, of one shape, and at least 20 long"):
                accumulate(buffers[0], given, places, buffers[1])
        for length in (1, 3, 5):
            with pytest.raises(ValueError, match="as long as their places"):
                accumulate(out, [given[0], torch.ones(length, device=DEVICE)], places)
        with pytest.raises(ValueError, match="longer"):
            accumulate(out, given[:1], places)
    assert not out.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_large_tensors_on_a_gpu(dtype: torch.dtype) -> None:
    assert_sums(
        dtype, [31_260_672, 1024, 4_194_304, 2, 3], [0, 31_260_672, 31_262_720, 35_457_024, 35_457_026], 35_457_040
    )
