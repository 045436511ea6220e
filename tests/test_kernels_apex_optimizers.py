"""NVIDIA Apex's optimizers: where they are refused, what they are given, and, on a GPU with Apex, that they agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import apex, apex_optimizers
from kernels.adam import Moments, adam_update
from kernels.backend import UnavailableError
from kernels.flat import Flat, make_layout
from kernels.lamb import lamb_begin, lamb_finish, trust_ratios
from tests.test_kernels_flat import DEVICE, UNIT, Share, share_out, zero_state
from trainer.engine.optimizer import OptimizerConfig, make_optimizer, require_implementation
from trainer.engine.partition import Buffer, Partition, Slice
from trainer.errors import TrainerError

RATE = 0.01
PLAIN = Moments(0.9, 0.999, 1e-6, True)
# Apex rounds the betas to fp32 before it subtracts them from 1. With betas that fp32 holds, only rounding is left.
MOMENTS = replace(PLAIN, beta1=float(torch.tensor(0.9)), beta2=float(torch.tensor(0.999)))
SIZES, DECAYS = [5, 70, 130, 1, 290], [0.0, 0.01, 0.5, 0.0, 0.01]  # those without decay have no row, either


def test_apexs_optimizers_are_refused_where_they_cannot_be_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lamb, adam = (OptimizerConfig(name, implementation="apex") for name in ("lamb", "adam"))
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    require_implementation(OptimizerConfig(), 1, 8, cpu)
    with pytest.raises(TrainerError, match="implementation is apex, which runs on GPUs, not on cpu: set it to lambert"):
        require_implementation(adam, 1, 1, cpu)
    with pytest.raises(TrainerError, match="on 2 ranks at zero_stage 1: Apex's FusedLAMB takes the norms of one rank"):
        require_implementation(lamb, 1, 2, gpu)
    (tmp_path / "apex.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    apex.extension.cache_clear()
    for config, stage, ranks in ((adam, 3, 8), (lamb, 1, 1), (lamb, 0, 8)):
        with pytest.raises(UnavailableError, match="NVIDIA's Apex is not installed, only a package of the same name"):
            require_implementation(config, stage, ranks, gpu)
    assert replace(lamb, max_trust_ratio=10.0).problems() == [
        "max_trust_ratio is set but Apex's FusedLAMB has no bounds: remove it, or set implementation to lambert"
    ]
    assert replace(adam, min_trust_ratio=0.1).problems() == [
        "min_trust_ratio is for LAMB, but name is adam: remove it, or set name to lamb"
    ]
    assert lamb.problems() == adam.problems() == []


# ---- the steps -----------------------------------------------------------------------------------------------


def draw(size: int, step: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(step))


def some_weights() -> Tensor:
    """Tensors whose norms differ by a factor of ten thousand."""
    parts = torch.split(draw(sum(SIZES), 0), SIZES)
    return torch.cat([part * 10.0 ** (2 - k % 5) for k, part in enumerate(parts)])


def adam_steps(
    whose: str, share: Share, state: Flat, gradients: list[Tensor], first: int = 1, moments: Moments = MOMENTS
) -> None:
    """Steps of ours or of Apex; the gradients arrive 256 times too large, in fp16."""
    update = adam_update if whose == "lambert" else apex_optimizers.adam_update
    factor = torch.tensor(1 / 256, device=DEVICE)
    for step, gradient in enumerate(gradients, first):
        given = share.flat(gradient * 256, torch.float16)
        before = given.clone()
        update(state, given, share.layout, moments, step, RATE, factor)
        assert torch.equal(given.nan_to_num(), before.nan_to_num())


def lamb_steps(
    whose: str, share: Share, state: Flat, gradients: list[Tensor], first: int = 1, moments: Moments = MOMENTS
) -> list[float]:
    """The same for LAMB; returns the last trust ratios by row."""
    factor, ratios = torch.tensor(1 / 256, device=DEVICE), torch.zeros(0)
    for step, gradient in enumerate(gradients, first):
        given = share.flat(gradient * 256, torch.float16)
        before = given.clone()
        if whose == "lambert":
            sums = torch.zeros(sum(decay > 0 for decay in DECAYS), 2, device=DEVICE)
            lamb_begin(state, given, share.layout, moments, step, RATE, factor, sums)
            ratios = trust_ratios(sums, moments)
            lamb_finish(state, share.layout, moments, step, RATE, ratios)
        else:
            found = apex_optimizers.lamb_update(state, given, share.layout, moments, step, RATE, factor)
            ratios = torch.stack([found[row] for row in sorted(found)])
        assert torch.equal(given.nan_to_num(), before.nan_to_num())
    return ratios.tolist()


STEPS: dict[str, Callable[..., Any]] = {"adam": adam_steps, "lamb": lamb_steps}


def assert_close(share: Share, ours: Flat, theirs: Flat) -> None:
    """Each tensor's weights and moments agree within rounding, and the copies are the weights, rounded."""
    for one, other in zip(ours[:3], theirs[:3], strict=True):
        pairs = zip(*(torch.split(share.inside(buffer), SIZES) for buffer in (one, other)), strict=True)
        for a, b in pairs:
            assert float((a - b).norm()) <= 2e-6 * float(b.norm())
    for state in (ours, theirs):
        assert state.copy is not None
        assert torch.equal(share.inside(state.copy), share.inside(state.master).to(state.copy.dtype))


