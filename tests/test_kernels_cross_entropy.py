"""Cross-entropy: torch's sum, ignored rows, the vocabulary's padding, and a gradient that may use the logits up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import backend
from kernels.cross_entropy import IGNORED, ROW, _backward, _cross_entropy_sum_kernel, _forward, cross_entropy
from tests.helpers.kernel_errors import assert_errs_at_most_twice, poisoned_buffers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Rows, columns, columns that take part: the NSP head, one of everything, around a block, more than a block.
SHAPES = [(3, 2, 2), (1, 1, 1), (5, 127, 127), (3, 128, 120), (4, 129, 128), (3, 4160, 4100), (0, 8, 7)]
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["torch", "triton"])
def either(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test runs with the reference, then with the kernels."""
    with backend.using(request.param):
        yield


@pytest.fixture
def triton() -> Iterator[None]:
    with backend.using("triton"):
        yield


def draw(rows: int, columns: int, valid: int, dtype: torch.dtype, scale: float = 4.0) -> tuple[Tensor, Tensor]:
    """Logits whose padding would win, and labels of which every third is ignored."""
    generator = torch.Generator(DEVICE).manual_seed(rows * columns)
    logits = torch.randn(rows, columns, generator=generator, device=DEVICE) * scale
    logits[:, valid:] = 60_000.0
    labels = torch.randint(0, valid, (rows,), generator=generator, device=DEVICE)
    labels[1::3] = IGNORED
    labels[:1] = logits[:1, :valid].argmax(-1)  # at least one right answer
    return logits.to(dtype), labels


