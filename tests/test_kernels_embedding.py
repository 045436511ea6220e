"""The embeddings: the three rows' sum, LayerNorm before dropout, gradients, refusals."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels import dropout
from kernels.embedding import embed
from kernels.layer_norm import layer_norm

EPS = 1e-12
INDICES = (torch.tensor([3, 0, 3, 8]), torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 2, 0]))
KEYS = dropout.token_keys(1, 0, torch.arange(2), INDICES[2], torch.tensor([0, 3, 4], dtype=torch.int32))


def draw() -> list[Tensor]:
    """Token, segment and position table, weight, bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((9, 6), (2, 6), (3, 6), (6,), (6,))
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


def embedded(tensors: Sequence[Tensor], p: float = 0.0) -> Tensor:
    token_table, segment_table, position_table, weight, bias = tensors
    tables = token_table, segment_table, position_table
    return embed(*INDICES, *tables, weight, bias, EPS, dropout_p=p, keys=KEYS, site=0)


def test_rows_are_added_normalised_and_dropped_in_this_order() -> None:
    tokens, segments, positions, weight, bias = draw()
    added = torch.stack([tokens[a] + segments[b] + positions[c] for a, b, c in zip(*INDICES, strict=True)])
    expected = layer_norm(added, weight, bias, EPS)
    torch.testing.assert_close(embedded(draw()), expected)
    torch.testing.assert_close(embedded(draw(), p=0.5), dropout.apply(expected, KEYS, 0, 0.5))


def test_gradients_are_those_of_the_function() -> None:
    def function(*tensors: Tensor) -> Tensor:
        return embedded(tensors, p=0.3)

    assert torch.autograd.gradcheck(function, draw())


def test_what_does_not_fit_is_refused() -> None:
    tokens, segments, positions = INDICES
    token_table, segment_table, position_table, weight, bias = draw()
    tables = token_table, segment_table, position_table
    with pytest.raises(ValueError, match=r"int64 \(4,\), torch.int32"):
        embed(tokens, segments.int(), positions, *tables, weight, bias, EPS)
    with pytest.raises(ValueError, match=r"\(9, 5\)"):
        embedded([token_table[:, :5], *draw()[1:]])
    with pytest.raises(IndexError):
        embed(tokens + 1, segments, positions, *tables, weight, bias, EPS)
