"""Cross-entropy: torch's sum, ignored rows, the vocabulary's padding, and batches without a target."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cross_entropy import IGNORED, cross_entropy


def test_sum_and_right_answers() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 5.0, 1.0], [0.0, 1.0, 2.0]])
    labels = torch.tensor([0, 2, IGNORED])
    loss, correct = cross_entropy(logits, labels)
    torch.testing.assert_close(loss, F.cross_entropy(logits[:2], labels[:2], reduction="sum"))
    assert (loss.dtype, correct.dtype, int(correct)) == (torch.float32, torch.int64, 1)


def test_padding_columns_never_win_and_have_no_gradient() -> None:
    logits = torch.randn(4, 10)
    logits[:, 7:] = 1e4
    logits.requires_grad_()
    labels = torch.tensor([0, 6, IGNORED, 3])
    loss, correct = cross_entropy(logits, labels, valid_columns=7)
    expected, expected_correct = cross_entropy(logits[:, :7].detach(), labels)
    assert torch.equal(loss, expected) and torch.equal(correct, expected_correct)
    torch.autograd.backward(loss)
    assert logits.grad is not None
    assert not logits.grad[:, 7:].any() and not logits.grad[2].any() and logits.grad[0, :7].all()


@pytest.mark.parametrize("rows", [0, 3])
def test_no_target_is_zero_loss_and_zero_gradient(rows: int) -> None:
    logits = torch.randn(rows, 5, requires_grad=True)
    loss, correct = cross_entropy(logits, torch.full((rows,), IGNORED))
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


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"logits \(2, 3\), labels torch.int64 \(3,\)"):
        cross_entropy(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="valid_columns is 4"):
        cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), valid_columns=4)
    with pytest.raises(IndexError):
        cross_entropy(torch.zeros(2, 3), torch.tensor([0, 2]), valid_columns=2)
