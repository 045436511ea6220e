"""LAMB over flat buffers against You et al. 2020, Algorithm 2, in fp64 on whole tensors, however these are cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import backend
from kernels.adam import Moments
from kernels.flat import Flat, Piece, gradient_square_sum, make_layout
from kernels.lamb import lamb_begin, lamb_finish, trust_ratios
from tests.test_kernels_flat import DEVICE, NAN, UNIT, Share, share_out, zero_state
from trainer.engine.optimizer import OptimizerConfig, make_optimizer
from trainer.engine.partition import Buffer, Partition, Slice

RATE = 0.01
MOMENTS = Moments(0.9, 0.999, 1e-6, True)
BOUNDED = replace(MOMENTS, lower=0.05, upper=0.5)
SIZES, DECAYS = [5, 70, 130, 1, 290], [0.0, 0.01, 0.5, 0.0, 0.01]  # no decay: not adapted either
CLIP = 3.0
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def draw(size: int, step: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(step))


def some_weights(sizes: list[int] = SIZES) -> Tensor:
    """Tensors whose norms differ by a factor of ten thousand."""
    parts = torch.split(draw(sum(sizes), 0), sizes)
    return torch.cat([part * 10.0 ** (2 - k % 5) for k, part in enumerate(parts)])


def paper(
    weights: Tensor, sizes: list[int], decays: list[float], gradients: list[Tensor], moments: Moments
) -> tuple[list[Tensor], list[float]]:
    """Algorithm 2 in fp64, gradients clipped to CLIP: the tensors, and the ratios of the last step."""
    x = [part.double() for part in torch.split(weights, sizes)]
    m, v = ([torch.zeros_like(part) for part in x] for _ in range(2))
    ratios: list[float] = []
    for t, gradient in enumerate(gradients, 1):
        whole = gradient.double()
        parts = torch.split(whole * min(1.0, CLIP / float(whole.norm())), sizes)
        unbiased = (1 - moments.beta1**t, 1 - moments.beta2**t) if moments.bias_correction else (1, 1)
        ratios = []
        for k, (g, decay) in enumerate(zip(parts, decays, strict=True)):
            m[k] = moments.beta1 * m[k] + (1 - moments.beta1) * g
            v[k] = moments.beta2 * v[k] + (1 - moments.beta2) * g**2
            u = m[k] / unbiased[0] / ((v[k] / unbiased[1]).sqrt() + moments.epsilon) + decay * x[k]
            if decay:
                norms = float(x[k].norm()), float(u.norm())
                bounded = min(max(norms[0] / norms[1], moments.lower), moments.upper) if norms[1] > 0 else 1.0
                ratios.append(bounded if norms[0] > 0 else 1.0)
                u = u * ratios[-1]
            x[k] = x[k] - RATE * u
    return x, ratios


def steps(
    shares: list[Share], weights: Tensor, gradients: list[Tensor], moments: Moments, scale: float = 256.0
) -> tuple[list[Flat], Tensor]:
    """Take all steps on all ranks, whose sums meet as an all-reduce would have them; and the last ratios."""
    states = [zero_state(share, weights, torch.float16) for share in shares]
    rows = 1 + max((piece.row for share in shares for piece in share.layout.pieces), default=-1)
    ratios = torch.ones(rows, device=DEVICE)
    for step, gradient in enumerate(gradients, 1):
        flats = [share.flat(gradient * scale) for share in shares]
        both = zip(flats, shares, strict=True)
        norm = torch.stack([gradient_square_sum(flat, share.layout) for flat, share in both]).sum().sqrt() / scale
        factor = (CLIP / norm).clamp(max=1.0) / scale
        sums = torch.zeros(rows, 2, device=DEVICE)
        for share, state, flat in zip(shares, states, flats, strict=True):
            lamb_begin(state, flat, share.layout, moments, step, RATE, factor, sums)
        ratios = trust_ratios(sums, moments)
        for share, state in zip(shares, states, strict=True):
            lamb_finish(state, share.layout, moments, step, RATE, ratios)
    return states, ratios


def gathered(shares: list[Share], states: list[Flat], sizes: list[int]) -> list[Tensor]:
    """The tensors from all ranks; asserts that no padding was written, and that the copies are the weights."""
    for share, state in zip(shares, states, strict=True):
        assert state.copy is not None
        assert torch.equal(share.inside(state.copy), share.inside(state.master).half())
        assert all(share.inside(buffer).isfinite().all() for buffer in state[1:3])
    whole = torch.cat([share.inside(state.master) for share, state in zip(shares, states, strict=True)])
    return list(torch.split(whole, sizes))


def assert_papers(
    name: str, moments: Moments, cuts: list[int], count: int, at_once: bool = True, unit: int = UNIT
) -> None:
    weights, gradients = some_weights(), [draw(sum(SIZES), step) * step for step in range(1, count + 1)]
    shares = share_out(SIZES, DECAYS, cuts, unit, at_once)
    assert any(len(share.layout.closed) > 0 for share in shares) == at_once or cuts
    with backend.using(name):
        states, ratios = steps(shares, weights, gradients, moments)
    exact, exact_ratios = paper(weights, SIZES, DECAYS, gradients, moments)
    for k, (ours, theirs) in enumerate(zip(gathered(shares, states, SIZES), exact, strict=True)):
        assert float((ours.cpu() - theirs).norm() / theirs.norm()) < 1e-6, k
    assert ratios.tolist() == pytest.approx(exact_ratios, rel=1e-5)


@pytest.mark.parametrize("correction", [True, False])
def test_steps_are_the_papers(correction: bool) -> None:
    moments = replace(MOMENTS, bias_correction=correction)
    assert_papers("torch", moments, [], 20)
    assert_papers("triton", moments, [], 2)


@settings(max_examples=20)
@given(st.lists(st.integers(0, sum(SIZES)), max_size=3))
def test_tensors_may_be_cut_anywhere(cuts: list[int]) -> None:
    """Some of the shares are empty."""
    assert_papers("torch", MOMENTS, sorted(cuts), 8)


@pytest.mark.parametrize("cuts", [[74, 74, 215], [1, 495]], ids=str)
def test_kernels_do_not_mind_the_cut(cuts: list[int]) -> None:
    assert_papers("triton", MOMENTS, cuts, 2)


def test_two_plain_passes_are_the_papers() -> None:
    assert_papers("triton", MOMENTS, [], 2, at_once=False)


@pytest.mark.parametrize("unit", [256, 512])
def test_a_tensor_may_be_shorter_than_the_blocks_that_are_asked_for_ahead(unit: int) -> None:
    assert_papers("triton", MOMENTS, [], 2, unit=unit)


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("moments", [MOMENTS, BOUNDED], ids=["free", "bounded"])
def test_a_norm_that_is_nan_makes_the_ratio_and_the_tensor_nan(name: str, moments: Moments) -> None:
    """Other tensors are unaffected. A ratio of 1 would hide the NaN in all elements but one."""
    sizes, decays = [40, 30], [0.01, 0.01]
    shares, weights = share_out(sizes, decays, []), draw(70, 0)
    weights[5] = NAN
    state = zero_state(shares[0], weights)
    factor, sums = torch.ones((), device=DEVICE), torch.zeros(2, 2, device=DEVICE)
    with backend.using(name):
        lamb_begin(state, shares[0].flat(draw(70, 1)), shares[0].layout, moments, 1, RATE, factor, sums)
        ratios = trust_ratios(sums, moments)
        lamb_finish(state, shares[0].layout, moments, 1, RATE, ratios)
    assert ratios.isnan().tolist() == [True, False]
    bad, sound = torch.split(shares[0].inside(state.master), sizes)
    assert bad.isnan().all() and sound.isfinite().all()


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_bounds_hold_and_those_that_never_bind_change_nothing(name: str) -> None:
    weights, gradients, shares = some_weights(), [draw(sum(SIZES), 1)], share_out(SIZES, DECAYS, [])
    found = []
    for moments in (MOMENTS, replace(MOMENTS, lower=1e-9, upper=1e9), replace(BOUNDED, upper=3.0)):
        with backend.using(name):
            states, ratios = steps(shares, weights, gradients, moments)
        found.append([*gathered(shares, states, SIZES), ratios])
        exact, exact_ratios = paper(weights, SIZES, DECAYS, gradients, moments)
        assert ratios.tolist() == pytest.approx(exact_ratios, rel=1e-5)
        assert all(float((a.cpu() - b).norm() / b.norm()) < 1e-6 for a, b in zip(found[-1], exact, strict=False))
    assert all(torch.equal(a, b) for a, b in zip(*found[:2], strict=True))
    [high, free, low] = exact_ratios
    assert (high, low) == (3.0, 0.05) and free == pytest.approx(float(found[0][-1][1]), rel=1e-5)  # each case is there


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize(("at_once", "moments"), [(True, MOMENTS), (False, MOMENTS), (True, BOUNDED)])
def test_a_zero_norm_gives_a_ratio_of_one(name: str, at_once: bool, moments: Moments) -> None:
    """No weight, no direction (β₁ = 0, and a tiny decay that no fp32 shows), and neither; whatever the bounds."""
    sizes, decays = [40, 30, 20], [0.01, 1e-30, 0.01]
    weights = torch.cat([torch.zeros(40), draw(30, 1) * 1e-3, torch.zeros(20)])
    gradient = torch.cat([draw(40, 2), torch.zeros(50)])
    shares = share_out(sizes, decays, [], at_once=at_once)
    with backend.using(name):
        states, ratios = steps(shares, weights, [gradient], moments)
    assert ratios.tolist() == [1.0, 1.0, 1.0]
    moved, kept, zero = gathered(shares, states, sizes)
    torch.testing.assert_close(moved.cpu(), -RATE * gradient[:40].sign(), rtol=1e-3, atol=1e-4)
    assert torch.equal(kept.cpu(), weights[40:70]) and not zero.any()


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_power_of_two_scales_change_nothing(name: str) -> None:
    sizes = SIZES[:2]
    shares, weights, gradients = share_out(sizes, DECAYS[:2], []), some_weights(sizes), [draw(sum(sizes), 1)]
    with backend.using(name):
        found = [
            gathered(shares, steps(shares, weights, gradients, MOMENTS, scale)[0], sizes) for scale in (1.0, 2.0**16)
        ]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_sums_are_added_to(name: str) -> None:
    """Several buffers, one per parameter under ZeRO 0, thus share one tensor of sums."""
    shares = share_out([40, 30], [0.1, 0.1], [40])
    sums = torch.full((2, 2), 5.0, device=DEVICE)
    weights = draw(70, 0)
    with backend.using(name):
        for share in shares:
            by = torch.ones((), device=DEVICE)
            lamb_begin(zero_state(share, weights), share.flat(weights), share.layout, MOMENTS, 1, RATE, by, sums)
    expected = [5 + float(part.square().sum()) for part in torch.split(weights, [40, 30])]
    assert sums[:, 0].tolist() == pytest.approx(expected, rel=1e-6)


def test_an_empty_share_is_left_alone() -> None:
    layout = make_layout([Piece(0, 0, 0.1, 0)], 5, DEVICE)
    state = Flat(*(torch.full((5,), NAN, device=DEVICE) for _ in range(3)))
    sums = torch.zeros(1, 2, device=DEVICE)
    for name in ("torch", "triton"):
        with backend.using(name):
            by = torch.ones((), device=DEVICE)
            lamb_begin(state, state.master.clone(), layout, MOMENTS, 1, RATE, by, sums)
            lamb_finish(state, layout, MOMENTS, 1, RATE, trust_ratios(sums, MOMENTS))
    assert all(buffer.isnan().all() for buffer in state[:3]) and not sums.any()


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    [share] = share_out([10], [0.1], [])
    state, by = zero_state(share, torch.zeros(10)), torch.ones((), device=DEVICE)
    with pytest.raises(ValueError, match=r"sums is \(0, 2\)"):
        lamb_begin(state, state.master, share.layout, MOMENTS, 1, RATE, by, torch.zeros(0, 2, device=DEVICE))
    for sums in (torch.zeros(1, 2, dtype=torch.float64, device=DEVICE), torch.zeros(2, 1, device=DEVICE).t()[:, ::2]):
        with pytest.raises(ValueError, match="sums is .* contiguous torch.float32"):
            lamb_begin(state, state.master, share.layout, MOMENTS, 1, RATE, by, sums)
    for ratios in (torch.ones(0, device=DEVICE), torch.ones(1, 1, device=DEVICE), torch.ones(1, device=DEVICE).half()):
        with pytest.raises(ValueError, match="ratios is .* at least 1 rows"):
            lamb_finish(state, share.layout, MOMENTS, 1, RATE, ratios)
    with pytest.raises(ValueError, match="step is 0"):
        lamb_begin(state, state.master, share.layout, MOMENTS, 0, RATE, by, torch.zeros(1, 2, device=DEVICE))


def test_a_part_of_a_tensor_is_not_taken_for_the_whole() -> None:
    """31 of its 32 elements: its norm needs another rank's, so it cannot be finished at once."""
    master = torch.ones(31 + 3, requires_grad=True)
    held = Buffer(master, (Slice("large", 0, 0, 31),))
    optimizer = make_optimizer(iter([master]), OptimizerConfig())
    optimizer.bind(Partition((held,), {"large": torch.Size([8, 4])}, True, master.device))
    [layout] = optimizer.layouts
    assert len(layout.closed) == 0 and len(layout.open) == 1


