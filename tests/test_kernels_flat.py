"""Flat buffers: the tables cover each element of each piece once and no padding, however tensors are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels import backend
from kernels.flat import ALIGN, HELD, Flat, Layout, Piece, Units, add_tensor_sums, gradient_square_sum, make_layout

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
UNIT = 128  # of the tests: the smallest
LEAD = 3  # elements of padding before what a share holds; as many come behind
NAN = float("nan")


@dataclass(frozen=True)
class Share:
    """One rank's share of tensors laid end to end: elements ``begin … end`` of all."""

    begin: int
    end: int
    layout: Layout

    def flat(self, values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Its elements of ``values`` as a flat buffer; the padding is NaN."""
        buffer = torch.full((self.layout.size,), NAN, dtype=dtype, device=DEVICE)
        buffer[LEAD : LEAD + self.end - self.begin] = values[self.begin : self.end].to(DEVICE, dtype)
        return buffer

    def inside(self, buffer: Tensor) -> Tensor:
        """The elements again; asserts that the padding is as it was."""
        held = slice(LEAD, LEAD + self.end - self.begin)
        outside = buffer.clone()
        outside[held] = NAN
        assert outside.isnan().all()
        return buffer[held]


def share_out(
    sizes: Sequence[int], decays: Sequence[float], cuts: Sequence[int], unit: int = UNIT, at_once: bool = True
) -> list[Share]:
    """Tensors of ``sizes`` over ``len(cuts) + 1`` ranks; those with a decay have a row of LAMB's sums each.

    ``at_once`` False hides from the layout that a tensor is whole.
    """
    boundaries = [0, *cuts, sum(sizes)]
    return [Share(begin, end, _layout(sizes, decays, begin, end, unit, at_once)) for begin, end in _pairs(boundaries)]


def _pairs(boundaries: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(boundaries, boundaries[1:], strict=False))


def _layout(sizes: Sequence[int], decays: Sequence[float], begin: int, end: int, unit: int, at_once: bool) -> Layout:
    pieces, at, row = [], 0, 0
    for size, decay in zip(sizes, decays, strict=True):
        low, high = max(at, begin), min(at + size, end)
        whole = at_once and (low, high) == (at, at + size)
        pieces.append(Piece(LEAD + low - begin, max(high - low, 0), decay, row if decay else -1, whole))
        at, row = at + size, row + (decay > 0)
    return make_layout(pieces, end - begin + 2 * LEAD, DEVICE, unit)


def zero_state(share: Share, weights: Tensor, copy: torch.dtype | None = None) -> Flat:
    """The buffers of a share before the first step; ``copy`` is poisoned as a whole."""
    master, zeros = share.flat(weights), torch.zeros(len(weights))
    rounded = None if copy is None else torch.full_like(master, NAN, dtype=copy)
    return Flat(master, share.flat(zeros), share.flat(zeros), rounded)


def elements(units: Units) -> list[int]:
    """Every offset that the programs of a table touch, as kernels/flat.py documents the columns."""
    found: list[int] = []
    for start, length, head, heads, tail, tails, _, _ in units.table.tolist():
        assert heads < ALIGN and tails < ALIGN
        found += range(start * ALIGN, (start + length) * ALIGN)
        found += [*range(head, head + heads), *range(tail, tail + tails)]
    return found


@st.composite
def some_pieces(draw: st.DrawFn) -> tuple[list[Piece], int]:
    """Pieces of 0 to 600 elements with gaps, and a buffer's size."""
    pieces, at = [], 0
    for row in range(draw(st.integers(0, 5))):
        at += draw(st.integers(0, 40))
        length = draw(st.one_of(st.integers(0, 40), st.integers(0, 600)))
        pieces.append(Piece(at, length, 0.01 * row, draw(st.sampled_from([-1, row])), draw(st.booleans())))
        at += length
    return pieces, at + draw(st.integers(0, 40))


@given(some_pieces())
def test_tables_cover_every_element_once(made: tuple[list[Piece], int]) -> None:
    pieces, size = made
    layout = make_layout(pieces, size, torch.device("cpu"), UNIT)
    inside = [i for piece in pieces for i in range(piece.offset, piece.offset + piece.length)]
    assert sorted(elements(layout.every)) == inside
    parts = [elements(units) for units in (layout.plain, layout.closed, layout.open)]
    assert sorted(sum(parts, [])) == inside
    assert sorted(parts[0]) == [i for p in pieces if p.row < 0 for i in range(p.offset, p.offset + p.length)]
    whole = {i for p in pieces if p.whole for i in range(p.offset, p.offset + p.length)}
    assert set(parts[1]) <= whole


@given(some_pieces())
def test_units_know_their_tensor(made: tuple[list[Piece], int]) -> None:
    pieces, size = made
    layout = make_layout(pieces, size, torch.device("cpu"), UNIT)
    owner = {i: piece for piece in layout.pieces for i in range(piece.offset, piece.offset + piece.length)}
    for units in (layout.every, layout.plain, layout.closed, layout.open):
        assert len(units.decays) == len(units) == sum(units.tensors[:, 2].tolist())
        for number, (row, first, count) in enumerate(units.tensors.tolist()):
            for unit in range(first, first + count):
                assert units.table[unit, 6] == number
                mine = [owner[i] for i in elements(replace(units, table=units.table[unit : unit + 1]))]
                assert {piece.row for piece in mine} == {row}
                assert all(piece.decay == pytest.approx(float(units.decays[unit])) for piece in mine)


def test_only_what_is_whole_and_fits_is_finished_at_once() -> None:
    cpu = torch.device("cpu")  # where one program is resident
    closed = [
        len(make_layout([Piece(0, length, row=0, whole=whole)], 1000, cpu, UNIT).closed)
        for length, whole in ((HELD * UNIT, True), (HELD * UNIT, False), (HELD * UNIT + ALIGN, True))
    ]
    assert closed == [1, 0, 0]
    twice = [Piece(0, 10, row=0, whole=True), Piece(10, 10, row=0, whole=True)]
    assert len(make_layout(twice, 20, cpu, UNIT).open) == 2


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_square_sum_is_that_of_the_pieces(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(1000, generator=generator) * 100).to(dtype)
    expected = float(values.double().square().sum())
    with backend.using(name):
        for cuts in ([], [1], [333, 333, 950]):
            shares = share_out([1, 700, 40, 259], [0.0, 0.1, 0.0, 0.1], cuts)
            found = sum(float(gradient_square_sum(share.flat(values, dtype), share.layout)) for share in shares)
            assert found == pytest.approx(expected, rel=1e-6)
        empty = make_layout([Piece(4, 0)], 9, DEVICE, UNIT)
        assert float(gradient_square_sum(torch.full((9,), NAN, dtype=dtype, device=DEVICE), empty)) == 0
        assert float(gradient_square_sum(torch.empty(0, dtype=dtype, device=DEVICE), make_layout([], 0, DEVICE))) == 0


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_square_sum_shows_an_overflow(name: str) -> None:
    [share] = share_out([300], [0.0], [])
    for bad in (float("inf"), NAN):
        for at in (0, 150, 299):  # in the head, the run and the tail
            values = torch.ones(300)
            values[at] = bad
            with backend.using(name):
                assert not gradient_square_sum(share.flat(values, torch.float16), share.layout).isfinite()


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    cpu = torch.device("cpu")
    for piece in (Piece(-1, 2), Piece(8, 3), Piece(0, -1), Piece(0, 1, row=-2)):
        with pytest.raises(ValueError, match="does not fit a flat buffer of 10 elements"):
            make_layout([piece], 10, cpu)
    with pytest.raises(ValueError, match="overlap"):
        make_layout([Piece(5, 5), Piece(0, 6)], 10, cpu)
    with pytest.raises(ValueError, match="unit is 100"):
        make_layout([], 10, cpu, unit=100)
    with pytest.raises(ValueError, match=r"gradient is \(9,\) on cpu; it must be contiguous, \(10,\)"):
        gradient_square_sum(torch.zeros(9), make_layout([], 10, cpu))
    for gradient in (torch.zeros(20)[::2], torch.zeros(10, device="meta")):  # strided; elsewhere
        with pytest.raises(ValueError, match=rf"{gradient.device}; it must be contiguous, \(10,\), and on cpu"):
            gradient_square_sum(gradient, make_layout([], 10, cpu))


def test_a_tensor_may_have_more_units_than_a_program_adds_at_once() -> None:
    """1,270, and it takes 512; to what stands there the sums are added, whole numbers and so exact."""
    partial = torch.randint(-9, 9, (1300, 2), device=DEVICE).float()
    tensors = torch.tensor([[1, 0, 30], [0, 30, 1270]], device=DEVICE)
    units = Units(torch.zeros(1300, 8, dtype=torch.int64, device=DEVICE), torch.zeros(1300, device=DEVICE), tensors)
    sums = torch.ones(2, 2, device=DEVICE)
    with backend.using("triton"):
        add_tensor_sums(partial, units, sums)
    assert torch.equal(sums, 1 + torch.stack([partial[30:].sum(0), partial[:30].sum(0)]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_square_sum_of_a_large_buffer_repeats_bit_for_bit(dtype: torch.dtype) -> None:
    sizes = [31_260_672, 4_194_304, 1024, 2, 3_145_728]
    values = torch.randn(sum(sizes), device=DEVICE).to(dtype)
    [share] = share_out(sizes, [0.0] * 5, [], unit=4096)
    flat = share.flat(values, dtype)
    first = gradient_square_sum(flat, share.layout)
    assert float(first) == pytest.approx(float(values.double().square().sum()), rel=1e-6)
    assert all(torch.equal(first, gradient_square_sum(flat, share.layout)) for _ in range(200))