def without_decay(share: Share) -> Share:
    """The same pieces, adapted as before, all with a weight decay of zero."""
    layout = share.layout
    return replace(share, layout=make_layout([replace(p, decay=0.0) for p in layout.pieces], layout.size, DEVICE, UNIT))


def take_turns(name: str, copy: torch.dtype = torch.float16, decays: bool = True) -> None:
    """Compare ours, Apex's, and a run that starts with one and goes on with the other, over eight steps."""
    [share] = share_out(SIZES, DECAYS, [])
    share = share if decays else without_decay(share)
    gradients = [draw(sum(SIZES), step) for step in range(1, 9)]
    states, ratios = [], []
    for turns in (("lambert", "lambert"), ("apex", "apex"), ("lambert", "apex"), ("apex", "lambert")):
        state = zero_state(share, some_weights(), copy)
        STEPS[name](turns[0], share, state, gradients[:3])
        ratios.append(STEPS[name](turns[1], share, state, gradients[3:], first=4))
        states.append(state)
    for state in states[1:]:
        assert_close(share, states[0], state)
    if name == "lamb":
        assert all(found == pytest.approx(ratios[0], rel=1e-5) for found in ratios)
        assert max(ratios[0]) > 10 * min(ratios[0])


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, int]]:
    """A stand-in for amp_C in plain PyTorch, since Apex needs a GPU: it shows what is passed, not Apex's numerics.

    Only the betas are rounded as Apex does it. Returns the calls: name, weight decay, and number of tensors.
    """
    calls: list[tuple[str, float, int]] = []

    def directions(lists: list[list[Tensor]], b1: float, b2: float, eps: float, step: int, corrects: bool) -> None:
        b1, b2 = (float(torch.tensor(beta)) for beta in (b1, b2))  # to fp32
        for g, _, m, v in zip(*lists, strict=True):
            m.mul_(b1).add_(g, alpha=1 - b1)
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
            c1, c2 = (1 - b1**step, 1 - b2**step) if corrects else (1, 1)
            g.copy_(m / c1 / ((v / c2).sqrt() + eps))

    def adam(chunk: int, flag: Tensor, lists: list[list[Tensor]], lr: float, *rest: float) -> None:
        b1, b2, eps, step, mode, corrects, decay = rest
        assert mode == 1 and flag.dtype == torch.int32
        calls.append(("adam", decay, len(lists[0])))
        directions(lists, b1, b2, eps, int(step), bool(corrects))
        for u, x in zip(*lists[:2], strict=True):
            x.sub_(u + decay * x, alpha=lr)

    def lamb(chunk: int, flag: Tensor, lists: list[list[Tensor]], lr: float, *rest: float | Tensor) -> None:
        b1, b2, eps, step, corrects, decay, averaging, mode, norm, most, nvlamb = map(float, rest)
        assert averaging == mode == 1 and norm <= most
        calls.append(("lamb", decay, len(lists[0])))
        directions(lists, b1, b2, eps, int(step), bool(corrects))
        for u, x in zip(*lists[:2], strict=True):
            u.add_(x, alpha=decay)
            x.sub_(u * (x.norm() / u.norm() if nvlamb or decay else 1.0), alpha=lr)

    def l2norm(chunk: int, flag: Tensor, lists: list[list[Tensor]], each: bool) -> tuple[Tensor, Tensor]:
        norms = torch.stack([x.norm() for x in lists[0]])
        return norms.norm()[None], norms

    def scale(chunk: int, flag: Tensor, lists: list[list[Tensor]], by: float) -> None:
        for source, target in zip(*lists, strict=True):
            target.copy_(source * by)

    amp = SimpleNamespace(multi_tensor_adam=adam, multi_tensor_lamb=lamb, multi_tensor_l2norm=l2norm)
    amp.multi_tensor_scale = scale
    monkeypatch.setattr(apex_optimizers, "extension", {"amp_C": amp}.__getitem__)
    return calls


@pytest.mark.parametrize("name", STEPS)
def test_apex_is_called_once_for_each_weight_decay(name: str, stand_in: list[tuple[str, float, int]]) -> None:
    take_turns(name)
    take_turns(name, decays=False)
    assert sorted(stand_in[:3]) == [(name, 0.0, 2), (name, 0.01, 2), (name, 0.5, 1)]


