"""Rules for all kernels: a second derivative is refused, and what lies far off in memory is read and written."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels import attention_block, attention_tiled, backend
from kernels.attention import attention
from kernels.bias_gelu import bias_gelu
from kernels.cross_entropy import cross_entropy
from kernels.embedding import embed, table_gradients
from kernels.layer_norm import layer_norm
from tests.test_kernels_attention import cumulative, keys_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def zeros() -> Tensor:
    return torch.zeros(3, dtype=torch.int64, device=DEVICE)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {  # of (3, 16)
    "attention": lambda x: attention(x[:, None, None].expand(3, 3, 1, 16), cumulative([3]).to(DEVICE), 3),
    "bias_gelu": lambda x: bias_gelu(x, x[0]),
    "cross_entropy": lambda x: cross_entropy(x, zeros())[0],
    "embed": lambda x: embed(zeros(), zeros(), zeros(), x, x, x, x[0], x[0], 1e-12),
    "layer_norm": lambda x: layer_norm(x, x[0], x[0], 1e-12),
}


@pytest.mark.parametrize("loss", [lambda y: y.square().sum(), lambda y: y.sum()], ids=["square", "linear"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_second_derivative_is_refused(name: str, loss: Callable[[Tensor], Tensor]) -> None:
    """The first one is a kernel's, which autograd knows nothing of: to it that would be a constant."""
    x = torch.randn(3, 16, device=DEVICE, requires_grad=True)
    with backend.using("triton"):
        (gradient,) = torch.autograd.grad(loss(FUNCTIONS[name](x)), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.backward(gradient.sum())


# Of what is allocated far off only the last rows are touched: the rest takes no memory.


@pytest.mark.whole_gpu
@pytest.mark.parametrize("kernels", [attention_block, attention_tiled], ids=["block", "tiled"])
def test_attention_beyond_two_to_the_31_numbers(kernels: ModuleType) -> None:
    """The last sequence of so many has the bits that it has alone, forward and backward."""
    length, heads, size = 5, 2, 64
    tokens = 2**31 // (3 * heads * size) + 100
    qkv, d_out = (torch.randn(length, n, size, device=DEVICE).half() for n in (3 * heads, heads))
    near = qkv.view(length, 3, heads, size), d_out, keys_of([length]).to(DEVICE)
    far = [t.new_empty(tokens, *t.shape[1:]) for t in near]
    for long, short in zip(far, near, strict=True):
        long[-length:] = short
    found = []
    for (given, towards, keys), begin in ((far, tokens - length), (near, 0)):
        ends = torch.tensor([begin, begin + length], dtype=torch.int32, device=DEVICE)
        out, lse = kernels.forward(given, ends, length, 0.1, keys, 3)
        kept = (out,) if kernels is attention_tiled else ()
        gradient = kernels.backward(towards, given, ends, lse, *kept, length, 0.1, keys, 3)
        found.append((out[-length:].clone(), gradient[-length:].clone()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


ROWS, WIDTH = 2**21 + 2, 1024  # of a table; the last begins beyond 2^31 numbers


@pytest.mark.whole_gpu
def test_a_row_of_a_table_beyond_two_to_the_31_numbers_is_read() -> None:
    table = torch.empty(ROWS, WIDTH, dtype=torch.float16, device=DEVICE)
    table[-1] = torch.randn(WIDTH).half()
    small, one = torch.randn(2, WIDTH, device=DEVICE).half(), torch.ones(WIDTH, device=DEVICE).half()
    with backend.using("triton"), torch.no_grad():
        out = embed(zeros() + ROWS - 1, zeros(), zeros(), table, small, small, one, one, 1e-12)
        expected = embed(zeros(), zeros(), zeros(), table[-1:], small, small, one, one, 1e-12)
    assert torch.equal(out, expected)


@pytest.mark.whole_gpu
def test_the_gradient_of_a_row_beyond_two_to_the_31_numbers_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "new_zeros", lambda self, rows, width: self.new_empty(rows, width))  # not touched
    values = torch.ones(3, WIDTH, device=DEVICE).half()
    token, segment, position = table_gradients(values, (zeros() + ROWS - 1, zeros(), zeros()), (ROWS, 1, 1))
    assert (token[-1] == 3).all() and (segment == 3).all() and (position == 3).all()
