"""LayerNorm, alone and behind a bias, dropout and the residual, against the formula written out."""

from __future__ import annotations

import unittest.mock
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import backend, dropout
from kernels import layer_norm as module
from kernels.layer_norm import dropout_add_layer_norm, layer_norm
from kernels.partials import add_partials
from tests.helpers.kernel_errors import assert_errs_at_most_twice, poisoned_buffers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the Triton kernels: on CPUs they are interpreted
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NAMES = ("out", "gradient of x", "of residual", "of weight", "of bias", "of x_bias")
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
    out, _ = dropout_add_layer_norm(x, residual, weight, bias, EPS, dropout_p=0.1, keys=keys, site=4)
    torch.testing.assert_close(out, formula(residual + dropped, weight, bias))
    out, _ = dropout_add_layer_norm(x, None, weight, bias, EPS, dropout_p=0.1, keys=keys, site=4)
    torch.testing.assert_close(out, formula(dropped, weight, bias))
    dropped = (x + bias) * dropout.multiplier(keys, 4, hidden, 0.1, x.dtype)
    out, _ = dropout_add_layer_norm(x, residual, weight, bias, EPS, x_bias=bias, dropout_p=0.1, keys=keys, site=4)
    torch.testing.assert_close(out, formula(residual + dropped, weight, bias))
    out, z = dropout_add_layer_norm(
        x, residual, weight, bias, EPS, x_bias=bias, dropout_p=0.1, keys=keys, site=4, return_sum=True
    )
    torch.testing.assert_close((out, z), (formula(residual + dropped, weight, bias), residual + dropped))
    out, _ = dropout_add_layer_norm(x, residual, weight, bias, EPS, dropout_p=0.1)  # evaluation
    torch.testing.assert_close(out, formula(residual + x, weight, bias))


