"""Time spans and large numbers as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """A time span in its two largest units."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    for unit, size, part, smaller in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} {int(seconds % size // smaller)} {part}"
    raise AssertionError(seconds)


def brief(seconds: float) -> str:
    """A time span of a few seconds or less."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def short(value: float) -> str:
    """A number with three digits and a unit, such as 1.23 M."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:,.3g} {unit}"
    return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"
