"""A profile as lines to read, each within 100 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

from trainer.profile import parts
from trainer.profile.advice import Setting, advise, busy_share
from trainer.profile.breakdown import COLUMNS, Breakdown
from trainer.profile.steps import Timing

WIDTH = 100
SLOWER = 1.03  # the slowest rank is named as such from this ratio on
FASTER = 0.05  # the profiler can only slow steps down; if they are faster by this share, the times vary
SLOWED = 0.15  # from this share on, the profiler's own time is worth a note


@dataclass(frozen=True)
class RankTimes:
    """The time that one rank works in a step."""

    rank: int
    host: str
    own: float  # ms of a profiled step for data, forward and backward, without waiting for other ranks


def lines(name: str, found: Breakdown, timing: Timing, setting: Setting, ranks: Sequence[RankTimes]) -> list[str]:
    """The whole report. ``name``: what was profiled, in one line."""
    blocks = [
        [name],
        _times(found, timing, setting),
        table(found, "GPU" if setting.cuda else "CPU"),
        _longest(found),
        _ranks(ranks),
        wrap(advise(found, timing, setting), WIDTH),
    ]
    return [line for block in filter(None, blocks) for line in ("", *block)][1:]


def _times(found: Breakdown, timing: Timing, setting: Setting) -> list[str]:
    over, busy = found.step / timing.milliseconds - 1, busy_share(found, timing, setting.cuda)
    device, with_or_without = ("GPU", "without") if setting.cuda else ("CPU", "with")
    micro = f"{setting.micro_batches:,} micro-batch{'es' * (setting.micro_batches > 1)}"
    seconds = timing.milliseconds / 1000
    rows = {
        "a step": f"{timing.milliseconds:.2f} ms without the profiler, {found.step:.2f} ms with it ({over:+.1%})",
        "per rank": f"{micro} of {setting.sequences:,} sequences, {setting.tokens:,.0f} tokens each",
        "speed": f"{timing.tokens / seconds:,.0f} tokens/s" + _flops(timing.flops / seconds / setting.ranks, setting),
        f"{device} busy": f"{found.busy:.2f} ms of a step, {busy:.1%} of its time {with_or_without} the profiler",
        "loader": f"a step waits for {timing.waited:.2f} ms, {timing.waited / timing.milliseconds:.1%}",
    }
    if setting.cuda:
        rows["launches"] = f"{found.pieces:,.0f} kernels, copies and fills per step"
    if found.hidden > 0.005:
        rows["hidden"] = f"{found.hidden:.2f} ms of the reduction, while the GPU also computed"
    said = [f"{key:10}{text}" for key, text in rows.items()]
    if setting.shortened > 1:
        note = (
            f"note: a step of the run has {setting.run_micro_batches:,} micro-batches, not {setting.micro_batches}, so "
            f"what it does once (optimizer, reduction) has {setting.shortened:.3g} times its usual share here"
        )
        said += wrap(note, WIDTH, subsequent_indent="  ")
    if over < -FASTER:
        said.append("note: the steps with the profiler were faster: something else used the machine; profile again")
    if over > SLOWED:
        longer = "idle times" if setting.cuda else "times"
        said.append(f"note: the profiler slowed the host down, so the {longer} in the table are longer than the run's")
    if timing.skipped:
        said.append(f"note: {timing.skipped} of the steps overflowed in fp16 and skipped the optimizer")
    return said


def _flops(rate: float, setting: Setting) -> str:
    """A rank's operations per second, and their share of the peak, if the GPU is known."""
    if not setting.cuda:
        return ""
    return f", {rate / 1e12:,.0f} TFLOP/s per GPU" + (
        f" ({rate / setting.peak:.1%} of its peak)" if setting.peak else ""
    )


def table(found: Breakdown, device: str) -> list[str]:
    """The device's time per step by part, in columns of what the host did; it adds up to the step."""
    rows: dict[str, Mapping[str, float]] = {
        part: found.spent[part] for part in parts.PARTS if found.part(part) >= 0.005
    }
    rows["idle"] = found.idle
    columns = [column for column in COLUMNS if any(row.get(column, 0.0) >= 0.005 for row in rows.values())]
    heading = [f"{device + ', ms per step':20}" + "".join(f"{each:>10}" for each in (*columns, "total", "share"))]
    everything = {column: sum(row.get(column, 0.0) for row in rows.values()) for column in columns}
    return heading + [
        f"{name:20}" + "".join(_cell(row.get(column, 0.0)) for column in columns) + _sum(sum(row.values()), found.step)
        for name, row in (rows | {"a profiled step": everything}).items()
    ]


def _cell(milliseconds: float) -> str:
    return f"{milliseconds:>10.2f}" if milliseconds >= 0.005 else f"{'-':>10}"


def _sum(milliseconds: float, step: float) -> str:
    return f"{milliseconds:>10.2f}{milliseconds / step:>10.1%}"


def _longest(found: Breakdown) -> list[str]:
    heading = "the longest by name, ms per step"
    return [heading, *(f"{ms:>10.2f}  {name[: WIDTH - 12]}" for name, ms in found.longest)]


def _ranks(ranks: Sequence[RankTimes]) -> list[str]:
    if len(ranks) == 1:
        return []
    slowest, fastest = (choose(ranks, key=lambda each: each.own) for choose in (max, min))
    said = [f"data, forward and backward: slowest rank {_rank(slowest)}; fastest {_rank(fastest)}"]
    if slowest.own > SLOWER * fastest.own:
        said.append(f"rank {slowest.rank} works {slowest.own / fastest.own - 1:.0%} longer: the others wait for it")
    return said


def _rank(each: RankTimes) -> str:
    return f"{each.rank} on {each.host}: {each.own:.2f} ms"
