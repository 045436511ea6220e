"""AdamW over flat buffers against Loshchilov & Hutter 2019, Algorithm 2, in fp64, however tensors are cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import backend
from kernels.adam import Moments, adam_update, adam_update_reference
from kernels.flat import Flat, Piece, make_layout
from tests.helpers.kernel_errors import assert_errs_at_most_twice
from tests.test_kernels_flat import DEVICE, NAN, Share, share_out, zero_state

RATE = 0.01
MOMENTS = Moments(0.9, 0.999, 1e-6, True)


def draw(size: int, step: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(step))


def paper(weights: Tensor, decay: Tensor, gradients: list[Tensor], moments: Moments) -> Tensor:
    """Algorithm 2 in fp64; ``decay`` is each element's."""
    x, m, v = weights.double(), torch.zeros_like(weights).double(), torch.zeros_like(weights).double()
    for t, gradient in enumerate(gradients, 1):
        g = gradient.double()
        m = moments.beta1 * m + (1 - moments.beta1) * g
        v = moments.beta2 * v + (1 - moments.beta2) * g**2
        unbiased = (1 - moments.beta1**t, 1 - moments.beta2**t) if moments.bias_correction else (1, 1)
        x = x - RATE * (m / unbiased[0] / ((v / unbiased[1]).sqrt() + moments.epsilon) + decay * x)
    return x


def steps(shares: list[Share], weights: Tensor, gradients: list[Tensor], moments: Moments) -> list[Flat]:
    """Take all steps on all ranks; the gradients arrive four times too large."""
    states = [zero_state(share, weights) for share in shares]
    factor = torch.tensor(0.25, device=DEVICE)
    for step, gradient in enumerate(gradients, 1):
        for share, state in zip(shares, states, strict=True):
            adam_update(state, share.flat(4 * gradient), share.layout, moments, step, RATE, factor)
    return states


def gathered(shares: list[Share], states: list[Flat]) -> Tensor:
    """The weights of all ranks; asserts that no padding was written."""
    for share, state in zip(shares, states, strict=True):
        for buffer in state[1:3]:
            assert share.inside(buffer).isfinite().all()
    return torch.cat([share.inside(state.master) for share, state in zip(shares, states, strict=True)]).cpu()


def assert_papers(name: str, moments: Moments, cuts: list[int], count: int) -> None:
    sizes, decays = [5, 70, 1, 290], [0.0, 0.01, 0.0, 0.5]
    weights, gradients = draw(sum(sizes), 0), [draw(sum(sizes), step) for step in range(1, count + 1)]
    shares = share_out(sizes, decays, cuts)
    with backend.using(name):
        found = gathered(shares, steps(shares, weights, gradients, moments))
    decay = torch.repeat_interleave(torch.tensor(decays), torch.tensor(sizes)).double()
    exact = paper(weights, decay, gradients, moments)
    for ours, theirs in zip(torch.split(found, sizes), torch.split(exact, sizes), strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-6


@pytest.mark.parametrize("correction", [True, False])
@pytest.mark.parametrize("cuts", [[], [6, 6, 200]], ids=str)
def test_steps_are_the_papers(correction: bool, cuts: list[int]) -> None:
    moments = Moments(0.9, 0.999, 1e-6, correction)
    assert_papers("torch", moments, cuts, 20)
    assert_papers("triton", moments, cuts, 5)


@pytest.mark.parametrize("gradient", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("copy", [None, torch.float16, torch.bfloat16], ids=str)
def test_kernel_is_the_reference(gradient: torch.dtype, copy: torch.dtype | None) -> None:
    [share] = share_out([40, 270], [0.1, 0.0], [])
    ours, torch_s = (zero_state(share, draw(310, 0), copy) for _ in range(2))
    flat, factor = share.flat(draw(310, 1) * 1024, gradient), torch.tensor(1 / 1024, device=DEVICE)
    with backend.using("triton"):
        adam_update(ours, flat, share.layout, MOMENTS, 1, RATE, factor)
    adam_update_reference(torch_s, flat, share.layout, MOMENTS, 1, RATE, factor)
    for mine, theirs in zip(ours[:3], torch_s[:3], strict=True):
        torch.testing.assert_close(share.inside(mine), share.inside(theirs), rtol=2e-6, atol=1e-9)
    if ours.copy is not None:
        # Triton's interpreter cuts where it should round to bf16; a GPU rounds.
        off = 2**-7 if DEVICE.type == "cpu" and copy == torch.bfloat16 else 0.0
        torch.testing.assert_close(share.inside(ours.copy), share.inside(ours.master).to(copy), rtol=off, atol=0)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_power_of_two_factors_change_nothing(name: str) -> None:
    """The gradient that reaches the moments is the same for every loss scale."""
    [share] = share_out([40, 100], [0.1, 0.0], [])
    found = []
    for scale in (1.0, 2.0**8, 2.0**16):
        state = zero_state(share, draw(140, 0))
        with backend.using(name):
            by = torch.tensor(1 / scale, device=DEVICE)
            adam_update(state, share.flat(draw(140, 1) * scale), share.layout, MOMENTS, 1, RATE, by)
        found.append(torch.cat([share.inside(buffer) for buffer in state[:3]]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_an_empty_share_is_left_alone() -> None:
    layout = make_layout([Piece(0, 0)], 5, DEVICE)
    state = Flat(*(torch.full((5,), NAN, device=DEVICE) for _ in range(3)))
    for name in ("torch", "triton"):
        with backend.using(name):
            adam_update(state, state.master.clone(), layout, MOMENTS, 1, RATE, torch.ones((), device=DEVICE))
    assert all(buffer.isnan().all() for buffer in state[:3])


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    [share] = share_out([10], [0.0], [])
    good, factor = zero_state(share, torch.zeros(10)), torch.ones((), device=DEVICE)
    with pytest.raises(ValueError, match="step is 0"):
        adam_update(good, good.master, share.layout, MOMENTS, 0, RATE, factor)
    with pytest.raises(ValueError, match=r"square is torch.float16; it must be torch.float32"):
        adam_update(good._replace(square=good.square.half()), good.master, share.layout, MOMENTS, 1, RATE, factor)
    with pytest.raises(ValueError, match=r"copy is \(15,\)"):
        adam_update(good._replace(copy=good.master[1:].half()), good.master, share.layout, MOMENTS, 1, RATE, factor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cuts", [[], [20_000_001]], ids=str)
def test_real_shapes(cuts: list[int]) -> None:
    sizes, decays = [31_260_672, 1024, 4_194_304, 2, 3_145_728, 1024], [0.01, 0.0, 0.01, 0.0, 0.01, 0.0]
    shares = share_out(sizes, decays, cuts, unit=4096)
    weights, gradients = draw(sum(sizes), 0) * 0.02, [draw(sum(sizes), step) for step in (1, 2, 3)]
    ours = steps(shares, weights, gradients, MOMENTS)
    again = steps(shares, weights, gradients, MOMENTS)
    assert all(torch.equal(a.master.nan_to_num(), b.master.nan_to_num()) for a, b in zip(ours, again, strict=True))
    with backend.using("torch"):
        plain = gathered(shares, steps(shares, weights, gradients, MOMENTS))
    decay = torch.repeat_interleave(torch.tensor(decays), torch.tensor(sizes)).double()
    assert_errs_at_most_twice(gathered(shares, ours), plain, paper(weights, decay, gradients, MOMENTS), "weights")