# ---- on a GPU: many programs at the same tensor ---------------------------------------------------------------

# The token table; a layer's matrices, the largest of which needs nearly all resident programs; what is small.
LARGE = [31_260_672, 1024, 524_288, 3_145_728, 3072, 1_048_576, 4_194_304, 4_194_304, 1024, 2048, 2]
ADAPTED = [0.01, 0.0, 0.01, 0.01, 0.0, 0.01, 0.01, 0.01, 0.0, 0.01, 0.0]


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("cuts", [[], [20_000_001], [33_000_000, 41_000_010]], ids=str)
def test_real_shapes_are_the_papers(cuts: list[int]) -> None:
    weights = draw(sum(LARGE), 0) * 0.02
    gradients = [draw(sum(LARGE), step) * 1e-3 for step in range(1, 4)]
    shares = share_out(LARGE, ADAPTED, cuts, unit=4096)
    assert sum(len(share.layout.closed) for share in shares) > 200
    states, ratios = steps(shares, weights, gradients, MOMENTS)
    exact, exact_ratios = paper(weights, LARGE, ADAPTED, gradients, MOMENTS)
    for ours, theirs in zip(gathered(shares, states, LARGE), exact, strict=True):
        assert float((ours.cpu() - theirs).norm() / theirs.norm()) < 1e-6
    assert ratios.tolist() == pytest.approx(exact_ratios, rel=1e-5)


