"""The embeddings: the three rows' sum, LayerNorm before dropout, gradients, refusals."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import backend, dropout
from kernels.embedding import embed, embed_sum, table_gradients
from kernels.layer_norm import layer_norm
from tests.helpers.kernel_errors import assert_errs_at_most_twice, poisoned_buffers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the Triton kernels: on CPUs they are interpreted
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NAMES = ("out", "gradient of the token table", "of the segment table", "of positions", "of weight", "of bias")
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
    torch.testing.assert_close(embed_sum(INDICES, (tokens, segments, positions)), added)
    torch.testing.assert_close(embedded(draw()), expected)
    torch.testing.assert_close(embedded(draw(), p=0.5), dropout.apply(expected, KEYS, 0, 0.5))


def test_gradients_are_those_of_the_function() -> None:
    def function(*tensors: Tensor) -> Tensor:
        return embedded(tensors, p=0.3)

    assert torch.autograd.gradcheck(function, draw())
    assert torch.autograd.gradcheck(lambda *tables: embed_sum(INDICES, tables), draw()[:3])


def test_what_does_not_fit_is_refused() -> None:
    tokens, segments, positions = INDICES
    token_table, segment_table, position_table, weight, bias = draw()
    tables = token_table, segment_table, position_table
    with pytest.raises(ValueError, match=r"int64 \(4,\), torch.int32"):
        embed(tokens, segments.int(), positions, *tables, weight, bias, EPS)
    with pytest.raises(ValueError, match=r"\(9, 5\)"):
        embedded([token_table[:, :5], *draw()[1:]])
    with pytest.raises(ValueError, match=r"\(9, 5\)"):
        embed_sum(INDICES, (token_table[:, :5], segment_table, position_table))
    with pytest.raises(ValueError, match=r"dropout keys .* must be int32 \(4, 2\)"):
        embed(tokens, segments, positions, *tables, weight, bias, EPS, dropout_p=0.1, keys=KEYS[:3])
    with pytest.raises(IndexError):
        embed(tokens + 1, segments, positions, *tables, weight, bias, EPS)


# ---- the kernels ---------------------------------------------------------------------------------------------


def batch_of(lengths: list[int], vocab: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """(tokens, segments, positions) of pairs as text has them, a few tokens very often; dropout keys."""
    generator = torch.Generator().manual_seed(vocab)
    positions = torch.cat([torch.arange(n) for n in lengths])
    segments = torch.cat([torch.arange(n) * 2 // n for n in lengths])
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens = (vocab ** torch.rand(len(positions), generator=generator)).long().clamp(max=vocab - 1)  # Zipf's law
    tokens[ends[:-1].long()], tokens[ends[1:].long() - 1] = 1, 0
    keys = dropout.token_keys(3, 1, torch.arange(len(lengths)), positions, ends)
    return (tokens.to(DEVICE), segments.to(DEVICE), positions.to(DEVICE)), keys.to(DEVICE)


def parameters_of(rows: tuple[int, int, int], width: int, dtype: torch.dtype) -> list[Tensor]:
    """Token, segment and position table, weight, bias."""
    generator = torch.Generator(DEVICE).manual_seed(width)
    shapes = (*((n, width) for n in rows), (width,), (width,))
    return [torch.randn(s, generator=generator, device=DEVICE).to(dtype) for s in shapes]


def with_gradients(
    kernels: str,
    indices: tuple[Tensor, Tensor, Tensor],
    parameters: list[Tensor],
    towards: Tensor,
    p: float,
    keys: Tensor | None,
) -> list[Tensor]:
    """[output, gradients of the parameters] by a backend, or by ``eager``: PyTorch's own operations.

    Without weight and bias among the parameters, the output is the sum of the rows.
    """
    leaves = [t.detach().requires_grad_() for t in parameters]
    if kernels == "eager":
        token, segment, position = (F.embedding(i, t) for i, t in zip(indices, leaves[:3], strict=True))
        out = token + segment + position
        if leaves[3:]:
            out = F.layer_norm(out, leaves[3].shape, leaves[3], leaves[4], EPS)
        if keys is not None:
            out = out * dropout.multiplier(keys, 5, out.shape[1], p, out.dtype)
    elif not leaves[3:]:
        with backend.using(kernels):
            out = embed_sum(indices, tuple(leaves))
    else:
        with backend.using(kernels):
            a, b, c, weight, bias = leaves
            out = embed(*indices, a, b, c, weight, bias, EPS, dropout_p=p, keys=keys, site=5)
    return [out.detach(), *torch.autograd.grad(out, leaves, towards)]


def check(lengths: list[int], rows: tuple[int, int, int], width: int, dtype: torch.dtype, p: float) -> None:
    indices, keys = batch_of(lengths, rows[0])
    parameters = parameters_of(rows, width, dtype)
    generator = torch.Generator(DEVICE).manual_seed(sum(lengths))
    towards = torch.randn(sum(lengths), width, generator=generator, device=DEVICE).to(dtype)
    with poisoned_buffers():
        ours = with_gradients("triton", indices, parameters, towards, p, keys)
    same_dtype = with_gradients("eager", indices, parameters, towards, p, keys)
    doubles = [t.double() for t in parameters]
    exact = with_gradients("torch", indices, doubles, towards.double(), p, keys)
    for a, b, c, name in zip(ours, same_dtype, exact, NAMES, strict=True):
        assert_errs_at_most_twice(a, b, c, name)
    with poisoned_buffers():
        ours = with_gradients("triton", indices, parameters[:3], towards, p, None)
    same_dtype = with_gradients("eager", indices, parameters[:3], towards, p, None)
    exact = with_gradients("torch", indices, doubles[:3], towards.double(), p, None)
    for a, b, c, name in zip(ours, same_dtype, exact, NAMES[:4], strict=True):
        assert_errs_at_most_twice(a, b, c, f"the sum's {name}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "rows", "width"),
    [
        pytest.param([1], (2, 1, 1), 5, id="one token"),
        pytest.param([7, 1, 4], (9, 2, 7), 129, id="three sequences"),
        pytest.param([9], (500, 3, 70), 20, id="rows that no token has"),
    ],
)
def test_kernels_err_at_most_twice_as_much_as_pytorch(
    lengths: list[int], rows: tuple[int, int, int], width: int, dtype: torch.dtype
) -> None:
    check(lengths, rows, width, dtype, 0.1)


def test_halves_that_are_summed_over_chunks_err_at_most_twice_as_much() -> None:
    check([31, 12], (9, 2, 31), 17, torch.float16, 0.1)  # 3 * 43 rows: more than a chunk of 128


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [768, 1024])
@pytest.mark.parametrize("lengths", [[128] * 256, [512] * 64, [1, 511, 300, 7], [3]])
def test_kernels_err_at_most_twice_as_much_as_pytorch_on_a_gpu(
    lengths: list[int], width: int, dtype: torch.dtype
) -> None:
    check(lengths, (30528, 2, 512), width, dtype, 0.1)
    check(lengths, (30528, 2, 512), width, dtype, 0.0)


@pytest.mark.parametrize("runs", [[8], [7, 1], [1, 8, 7], [20], [8, 8, 8], [1] * 10, [30, 1, 3, 17]])
def test_runs_are_summed_wherever_they_begin_and_end(runs: list[int]) -> None:
    check_runs(runs, chunk=8)


def test_a_run_has_any_number_of_chunks() -> None:
    check_runs([3, 68, 1], chunk=2)  # 34 of them; 32 are looked at together


def check_runs(runs: list[int], chunk: int) -> None:
    """Whole numbers make every sum exact, in any order."""
    tokens = torch.repeat_interleave(torch.arange(len(runs)), torch.tensor(runs)).to(DEVICE)
    shuffled = tokens[torch.randperm(len(tokens)).to(DEVICE)]
    values = torch.randint(-9, 9, (len(tokens), 3)).float().to(DEVICE)
    indices = shuffled, shuffled % 2, shuffled % 3
    rows = len(runs) + 2, 2, 3  # two that no token has
    found = table_gradients(values, indices, rows, chunk)
    for grad, index, count in zip(found, indices, rows, strict=True):
        assert torch.equal(grad, torch.zeros(count, 3, device=DEVICE).index_add_(0, index, values))


def test_an_index_without_a_row_is_seen_in_the_output_and_reads_nothing_else() -> None:
    indices, _ = batch_of([5], 9)
    parameters = parameters_of((9, 2, 5), 6, torch.float32)
    for wrong in (-1, 9, 1 << 40):
        indices[0][2] = wrong
        out, *grads = with_gradients("triton", indices, parameters, torch.ones(5, 6, device=DEVICE), 0.0, None)
        assert out[2].isnan().all() and out[[0, 1, 3, 4]].isfinite().all()
        assert grads[2][2].isnan().all()  # the position's


@pytest.mark.parametrize("which", [1, 2], ids=["segment", "position"])
def test_a_segment_or_a_position_without_a_row_is_seen_too(which: int) -> None:
    """Each table has its own number of rows, and the memory after them holds finite numbers."""
    indices, _ = batch_of([5], 9)
    around = [torch.randn(20, 6, device=DEVICE) for _ in range(3)]
    a, b, c = (table[:rows] for table, rows in zip(around, (9, 2, 5), strict=True))
    for wrong in (-1, (9, 2, 5)[which]):
        indices[which][2] = wrong
        with backend.using("triton"):
            out = embed(*indices, a, b, c, a.new_ones(6), a.new_zeros(6), EPS)
        assert out[2].isnan().all() and out[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("chunk", [8, 2])
def test_an_index_beyond_all_tables_writes_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is the last table's, so no other row can be mistaken for it. Runs fit in a chunk, or are longer."""
    guarded, zero = torch.zeros(6 + 4, 4, device=DEVICE), torch.zeros(5, dtype=torch.int64, device=DEVICE)
    monkeypatch.setattr(Tensor, "new_zeros", lambda self, rows, width: guarded[:rows])
    table_gradients(torch.ones(5, 4, device=DEVICE), (zero, zero, zero + 2), (2, 2, 2), chunk)
    assert not guarded[6:].any()