@pytest.mark.usefixtures("stand_in")
def test_under_stage_0_its_lamb_needs_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank holds whole tensors and summed gradients, so the steps are ours, without a collective."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_: pytest.fail("a collective"))
    parts = torch.split(some_weights(), SIZES)
    found = []
    for whose in ("lambert", "apex"):
        masters = [part.reshape(1, -1).clone().requires_grad_() for part in parts]
        buffers = tuple(Buffer(x, (Slice(str(n), 0, 0, x.numel()),)) for n, x in enumerate(masters))
        shapes = {part.name: buffer.master.shape for buffer in buffers for part in buffer.slices}
        optimizer = make_optimizer(iter(masters), OptimizerConfig(implementation=whose))
        optimizer.bind(Partition(buffers, shapes, False, DEVICE))
        optimizer.rate = RATE
        for step in (1, 2):
            for master, gradient in zip(masters, torch.split(draw(sum(SIZES), step), SIZES), strict=True):
                master.grad = gradient.reshape(1, -1)
            optimizer.step()
        found.append((torch.cat([x.detach().flatten() for x in masters]), optimizer.trust))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("stand_in")
def test_what_apex_cannot_step_over_is_refused() -> None:
    factor = torch.ones((), device=DEVICE)
    [whole], [part, _] = share_out(SIZES, DECAYS, []), share_out(SIZES, DECAYS, [40])
    for share, moments, step, message in (
        (part, MOMENTS, 1, "is part of a tensor; FusedLAMB needs whole ones"),
        (whole, replace(MOMENTS, upper=10.0), 1, "bounded by 0.0 and 10.0; FusedLAMB has no bounds"),
        (whole, MOMENTS, 0, "step is 0; it must be 1 or more"),
    ):
        state = zero_state(share, some_weights())
        with pytest.raises(ValueError, match=message):
            apex_optimizers.lamb_update(state, state.master.clone(), share.layout, moments, step, RATE, factor)
    state = zero_state(whole, some_weights())._replace(mean=torch.zeros(3, device=DEVICE))
    with pytest.raises(ValueError, match=r"mean is \(3,\)"):
        apex_optimizers.adam_update(state, state.master, whole.layout, MOMENTS, 1, RATE, factor)


def test_the_configuration_chooses_the_implementation() -> None:
    master = torch.zeros(3, requires_grad=True)
    made = {
        (name, whose): type(make_optimizer(iter([master]), OptimizerConfig(name, implementation=whose))).__name__
        for name in ("lamb", "adam")
        for whose in ("lambert", "apex")
    }
    assert list(made.values()) == ["Lamb", "ApexLamb", "Adam", "Adam"]


# ---- on a GPU with Apex --------------------------------------------------------------------------------------

FOUND = apex.find()
on_a_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and FOUND is not None and FOUND.has("amp_C")),
    reason="needs a CUDA device, and NVIDIA's Apex with amp_C",
)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("decays", [True, False], ids=["decay", "none"])
@pytest.mark.parametrize("copy", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_apexs_steps_are_ours(name: str, copy: torch.dtype, decays: bool) -> None:
    take_turns(name, copy, decays)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("name", STEPS)
def test_apex_rounds_beta2_before_it_subtracts(name: str) -> None:
    """Apex's 1 - beta2 is smaller than ours by 1.3e-5 of its value at 0.999, and so is v after one step."""
    [share] = share_out(SIZES, DECAYS, [])
    ours, theirs = (zero_state(share, some_weights(), torch.float16) for _ in range(2))
    for whose, state in (("lambert", ours), ("apex", theirs)):
        STEPS[name](whose, share, state, [draw(sum(SIZES), 1)], moments=PLAIN)
    expected = share.inside(ours.square) * ((1 - MOMENTS.beta2) / (1 - PLAIN.beta2))
    torch.testing.assert_close(share.inside(theirs.square), expected, rtol=1e-6, atol=0)


@pytest.mark.gpu
@on_a_gpu
def test_apexs_adam_steps_over_any_share() -> None:
    shares, [whole] = share_out(SIZES, DECAYS, [6, 6, 200]), share_out(SIZES, DECAYS, [])
    expected, gradients = zero_state(whole, some_weights(), torch.float16), [draw(sum(SIZES), step) for step in (1, 2)]
    adam_steps("apex", whole, expected, gradients)
    states = [zero_state(share, some_weights(), torch.float16) for share in shares]
    for share, state in zip(shares, states, strict=True):
        adam_steps("apex", share, state, gradients)
    found = torch.cat([share.inside(state.master) for share, state in zip(shares, states, strict=True)])
    assert torch.equal(found, whole.inside(expected.master))


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("name", STEPS)
def test_apexs_steps_repeat_bit_for_bit(name: str) -> None:
    [share] = share_out(SIZES, DECAYS, [])
    states = [zero_state(share, some_weights(), torch.float16) for _ in range(2)]
    for state in states:
        STEPS[name]("apex", share, state, [draw(sum(SIZES), step) for step in (1, 2, 3)])
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*states, strict=True))