@pytest.mark.gpu
@gpu
def test_steps_repeat_bit_for_bit() -> None:
    sizes = LARGE[1:] * 3
    weights, gradients = some_weights(sizes), [draw(sum(sizes), 1)]
    [share] = shares = share_out(sizes, ADAPTED[1:] * 3, [], unit=4096)
    first, ratios = steps(shares, weights, gradients, MOMENTS)
    factor, sums = torch.tensor(1.0, device=DEVICE), torch.zeros(len(ratios), 2, device=DEVICE)
    start, flat = zero_state(share, weights, torch.float16), share.flat(gradients[0])
    expected: list[Tensor] = []
    for _ in range(200):
        state = Flat(*(buffer.clone() for buffer in start if buffer is not None))
        sums.zero_()
        lamb_begin(state, flat, share.layout, MOMENTS, 1, RATE, factor, sums)
        lamb_finish(state, share.layout, MOMENTS, 1, RATE, trust_ratios(sums, MOMENTS))
        found = [share.inside(buffer) for buffer in state if buffer is not None] + [sums]
        expected = expected or [*found[:-1], sums.clone()]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
@gpu
def test_steps_are_deepspeeds_fused_lamb() -> None:
    """Compared without bias correction, within its bounds. Its sums are fp32, ours within 1e-6 of the paper's in fp64.

    With bias correction DeepSpeed scales the step, and not what the trust ratio is taken of: its directions' norms are
    off by the correction. It adapts tensors that have no decay, too.
    """
    from deepspeed.ops.lamb import FusedLamb

    moments, decays = replace(MOMENTS, bias_correction=False, lower=0.01, upper=10.0), [0.01] * len(SIZES)
    weights, gradients = some_weights(), [draw(sum(SIZES), step) * step for step in range(1, 21)]
    shares = share_out(SIZES, decays, [])
    with backend.using("triton"):
        states, _ = steps(shares, weights, gradients, moments)
    theirs = [torch.nn.Parameter(part.clone().cuda()) for part in torch.split(weights, SIZES)]
    constants = {"betas": (moments.beta1, moments.beta2), "eps": moments.epsilon, "weight_decay": 0.01}
    lamb = FusedLamb(theirs, RATE, bias_correction=False, min_coeff=0.01, max_coeff=10.0, **constants)
    for gradient in gradients:
        clipped = gradient * min(1.0, CLIP / float(gradient.norm()))
        for parameter, part in zip(theirs, torch.split(clipped, SIZES), strict=True):
            parameter.grad = part.cuda()
        lamb.step()
    for k, (own, other) in enumerate(zip(gathered(shares, states, SIZES), theirs, strict=True)):
        assert float((own - other.detach()).norm() / other.detach().norm()) < 1e-5, k