def test_runs_are_added_in_fp32() -> None:
    """A 1,024 and 127 quarters are 1,055.75; in fp16 each quarter would be rounded off."""
    values, zero = torch.full((128, 3), 0.25, device=DEVICE).half(), torch.zeros(128, dtype=torch.int64, device=DEVICE)
    values[0] = 1024.0
    for gradient in table_gradients(values, (zero, zero, zero), (1, 1, 1)):
        assert torch.equal(gradient, torch.full((1, 3), 1056.0, device=DEVICE).half())


def test_halves_at_the_end_of_their_range_give_finite_results() -> None:
    indices, keys = batch_of([5], 9)
    parameters = parameters_of((9, 2, 5), 40, torch.float16)
    for table in parameters[:3]:
        table.copy_(torch.where(table > 0, 60000.0, -60000.0))
    results = with_gradients("triton", indices, parameters, torch.ones(5, 40, device=DEVICE).half(), 0.1, keys)
    assert all(t.isfinite().all() for t in results)


def test_strides_no_tokens_and_no_gradient() -> None:
    indices, keys = batch_of([7], 9)
    parameters, towards = parameters_of((9, 2, 7), 12, torch.float32), torch.randn(7, 12, device=DEVICE)
    out, *grads = with_gradients("triton", indices, parameters, towards, 0.2, keys)
    a, b, c = (torch.stack([i, i], -1)[:, 0] for i in indices)
    far = [torch.stack([t, t], -1)[..., 1] for t in parameters]
    found = with_gradients("triton", (a, b, c), far, towards, 0.2, keys)
    assert all(torch.equal(a, b) for a, b in zip(found, [out, *grads], strict=True))

    with backend.using("triton"), torch.inference_mode():
        assert torch.equal(embed(*indices, *far, EPS, dropout_p=0.2, keys=keys, site=5), out)  # type: ignore[misc,arg-type]

    a, b, c = (i[:0] for i in indices)
    empty, *grads = with_gradients("triton", (a, b, c), parameters, towards[:0], 0.2, keys[:0])
    assert empty.shape == (0, 12) and not any(g.any() for g in grads)


@pytest.mark.parametrize(
    ("lengths", "width", "runs"), [([9], 16, 1), pytest.param([128] * 40, 1024, 200, marks=[pytest.mark.gpu, on_gpu])]
)
def test_every_run_gives_the_same_bits(lengths: list[int], width: int, runs: int) -> None:
    indices, keys = batch_of(lengths, 3000)
    parameters = parameters_of((3000, 2, 128), width, torch.float16)
    towards = torch.randn(sum(lengths), width, device=DEVICE).half()
    first = with_gradients("triton", indices, parameters, towards, 0.1, keys)
    for _ in range(runs):
        again = with_gradients("triton", indices, parameters, towards, 0.1, keys)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
