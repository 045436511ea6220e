"""The accuracy criterion for every kernel: its error is at most twice that of PyTorch in the same dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def assert_errs_at_most_twice(ours: Tensor, same_dtype: Tensor, exact: Tensor, name: str) -> None:
    """Assert that ``ours`` is at most twice as far from ``exact`` as ``same_dtype`` is, in maximum and RMS.

    ``same_dtype`` is what PyTorch's own operations give in the dtype of ``ours``; ``exact`` is the same from
    fp32 or fp64 (fp64 if ``ours`` is fp32). One unit in the last place is allowed on top: each element's
    own for the maximum, and their RMS for the RMS. What rounds to infinity must be infinite in ``ours``,
    everything else finite; if only PyTorch overflows, its error there does not count.
    """
    assert ours.shape == same_dtype.shape == exact.shape, f"{name}: {ours.shape}, {same_dtype.shape}, {exact.shape}"
    assert ours.dtype == same_dtype.dtype, f"{name}: {ours.dtype}, {same_dtype.dtype}"
    rounded, exact = exact.to(ours.dtype), exact.double()
    finite = rounded.isfinite()
    assert torch.equal(ours[~finite], rounded[~finite]), f"{name}: not infinite where it rounds to infinity"
    assert ours[finite].isfinite().all(), f"{name}: {int((~ours[finite].isfinite()).sum())} elements are not finite"
    if not finite.any():
        return
    unit = last_place(rounded)[finite]
    error = (ours.double() - exact).abs()[finite]
    theirs = (same_dtype.double() - exact).abs()[finite & same_dtype.isfinite()]
    largest = float(theirs.max()) if theirs.numel() else 0.0
    over = error > 2 * largest + unit
    worst = int((error - unit).argmax())
    assert not over.any(), (
        f"{name}: {int(over.sum())} of {over.numel()} elements err by more than twice PyTorch's {largest:.3g}; worst: "
        f"{float(error[worst]):.3g} at {ours[finite][worst].item():.6g} for {float(exact[finite][worst]):.6g}"
    )
    bound = 2 * _rms(theirs) + _rms(unit)
    assert _rms(error) <= bound, f"{name}: the RMS error is {_rms(error):.3g}; at most {bound:.3g} is allowed"


@contextmanager
def poisoned_buffers() -> Iterator[None]:
    """Fill memory that torch allocates, until it is written, with NaN or the largest integer, inside this context."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills as it allocates: torch.utils.deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def last_place(x: Tensor) -> Tensor:
    """The distance, fp64, from each |element| to the next larger number of its dtype."""
    limits = torch.finfo(x.dtype)
    _, exponent = torch.frexp(x.double().abs().clamp(min=limits.tiny))  # x = m * 2^exponent, m from 0.5 to 1
    return torch.ldexp(torch.full_like(exponent, limits.eps / 2, dtype=torch.float64), exponent)


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0
