"""Dropout: the hash against a plain Python model of it, its statistics, and its independence of the cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import dropout

ROWS, COLUMNS = 2048, 256  # 524,288 elements: a share's standard deviation is 4e-4 at p = 0.1


def some_keys(seed: int = 1, step: int = 0, sample: int = 0, rows: int = ROWS) -> Tensor:
    ends = torch.tensor([0, rows], dtype=torch.int32)
    return dropout.token_keys(seed, step, torch.tensor([sample]), torch.arange(rows), ends)


def xor_shift(h: int, by: int) -> int:
    return h ^ (h >> by)


def mix64(h: int) -> int:
    h = xor_shift(h, 30) * 0xBF58476D1CE4E5B9 % 2**64
    h = xor_shift(h, 27) * 0x94D049BB133111EB % 2**64
    return xor_shift(h, 31)


def mix32(h: int, key: int = 0, last: int = 0x846CA68B) -> int:
    h = (xor_shift(h, 16) * 0x7FEB352D + key) % 2**32
    return xor_shift(xor_shift(h, 15) * last % 2**32, 16)


def half(seed: int, step: int, sample: int, position: int, site: int, column: int) -> int:
    """The signed 16-bit number of one element, computed in unsigned arithmetic as a GPU kernel does."""
    key = 0
    for part in (seed, step, sample, position):
        key = mix64(((key ^ part) + 0x9E3779B97F4A7C15) % 2**64)
    a = mix32((key % 2**32 + site * 0x9E3779B9) % 2**32)
    b = mix32(((key >> 32) + site * 0x85EBCA6B) % 2**32)
    word = mix32((column // 4 * 0x9E3779B9 + a) % 2**32, b, 0xAC4C1B51 if column % 4 >= 2 else 0x846CA68B)
    value = word >> 16 if column % 2 else word & 0xFFFF
    return value - 65536 if value >= 32768 else value


@pytest.mark.parametrize(("seed", "step", "sample"), [(0, 0, 0), (1, 5, 123_456_789_012), (2**64 - 1, 9, 7)])
def test_masks_are_the_documented_hash_bit_for_bit(seed: int, step: int, sample: int) -> None:
    site = 4093 + 15 * dropout.HEAD
    mask = dropout.keep(some_keys(seed, step, sample, rows=5), site, 7, 0.3)
    cut = round(0.3 * 65536) - 32768
    expected = [[half(seed, step, sample, row, site, c) >= cut for c in range(7)] for row in range(5)]
    assert mask.tolist() == expected


def test_masks_never_change_between_versions() -> None:
    keys = some_keys(seed=1, step=2, sample=3, rows=2)
    assert keys.tolist() == [[-1647408985, 307793280], [-1229467011, -1501625527]]
    word = dropout.keep(keys, 4, 32, 0.5).long() @ (1 << torch.arange(32))
    assert word.tolist() == [1810992003, 3035571358]


@pytest.mark.parametrize("p", [0.0001, 0.1, 0.5, 0.9])
def test_the_share_kept_is_one_minus_p(p: float) -> None:
    kept = dropout.keep(some_keys(), 3, COLUMNS, p).double()
    deviation = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(float(kept.mean()) - (1 - p)) < 5 * deviation + 1 / 131072
    for mean, count in ((kept.mean(0), ROWS), (kept.mean(1), COLUMNS)):  # of each column, of each row
        assert float((mean - (1 - p)).abs().max()) < 6 * (p * (1 - p) / count) ** 0.5 + 4 / count


def test_the_expectation_is_exact_for_the_quantised_p() -> None:
    values = dropout.multiplier(some_keys(), 0, COLUMNS, 0.1, torch.float64)
    cut = dropout.threshold(0.1)
    assert sorted(set(values.flatten().tolist())) == [0.0, 65536 / (65536 - cut)]
    assert abs(float(values.mean()) - 1) < 5 * (0.1 / 0.9 / values.numel()) ** 0.5


@pytest.mark.parametrize("bits", [range(0, 8), range(8, 16)])
def test_the_16_bit_numbers_are_uniform(bits: range) -> None:
    halves = dropout._halves(some_keys(), 11, COLUMNS).long() & 0xFFFF
    counts = torch.bincount((halves >> bits[0] & 0xFF).flatten(), minlength=256).double()
    expected = halves.numel() / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_four_columns_of_a_hash_are_independent(p: float) -> None:
    kept = dropout.keep(some_keys(), 7, 4 * COLUMNS, p).view(-1, 4).long()  # (524,288, 4)
    counts = torch.bincount(kept @ torch.tensor([8, 4, 2, 1]), minlength=16).double()
    stay = 1 - dropout.threshold(p) / 65536
    shares = torch.tensor([stay ** (n := pattern.bit_count()) * (1 - stay) ** (4 - n) for pattern in range(16)])
    expected = shares.double() * len(kept)
    assert float(((counts - expected) ** 2 / expected).sum()) < 44.3  # 15 degrees of freedom, p = 1e-4


MASK: Tensor = dropout.keep(some_keys(), 0, COLUMNS, 0.5)
NEIGHBOURS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "columns": lambda: (MASK[:, :-1], MASK[:, 1:]),
    "pairs of columns": lambda: (MASK[:, :-2], MASK[:, 2:]),
    "fours of columns": lambda: (MASK[:, :-4], MASK[:, 4:]),
    "rows": lambda: (MASK[:-1], MASK[1:]),
    "diagonals": lambda: (MASK[:-1, :-1], MASK[1:, 1:]),
    "sites": lambda: (MASK, dropout.keep(some_keys(), 1, COLUMNS, 0.5)),
    "heads": lambda: (MASK, dropout.keep(some_keys(), dropout.HEAD, COLUMNS, 0.5)),
    "steps": lambda: (MASK, dropout.keep(some_keys(step=1), 0, COLUMNS, 0.5)),
    "samples": lambda: (MASK, dropout.keep(some_keys(sample=1), 0, COLUMNS, 0.5)),
    "seeds": lambda: (MASK, dropout.keep(some_keys(seed=2), 0, COLUMNS, 0.5)),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_are_independent(name: str) -> None:
    first, second = NEIGHBOURS[name]()
    joint = torch.bincount((first.long() * 2 + second.long()).flatten(), minlength=4).double()
    expected = first.numel() / 4
    chi_square = float(((joint - expected) ** 2 / expected).sum())  # 3 degrees of freedom
    assert chi_square < 21.1  # p = 1e-4


def test_keys_are_distinct() -> None:
    keys = torch.cat([some_keys(step=s, sample=n, rows=512) for s in range(8) for n in range(8)])
    assert len({tuple(key) for key in keys.tolist()}) == len(keys)


def test_keys_do_not_depend_on_the_cut() -> None:
    lengths, samples = [3, 1, 7, 5], torch.tensor([9, 4, 1 << 40, 0])

    def keys_of(chosen: list[int]) -> list[Tensor]:
        sizes = torch.tensor([lengths[i] for i in chosen])
        ends = torch.cat([torch.zeros(1), sizes.cumsum(0)]).int()
        positions = torch.cat([torch.arange(n) for n in sizes.tolist()])
        return list(torch.split(dropout.token_keys(7, 3, samples[chosen], positions, ends), sizes.tolist()))

    whole = keys_of([0, 1, 2, 3])
    for cut in ([[0], [1], [2], [3]], [[3, 1], [0, 2]], [[2, 3, 0], [1]]):
        for part in cut:
            for index, keys in zip(part, keys_of(part), strict=True):
                assert torch.equal(keys, whole[index])


def test_a_column_does_not_depend_on_how_many_there_are() -> None:
    keys = some_keys(rows=9)
    whole = dropout.keep(keys, 5, 128, 0.4)
    for columns in (1, 2, 17, 127):
        assert torch.equal(dropout.keep(keys, 5, columns, 0.4), whole[:, :columns])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_backward_has_forwards_mask(dtype: torch.dtype) -> None:
    x = torch.ones(64, 33, dtype=dtype, requires_grad=True)
    keys = some_keys(rows=64)
    out = dropout.apply(x, keys, 2, 0.5)
    torch.autograd.backward(out.sum())
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach()) and out.dtype == dtype
    assert torch.equal(out != 0, dropout.keep(keys, 2, 33, 0.5))


def test_no_keys_and_no_p_change_nothing() -> None:
    x = torch.randn(3, 4)
    assert dropout.apply(x, None, 0, 0.5) is x
    assert dropout.apply(x, some_keys(rows=3), 0, 0.0) is x


@pytest.mark.parametrize("p", [-0.1, 1.0, 0.999999])
def test_a_p_that_keeps_nothing_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        dropout.threshold(p)


def test_keys_of_another_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match="int64"):
        dropout.keep(torch.zeros(3, 2, dtype=torch.int64), 0, 4, 0.1)