@pytest.mark.parametrize("return_sum", [False, True])
def test_gradients_are_those_of_the_function(return_sum: bool) -> None:
    inputs = [t.requires_grad_() for t in draw(4, 6)]
    rest: Any = {"dropout_p": 0.3, "keys": keys_of(4), "site": 1, "return_sum": return_sum}

    def function(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return dropout_add_layer_norm(x, residual, weight, bias, EPS, x_bias=b, **rest)

    assert torch.autograd.gradcheck(function, [*inputs, inputs[0][0].detach().clone().requires_grad_()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_errs_by_its_own_rounding_only(dtype: torch.dtype) -> None:
    x, residual, weight, bias = (t.to(dtype) for t in draw(16, 256))
    x = x + 100  # statistics in half precision would lose this row's variance
    x_bias = bias + 3
    out, _ = dropout_add_layer_norm(x, residual, weight, bias, EPS, x_bias=x_bias)
    exact = formula(x.double() + x_bias.double() + residual.double(), weight.double(), bias.double())
    assert out.dtype == dtype
    assert float(((out.double() - exact).abs() / (exact.abs() + 1e-2)).max()) < torch.finfo(dtype).eps


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    x, weight = torch.zeros(3, 4), torch.zeros(5)
    with pytest.raises(ValueError, match=r"x \(3, 4\), weight \(5,\)"):
        layer_norm(x, weight, weight, EPS)
    with pytest.raises(ValueError, match=r"residual \(2, 4\)"):
        dropout_add_layer_norm(x, x[:2], x[0], x[0], EPS)
    with pytest.raises(ValueError, match=r"x_bias \(5,\)"):
        dropout_add_layer_norm(x, x, x[0], x[0], EPS, x_bias=weight)
    with pytest.raises(ValueError, match="float16"):
        layer_norm(x.half(), x[0], x[0], EPS)
    with pytest.raises(ValueError, match="float16"):
        dropout_add_layer_norm(x, x, x[0], x[0], EPS, x_bias=x[0].half())


# ---- the kernels ---------------------------------------------------------------------------------------------


def inputs_of(tokens: int, hidden: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """(x, residual, weight, bias, x_bias), the gradient of the output, dropout keys."""
    generator = torch.Generator(DEVICE).manual_seed(tokens)
    shapes = ((tokens, hidden), (tokens, hidden), (hidden,), (hidden,), (hidden,), (tokens, hidden))
    *inputs, towards = (torch.randn(s, generator=generator, device=DEVICE).to(dtype) for s in shapes)
    inputs[1] += 1
    return inputs, towards, keys_of(tokens).to(DEVICE)


def with_gradients(
    kernels: str,
    inputs: list[Tensor],
    towards: Tensor,
    p: float,
    keys: Tensor | None,
    again: Tensor | None = None,
    return_sum: bool = False,
) -> list[Tensor]:
    """[output, gradients of ``inputs``] by a backend, or by ``eager``: PyTorch's own operations.

    ``again`` is the gradient of the second result, which is the first, or with ``return_sum`` the sum. That then ends
    the list.
    """
    x, residual, weight, bias, *rest = leaves = [t.detach().requires_grad_() for t in inputs]
    x_bias = rest[0] if rest else None
    if kernels == "eager":
        x = x if x_bias is None else x + x_bias
        if keys is not None:
            x = x * dropout.multiplier(keys, 2, x.shape[1], p, x.dtype)
        z = residual + x
        out = F.layer_norm(z, weight.shape, weight, bias, EPS)
        outs = out, z if return_sum else out
    else:
        with backend.using(kernels):
            outs = dropout_add_layer_norm(
                x, residual, weight, bias, EPS, x_bias=x_bias, dropout_p=p, keys=keys, site=2, return_sum=return_sum
            )
    assert (outs[0].data_ptr() == outs[1].data_ptr()) is not (return_sum and outs[0].numel() > 0)
    used = 1 if again is None else 2
    sums = [outs[1].detach()] if return_sum else []
    return [outs[0].detach(), *torch.autograd.grad(outs[:used], leaves, [towards, again][:used]), *sums]


def check(inputs: list[Tensor], towards: Tensor, p: float, keys: Tensor | None, return_sum: bool = False) -> None:
    again = towards.flip(1) if len(inputs) == 5 else None
    with poisoned_buffers():
        ours = with_gradients("triton", inputs, towards, p, keys, again, return_sum)
    same_dtype = with_gradients("eager", inputs, towards, p, keys, again, return_sum)
    wide = None if again is None else again.double()
    exact = with_gradients("torch", [t.double() for t in inputs], towards.double(), p, keys, wide, return_sum)
    for a, b, c, name in zip(ours, same_dtype, exact, [*NAMES[: 1 + len(inputs)], "sum"][: len(ours)], strict=True):
        assert_errs_at_most_twice(a, b, c, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 1), (1, 127), (2, 128), (3, 129)])
def test_kernels_err_at_most_twice_as_much_as_pytorch(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    inputs, towards, keys = inputs_of(tokens, hidden, dtype)
    check(inputs, towards, 0.1, keys)
    check(inputs, towards, 0.1, keys, return_sum=True)
    if hidden == 129:  # what falls away does not depend on the shape
        check(inputs, towards, 0.1, None)
        check(inputs, towards, 0.1, None, return_sum=True)
        check(inputs[:4], towards, 0.1, keys)


@pytest.mark.parametrize("return_sum", [False, True])
@pytest.mark.parametrize("given", range(16))
def test_what_may_be_absent_is(given: int, return_sum: bool) -> None:
    """The residual, x_bias, keys, and a gradient of the second result."""
    inputs, towards, keys = inputs_of(3, 20, torch.float32)
    found = []
    for kernels in ("triton", "torch"):
        x, residual, weight, bias, x_bias = leaves = [t.detach().requires_grad_() for t in inputs]
        a, b, c = (t if given >> i & 1 else None for i, t in enumerate((residual, x_bias, keys)))
        with backend.using(kernels):
            outs = dropout_add_layer_norm(
                x, a, weight, bias, EPS, x_bias=b, dropout_p=0.3, keys=c, site=2, return_sum=return_sum
            )
        used = 1 + (given >> 3)
        torch.autograd.backward(outs[:used], [towards, towards.flip(1)][:used])
        found.append([*(out.detach() for out in outs), *(t.grad for t in leaves if t.grad is not None)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(("tokens", "hidden"), [(35, 20), (2, 1025)])
def test_more_rows_than_programs_take_at_once_and_rows_of_a_program_each(tokens: int, hidden: int) -> None:
    inputs, towards, keys = inputs_of(tokens, hidden, torch.float16)
    check(inputs, towards, 0.1, keys)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(32768, 1024), (32767, 768), (1, 1024), (5000, 2000), (300, 16384)])
def test_kernels_err_at_most_twice_as_much_as_pytorch_on_a_gpu(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    inputs, towards, keys = inputs_of(tokens, hidden, dtype)
    for return_sum in (False, True):
        check(inputs, towards, 0.1, keys, return_sum)
        check(inputs, towards, 0.1, None, return_sum)


@pytest.mark.parametrize("p", [0.5, 65535 / 65536])  # the second drops nearly all
def test_the_kernels_mask_is_the_references(p: float) -> None:
    inputs, towards, keys = inputs_of(9, 33, torch.float32)
    out, d_x, d_residual, *_ = with_gradients("triton", inputs, towards, p, keys)
    kept = dropout.keep(keys, 2, 33, p)
    torch.testing.assert_close(d_x, torch.where(kept, d_residual * 65536 / (65536 - dropout.threshold(p)), 0.0))
    torch.testing.assert_close(out, with_gradients("torch", inputs, towards, p, keys)[0])


def test_a_row_without_variance_is_its_bias() -> None:
    (x, _, weight, bias, _), towards, _ = inputs_of(3, 40, torch.float16)
    x = torch.full_like(x, 7).requires_grad_()
    with backend.using("triton"):
        out = layer_norm(x, weight, bias, EPS)
    (d_x,) = torch.autograd.grad(out, x, towards / 1000)
    assert torch.equal(out, bias.expand(3, 40))
    assert d_x.isfinite().all() and d_x.abs().max() > 100  # 1 / sqrt(1e-12) is a million


def test_halves_at_the_end_of_their_range_give_finite_results() -> None:
    inputs, towards, keys = inputs_of(6, 130, torch.float16)
    for t in inputs[:2]:
        t.copy_(torch.where(t > 0.5, 60000.0, -60000.0))  # their sum is beyond fp16
    check(inputs, towards, 0.1, keys)
    assert all(t.isfinite().all() for t in with_gradients("triton", inputs, towards, 0.1, keys))


def test_a_row_far_from_zero_keeps_its_variance() -> None:
    """The mean of the squares less the square of the mean would lose it."""
    inputs, towards, keys = inputs_of(4, 64, torch.float32)
    inputs[1] += 1000
    check(inputs, towards, 0.1, keys)


def test_partial_sums_of_more_programs_than_are_added_at_once() -> None:
    """130, and 64 are added at once; whole numbers make the sums exact."""
    partials = torch.randint(-9, 9, (2, 130, 40), device=DEVICE).float()
    assert torch.equal(add_partials(partials, torch.float32), partials.sum(1))


def test_epsilon_is_honoured_in_half_precision() -> None:
    x = torch.tensor([[3e-7, -3e-7]], dtype=torch.float16, device=DEVICE)  # fp16 rounds 1e-12 to 0
    one, zero = torch.ones_like(x[0]), torch.zeros_like(x[0])
    with backend.using("triton"):
        shrunk = layer_norm(x, one, zero, 1e-12), layer_norm(x, one, zero, 1e-13)
    exact = [float(x[0, 0].double() / (x[0, 0].double().square() + eps).sqrt()) for eps in (1e-12, 1e-13)]
    assert [float(t[0, 0]) for t in shrunk] == pytest.approx(exact, rel=1e-3)


def test_strides_change_nothing() -> None:
    inputs, towards, keys = inputs_of(5, 24, torch.float32)
    strided = [torch.stack([t, t], -1)[..., 0] for t in inputs]
    both = torch.stack([towards, towards.flip(1)], -1)
    expected = with_gradients("triton", inputs, towards, 0.3, keys, towards.flip(1))
    far = torch.stack([keys, keys], -1)[..., 0]
    found = with_gradients("triton", strided, both[..., 0], 0.3, far, both[..., 1])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_no_tokens_give_no_output_and_zero_gradients() -> None:
    inputs, towards, keys = inputs_of(0, 8, torch.float32)
    out, d_x, d_residual, *sums = with_gradients("triton", inputs, towards, 0.1, keys)
    assert out.shape == d_x.shape == d_residual.shape == (0, 8)
    assert [t.shape for t in sums] == [(8,)] * 3 and not any(t.any() for t in sums)
    assert len(with_gradients("triton", inputs, towards, 0.1, keys, towards, return_sum=True)) == 7
    x, _, weight, bias, _ = (t.detach().requires_grad_() for t in inputs)
    with backend.using("triton"):
        out = layer_norm(x, weight, bias, EPS)
    d_x, d_weight = torch.autograd.grad(out, [x, weight], towards)
    assert d_x.shape == (0, 8) and not d_weight.any()


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_one_gradient_alone_is_the_same(p: float) -> None:
    inputs, towards, keys = inputs_of(3, 24, torch.float32)
    _, *expected = with_gradients("triton", inputs, towards, p, keys)
    for wanted in range(5):
        leaves = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(inputs)]
        with backend.using("triton"):
            x, residual, weight, bias, x_bias = leaves
            out, _ = dropout_add_layer_norm(
                x, residual, weight, bias, EPS, x_bias=x_bias, dropout_p=p, keys=keys, site=2
            )
        (found,) = torch.autograd.grad(out, [leaves[wanted]], towards)
        assert torch.equal(found, expected[wanted])


def test_a_residual_that_is_x_gets_both_gradients() -> None:
    (x, _, weight, bias, _), towards, _ = inputs_of(4, 16, torch.float32)
    grads = []
    for kernels in ("triton", "torch"):
        leaf = x.detach().requires_grad_()
        with backend.using(kernels):
            torch.autograd.backward(dropout_add_layer_norm(leaf, leaf, weight, bias, EPS)[0], towards)
        assert leaf.grad is not None
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


def test_the_second_result_alone_has_the_gradients_of_the_first() -> None:
    (x, residual, weight, bias, _), towards, _ = inputs_of(4, 16, torch.float32)
    leaf = x.detach().requires_grad_()
    with backend.using("triton"):
        outs = dropout_add_layer_norm(leaf, residual, weight, bias, EPS)
    first, second = (torch.autograd.grad(out, leaf, towards, retain_graph=True)[0] for out in outs)
    assert torch.equal(first, second)


def require_same_bits(kernels: str, tokens: int, hidden: int, dtype: torch.dtype) -> None:
    """LayerNorm of the returned sum, which is another compiled kernel, is the first result bit for bit."""
    (x, residual, weight, bias, x_bias), _, keys = inputs_of(tokens, hidden, dtype)
    with backend.using(kernels):
        for given in (keys, None):
            rest: Any = {"x_bias": x_bias, "dropout_p": 0.1, "keys": given, "return_sum": True}
            out, z = dropout_add_layer_norm(x, residual, weight, bias, EPS, **rest)
            assert torch.equal(out, layer_norm(z, weight, bias, EPS))


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_what_is_normalised_is_the_sum_that_is_returned(kernels: str) -> None:
    """Bit for bit, in half precision, so that backward can read that sum."""
    require_same_bits(kernels, 4, 100, torch.float16)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [32, 40, 64, 128, 200, 384, 768, 1024])
def test_the_returned_sum_is_normalised_to_the_same_bits_on_a_gpu(hidden: int, dtype: torch.dtype) -> None:
    """The two kernels, compiled for an H100, once differed at widths of 32 to 128 (docs/lab.md)."""
    require_same_bits("triton", 5000, hidden, dtype)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_the_sum_alone_has_the_gradients_of_an_addition(p: float) -> None:
    inputs, towards, keys = inputs_of(4, 16, torch.float32)
    x, residual, weight, bias, x_bias = leaves = [t.detach().requires_grad_() for t in inputs]
    with backend.using("triton"):
        rest: Any = {"x_bias": x_bias, "dropout_p": p, "keys": keys, "site": 2, "return_sum": True}
        z = dropout_add_layer_norm(x, residual, weight, bias, EPS, **rest)[1]
    d_x, d_residual, d_weight, d_bias, d_x_bias = torch.autograd.grad(z, leaves, towards)
    dropped = dropout.apply(towards, keys, 2, p)
    torch.testing.assert_close((d_x, d_residual, d_x_bias), (dropped, towards, dropped.sum(0)))
    assert not d_weight.any() and not d_bias.any()


def test_a_result_that_nobody_used_is_not_read_as_zeros() -> None:
    """Its gradient would be another pass over memory: the kernel is given none."""
    (x, residual, weight, bias, _), towards, _ = inputs_of(4, 16, torch.float32)
    with unittest.mock.patch.object(module, "_backward", wraps=module._backward) as backward, backend.using("triton"):
        outs = dropout_add_layer_norm(x.detach().requires_grad_(), residual, weight, bias, EPS)
        summed = dropout_add_layer_norm(x.detach().requires_grad_(), residual, weight, bias, EPS, return_sum=True)
        for out in (*outs, summed[0]):
            torch.autograd.backward(out, towards, retain_graph=True)
    assert [[d is None for d in call.args[0]] for call in backward.call_args_list] == [[False, True, True]] * 3


def test_a_result_whose_memory_another_reads_is_not_changed_in_place() -> None:
    (x, residual, weight, bias, _), _, _ = inputs_of(4, 16, torch.float32)
    for changed in range(2):
        with backend.using("triton"):
            outs = dropout_add_layer_norm(x.detach().requires_grad_(), residual, weight, bias, EPS)
        with pytest.raises(RuntimeError, match="is a view"):
            torch.autograd.backward((outs[changed].mul_(2) + outs[1 - changed]).sum())


def test_where_no_gradient_comes_none_goes() -> None:
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> None:
            return None

    (x, residual, weight, bias, _), towards, _ = inputs_of(4, 16, torch.float32)
    leaf = x.detach().requires_grad_()
    with backend.using("triton"):
        out, _ = dropout_add_layer_norm(leaf, residual, weight, bias, EPS)
    torch.autograd.backward(Stop.apply(out), towards)  # type: ignore[no-untyped-call]
    assert leaf.grad is None


def test_without_gradients_the_output_is_the_same() -> None:
    (x, residual, weight, bias, _), towards, keys = inputs_of(5, 48, torch.float16)
    expected = with_gradients("triton", [x, residual, weight, bias], towards, 0.1, keys)[0]
    with backend.using("triton"), torch.inference_mode():
        out, _ = dropout_add_layer_norm(x, residual, weight, bias, EPS, dropout_p=0.1, keys=keys, site=2)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("tokens", "hidden", "runs"), [(5, 48, 1), pytest.param(5000, 1024, 200, marks=[pytest.mark.gpu, on_gpu])]
)
def test_every_run_gives_the_same_bits(tokens: int, hidden: int, runs: int) -> None:
    inputs, towards, keys = inputs_of(tokens, hidden, torch.float16)
    first = with_gradients("triton", inputs, towards, 0.1, keys)
    for _ in range(runs):
        again = with_gradients("triton", inputs, towards, 0.1, keys)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.whole_gpu
@pytest.mark.gpu
@on_gpu
def test_more_than_two_to_the_31_elements() -> None:
    tokens, hidden = 2_100_000, 1024
    inputs, towards, keys = inputs_of(2, hidden, torch.float16)
    far = [t.new_zeros(tokens, hidden) for t in (*inputs[:2], towards)]
    far_keys = keys.new_zeros(tokens, 2)
    for big, small in zip((*far, far_keys), (*inputs[:2], towards, keys), strict=True):
        big[-2:] = small
    found = with_gradients("triton", [*far[:2], *inputs[2:]], far[2], 0.1, far_keys)
    expected = with_gradients("triton", inputs, towards, 0.1, keys)
    assert all(torch.equal(a[-2:], b) for a, b in zip(found[:3], expected[:3], strict=True))
    for a, b in zip(found[3:], expected[3:], strict=True):  # all other rows have no gradient
        torch.testing.assert_close(a, b)


def test_keys_of_other_tokens_are_refused() -> None:
    x = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"int32 \(2, 2\); they must be int32 \(3, 2\)"):
        dropout_add_layer_norm(x, None, x[0], x[0], EPS, dropout_p=0.1, keys=keys_of(2))
    with pytest.raises(ValueError, match=r"torch.int64 \(3, 2\); they must be int32"):
        dropout_add_layer_norm(x, None, x[0], x[0], EPS, dropout_p=0.1, keys=keys_of(3).long())