def results(name: str, logits: Tensor, labels: Tensor, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, correct, gradient of 3 times the loss) with the kernels of one backend."""
    leaf = logits.clone().requires_grad_()
    with backend.using(name):
        loss, correct = cross_entropy(leaf * 1, labels, valid)
    torch.autograd.backward(loss * 3.0)
    assert leaf.grad is not None
    return loss.detach(), correct, leaf.grad


def assert_right(logits: Tensor, labels: Tensor, valid: int) -> None:
    loss, correct, gradient = results("triton", logits, labels, valid)
    torch_loss, torch_correct, torch_gradient = results("torch", logits, labels, valid)
    exact_loss, _, exact_gradient = results("torch", logits.double(), labels, valid)
    assert (loss.dtype, gradient.dtype, correct.dtype) == (torch.float32, logits.dtype, torch.int64)
    assert int(correct) == int(torch_correct)
    assert_errs_at_most_twice(loss, torch_loss, exact_loss, "loss")
    assert_errs_at_most_twice(gradient, torch_gradient, exact_gradient, "gradient")
    assert not gradient[:, valid:].any() and not gradient[labels == IGNORED].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_err_at_most_twice_as_much_as_torch(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    logits, labels = draw(*shape, dtype)
    assert_right(logits, labels, shape[2])


def test_large_logits_keep_their_digits() -> None:
    """A log-sum-exp of 60,000 has a last place of 0.004: it must not be one number."""
    logits, labels = draw(6, 300, 290, torch.float16, scale=1.0)
    assert_right((logits.clamp(max=4.0) * 30.0 + 59_000.0).half(), labels, 290)
    assert_right((logits.sign() * 60_000.0).half(), labels, 290)


def test_more_rows_than_the_sum_takes_at_once() -> None:
    """2,500, and it takes 1,024: none is left out, of the loss or of the count."""
    kept = torch.randint(0, 2, (ROW, 2500), device=DEVICE).float()
    loss, correct = kept.new_empty(()), kept.new_empty((), dtype=torch.int64)
    _cross_entropy_sum_kernel[(1,)](kept, loss, correct, 2500, BLOCK=1024)
    assert (float(loss), int(correct)) == tuple(kept[2:].sum(1).tolist())


def test_padding_takes_no_part_where_all_columns_fill_whole_blocks(triton: None) -> None:
    """1,024 columns are a block; the 1,000 that take part are not."""
    logits, labels = draw(3, 1024, 1000, torch.float32)
    loss, correct = cross_entropy(logits, labels, 1000)
    torch.testing.assert_close(loss, F.cross_entropy(logits[:, :1000], labels, reduction="sum"))
    assert int(correct) >= 1


def test_small_shares_survive_the_loss_scale(triton: None) -> None:
    """A share of 2e-9 is nothing in fp16, but 65,536 times it is something: the scale comes before the rounding."""
    logits = torch.tensor([[0.0, -20.0]], device=DEVICE).half().requires_grad_()
    loss, _ = cross_entropy(logits, torch.tensor([0], device=DEVICE))
    (gradient,) = torch.autograd.grad(loss, logits, torch.tensor(65536.0, device=DEVICE))
    assert float(gradient[0, 1]) == pytest.approx(65536 * 2.0611536e-9, rel=1e-3)


def test_what_takes_no_part_has_no_gradient_where_the_loss_overflows(triton: None) -> None:
    """Padding and rows without a label have none: 0 times infinity would be NaN."""
    logits = torch.randn(2, 10, device=DEVICE, requires_grad=True)
    loss, _ = cross_entropy(logits, torch.tensor([0, IGNORED], device=DEVICE), 7)
    (gradient,) = torch.autograd.grad(loss, logits, torch.tensor(float("inf"), device=DEVICE))
    assert not gradient[:, 7:].any() and not gradient[1].any()


def test_a_row_without_a_label_leaves_zeros_whatever_its_memory_held(triton: None) -> None:
    with poisoned_buffers():
        loss, correct = cross_entropy(torch.randn(3, 10, device=DEVICE), torch.full((3,), IGNORED, device=DEVICE))
    assert float(loss) == 0 and int(correct) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_whose_loss_is_nan_has_no_right_answer(either: None, bad: float) -> None:
    """This holds even if the NaN is at the label."""
    for column in range(3):
        logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 5.0, 1.0]], device=DEVICE)
        logits[0, column] = bad
        if bad < 0:
            logits[0] = bad  # alone, it is a share of zero
        loss, correct = cross_entropy(logits, torch.tensor([1, 1], device=DEVICE))
        assert loss.isnan() and int(correct) == 1


def test_sum_and_right_answers(either: None) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 5.0, 1.0], [0.0, 1.0, 2.0]], device=DEVICE)
    labels = torch.tensor([0, 2, IGNORED], device=DEVICE)
    loss, correct = cross_entropy(logits, labels)
    torch.testing.assert_close(loss, F.cross_entropy(logits[:2], labels[:2], reduction="sum"))
    assert (loss.dtype, correct.dtype, int(correct)) == (torch.float32, torch.int64, 1)


def test_the_first_of_several_maxima_wins(either: None) -> None:
    logits = torch.zeros(3, 9, device=DEVICE)
    logits[:, [2, 5, 8]] = 1.0
    _, correct = cross_entropy(logits, torch.tensor([2, 5, 8], device=DEVICE))
    assert int(correct) == 1
    _, correct = cross_entropy(logits, torch.tensor([2, 2, 2], device=DEVICE))
    assert int(correct) == 3


def test_padding_columns_never_win_and_have_no_gradient(either: None) -> None:
    logits = torch.randn(4, 10, device=DEVICE)
    logits[:, 7:] = 1e4
    logits.requires_grad_()
    labels = torch.tensor([0, 6, IGNORED, 3], device=DEVICE)
    loss, correct = cross_entropy(logits, labels, valid_columns=7)
    expected, expected_correct = cross_entropy(logits[:, :7].detach(), labels)
    assert torch.equal(loss, expected) and torch.equal(correct, expected_correct)
    torch.autograd.backward(loss)
    assert logits.grad is not None
    assert not logits.grad[:, 7:].any() and not logits.grad[2].any() and logits.grad[0, :7].all()


@pytest.mark.parametrize("rows", [0, 3])
def test_no_target_is_zero_loss_and_zero_gradient(either: None, rows: int) -> None:
    logits = torch.randn(rows, 5, requires_grad=True, device=DEVICE)
    loss, correct = cross_entropy(logits, torch.full((rows,), IGNORED, device=DEVICE))
    torch.autograd.backward(loss)
    assert logits.grad is not None
    assert loss.item() == 0 and correct.item() == 0 and not logits.grad.any()


def test_gradients_are_those_of_the_function() -> None:
    labels = torch.tensor([1, IGNORED, 4, 0])

    def function(logits: Tensor) -> Tensor:
        return cross_entropy(logits, labels, valid_columns=5)[0]

    assert torch.autograd.gradcheck(function, (torch.randn(4, 6, dtype=torch.float64, requires_grad=True),))


def test_half_precision_sums_in_fp32() -> None:
    logits = torch.zeros(4096, 4, dtype=torch.float16)
    loss, _ = cross_entropy(logits, torch.zeros(4096, dtype=torch.int64))
    torch.testing.assert_close(loss, 4096 * torch.tensor(4.0).log())  # 5678.3; fp16 has 5676 and 5680


def test_non_contiguous_logits_and_labels(triton: None) -> None:
    logits, labels = draw(6, 40, 33, torch.float32)
    expected = results("triton", logits, labels, 33)
    leaf = logits.t().contiguous().requires_grad_()
    spread = torch.stack([labels, labels], 1)[:, 0]
    assert not spread.is_contiguous()
    loss, correct = cross_entropy(leaf.t(), spread, 33)
    torch.autograd.backward(loss * 3.0)
    assert leaf.grad is not None
    for a, b in zip((loss, correct, leaf.grad.t()), expected, strict=True):
        assert torch.equal(a, b)


def test_every_element_of_the_gradient_is_written(triton: None) -> None:
    logits, labels = draw(7, 139, 130, torch.float16)
    _, _, kept = _forward(logits, labels, 130)
    gradient = torch.full_like(logits, float("nan"))
    _backward(logits, gradient, labels, kept, torch.ones((), device=DEVICE), 130)
    assert gradient.isfinite().all()


def test_a_label_out_of_range_is_loud(triton: None) -> None:
    for label in (5, 7, 1 << 40, -1):
        leaf = torch.randn(2, 6, device=DEVICE, requires_grad=True)
        loss, correct = cross_entropy(leaf, torch.tensor([label, 1], device=DEVICE), valid_columns=5)
        torch.autograd.backward(loss)
        assert leaf.grad is not None
        assert loss.isnan() and leaf.grad[0, :5].isnan().all() and leaf.grad[1].isfinite().all()
        assert int(correct) == int(leaf[1, :5].argmax() == 1)


# ---- the logits, used up ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_the_gradient_takes_the_place_of_logits_that_nobody_owns(triton: None, bias: bool) -> None:
    """A linear layer's; the gradient's bits are those that it has in memory of its own."""
    logits, labels = draw(3, 20, 17, torch.float32)
    leaf = logits.clone().requires_grad_()
    made = F.linear(leaf, torch.eye(20, device=DEVICE), torch.zeros(20, device=DEVICE) if bias else None)
    loss, _ = cross_entropy(made, labels, 17)
    torch.autograd.backward(loss * 3.0)
    assert leaf.grad is not None
    assert torch.equal(made.detach(), leaf.grad), "the gradient is elsewhere"
    assert torch.equal(leaf.detach(), logits) and torch.equal(leaf.grad, results("triton", logits, labels, 17)[2])


def test_used_logits_are_never_used_again(triton: None) -> None:
    logits, labels = draw(3, 20, 17, torch.float32)
    made = logits.requires_grad_() @ torch.eye(20, device=DEVICE)
    loss, _ = cross_entropy(made, labels, 17)
    square = made.square().sum()  # keeps the logits for its own backward
    torch.autograd.backward(loss, retain_graph=True)
    for again in (loss, square):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(again)


class _Passed(torch.autograd.Function):
    """A function whose output is its input's memory, and no view of it to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Tensor:
        return d_out


@pytest.mark.parametrize("kind", ["leaf", "view", "view of a product", "passed on"])
def test_what_somebody_owns_is_left_alone(triton: None, kind: str) -> None:
    logits, labels = draw(3, 20, 17, torch.float32)
    leaf = logits.clone().requires_grad_()
    whole = leaf if kind != "view of a product" else leaf @ torch.eye(20, device=DEVICE)
    used = leaf if kind == "leaf" else whole[:]
    if kind == "passed on":
        used = _Passed.apply(leaf)  # type: ignore[no-untyped-call]
    loss, _ = cross_entropy(used, labels, 17)
    torch.autograd.backward(loss * 3.0, retain_graph=True)
    assert torch.equal(whole.detach(), logits) and torch.equal(leaf.detach(), logits)
    assert leaf.grad is not None
    first = leaf.grad.clone()
    torch.autograd.backward(loss * 3.0)
    assert torch.equal(leaf.grad, 2 * first) and torch.equal(first, results("triton", logits, labels, 17)[2])


def test_no_gradient_is_asked_for_in_evaluation(triton: None) -> None:
    logits, labels = draw(3, 20, 17, torch.float32)
    with torch.inference_mode():
        loss, _ = cross_entropy(logits, labels, 17)
    assert torch.equal(loss, results("triton", logits, labels, 17)[0]) and not loss.requires_grad


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"logits \(2, 3\), labels torch.int64 \(3,\)"):
        cross_entropy(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="valid_columns is 4"):
        cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), valid_columns=4)
    with pytest.raises(IndexError):
        cross_entropy(torch.zeros(2, 3), torch.tensor([0, 2]), valid_columns=2)


# ---- on a GPU -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 8.0, 15_000.0])
def test_real_shapes(dtype: torch.dtype, scale: float) -> None:
    logits, labels = draw(1216, 30528, 30522, torch.float32, scale)
    assert_right(logits.clamp(-60_000, 60_000).to(dtype), labels, 30522)


@pytest.mark.gpu
@gpu
def test_results_repeat_bit_for_bit() -> None:
    logits, labels = draw(4864, 30528, 30522, torch.float16)
    first = results("triton", logits, labels, 30522)
    for _ in range(200):
        assert all(torch.equal(a, b) for a, b in zip(first, results("triton", logits, labels, 30522), strict=True))


@pytest.mark.whole_gpu
@pytest.mark.gpu
@gpu
def test_more_than_two_to_the_31_logits(triton: None) -> None:
    rows, columns = 70_500, 30_528
    logits = torch.zeros(rows, columns, dtype=torch.float16, device=DEVICE)
    labels = torch.full((rows,), IGNORED, device=DEVICE)
    logits[-1, 5], labels[-1] = 1.0, 5
    made = logits.requires_grad_() * 1
    loss, correct = cross_entropy(made, labels, columns)
    expected = torch.log(torch.tensor(columns - 1 + 2.718281828)) - 1
    torch.testing.assert_close(loss.detach().cpu(), expected)
    torch.autograd.backward(loss)
    assert int(correct) == 1 and logits.grad is not None
    assert float(logits.grad[-1, 5]) == pytest.approx(-1.0, abs=1e-3) and not logits.grad[:-1].any()
